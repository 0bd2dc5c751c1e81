"""One roll call: all ranks are about to run one program on the same values, or raise one error.

    the CPU    each call of a program, before it sends anything else
    a GPU      only first calls of programs; the others are those of runtime/call_comparison.py

A program's first sum may travel in the roll call: data parallelism sums only a loss before its
gradients. Ranks whose numbers differ exchange an Account, and raise the error before any rank could
wait forever.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import RankError, user_line
from .json_rows import from_row
from .process_groups import ProcessGroups, Ranks
from .rank_failure import apart
from .value_check import WORDS, Checksum, Reading, is_close, words, words_differ

HEAD = 1 + WORDS  # Compared numbers in a row: that of the program, and those of checksums.
FEW_RANKS = 8  # that sum the terms of all by themselves
ROOM = 7  # Elements of a sum that a row may carry.


class RankCheck:
    """One comparison between all ranks: a 63-bit number, and checksums on arguments.

    Every rank calls `begin`, then `check`. on_difference: called on every rank if the numbers
    differ; it raises. on_other_values: called if only the checksums differ, by more than rounding.
    compares: whether a message is sent that none of the program's sums needs.
    """

    def __init__(
        self,
        ranks: Ranks,
        number: int,
        on_difference: Callable[[], Any],
        values: Mapping[str, Checksum] = MappingProxyType({}),
        on_other_values: Callable[[], Any] = lambda: None,
        compares: bool = True,
    ) -> None:
        self.watcher, self.number, self.on_difference = ranks.watcher, number, on_difference
        self.values, self.on_other_values = values, on_other_values
        self.compares, self.is_sent = compares, False

    def begin(self, term: Tensor | None = None) -> RankCheck:
        """Send the number and `term`, this rank's part in a sum over all ranks that `fits`."""
        self.term, self.is_sent = term, self.compares or term is not None
        if self.is_sent:
            row = [self.number, *(words(self.values) if self.values else [0] * WORDS)]
            self.watcher.call([*row, *([] if term is None else term.flatten().tolist())])
        return self

    def check(self) -> None:
        """Wait for all ranks' numbers and compare them."""
        if not self.is_sent:
            return
        self.rows, self.is_sent = self.watcher.texts(), False
        if self.rows.count(self.rows[0]) == len(self.rows):
            return
        first, *others = map(json.loads, self.rows)
        if any(row[0] != first[0] for row in others):
            self.on_difference()
        # Other programs are an error before other values: these may follow from those.
        elif any(row[:HEAD] != first[:HEAD] for row in others):
            if any(words_differ(row[1:HEAD], first[1:HEAD]) for row in others):
                self.on_other_values()

    def total(self) -> Tensor:
        """Check the numbers and sum the terms, the same on every rank."""
        self.check()
        assert self.term is not None
        rows = [json.loads(row)[HEAD:] for row in self.rows]
        terms = torch.tensor(rows, dtype=torch.float64)
        return terms.sum(0).to(self.term.dtype).view(self.term.shape)


def check_ranks(ranks: Ranks, number: int, on_difference: Callable[[], object]) -> None:
    """Call `on_difference` on every rank unless all have the same number."""
    RankCheck(ranks, number, on_difference).begin().check()


def fits(groups: ProcessGroups, shape: tuple[int, ...], dtype: torch.dtype, ranks: int) -> bool:
    """Whether a sum with this shape over `ranks` ranks may travel in a comparison's message.

    It must not delay the comparison.
    """
    # A copy from a GPU would make the comparison wait for its computation.
    return (
        groups.device_type == "cpu"
        and dtype.is_floating_point
        and math.prod(shape) <= ROOM
        and ranks == groups.mesh.size <= FEW_RANKS
        and not groups.is_fake
    )


MOST = 2**16  # Elements per tensor that are compared before the first run.
_MAX_DIFFERENCES, _MAX_CHARACTERS = 3, 60  # in a message, in a value
_ACCOUNT = "the accounts of all ranks"

Description = Sequence[tuple[str, str]]  # (name, value), written alike by every process


@dataclass(frozen=True)
class Account:
    """The program that one rank is about to run, and its inputs."""

    call: str  # "gspmd.save"
    arguments: Sequence[str] = ()
    model: Description = ()  # names and values that the programs of the module depend on
    generator: int | None = None  # state of torch's generator, if random numbers are drawn
    is_made: bool = False  # whether the rank has built its program
    failure: str = ""  # the error of building it
    at: str = ""  # the user's line
    step: int = 0

    def of_all(self, ranks: Ranks) -> list[Account]:
        """Return all ranks' accounts."""
        mine = replace(self, at=user_line() or "", step=ranks.watcher.step)
        return [from_row(Account, row) for row in all_gather_rows(ranks, asdict(mine), _ACCOUNT)]


def agree(ranks: Ranks, call: str, model: Description = (), generator: int | None = None) -> None:
    """Meet all ranks before a call that communicates.

    A RankError is raised on every rank unless all make the call, on equal things.

    call: its name, as "gspmd.save". model: what its messages depend on. generator: a state that is
    compared.
    """
    agreement(ranks, call, model, generator).begin().check()


def agreement(
    ranks: Ranks, call: str, model: Description = (), generator: int | None = None
) -> RankCheck:
    """Return the comparison that `agree` makes."""
    ranks.watcher.note(call)
    number = zlib.crc32(f"{call} {model} {generator}".encode())

    def differ() -> NoReturn:
        raise_difference(ranks, Account(call, (), model, generator))

    return RankCheck(ranks, number, differ)


def all_gather_rows(ranks: Ranks, mine: object, call: str = "a comparison of values") -> list[Any]:
    """Return all ranks' values, as JSON has them: nothing that ranks send is unpickled.

    mine: dicts, lists, numbers and texts. call: as in `agree`.
    """
    watcher, number = ranks.watcher, zlib.crc32(call.encode())
    while True:
        watcher.call([number, mine])
        rows = watcher.answers()
        if all(row[0] == number for row in rows):
            return [row[1] for row in rows]
        # Ranks that have found a difference exchange accounts; the others follow them.
        if call != _ACCOUNT:
            raise_difference(ranks, Account(call))


def raise_difference(ranks: Ranks, mine: Account) -> NoReturn:
    """Raise the ShardingError for the differences between all ranks' accounts."""
    accounts = mine.of_all(ranks)
    if any(account.call != accounts[0].call for account in accounts):
        calls = {r: (a.call, a.step, f" at {a.at}") for r, a in enumerate(accounts)}
        what, why = apart(calls)
        raise RankError.here(
            what,
            why=why,
            fix="make the same calls on every rank, also where only one needs what comes of it",
        )
    failed = next((r for r, account in enumerate(accounts) if account.failure), None)
    if failed is not None:
        raise RankError.here(
            f"rank {failed} could not make its program",
            why=accounts[failed].failure,
            fix="read the error of that rank; forward has to do the same on every rank",
        )
    arguments = [account.arguments for account in accounts]
    if any(own != arguments[0] for own in arguments):
        raise RankError.here(
            "the arguments differ between ranks",
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
        raise RankError.here(
            "the ranks have made different programs",
            why=differences or "the model, its marks or the versions of torch differ between ranks",
            fix=fix if differences else None,
        )
    if len({account.generator for account in accounts} - {None}) > 1:
        raise RankError.here(
            "the ranks would draw different random numbers",
            why="the state of torch's generator differs between them",
            fix="call torch.manual_seed with the same number on every rank",
        )
    raise RankError.here(
        "the models differ between ranks",
        why=differences
        or "of one a mode, an attribute, a buffer or a submodule has changed since the last call, "
        "of another not",
        fix="change the model on every rank alike",
    )


def check_alike(
    ranks: Ranks, tensors: Sequence[tuple[str, bool, Tensor]], raise_unnamed: Callable[[], NoReturn]
) -> None:
    """Raise ShardingError on every rank if a tensor's values differ between ranks.

    tensors: (name, whether it is an argument, tensor). raise_unnamed: raises the error for a tensor
    without a name.
    """
    for index, rank in _differing(ranks, [tensor for _, _, tensor in tensors]):
        name, is_argument, _ = tensors[index]
        if not name:
            raise_unnamed()
        if is_argument:
            raise _other_values(name, rank)
        raise RankError.here(
            f"'{name}' has other values on rank {rank} than on rank 0",
            why="a tensor that a module keeps is the same on every rank, as on one device",
            fix="compute it from the same random numbers, "
            "or register it as a buffer before parallelize: rank 0's counts",
        )


def check_values(ranks: Ranks, values: Mapping[str, Checksum]) -> None:
    """Raise ShardingError on every rank if an argument's checksum differs between ranks."""
    rows = all_gather_rows(ranks, dict(values))
    for rank, row in enumerate(rows):
        for name in (name for name in row if name in rows[0]):
            if not is_close(row[name], rows[0][name]):
                raise _other_values(name, rank)


def _differing(ranks: Ranks, tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Return (index, first rank) for every tensor whose values on a rank differ from rank 0's."""
    # One reading each: they may be on several devices.
    own = [Reading([""], [t], MOST).checksums()[""] for t in tensors]
    rows = all_gather_rows(ranks, own)
    differences = [
        [not is_close(own, rows[0][i]) for own in column] for i, column in enumerate(zip(*rows))
    ]
    return [(i, column.index(True)) for i, column in enumerate(differences) if any(column)]


def _other_values(name: str, rank: int) -> RankError:
    return RankError.here(
        f"argument '{name}' has other values on rank {rank} than on rank 0",
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
