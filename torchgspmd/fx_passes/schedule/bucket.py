"""Sends small collectives of one kind as one.

before   %a_r = all_reduce(%a, sum, data);  %b = mm(...);  %b_r = all_reduce(%b, sum, data)
after    %b = mm(...);  %a_r_start = start(all_reduce, [%a, %b], ...);  %a_r = wait(%a_r_start, 0);  %b_r = wait(%a_r_start, 1)
needs    the program of one device
ensures  only collectives of equal key() are joined, in the same order on every rank

Reductions (of gradients, mostly) are taken in the order in which their terms are computed, which of
gradients is that of layers from the last to the first; they wait for the last one of their bucket.
Gathers of inputs (weights) move up to the first one of theirs; of others only those that follow one
another are joined. No bucket is larger than CAP. What is to be sent of one key goes in at least
PARTS buckets, so that the first reduction is on its way while there is something left to compute,
and the first weights are there soon, but not in much less than SMALL bytes, which would cost more
time in starting collectives than it hides; of reductions, one is enough where the cores that
compute also send. A sum that is divided by another one before it is reduced, as a loss by a count,
is reduced before, together with that. Source: the buckets of PyTorch's DistributedDataParallel
(arXiv 2006.15704, section 3.2.3), which have 25 MB, the first 1 MB.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import fx

from ...comm.collective import all_gather, all_reduce, reduce_scatter
from ...rules import quotient
from ..partition.machine import Machine
from .liveness import bytes_of
from .start_wait import join

CAP = 25 * 2**20  # bytes
SMALL = 2**20  # bytes
PARTS = 4


def key(node: fx.Node) -> Any:
    """Equal for collectives that may be one: kind, axes, reduction, type, forward or backward. None
    for other nodes.
    """
    if node.target is all_reduce or node.target is reduce_scatter:
        return node.target, node.args[1], node.args[-1], node.meta["dtype"], node.meta["backward"]
    if node.target is all_gather:
        return node.target, node.args[2], node.meta["dtype"], node.meta["backward"]
    return None


def bucket(graph: fx.Graph, machine: Machine) -> fx.Graph:
    """Rewrites the graph in place and returns it."""
    _reduce_before_division(graph)
    _raise_reductions(graph)
    _sink_tails(graph)
    caps = _caps(graph, machine)
    order = {node: i for i, node in enumerate(graph.nodes)}
    last = len(order)
    deadline = {
        n: min((order[u] for u in n.users if u.op != "output"), default=last) for n in order
    }
    _collect(
        order,
        caps,
        lambda n: n.target in (all_reduce, reduce_scatter),
        lambda bucket, n: all(deadline[m] > order[n] for m in bucket),
        lambda bucket: [bucket[-1].prepend(n) for n in bucket[:-1]],
    )
    _collect(
        order,
        caps,
        lambda n: n.target is all_gather and n.args[0].op == "placeholder",
        lambda bucket, n: True,
        lambda bucket: [bucket[0].append(n) for n in reversed(bucket[1:])],
    )
    for node in list(graph.nodes):
        if key(node) is not None and len(run := _run_of(node, caps)) > 1:
            join(graph, run)
    return graph


def _caps(graph: fx.Graph, machine: Machine) -> dict[Any, float]:
    """Bytes of a bucket, for every key."""
    totals: dict[Any, float] = defaultdict(float)
    for node in graph.nodes:
        if key(node) is not None:
            totals[key(node)] += _payload(node)
    parts = {k: PARTS if machine.beside or k[0] is all_gather else 1 for k in totals}
    return {
        k: min(CAP, total / min(parts[k], max(1, round(total / SMALL))))
        for k, total in totals.items()
    }


def _reduce_before_division(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=all_reduce):
        divided = node.args[0]
        if (found := quotient(divided)) is None or len(divided.users) > 1 or node.args[1] != "sum":
            continue
        terms, count = found
        if key(count) == key(node) and all(
            terms.meta[k] == node.meta[k] for k in ("shape", "dtype")
        ):
            node.replace_all_uses_with(divided)
            divided.replace_input_with(terms, node)
            node.args = (terms, *node.args[1:])
            divided.prepend(node)


def _raise_reductions(graph: fx.Graph) -> None:
    """Moves every reduction up to its operand. They stand where their results are used: all
    gradients at the end.
    """
    for node in list(graph.nodes):
        if node.target in (all_reduce, reduce_scatter) and node.args[0].op == "call_function":
            node.args[0].append(node)


def _sink_tails(graph: fx.Graph) -> None:
    """Moves what only reshapes or scales a reduced value for the output to the end, where it forces
    no bucket to be closed.
    """
    end = graph.output_node()
    for node in [n for n in graph.nodes if n.target in (all_reduce, reduce_scatter)]:
        chain = []
        while (
            len(node.users) == 1
            and (user := next(iter(node.users))) is not end
            and user.all_input_nodes == [node]
        ):
            chain.append(user)
            node = user
        if list(node.users) == [end]:
            for tail in chain:
                end.prepend(tail)


def _collect(
    order: dict[fx.Node, int],
    caps: dict[Any, float],
    chosen: Callable,
    fits: Callable,
    move: Callable,
) -> None:
    """Fills buckets in program order; a bucket is moved when something does not fit into it any
    more.
    """
    buckets: dict[Any, list[fx.Node]] = {}
    filled: dict[Any, int] = defaultdict(int)
    for node in order:
        if not chosen(node):
            continue
        kind, size = key(node), _payload(node)
        found = buckets.setdefault(kind, [])
        if found and not (filled[kind] + size <= caps[kind] and fits(found, node)):
            move(found)
            found = buckets[kind] = []
            filled[kind] = 0
        found.append(node)
        filled[kind] += size
    for found in buckets.values():
        move(found)


def _run_of(node: fx.Node, caps: dict[Any, float]) -> list[fx.Node]:
    """The node and the collectives right behind it that can go with it: of equal key, and not using
    its result.
    """
    run, total = [node], _payload(node)
    while key(run[-1].next) == key(node) and run[-1].next.args[0] not in run:
        total += _payload(run[-1].next)
        if total > caps[key(node)]:
            break
        run.append(run[-1].next)
    return run


def _payload(node: fx.Node) -> int:
    """Bytes of the whole tensor: gathered, or before it is scattered. The same on any number of
    devices.
    """
    return max(bytes_of(node), bytes_of(node.args[0]))
