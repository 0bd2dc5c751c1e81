"""Finish the ranks' comparison before the forward's first collective.

before   %r = all_reduce_(%x, sum, g);  %w = wait_tensor(%r)
after    finish_check();  %r = all_reduce_(%x, sum, g);  %w = wait_tensor(%r)
before   %r = all_reduce_(%x, sum, g);  %w = wait_tensor(%r)    # a few numbers
after    %c = carry_check(%x);  %w = total(%c)
needs    one rank's forward; meta["shape"] and meta["dtype"] on collectives

The comparison's message carries a small sum that ends before the next collective begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from ...comm.kinds import KINDS, FusedKind, all_reduce
from ...comm.rank_check import RankCheck, fits
from ..loop_call import BodyCall
from ..program import Program
from .verify_in_flight import STARTS, WAIT


def insert_rank_check(program: Program) -> fx.Graph | None:
    """Rewrite the graph in place and return it; None for a backward, or if nothing is sent."""
    graph, rank = program.graph, program.rank
    # The forward has compared the ranks already; a backward follows it.
    if program.backward is None:
        return None
    first, done = [*sending_nodes(graph), None, None][:2]
    if first is None:
        return None
    carries = (
        first.target in {wire.op for wire in all_reduce.wire}
        and first.args[1] == "sum"
        and done.args[0] is first
        and fits(
            rank.groups, first.meta["shape"], first.meta["dtype"], rank.groups.size(first.args[2])
        )
    )
    with graph.inserting_before(first):
        # Ranks that differ would hang in the collective, so the comparison has to end before it.
        if not carries:
            graph.call_function(rank.finish_check)
            return graph
        check = graph.call_function(rank.carry_check, (first.args[0],))
    with graph.inserting_before(done):
        done.replace_all_uses_with(graph.call_function(RankCheck.total, (check,)))
    graph.erase_node(done)
    graph.erase_node(first)
    return graph


def sending_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the nodes at which ranks communicate."""
    rings = (run for kind in KINDS.values() if isinstance(kind, FusedKind) for run in kind.runs)
    sending = {*STARTS, WAIT, *rings}
    return (n for n in graph.nodes if _sends(n, sending))


def _sends(node: fx.Node, sending: set) -> bool:
    """Return whether ranks communicate at a node, or in the loop that it is."""
    call: Any = node.target
    if isinstance(call, BodyCall) and not call.sends:
        return any(_sends(n, sending) for b in call.bodies for n in b.graph.nodes)
    return call in sending or getattr(call, "sends", False)
