"""Collectives between CPU processes by all_to_all and arithmetic, where torch's own are slow, or
not safe.

before   %r = reduce_scatter_tensor(%x, sum, 2, g);  %w = wait_tensor(%r)
after    %r = all_to_all_single(%x, [1, 1], [1, 1], g);  %y = wait_tensor(%r);  %w = sum(%y, [0], True)
before   %r = all_reduce_(%x, sum, g);  %w = wait_tensor(%r)                    # two ranks, few bytes; this is rank 0
after    %r = all_to_all_single(%x, [0, 8], [0, 8], g);  %y = wait_tensor(%r);  %w = add_(%x, %y)
before   %r = all_gather_into_tensor(%x, 2, g);  %w = wait_tensor(%r)
after    %r = all_to_all_single(%x, [0, 8], [0, 8], g);  %y = wait_tensor(%r);  %w = cat([%x, %y])
needs    the program of one rank, operands contiguous; meta["shape"] and meta["dtype"] on collectives
ensures  every rank has the same result, and sends the bytes that the plan says; more only where more than two ranks all_reduce
         numbers of a type that no library computes with: each gets all terms

Fast: over gloo torch makes a reduce_scatter of an all_reduce, which sends twice the bytes: for 32
MB between two processes 53 ms, this way 24. A small all_reduce takes 0.8 ms of a process, an
exchange 0.3.

Safe: gloo's two threads write down the name of what they finished, without a lock, in one string
(ProcessGroupGloo::runLoop, lastCompletedWorkName). A name of more than 15 characters lies on the
heap, where one thread writes what the other has freed: the process dies of "malloc(): unaligned
tcache chunk detected", once in some ten thousand collectives that overlap (torch 2.13.0 alone
does). Of those that we use only all_gather_into_tensor has such a name, ALLGATHER_COALESCED.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx

from ...comm.process_groups import ProcessGroups
from ...compat.operators import aten, c10d
from ...compat.private_apis import OpOverload
from .wire_dtypes import CARRIERS

FEW = 2**21  # bytes up to which two ranks exchange their terms of a sum
# What reduces over a dimension; two tensors; two tensors, written over the first. Named as c10d
# does.
_OVER = {
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
    """Rewrites the graph in place and returns it. For other devices only reductions of numbers that
    no library computes with.
    """
    for node in graph.nodes:
        if node.target in _WAYS and (groups.device_type == "cpu" or _is_foreign(node)):
            _WAYS[node.target](_Call(graph, node, groups))
    return graph


def _is_foreign(node: fx.Node) -> bool:
    """Whether neither gloo nor NCCL reduces numbers of this type so."""
    dtype = node.meta["dtype"]
    return node.target is not c10d.all_gather_into_tensor.default and (
        dtype in CARRIERS or dtype.is_complex and node.args[1] != "sum"
    )


class _Call:
    """A collective of which an all_to_all becomes."""

    def __init__(self, graph: fx.Graph, node: fx.Node, groups: ProcessGroups):
        self.graph, self.node = graph, node
        self.x, *self.options, self.group = node.args
        self.ranks, self.me = groups.size(self.group), groups.position(self.group)
        self.shape, self.dtype = list(node.meta["shape"]), node.meta["dtype"]
        self.wait = next(iter(node.users))

    def all_to_all(self, x: fx.Node, splits: list[int]) -> None:
        """Sends so many rows of x to each rank, and receives as many."""
        self.node.target, self.node.args = (
            c10d.all_to_all_single.default,
            (x, splits, splits, self.group),
        )

    def swap(self, shape: Sequence[int]) -> fx.Node:
        """Of two ranks, each sends the other what it has, which is of this shape; returns what
        arrives.
        """
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
        """Sends to each rank what this one has, which is of this shape; what arrives has one more
        dimension, in front.
        """
        with self.graph.inserting_before(self.node):
            copies = self.graph.call_function(aten.expand.default, (self.x, [self.ranks, *shape]))
            copies = self.graph.call_function(aten.contiguous.default, (copies,))
        self.all_to_all(copies, [1] * self.ranks)

    def reduce(self, reduction: str, keepdim: bool) -> None:
        """What arrives, reduced over its first dimension."""
        widens = (
            reduction in ("sum", "product")
            and not self.dtype.is_floating_point
            and not self.dtype.is_complex
        )
        self.result(
            self.wait,
            _OVER[reduction],
            self.wait,
            0 if reduction == "product" else [0],
            keepdim,
            **({"dtype": self.dtype} if widens else {}),
        )

    def result(self, arrived: fx.Node, op: OpOverload, *args: object, **kwargs: object) -> None:
        """What everyone uses who waited."""
        users = [user for user in self.wait.users if user is not arrived]
        with self.graph.inserting_after(arrived):
            made = self.graph.call_function(op, args, kwargs)
        made.meta = dict(self.wait.meta)
        for user in users:
            user.replace_input_with(self.wait, made)


def _reduce_scatter(call: _Call) -> None:
    call.all_to_all(call.x, [1] * call.ranks)
    call.reduce(call.options[0], True)


def _all_reduce(call: _Call) -> None:
    reduction = call.options[0]
    if call.ranks == 2 and math.prod(call.shape) * call.dtype.itemsize <= FEW:
        of_two = _IN_PLACE if call.node.target is c10d.all_reduce_.default else _OF_TWO
        arrived = call.swap(call.shape)
        call.result(arrived, of_two[reduction], call.x, arrived)
    elif _is_foreign(call.node):
        call.send_all(call.shape)
        call.reduce(reduction, False)


def _all_gather(call: _Call) -> None:
    part = [call.shape[0] // call.ranks, *call.shape[1:]]
    if call.ranks == 2:
        arrived = call.swap(part)
        call.result(arrived, aten.cat.default, [arrived, call.x] if call.me else [call.x, arrived])
    else:
        call.send_all(part)
        call.result(call.wait, aten.reshape.default, call.wait, call.shape)


_WAYS = {
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.all_reduce.default: _all_reduce,
    c10d.all_reduce_.default: _all_reduce,
}
