"""Computes what is reduced together where it is reduced, in one piece of memory.

before   %a = mm(%x, %y);  ...;  %flat = cat([reshape(%a, [-1]), reshape(%b, [-1])]);  %r = all_reduce_(%flat)
after    %bucket = empty(%x, 96);  %parts = split_with_sizes(%bucket, [64, 32]);  %a = reshape(%parts[0], [8, 8])
         mm(%x, %y, out=%a);  ...;  cat([reshape(%b, [-1])], out=%parts[1]);  %r = all_reduce_(%bucket)
needs    the program of one rank, lowered and checked (in_flight.py): after this, results stand before the wait that they are ready after
ensures  the same numbers at the same places of the same collectives

Products and sums are written so, gradients of weights and biases; other values are copied as before. With 14 MB of gradients on
two CPU processes the copies took 4 ms of a step's 210. The memory is that of the last step, if its gradients are gone.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import fx

from ..comm.kept import Kept

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
WRITING = {aten.mm.default: torch.mm, aten.bmm.default: torch.bmm, aten.sum.dim_IntList: torch.sum}     # they take out=
ALIGNED = 16                    # bytes; what begins elsewhere is written slower by GPUs


def into_buckets(graph: fx.Graph) -> fx.Graph:
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
    made = dict(_made(flat, sizes))                                         # position -> what computes it
    if not made:
        return
    first = min(made.values(), key=order.__getitem__)
    with graph.inserting_before(first):
        source = next(x for x in first.args if isinstance(x, fx.Node))
        bucket = graph.call_function(Kept().empty, (source, sum(sizes), first.meta["dtype"]))
        parts = graph.call_function(aten.split_with_sizes.default, (bucket, sizes))
    for i, node in made.items():
        with graph.inserting_before(node):
            piece = graph.call_function(operator.getitem, (parts, i))
            place = graph.call_function(aten.reshape.default, (piece, list(node.meta["shape"])))
            graph.call_function(WRITING[node.target], node.args, {"out": place})
        _read_there(graph, split, i, place)
    members = list(flat.args[0])
    with graph.inserting_before(flat):
        for is_made, run in groupby(range(len(sizes)), made.__contains__):
            if not is_made:
                run = list(run)
                place = graph.call_function(aten.narrow.default, (bucket, 0, sum(sizes[:run[0]]), sum(sizes[i] for i in run)))
                graph.call_function(torch.cat, ([members[i] for i in run],), {"out": place})
    flat.replace_all_uses_with(bucket)
    _erase(graph, flat)


def _taken_apart(reduction: fx.Node) -> fx.Node | None:
    """What takes the members out of the reduced bucket."""
    waited = next(iter(reduction.users), None)
    users = waited.users if waited is not None and waited.target is c10d.wait_tensor.default else ()
    return next((u for u in users if u.target is aten.split_with_sizes.default), None)


def _made(flat: fx.Node, sizes: Sequence[int]) -> Iterator[tuple[int, fx.Node]]:
    """Members that nobody else uses, of operations that can write them in their place."""
    for i, node in enumerate(flat.args[0] if sizes else ()):
        while node.target in (aten.reshape.default, aten.contiguous.default) and len(node.users) == 1:
            node = node.args[0]
        if node.target in WRITING and not node.kwargs and len(node.users) == 1 and all(map(node.meta.get, ("shape", "dtype"))):
            begins = sum(sizes[:i]) * node.meta["dtype"].itemsize
            if begins % ALIGNED == 0 and math.prod(node.meta["shape"]) == sizes[i]:
                yield i, node


def _read_there(graph: fx.Graph, split: fx.Node, i: int, place: fx.Node) -> None:
    """A reduced member that has the shape it was computed in is where it was."""
    for piece in [u for u in split.users if u.args[1] == i]:
        for view in list(piece.users):
            if view.target is aten.reshape.default and list(view.args[1]) == list(place.args[1]):
                view.replace_all_uses_with(place)
                graph.erase_node(view)
        if not piece.users:
            graph.erase_node(piece)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """A node without users, and what only it used."""
    operands = node.all_input_nodes
    graph.erase_node(node)
    for operand in operands:
        if not operand.users and operand.op == "call_function":
            _erase(graph, operand)
