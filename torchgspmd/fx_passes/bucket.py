"""Brings small collectives of one kind together, so that they can be sent as one.

before   %a_r = all_reduce(%a, sum, data);  %b = mm(...);  %b_r = all_reduce(%b, sum, data)
after    %b = mm(...);  %a_r = all_reduce(%a, sum, data);  %b_r = all_reduce(%b, sum, data)
needs    the program of one device
ensures  nothing but the order changes, the same on every rank; adjacent collectives of equal key() may be merged

Reductions (of gradients, mostly) wait for the last one of their bucket; gathers of inputs (weights) move up to the
first one of theirs. A bucket ends at `cap` bytes, so that communication starts while there is something left to compute.
Source: the buckets of PyTorch's DistributedDataParallel (arXiv 2006.15704, section 3.2.3).
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import fx

from ..comm.collective import all_gather, all_reduce, reduce_scatter

CAP = 25 * 2 ** 20              # bytes


def key(node: fx.Node) -> Any:
    """Equal for collectives that may be one: kind, axes, reduction, type, forward or backward. None for other nodes."""
    if node.target is all_reduce or node.target is reduce_scatter:
        return node.target, node.args[1], node.args[-1], node.meta["dtype"], node.meta["backward"]
    if node.target is all_gather:
        return node.target, node.args[2], node.meta["dtype"], node.meta["backward"]
    return None


def bucket(graph: fx.Graph, cap: int = CAP) -> fx.Graph:
    """Reorders the graph in place and returns it."""
    _sink_tails(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    last = len(order)
    deadline = {n: min((order[u] for u in n.users if u.op != "output"), default=last) for n in order}
    _collect(order, cap, lambda n: n.target in (all_reduce, reduce_scatter), lambda bucket, n: all(deadline[m] > order[n] for m in bucket),
             lambda bucket: [bucket[-1].prepend(n) for n in bucket[:-1]])
    _collect(order, cap, lambda n: n.target is all_gather and n.args[0].op == "placeholder", lambda bucket, n: True,
             lambda bucket: [bucket[0].append(n) for n in reversed(bucket[1:])])
    return graph


def _sink_tails(graph: fx.Graph) -> None:
    """Moves what only reshapes or scales a reduced value for the output to the end, where it forces no bucket to be closed."""
    end = graph.output_node()
    for node in [n for n in graph.nodes if n.target in (all_reduce, reduce_scatter)]:
        chain = []
        while len(node.users) == 1 and (user := next(iter(node.users))) is not end and user.all_input_nodes == [node]:
            chain.append(user)
            node = user
        if list(node.users) == [end]:
            for tail in chain:
                end.prepend(tail)


def _collect(order: dict[fx.Node, int], cap: int, chosen: Callable, fits: Callable, move: Callable) -> None:
    """Fills buckets in program order; a bucket is moved when something does not fit into it any more."""
    buckets: dict[Any, list[fx.Node]] = {}
    for node in order:
        if not chosen(node):
            continue
        found = buckets.setdefault(key(node), [])
        if found and not (fits(found, node) and sum(map(_bytes, found)) + _bytes(node) <= cap):
            move(found)
            found = buckets[key(node)] = []
        found.append(node)
    for found in buckets.values():
        move(found)


def _bytes(node: fx.Node) -> int:
    return math.prod(node.meta["shape"]) * node.meta["dtype"].itemsize
