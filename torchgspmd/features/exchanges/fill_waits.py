"""Move products that need no exchange to where the device would wait for one.

    %r = all_to_all(%x, 1, 0, expert);  %h = einsum(egcm,emh->egch, %r, %up);  ...
    %s = einsum(amk,kn->amn, %x0, %shared)                  # moves to directly behind %r

As many products are moved as an exchange takes, with the operations that only they need: experts
that all tokens share, for instance. The rest stays, beside later exchanges.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx

from ...comm.hardware import Hardware
from ...comm.kinds import StepKind
from ...fx_passes.loop_call import BodyCall
from ...fx_passes.schedule.arithmetic import flops, op_seconds, step_seconds
from ...layout.mesh import Mesh
from .find_chains import EXCHANGES, draws_or_writes

WINDOW = 400  # How many operations behind a wait may be moved: about a layer's.


def fill_waits(graph: fx.Graph, mesh: Mesh, hardware: Hardware) -> None:
    """Rewrite the graph in place."""
    place = {node: float(i) for i, node in enumerate(graph.nodes)}
    for exchange in [n for n in graph.nodes if n.target in EXCHANGES]:
        first = min(exchange.users, key=place.__getitem__, default=None)
        if first is None or first.op == "output":
            continue
        left = step_seconds([exchange.meta["step"]], mesh, hardware)
        node = exchange.next
        while node is not first and left > 0:
            left -= op_seconds(node, mesh, hardware) if _is_computed(node) else 0.0
            node = node.next
        behind = [first]  # all that follows it, and may be moved before it
        while len(behind) < WINDOW and behind[-1].next.op != "output":
            behind.append(behind[-1].next)
        there = {*behind}
        for product in behind:
            if left <= 0:
                break
            if product not in there or product.op != "call_function" or not flops(product, mesh):
                continue
            moved = _needed(product, there, place, place[first], _phase(exchange))
            for node in sorted(moved, key=place.__getitem__):
                first.prepend(node)
                place[node] = place[first] - 0.5
                left -= op_seconds(node, mesh, hardware)
            there -= moved


def _phase(node: fx.Node) -> bool:
    return bool(node.meta.get("backward"))


def _is_computed(node: fx.Node) -> bool:
    is_body = isinstance(node.target, (BodyCall, StepKind))
    return node.op == "call_function" and not is_body and not draws_or_writes(node)


def _needed(
    product: fx.Node,
    there: Collection[fx.Node],
    place: Mapping[fx.Node, float],
    here: float,
    phase: bool,
) -> set[fx.Node]:
    """Return the operations to move for a product, itself included; none if one cannot move.

    here: the place to which they would move. Collectives without a user before it would be waited
    for there.
    """
    needed, stack = {product}, [product]
    while stack:
        node = stack.pop()
        if not _is_computed(node) or _phase(node) != phase:
            return set()
        for x in node.all_input_nodes:
            if x in there and x not in needed:
                needed.add(x)
                stack.append(x)
            elif isinstance(x.target, StepKind) and all(place[u] >= here for u in x.users):
                return set()
    return needed
