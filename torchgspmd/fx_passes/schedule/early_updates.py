"""A part of `overlap`: updates to weights that are gathered only to be returned.

    %g1_start = start(reduce_scatter, %dw1); ... the backward up to %dw0; %g0_start = ...
    %w1 = adam(wait(%g1_start)); start(all_gather, %w1); ... the rest of the backward

Nothing else asks for such a gather before the program ends, where no computation is left to hide
it. It begins one gradient later than the sum that it needs: that one has had a layer's time. The
idea of sharded updates comes from arXiv 2004.13336, which gathers in the next step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import fx

from ...comm.collective import start, wait


def early_updates(order: Sequence[fx.Node], updates: Collection[fx.Node]) -> list[fx.Node]:
    """Order nodes so that update messages that depend on sums follow the sum after these."""
    place = {node: i for i, node in enumerate(order)}
    last = {
        s: before
        for s in order
        if s.target is start and all(arrived in updates for arrived in s.users)
        if _is_returned(s) and (before := _ancestors(s, place))
    }
    # start -> the place from which on it can begin, which is where it will
    begins = {
        n: max((place[x] for x in n.all_input_nodes if x in place), default=0)
        for n in order
        if n.target is start and n not in last
    }
    starts = sorted(begins, key=begins.__getitem__)
    behind: dict[int, list[fx.Node]] = {}  # place -> what is to follow
    for sent, ancestors in last.items():
        sums = max((begins.get(n, len(order)) for n in ancestors if n.target is start), default=-1)
        following = next((s for s in starts if begins[s] > sums >= 0), None)
        if following is not None and begins[following] < place[sent]:
            behind.setdefault(begins[following], []).extend((following, *ancestors, sent))
    result: dict[fx.Node, None] = {}
    for i, node in enumerate(order):
        result[node] = None
        result.update(dict.fromkeys(behind.get(i, ())))
    return [*result]


def _is_returned(node: fx.Node) -> bool:
    """Return whether a node sends computed values, and the program only returns its result."""
    return any(
        x.op == "call_function" and x.target is not wait for x in node.all_input_nodes
    ) and all(user.op == "output" for arrived in node.users for user in arrived.users)


def _ancestors(node: fx.Node, place: dict[fx.Node, int]) -> list[fx.Node]:
    """Return a node's ancestors, in order; none if random numbers are drawn for it."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        new = [x for x in stack.pop().all_input_nodes if x in place and x not in found]
        found.update(new)
        stack += new
    # Moved draws would give other numbers than one device has.
    if any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in found):
        return []
    return sorted(found, key=place.__getitem__)
