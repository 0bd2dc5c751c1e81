"""What ranks tell each other when a comparison (agreement.py) has found them about to do different
things, and the error of that.

A difference is raised on every rank, before anything is sent that another rank would wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from ..errors import ShardingError, user_line
from .process_groups import ProcessGroups
from .rank_check import differing, gathered

_SHOWN, _SHORT = 3, 60  # differences in a message, and characters of a value

Described = Sequence[tuple[str, str]]  # names and values, as every process writes them


@dataclass(frozen=True)
class Account:
    """What one rank is about to do, and with what."""

    does: str  # "calls a module"
    arguments: Sequence[str] = ()
    model: Described = ()  # what the programs of the module depend on
    generator: int | None = None  # the state of torch's, if it draws random numbers
    is_made: bool = False  # it has made a program
    failure: str = ""  # why it could not


def raise_difference(groups: ProcessGroups, mine: Account) -> NoReturn:
    """Every rank comes here, with its account."""
    accounts = gathered(groups, mine)
    if any(account.does != accounts[0].does for account in accounts):
        raise ShardingError(
            "the ranks do different things",
            where=user_line(),
            why="; ".join(f"rank {r} {account.does}" for r, account in enumerate(accounts)),
            fix="do it on every rank, also where only one needs what comes of it",
        )
    failed = next((r for r, account in enumerate(accounts) if account.failure), None)
    if failed is not None:
        raise ShardingError(
            f"rank {failed} could not make its program",
            where=user_line(),
            why=accounts[failed].failure,
            fix="the error of that rank says more; forward has to do the same on every rank",
        )
    arguments = [account.arguments for account in accounts]
    if any(given != arguments[0] for given in arguments):
        raise ShardingError(
            "the arguments differ between ranks",
            where=user_line(),
            why="; ".join(
                f"rank {r}: {', '.join(a)}"
                for r, a in enumerate(arguments)
                if a != arguments[0] or r == 0
            ),
            fix="give every rank the same numbers and global batch, or its own part as a DTensor made by shard_batch",
        )
    found = _differences([account.model for account in accounts])
    if all(account.is_made for account in accounts):
        alone = "let forward do the same on every rank; what one of them does alone goes behind the call"
        raise ShardingError(
            "the ranks have made different programs",
            where=user_line(),
            why=found or "the model, its marks or the versions of torch differ between ranks",
            fix=alone if found else None,
        )
    if len({account.generator for account in accounts} - {None}) > 1:
        raise ShardingError(
            "the ranks would draw different random numbers",
            where=user_line(),
            why="the state of torch's generator differs between them",
            fix="call torch.manual_seed with the same number on every rank",
        )
    raise ShardingError(
        "the models differ between ranks",
        where=user_line(),
        why=found
        or "of one a mode, an attribute, a buffer or a submodule has changed since the last call, of another not",
        fix="change the model on every rank alike",
    )


def check_alike(
    groups: ProcessGroups,
    given: Sequence[tuple[str, bool, Tensor]],
    otherwise: Callable[[], NoReturn],
) -> None:
    """ShardingError on every rank where one of these tensors has other values on one: their names,
    and whether each is an argument. otherwise: raises it for those without a name.
    """
    for place, rank in differing(groups, [tensor for _, _, tensor in given]):
        name, is_argument, _ = given[place]
        if not name:
            otherwise()
        if is_argument:
            raise ShardingError(
                f"argument '{name}' has other values on rank {rank} than on rank 0",
                where=user_line(),
                why="a plain tensor is the global one, of which each rank takes its part",
                fix="give every rank the same global batch, or its own part as a DTensor made by shard_batch",
            )
        raise ShardingError(
            f"'{name}' has other values on rank {rank} than on rank 0",
            where=user_line(),
            why="a tensor that a module keeps is the same on every rank, as on one device",
            fix="compute it from the same random numbers, or register it as a buffer before parallelize: rank 0's counts",
        )


def _differences(models: Sequence[Described]) -> str:
    """Which names have other values on a rank than on rank 0, and which values; names that one rank
    only has, if there are no others.
    """
    found, of_one = [], []
    columns = [_by_name(model) for model in models]
    for name in dict.fromkeys(name for column in columns for name in column):
        rank = next(
            (r for r, column in enumerate(columns) if column.get(name) != columns[0].get(name)),
            None,
        )
        if rank is not None:
            values = [column.get(name) for column in (columns[0], columns[rank])]
            if None in values:
                of_one.append(f"{name} matters on rank {rank if values[0] is None else 0} only")
            elif any(len(value) > _SHORT for value in values):
                found.append(f"{name} is another on rank {rank} than on rank 0")
            else:
                found.append(f"{name} is {values[0]} on rank 0 and {values[1]} on rank {rank}")
    found = found or of_one
    return "; ".join(
        [*found[:_SHOWN], *([f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else [])]
    )


def _by_name(model: Described) -> dict[str, str]:
    """Of several values of one name, all."""
    table: dict[str, list[str]] = {}
    for name, value in model:
        table.setdefault(name, []).append(value)
    return {name: ", ".join(dict.fromkeys(values)) for name, values in table.items()}
