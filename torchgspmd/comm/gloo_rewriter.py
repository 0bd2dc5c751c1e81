"""GlooRewriter: replaces a lowered program's collective by an all_to_all and arithmetic."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..compat.operators import aten, c10d
from ..compat.private_apis import OpOverload
from .process_groups import ProcessGroups


class GlooLimits(NamedTuple):
    """Sizes in bytes by which a collective over gloo gets its form.

    few: Two ranks exchange the terms of a reduction up to it. many: An exchange of more with a rank
    is cut into pieces.
    """

    few: int
    many: int


# Messages in flight that fill both directions of a link: at least, and at most for so many bytes
# each. Of 8 MiB each way, 4 messages take 1.2 to 1.3 of bytes / rate, 16 take 1.0.
PIECES, MOST_PIECES, PIECE = 4, 64, 2**19


class GlooRewriter:
    """A collective in one rank's program that is rewritten to an all_to_all.

    is_unsupported: no library has the reduction for the dtype.
    """

    def __init__(
        self,
        graph: fx.Graph,
        node: fx.Node,
        groups: ProcessGroups,
        limits: GlooLimits,
        is_unsupported: bool,
    ) -> None:
        self.graph, self.node, self.is_unsupported = graph, node, is_unsupported
        arguments: tuple[Any, ...] = node.args
        self.x, *self.options, self.group = arguments
        self.ranks, self.me = groups.size(self.group), groups.position(self.group)
        self.shape, self.dtype = list(node.meta["shape"]), node.meta["dtype"]
        self.wait = next(iter(node.users))
        self.many = limits.many
        # Faster for few bytes: 0.3 ms a process, where a small all_reduce takes 0.8 ms.
        self.swaps = self.ranks == 2 and self._bytes(self.shape) <= limits.few

    @property
    def reduction(self) -> Reduction:
        """The reduction, in a collective that has one."""
        return BY_C10D_NAME[self.options[0]]

    def all_to_all(self, x: fx.Node, splits: list[int], row: Sequence[int]) -> None:
        """Send `splits` rows from x to the ranks, and receive as many. row: what a rank gets."""
        op, width = c10d.all_to_all_single.default, math.prod(row)
        if self._bytes(row) <= self.many:
            self.node.target, self.node.args = op, (x, splits, splits, self.group)
            return
        rows, call = self.ranks - splits.count(0), self.graph.call_function
        count = min(max(PIECES, -(-self._bytes(row) // PIECE)), MOST_PIECES)
        borders = sorted({width * i // count for i in range(count + 1)})
        begun, arrived = [], []
        with self.graph.inserting_before(self.node):
            matrix = call(aten.reshape.default, (x, [rows, width]))
            for start, stop in itertools.pairwise(borders):
                size = [split and stop - start for split in splits]
                piece = call(aten.slice.Tensor, (matrix, 1, start, stop))
                piece = call(aten.contiguous.default, (piece,))
                piece = call(aten.reshape.default, (piece, [-1]))
                begun.append(call(op, (piece, size, size, self.group)))
                begun[-1].meta = {"shape": [rows * (stop - start)], "dtype": self.dtype}
        with self.graph.inserting_before(self.wait):
            for start, stop, piece in zip(borders, borders[1:], begun):
                piece = call(self.wait.target, (piece,))
                arrived.append(call(aten.reshape.default, (piece, [rows, stop - start])))
            joined = call(aten.cat.default, (arrived, 1))
        shape = [width] if rows == 1 else [rows, *row]
        self.wait.target, self.wait.args = aten.reshape.default, (joined, shape)
        self.graph.erase_node(self.node)

    def swap(self, shape: Sequence[int]) -> fx.Node:
        """Exchange a tensor with this shape between two ranks, and return the other's."""
        with self.graph.inserting_before(self.node):
            flat = (
                self.x
                if len(shape) == 1
                else self.graph.call_function(aten.reshape.default, (self.x, [-1]))
            )
        # A rank sends nothing to itself: its own term is in memory.
        rows = math.prod(shape)
        self.all_to_all(flat, [0 if rank == self.me else rows for rank in range(2)], shape)
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
        self.all_to_all(copies, [1] * self.ranks, shape)

    def _bytes(self, shape: Sequence[int]) -> int:
        return math.prod(shape) * self.dtype.itemsize

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
