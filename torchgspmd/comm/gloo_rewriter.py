"""GlooRewriter: replaces a lowered program's collective by an all_to_all and arithmetic."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.operators import aten, c10d
from ..compat.private_apis import OpOverload
from .process_groups import ProcessGroups


class GlooRewriter:
    """A collective in one rank's program that is rewritten to an all_to_all.

    few: bytes up to which two ranks exchange the terms of a reduction. is_unsupported: no library
    has the reduction for the dtype.
    """

    def __init__(
        self, graph: fx.Graph, node: fx.Node, groups: ProcessGroups, few: int, is_unsupported: bool
    ) -> None:
        self.graph, self.node, self.is_unsupported = graph, node, is_unsupported
        arguments: tuple[Any, ...] = node.args
        self.x, *self.options, self.group = arguments
        self.ranks, self.me = groups.size(self.group), groups.position(self.group)
        self.shape, self.dtype = list(node.meta["shape"]), node.meta["dtype"]
        self.wait = next(iter(node.users))
        # Faster for few bytes: 0.3 ms a process, where a small all_reduce takes 0.8 ms.
        self.swaps = self.ranks == 2 and math.prod(self.shape) * self.dtype.itemsize <= few

    @property
    def reduction(self) -> Reduction:
        """The reduction, in a collective that has one."""
        return BY_C10D_NAME[self.options[0]]

    def all_to_all(self, x: fx.Node, splits: list[int]) -> None:
        """Send `splits` rows from x to the ranks, and receive as many."""
        self.node.target = c10d.all_to_all_single.default
        self.node.args = (x, splits, splits, self.group)

    def swap(self, shape: Sequence[int]) -> fx.Node:
        """Exchange a tensor with this shape between two ranks, and return the other's."""
        with self.graph.inserting_before(self.node):
            flat = (
                self.x
                if len(shape) == 1
                else self.graph.call_function(aten.reshape.default, (self.x, [-1]))
            )
        # A rank sends nothing to itself: its own term is in memory.
        self.all_to_all(flat, [0 if rank == self.me else math.prod(shape) for rank in range(2)])
        with self.graph.inserting_after(self.wait):
            return (
                self.wait
                if len(shape) == 1
                else self.graph.call_function(aten.reshape.default, (self.wait, list(shape)))
            )

    def send_all(self, shape: Sequence[int]) -> None:
        """Send a tensor with this shape to each rank; the result's first dimension is the ranks."""
        with self.graph.inserting_before(self.node):
            copies = self.graph.call_function(aten.expand.default, (self.x, [self.ranks, *shape]))
            copies = self.graph.call_function(aten.contiguous.default, (copies,))
        self.all_to_all(copies, [1] * self.ranks)

    def reduce(self, keepdim: bool) -> None:
        """Replace the result by the received values, reduced over its first dimension."""
        product = self.reduction.c10d == "product"
        # torch sums and multiplies small integers in int64 unless a dtype is given.
        widens = (
            (product or self.reduction.c10d == "sum")
            and not self.dtype.is_floating_point
            and not self.dtype.is_complex
        )
        self.replace_result(
            self.wait,
            self.reduction.over_dim,
            self.wait,
            0 if product else [0],
            keepdim,
            **({"dtype": self.dtype} if widens else {}),
        )

    def replace_result(
        self, arrived: fx.Node, op: OpOverload, *args: object, **kwargs: object
    ) -> None:
        """Redirect the wait's users to op(*args, **kwargs)."""
        users = [user for user in self.wait.users if user is not arrived]
        with self.graph.inserting_after(arrived):
            result = self.graph.call_function(op, args, kwargs)
        result.meta = dict(self.wait.meta)
        for user in users:
            user.replace_input_with(self.wait, result)


@dataclass(frozen=True)
class Reduction:
    """One reduction. c10d: its name in torch.distributed. The operators do the same locally."""

    c10d: str
    combine: Callable[[Tensor, Tensor], Tensor]
    of_two: Any
    of_two_in_place: Any
    over_dim: Any


REDUCTIONS = {
    "sum": Reduction("sum", operator.add, aten.add.Tensor, aten.add_.Tensor, aten.sum.dim_IntList),
    # maximum has no in-place form.
    "max": Reduction(
        "max", torch.maximum, aten.maximum.default, aten.maximum.default, aten.amax.default
    ),
    "min": Reduction(
        "min", torch.minimum, aten.minimum.default, aten.minimum.default, aten.amin.default
    ),
    "prod": Reduction(
        "product", operator.mul, aten.mul.Tensor, aten.mul_.Tensor, aten.prod.dim_int
    ),
}


# Lowered calls have torch's name for a reduction.
BY_C10D_NAME = {reduction.c10d: reduction for reduction in REDUCTIONS.values()}
