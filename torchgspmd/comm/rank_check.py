"""Check that all ranks are about to run the same program on the same values, by one roll call.

    the CPU    each call of a program, before it sends anything else
    a GPU      only first calls of programs; the others are those of late_check.py

A program's first sum may travel in the roll call: data parallelism sums only a loss before its
gradients.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .process_groups import ProcessGroups
from .value_check import WORDS, Checksum, words, words_differ
from .watcher import Ranks

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
