"""Check that all ranks are about to run the same program on the same values, by one small message.

    up to FEW_RANKS     an all_to_all with all ranks' words, which are compared
    more                an all_reduce of the largest and the smallest of each word
    GPUs                only first calls of programs; the others are those of late_check.py

An all_to_all connects each rank to each. On two gloo processes it takes 0.2 ms of CPU time up to
256 bytes, an all_reduce 0.4 to 0.8 ms, a small model's step 25 ms.

A program's first sum may travel in the all_to_all: data parallelism sums only a loss before
its gradients.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .process_groups import ProcessGroups
from .value_check import WORDS, Checksum, as_doubles, as_real, is_close, words, words_differ

SAMPLE = 2**16  # Elements per tensor that are compared before the first run.
HEAD = 1 + WORDS  # Compared words in a message: the number, and those of checksums.
FLOATS = 2  # Checksum words that are bits of doubles, the last ones.
FEW_RANKS = 8
ROOM = 7  # Elements of a sum that a message has room for, used or not.


class RankCheck:
    """One comparison between all ranks: a 63-bit number, and checksums on arguments.

    Every rank calls `begin`, then `check`. on_difference: called on every rank if the numbers
    differ; it raises. on_other_values: called if only the checksums differ, by more than rounding.
    compares: whether a message is sent that none of the program's sums needs.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        number: int,
        on_difference: Callable[[], Any],
        values: Mapping[str, Checksum] = MappingProxyType({}),
        on_other_values: Callable[[], Any] = lambda: None,
        compares: bool = True,
    ) -> None:
        self.groups, self.number, self.on_difference = groups, number, on_difference
        self.values, self.on_other_values = values, on_other_values
        self.compares = compares and not groups.is_fake
        self.work: Any = None
        self.finish: Callable[[], None] = lambda: None

    def begin(self, term: Tensor | None = None) -> RankCheck:
        """Send the number and `term`, this rank's part in a sum over all ranks that `fits`."""
        row = [self.number, *(words(self.values) if self.values else [0] * WORDS)]
        self.term = term
        # Between few ranks one exchange is faster than a reduction, and it can carry a small sum.
        if term is not None or self.compares and self.groups.mesh.size <= FEW_RANKS:
            self._exchange(row, term)
        elif self.compares:
            self._reduce(row)
        return self

    def _exchange(self, row: list[int], term: Tensor | None) -> None:
        """Send this rank's words to each, and receive all ranks' words."""
        groups = self.groups
        message = torch.tensor([*row, *[0] * ROOM], device=groups.checked_on)
        message = message.repeat(groups.mesh.size, 1)
        if term is not None:
            _terms(message, term).copy_(term.flatten())
        self.received = torch.empty_like(message)
        self.finish = lambda: self._compare(self.received[:, :HEAD].tolist())
        self.work = dist.all_to_all_single(
            self.received, message, group=groups.checks, async_op=True
        )

    def _reduce(self, row: list[int]) -> None:
        """Reduce the words to the largest over all ranks, and to the smallest."""
        # A largest and a smallest that are equal say that all are: one all_reduce at any number of
        # ranks.
        own = [*row[:-FLOATS], *map(ordered, row[-FLOATS:])]
        largest = torch.tensor([*own, *(~word for word in own)], device=self.groups.checked_on)

        def rows() -> list[list[int]]:
            top, bottom = largest.view(2, HEAD).tolist()
            both = top, [~word for word in bottom]
            return [[*each[:-FLOATS], *map(ordered, each[-FLOATS:])] for each in both]

        self.finish = lambda: self._compare(rows())
        self.work = dist.all_reduce(
            largest, dist.ReduceOp.MAX, group=self.groups.checks, async_op=True
        )

    def check(self) -> None:
        """Wait for all ranks' numbers and compare them."""
        if self.work is not None:
            # A plain wait would hang if another rank has died.
            self.groups.watcher.run(self.work.wait)
            self.groups.watcher.end_comparison()
        self.finish()

    def _compare(self, rows: list[list[int]]) -> None:
        first, *others = rows
        if any(row != first for row in others):
            if any(row[0] != first[0] for row in others):
                self.on_difference()
            # Other programs are an error before other values: these may follow from those.
            elif any(words_differ(row[1:], first[1:]) for row in others):
                self.on_other_values()

    def total(self) -> Tensor:
        """Check the numbers and sum the terms, the same on every rank."""
        self.check()
        assert self.term is not None
        return _terms(self.received, self.term).sum(0).to(self.term.dtype).view(self.term.shape)


def ordered(bits: int) -> int:
    """Return an integer that orders a double's bits as the numbers are; its own inverse."""
    return bits if bits >= 0 else bits ^ (2**63 - 1)


def _terms(message: Tensor, term: Tensor) -> Tensor:
    """Return the terms [ranks, elements] in a message."""
    return message.view(torch.float64)[:, HEAD : HEAD + term.numel()]


def check_ranks(groups: ProcessGroups, number: int, on_difference: Callable[[], object]) -> None:
    """Call `on_difference` on every rank unless all have the same number."""
    RankCheck(groups, number, on_difference).begin().check()


def all_gather_rows(groups: ProcessGroups, mine: object) -> list[Any]:
    """Return all ranks' values, as JSON has them: nothing that ranks send is unpickled.

    mine: dicts, lists, numbers and texts. Ranks that differ exchange their Accounts so
    (rank_mismatch.py).
    """
    if groups.is_fake:
        return [mine] * groups.mesh.size
    body = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    count = torch.tensor([len(body)], device=groups.checked_on)
    # all_gather needs equal sizes, so the lengths go first.
    counts = [torch.empty_like(count) for _ in range(groups.mesh.size)]
    groups.watcher.run(dist.all_gather, counts, count, group=groups.checks)
    sizes = [int(each) for each in counts]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=groups.checked_on)
    padded[: len(body)] = body
    rows = [torch.empty_like(padded) for _ in sizes]
    groups.watcher.run(dist.all_gather, rows, padded, group=groups.checks)
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes)]


def differing(groups: ProcessGroups, tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Return (index, first rank) for every tensor whose values on a rank differ from rank 0's."""
    rows = all_gather_rows(groups, [_fingerprint(t) for t in tensors])
    differences = [
        [not is_close(own, rows[0][i]) for own in column] for i, column in enumerate(zip(*rows))
    ]
    return [(i, column.index(True)) for i, column in enumerate(differences) if any(column)]


def _fingerprint(tensor: Tensor) -> Checksum:
    """Return a checksum for integers, or a norm and an irregular mean for floats.

    Only a sample is read if the tensor is large.
    """
    values = tensor.detach().flatten()
    values = values[:: max(1, len(values) // SAMPLE)].cpu()
    if not (values.is_floating_point() or values.is_complex()):
        return zlib.crc32(values.numpy().tobytes())
    values = as_doubles(as_real(values).flatten())
    # Irregular weights: a norm alone would not see elements that have changed places.
    weights = torch.arange(len(values), dtype=torch.float64).mul_(0.618).frac_().sub_(0.5)
    norm = values.norm().item()
    return norm, (weights @ values).item() / (norm or 1.0)


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
