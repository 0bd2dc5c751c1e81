"""Errors for ranks whose programs, arguments, models or random states differ (see rank_check.py).

Ranks exchange an Account. The error is raised on every rank, before any rank could wait forever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

from torch import Tensor

from ..errors import RankError, user_line
from .json_rows import from_row
from .process_groups import ProcessGroups
from .rank_check import all_gather_rows, differing
from .value_check import Checksum, is_close

_MAX_DIFFERENCES, _MAX_CHARACTERS = 3, 60  # in a message, in a value

Description = Sequence[tuple[str, str]]  # (name, value), written alike by every process


@dataclass(frozen=True)
class Account:
    """The program that one rank is about to run, and its inputs."""

    does: str  # "calls a module"
    arguments: Sequence[str] = ()
    model: Description = ()  # names and values that the programs of the module depend on
    generator: int | None = None  # state of torch's generator, if random numbers are drawn
    is_made: bool = False  # whether the rank has built its program
    failure: str = ""  # the error of building it

    def of_all(self, groups: ProcessGroups) -> list[Account]:
        """Return all ranks' accounts."""
        return [from_row(Account, row) for row in all_gather_rows(groups, asdict(self))]


def raise_difference(groups: ProcessGroups, mine: Account) -> NoReturn:
    """Raise the ShardingError for the differences between all ranks' accounts."""
    accounts = mine.of_all(groups)
    if any(account.does != accounts[0].does for account in accounts):
        raise RankError(
            "the ranks do different things",
            where=user_line(),
            why="; ".join(f"rank {r} {account.does}" for r, account in enumerate(accounts)),
            fix="do it on every rank, also where only one needs what comes of it",
        )
    failed = next((r for r, account in enumerate(accounts) if account.failure), None)
    if failed is not None:
        raise RankError(
            f"rank {failed} could not make its program",
            where=user_line(),
            why=accounts[failed].failure,
            fix="read the error of that rank; forward has to do the same on every rank",
        )
    arguments = [account.arguments for account in accounts]
    if any(own != arguments[0] for own in arguments):
        raise RankError(
            "the arguments differ between ranks",
            where=user_line(),
            why="; ".join(
                f"rank {r}: {', '.join(a)}"
                for r, a in enumerate(arguments)
                if a != arguments[0] or r == 0
            ),
            fix="give every rank the same numbers and global batch, "
            "or its own part as a DTensor made by shard_batch",
        )
    differences = _differences([account.model for account in accounts])
    if all(account.is_made for account in accounts):
        fix = (
            "let forward do the same on every rank; "
            "what one of them does alone goes behind the call"
        )
        raise RankError(
            "the ranks have made different programs",
            where=user_line(),
            why=differences or "the model, its marks or the versions of torch differ between ranks",
            fix=fix if differences else None,
        )
    if len({account.generator for account in accounts} - {None}) > 1:
        raise RankError(
            "the ranks would draw different random numbers",
            where=user_line(),
            why="the state of torch's generator differs between them",
            fix="call torch.manual_seed with the same number on every rank",
        )
    raise RankError(
        "the models differ between ranks",
        where=user_line(),
        why=differences
        or "of one a mode, an attribute, a buffer or a submodule has changed since the last call, "
        "of another not",
        fix="change the model on every rank alike",
    )


def check_alike(
    groups: ProcessGroups,
    tensors: Sequence[tuple[str, bool, Tensor]],
    raise_unnamed: Callable[[], NoReturn],
) -> None:
    """Raise ShardingError on every rank if a tensor's values differ between ranks.

    tensors: (name, whether it is an argument, tensor). raise_unnamed: raises the error for a tensor
    without a name.
    """
    for index, rank in differing(groups, [tensor for _, _, tensor in tensors]):
        name, is_argument, _ = tensors[index]
        if not name:
            raise_unnamed()
        if is_argument:
            raise _other_values(name, rank)
        raise RankError(
            f"'{name}' has other values on rank {rank} than on rank 0",
            where=user_line(),
            why="a tensor that a module keeps is the same on every rank, as on one device",
            fix="compute it from the same random numbers, "
            "or register it as a buffer before parallelize: rank 0's counts",
        )


def check_values(groups: ProcessGroups, values: Mapping[str, Checksum]) -> None:
    """Raise ShardingError on every rank if an argument's checksum differs between ranks."""
    rows = all_gather_rows(groups, dict(values))
    for rank, row in enumerate(rows):
        for name in (name for name in row if name in rows[0]):
            if not is_close(row[name], rows[0][name]):
                raise _other_values(name, rank)


def _other_values(name: str, rank: int) -> RankError:
    return RankError(
        f"argument '{name}' has other values on rank {rank} than on rank 0",
        where=user_line(),
        why="a plain tensor is the global one, of which each rank takes its part",
        fix="give every rank the same global batch, "
        "or its own part as a DTensor made by shard_batch",
    )


def _differences(models: Sequence[Description]) -> str:
    """Return a text with the names whose values differ from rank 0's.

    Names that only one rank has are listed if there are no other differences.
    """
    differences, on_one_rank = [], []
    columns = [_by_name(model) for model in models]
    for name in dict.fromkeys(name for column in columns for name in column):
        rank = next(
            (r for r, column in enumerate(columns) if column.get(name) != columns[0].get(name)),
            None,
        )
        if rank is not None:
            values = [column.get(name) for column in (columns[0], columns[rank])]
            if None in values:
                on_one_rank.append(
                    f"{name} matters on rank {rank if values[0] is None else 0} only"
                )
            elif any(len(value or "") > _MAX_CHARACTERS for value in values):
                differences.append(f"{name} is another on rank {rank} than on rank 0")
            else:
                differences.append(
                    f"{name} is {values[0]} on rank 0 and {values[1]} on rank {rank}"
                )
    differences = differences or on_one_rank
    more = len(differences) - _MAX_DIFFERENCES
    return "; ".join([*differences[:_MAX_DIFFERENCES], *([f"and {more} more"] if more > 0 else [])])


def _by_name(model: Description) -> dict[str, str]:
    """Return the values by name; several values under one name are joined."""
    table: dict[str, list[str]] = {}
    for name, value in model:
        table.setdefault(name, []).append(value)
    return {name: ", ".join(dict.fromkeys(values)) for name, values in table.items()}
