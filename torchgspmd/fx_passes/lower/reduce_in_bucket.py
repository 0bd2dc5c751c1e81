"""Computes what is reduced together where it is reduced, in one piece of memory.

before   %a = mm(%x, %y);  ...;  %flat = cat([reshape(%a, [-1]), reshape(%b, [-1])]);  %r = all_reduce_(%flat)
after    %bucket = empty(%x, 96);  %parts = split_with_sizes(%bucket, [64, 32]);  %a = reshape(%parts[0], [8, 8])
         mm(%x, %y, out=%a);  ...;  _foreach_copy_([%parts[1]], [reshape(%b, [-1])]);  %r = all_reduce_(%bucket)
needs    the program of one rank, lowered and checked (in_flight.py): after this, results stand before the wait that they are ready after
ensures  the same numbers at the same places of the same collectives

Products and sums are written so, gradients of weights and biases; other values are copied as
before. With 14 MB of gradients on two CPU processes the copies took 4 ms of a step's 210. The
memory is that of the last step, if its gradients are gone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from ...comm.bucket_memory import BucketMemory
from ...compat.operators import aten, c10d
from ...compat.private_apis import _foreach_copy_

WRITING = {
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.sum.dim_IntList: torch.sum,
}  # they take out=
ALIGNED = 16  # bytes; what begins elsewhere is written slower by GPUs
_IN_ORDER = (None, torch.contiguous_format)


def reduce_in_bucket(graph: fx.Graph) -> fx.Graph:
    """Rewrites the graph in place and returns it."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.find_nodes(op="call_function", target=c10d.all_reduce_.default):
        flat = node.args[0]
        if flat.target is aten.cat.default and len(flat.users) == 1 and len(flat.args) == 1:
            _write(graph, node, flat, order)
    return graph


def _write(graph: fx.Graph, reduction: fx.Node, flat: fx.Node, order: dict[fx.Node, int]) -> None:
    split = _taken_apart(reduction)
    sizes = list(split.args[1]) if split is not None else []
    made = dict(_made(flat, sizes))  # position -> what computes it
    if not made:
        return
    first = min(made.values(), key=order.__getitem__)
    with graph.inserting_before(first):
        source = next(x for x in first.args if isinstance(x, fx.Node))
        bucket = graph.call_function(
            BucketMemory().empty, (source, sum(sizes), first.meta["dtype"])
        )
        parts = graph.call_function(aten.split_with_sizes.default, (bucket, sizes))
        pieces = [graph.call_function(operator.getitem, (parts, i)) for i in range(len(sizes))]
    places = {}
    for i, node in made.items():
        args, shape = _without_ones(node)
        with graph.inserting_before(node):
            places[i] = (
                pieces[i]
                if len(shape) == 1
                else graph.call_function(aten.reshape.default, (pieces[i], shape))
            )
            graph.call_function(WRITING[node.target], args, {"out": places[i]})
    others = [
        (piece, _as_vector(member))
        for i, (piece, member) in enumerate(zip(pieces, flat.args[0]))
        if i not in made
    ]
    if others:
        with graph.inserting_before(flat):
            graph.call_function(_foreach_copy_, tuple(map(list, zip(*others))))
    flat.replace_all_uses_with(bucket)
    for i, piece in enumerate(pieces):
        _read_there(graph, split, i, piece, places.get(i))
    _erase(graph, flat)
    graph.erase_node(split)


def _taken_apart(reduction: fx.Node) -> fx.Node | None:
    """What takes the members out of the reduced bucket."""
    waited = next(iter(reduction.users), None)
    users = waited.users if waited is not None and waited.target is c10d.wait_tensor.default else ()
    return next((u for u in users if u.target is aten.split_with_sizes.default), None)


def _made(flat: fx.Node, sizes: Sequence[int]) -> Iterator[tuple[int, fx.Node]]:
    """Members that nobody else uses, of operations that can write them in their place."""
    for i, node in enumerate(flat.args[0] if sizes else ()):
        while (
            node.target in (aten.reshape.default, aten.contiguous.default) and len(node.users) == 1
        ):
            node = node.args[0]
        if (
            node.target in WRITING
            and not node.kwargs
            and len(node.users) == 1
            and all(map(node.meta.get, ("shape", "dtype")))
        ):
            begins = sum(sizes[:i]) * node.meta["dtype"].itemsize
            if begins % ALIGNED == 0 and math.prod(node.meta["shape"]) == sizes[i]:
                yield i, node


def _without_ones(node: fx.Node) -> tuple[tuple, list[int]]:
    """Arguments of what computes a member, and the shape of its result; sums keep no dimensions of
    size one, as gradients do not.
    """
    shape = list(node.meta["shape"])
    if node.target is not aten.sum.dim_IntList or len(node.args) < 3 or not node.args[2]:
        return node.args, shape
    x, dims, _, *rest = node.args
    summed = {d % len(shape) for d in dims or range(len(shape))}
    return (x, dims, False, *rest), [n for d, n in enumerate(shape) if d not in summed]


def _as_vector(member: fx.Node) -> fx.Node:
    """A member, which is a vector; what it is a view of if that is one too."""
    viewed = member.args[0] if member.target is aten.reshape.default else member
    return viewed if len(viewed.meta.get("shape") or ()) == 1 else member


def _read_there(
    graph: fx.Graph, split: fx.Node, i: int, piece: fx.Node, place: fx.Node | None
) -> None:
    """A reduced member is where its terms were written: as they were, as a vector, or in another
    shape.
    """
    for taken in [u for u in split.users if u.args[1] == i]:
        taken.replace_all_uses_with(piece)
        graph.erase_node(taken)
    for view in [u for u in piece.users if u.target is aten.reshape.default and u is not place]:
        shape = list(view.args[1])
        for copy in [
            u
            for u in view.users
            if u.target is aten.contiguous.default and u.kwargs.get("memory_format") in _IN_ORDER
        ]:
            copy.replace_all_uses_with(view)
            graph.erase_node(copy)
        if len(shape) == 1 or place not in (None, piece) and shape == list(place.args[1]):
            view.replace_all_uses_with(piece if len(shape) == 1 else place)
            graph.erase_node(view)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """A node without users, and what only it used."""
    operands = node.all_input_nodes
    graph.erase_node(node)
    for operand in operands:
        if not operand.users and operand.op == "call_function":
            _erase(graph, operand)
