"""Lower collectives between CPU processes to all_to_all and arithmetic.

Torch's own are slow or unsafe over gloo. Examples for two ranks, on rank 0:

before   %r = reduce_scatter_tensor(%x, sum, 2, g);  %w = wait_tensor(%r)
after    %r = all_to_all_single(%x, [1, 1], [1, 1], g);  %y = wait_tensor(%r)
         %w = sum(%y, [0], True)
before   %r = all_reduce_(%x, sum, g);  %w = wait_tensor(%r)         # up to FEW bytes
after    %r = all_to_all_single(%x, [0, 8], [0, 8], g);  %y = wait_tensor(%r);  %w = add_(%x, %y)
before   %r = all_gather_into_tensor(%x, 2, g);  %w = wait_tensor(%r)
after    %r = all_to_all_single(%x, [0, 8], [0, 8], g);  %y = wait_tensor(%r);  %w = cat([%x, %y])
needs    the program of one rank, operands contiguous; meta["shape"] and meta["dtype"] on
         collectives
ensures  every rank has the same result, and sends the bytes that the plan says. One case sends
         more: an all_reduce of more than two ranks whose dtype no library reduces sends all terms
         to each.

Fast: over gloo torch computes a reduce_scatter by an all_reduce, which sends twice the bytes. 32 MB
between two processes take 53 ms that way, 24 ms this way. A small all_reduce takes a process 0.8
ms, an exchange 0.3.

Safe: gloo's two threads write the name of the work they finished into one string, without a lock
(ProcessGroupGloo::runLoop, lastCompletedWorkName). A name of more than 15 characters lies on the
heap, where one thread writes what the other has freed. The process dies of "malloc(): unaligned
tcache chunk detected", once in some ten thousand overlapping collectives (torch 2.13.0 alone does).
Of those in use only all_gather_into_tensor has such a name, ALLGATHER_COALESCED.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx

from ...comm.process_groups import ProcessGroups
from ...compat.operators import aten, c10d
from ...compat.private_apis import OpOverload
from .wire_dtypes import CARRIERS

FEW = 2**21  # Two ranks exchange the terms of an all_reduce of up to this many bytes.
# The operation of each of c10d's reductions: over a dimension, of two tensors, and in place.
_OVER_DIM = {
    "sum": aten.sum.dim_IntList,
    "max": aten.amax.default,
    "min": aten.amin.default,
    "product": aten.prod.dim_int,
}
_OF_TWO = {
    "sum": aten.add.Tensor,
    "max": aten.maximum.default,
    "min": aten.minimum.default,
    "product": aten.mul.Tensor,
}
_IN_PLACE = _OF_TWO | {"sum": aten.add_.Tensor, "product": aten.mul_.Tensor}


def gloo_all_to_all(graph: fx.Graph, groups: ProcessGroups) -> fx.Graph:
    """Rewrite the graph in place and return it.

    For devices other than the CPU, only reductions that no library supports are rewritten.
    """
    for node in graph.nodes:
        if node.target in _REWRITES and (groups.device_type == "cpu" or _is_unsupported(node)):
            _REWRITES[node.target](_Rewriter(graph, node, groups))
    return graph


def _is_unsupported(node: fx.Node) -> bool:
    """Return True if neither gloo nor NCCL has this reduction for the node's dtype."""
    dtype = node.meta["dtype"]
    return node.target is not c10d.all_gather_into_tensor.default and (
        dtype in CARRIERS or dtype.is_complex and node.args[1] != "sum"
    )


class _Rewriter:
    """A collective that is rewritten to an all_to_all."""

    def __init__(self, graph: fx.Graph, node: fx.Node, groups: ProcessGroups) -> None:
        self.graph, self.node = graph, node
        self.x, *self.options, self.group = node.args
        self.ranks, self.me = groups.size(self.group), groups.position(self.group)
        self.shape, self.dtype = list(node.meta["shape"]), node.meta["dtype"]
        self.wait = next(iter(node.users))

    def all_to_all(self, x: fx.Node, splits: list[int]) -> None:
        """Send `splits` rows of x to the ranks, and receive as many."""
        self.node.target, self.node.args = (
            c10d.all_to_all_single.default,
            (x, splits, splits, self.group),
        )

    def swap(self, shape: Sequence[int]) -> fx.Node:
        """Exchange a tensor of this shape between two ranks, and return the other's."""
        with self.graph.inserting_before(self.node):
            flat = (
                self.x
                if len(shape) == 1
                else self.graph.call_function(aten.reshape.default, (self.x, [-1]))
            )
        self.all_to_all(flat, [0 if rank == self.me else math.prod(shape) for rank in range(2)])
        with self.graph.inserting_after(self.wait):
            return (
                self.wait
                if len(shape) == 1
                else self.graph.call_function(aten.reshape.default, (self.wait, list(shape)))
            )

    def send_all(self, shape: Sequence[int]) -> None:
        """Send a tensor of this shape to each rank; the result has a first dimension of ranks."""
        with self.graph.inserting_before(self.node):
            copies = self.graph.call_function(aten.expand.default, (self.x, [self.ranks, *shape]))
            copies = self.graph.call_function(aten.contiguous.default, (copies,))
        self.all_to_all(copies, [1] * self.ranks)

    def reduce(self, reduction: str, keepdim: bool) -> None:
        """Replace the result by what arrives, reduced over its first dimension."""
        widens = (
            reduction in ("sum", "product")
            and not self.dtype.is_floating_point
            and not self.dtype.is_complex
        )
        self.replace_result(
            self.wait,
            _OVER_DIM[reduction],
            self.wait,
            0 if reduction == "product" else [0],
            keepdim,
            **({"dtype": self.dtype} if widens else {}),
        )

    def replace_result(
        self, arrived: fx.Node, op: OpOverload, *args: object, **kwargs: object
    ) -> None:
        """Let the users of the wait read op(*args, **kwargs) instead."""
        users = [user for user in self.wait.users if user is not arrived]
        with self.graph.inserting_after(arrived):
            result = self.graph.call_function(op, args, kwargs)
        result.meta = dict(self.wait.meta)
        for user in users:
            user.replace_input_with(self.wait, result)


def _reduce_scatter(collective: _Rewriter) -> None:
    collective.all_to_all(collective.x, [1] * collective.ranks)
    collective.reduce(collective.options[0], True)


def _all_reduce(collective: _Rewriter) -> None:
    reduction = collective.options[0]
    if collective.ranks == 2 and math.prod(collective.shape) * collective.dtype.itemsize <= FEW:
        ops = _IN_PLACE if collective.node.target is c10d.all_reduce_.default else _OF_TWO
        arrived = collective.swap(collective.shape)
        collective.replace_result(arrived, ops[reduction], collective.x, arrived)
    elif _is_unsupported(collective.node):
        collective.send_all(collective.shape)
        collective.reduce(reduction, False)


def _all_gather(collective: _Rewriter) -> None:
    shard = [collective.shape[0] // collective.ranks, *collective.shape[1:]]
    if collective.ranks == 2:
        arrived, x = collective.swap(shard), collective.x
        in_order = [arrived, x] if collective.me else [x, arrived]
        collective.replace_result(arrived, aten.cat.default, in_order)
    else:
        collective.send_all(shard)
        wait = collective.wait
        collective.replace_result(wait, aten.reshape.default, wait, collective.shape)


_REWRITES = {
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.all_reduce.default: _all_reduce,
    c10d.all_reduce_.default: _all_reduce,
}
