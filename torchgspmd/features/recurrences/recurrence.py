"""A recurrence: a body that is computed for each part of a sequence, and what it passes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, fx

from ...compat.fx_nodes import add_node, origin_of
from ...compat.operators import aten
from ...fx_passes.ir import Op, call_of, operands_of
from ...rules import rule_of
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

    def choose(
        self, graph: fx.Graph, is_end: fx.Node, other: fx.Node | None, value: fx.Node
    ) -> fx.Node:
        """Replace a value by another one in one iteration; return the new value.

        other: its operation is in front of the value's; None for zeros. is_end: a row that says
        which iteration.
        """
        op = choice(graph, is_end, other, value)
        return self._replace(value, self.makers[value], op)

    def replace(self, graph: fx.Graph, value: fx.Node, target: Any, args: tuple) -> fx.Node:
        """Compute a value by another operation; return the new value."""
        op = added_op(graph, target, args, value.meta["val"], value)
        return self._replace(value, op)

    def _replace(self, value: fx.Node, *ops: Op) -> fx.Node:
        """Put operations in the place of a value's; its readers read the last one's result."""
        at, new = self.ops.index(self.makers[value]), {value: ops[-1].node}
        behind = [reading(op, new) for op in self.ops[at + 1 :]]
        self.ops[at:] = *ops, *behind
        for carry, (first, again) in self.carries.items():
            self.carries[carry] = Carry(first, new.get(again, again))
        del self.makers
        self.known.clear()
        return ops[-1].node

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


def choice(graph: fx.Graph, is_end: fx.Node, other: fx.Node | None, value: fx.Node) -> Op:
    """Return the choice of another value in one iteration. other: None for zeros."""
    val = value.meta["val"]
    if other is None:
        kwargs = {"dtype": val.dtype, "device": val.device}
        other = add_node(graph, "call_function", aten.zeros.default, ([*val.shape],), kwargs)
        other.meta = {**origin_of(value), "val": val.new_empty(val.shape)}
    return added_op(graph, aten.where.self, (is_end, other, value), val, value)


def reading(op: Op, new: Mapping[fx.Node, fx.Node]) -> Op:
    """Return an operation on other operands."""
    return replace(op, operands=tuple(new.get(v, v) for v in op.operands))


def added_op(graph: fx.Graph, target: Any, args: tuple, val: Tensor, like: fx.Node) -> Op:
    """Add an operation to an iteration. val: its value's. like: has its place in the program."""
    node = add_node(graph, "call_function", target, args, {})
    node.meta = {**origin_of(like), "val": val.new_empty(val.shape)}
    return Op(node, rule_of(call_of(node)), (*operands_of(node),), (node,), id(node))
