"""Move products that need no exchange to where the device would wait for one.

before   %r = all_to_all(%x, 1, 0, expert);  %h = einsum(egcm,emh->egch, %r, %up);  ...
         %s = einsum(amk,kn->amn, %x0, %shared)
after    %r = all_to_all(%x, 1, 0, expert);  %s = einsum(amk,kn->amn, %x0, %shared)
         %h = einsum(egcm,emh->egch, %r, %up);  ...
needs    one device's program, before start_wait
ensures  an operation stands behind its operands, and no wait comes earlier than before

As many products are moved as an exchange takes, with the operations that only they need: experts
that all tokens share, for instance. The rest stays, beside later exchanges.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from ...comm.hardware import Hardware
from ...comm.kinds import StepKind
from ...fx_passes.loop_call import BodyCall
from ...fx_passes.schedule.arithmetic import flops, op_seconds, step_seconds
from ...layout.mesh import Mesh
from .find_chains import EXCHANGES, draws_or_writes


def fill_waits(graph: fx.Graph, mesh: Mesh, hardware: Hardware) -> None:
    """Rewrite the graph in place."""
    for exchange in [n for n in graph.nodes if n.target in EXCHANGES]:
        order = [*graph.nodes]
        place = {node: i for i, node in enumerate(order)}
        first = min(exchange.users, key=place.__getitem__, default=None)
        if first is None or first.op == "output":
            continue
        between = order[place[exchange] + 1 : place[first]]
        left = step_seconds([exchange.meta["step"]], mesh, hardware)
        left -= sum(op_seconds(n, mesh, hardware) for n in between if _is_computed(n))
        arrived = {n for n in order[: place[first]] if _has_arrived(n, place, place[first])}
        for product in order[place[first] :]:
            if left <= 0:
                break
            if product.op != "call_function" or not flops(product, mesh):
                continue
            moved = _needed(product, arrived, _phase(exchange))
            for node in sorted(moved, key=place.__getitem__):
                first.prepend(node)
                left -= op_seconds(node, mesh, hardware)
            arrived |= moved


def _phase(node: fx.Node) -> bool:
    return bool(node.meta.get("backward"))


def _is_computed(node: fx.Node) -> bool:
    is_body = isinstance(node.target, (BodyCall, StepKind))
    return node.op == "call_function" and not is_body and not draws_or_writes(node)


def _has_arrived(node: fx.Node, place: dict[fx.Node, int], here: int) -> bool:
    """Return whether a value exists at a place without a wait: a collective's if it is in use."""
    return not isinstance(node.target, StepKind) or any(place[u] < here for u in node.users)


def _needed(product: fx.Node, arrived: Collection[fx.Node], phase: bool) -> set[fx.Node]:
    """Return the operations to move for a product, itself included; none if one cannot move."""
    needed, stack = {product}, [product]
    while stack:
        node = stack.pop()
        if not _is_computed(node) or _phase(node) != phase:
            return set()
        new = [x for x in node.all_input_nodes if x not in arrived and x not in needed]
        needed.update(new)
        stack += new
    return needed
