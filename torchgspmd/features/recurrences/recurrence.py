"""A recurrence: a body that is computed for each part of a sequence, and what it passes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torch import fx

from ...fx_passes.ir import Op
from ...rules.algebra import constant_of


class Carry(NamedTuple):
    """A value for the next iteration. first: None for zeros. again: the next carry."""

    first: fx.Node | None
    again: fx.Node


@dataclass
class Recurrence:
    """One iteration's operations, in order, and how its values follow from outer ones.

    rows: a value of the iteration -> the values of all iterations, along a first dimension.
    carries: by the value in the iteration. vanishing: values that have to be zeros in an iteration,
    where the program has nothing in their places. zeros: rows that are zeros in an iteration.
    All other operands from outside are the same in each iteration.
    """

    count: int
    reverse: bool
    ops: list[Op]
    rows: dict[fx.Node, fx.Node] = field(default_factory=dict)
    carries: dict[fx.Node, Carry] = field(default_factory=dict)
    vanishing: set[tuple[fx.Node, int]] = field(default_factory=set)
    zeros: set[tuple[fx.Node, int]] = field(default_factory=set)
    known: dict[tuple[fx.Node, int], bool] = field(default_factory=dict)  # results of `vanishes`

    @property
    def begin(self) -> int:
        """The iteration that is computed first."""
        return self.count - 1 if self.reverse else 0

    @cached_property
    def makers(self) -> dict[fx.Node, Op]:
        """The operation that computes each value."""
        return {v: op for op in self.ops for v in op.results if v is not None}

    def vanishes(self, value: fx.Node, i: int) -> bool:
        """Return whether a value is zeros in an iteration, by the form of its operations."""
        if (value, i) not in self.known:
            self.known[value, i] = self._vanishes(value, i)
        return self.known[value, i]

    def _vanishes(self, value: fx.Node, i: int) -> bool:
        if (carry := self.carries.get(value)) is not None:
            starts = carry.first is None or constant_of(carry.first) == 0
            return i == self.begin and starts
        if (value, i) in self.zeros or constant_of(value) == 0:
            return True
        op = self.makers.get(value)
        return op is not None and any(
            all(self.vanishes(op.operands[j], i) for j in group) for group in op.rule.linear
        )
