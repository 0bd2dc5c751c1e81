"""What a partitioned graph does that nobody asked for: operations that every device computes whole,
and operands gathered so that the devices of an axis all compute the same. What marks and outputs
ask for is not listed, nor a gather for an operation that divides another dimension by the axis: so
are weights of FSDP and sequences gathered, on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from ..mesh import Mesh
from .ir import operands_of, tensors_of


@dataclass(frozen=True)
class ReplicatedOp:
    """An operation that every device computes whole, or an operand gathered for one, though nobody
    asked for it.
    """

    op: str
    source: str | None
    bytes: int  # of the results, or of the gathered operand, on one device
    why: str
    value: str | None = None  # what was gathered
    dim: int = 0  # and along which dimension


def replication_report(graph: fx.Graph, mesh: Mesh) -> tuple[ReplicatedOp, ...]:
    """In program order; needs a partitioned graph."""
    found: dict[ReplicatedOp, None] = {}
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        rule = node.meta.get("rule")
        if rule is None or "mark" in node.meta:
            continue
        if not rule.known:
            size = sum(t.numel() * t.element_size() for t in tensors_of(node))
            why = (
                "its sizes depend on values"
                if node.meta.get("dynamic")
                else "no rule and no decomposition"
            )
            if size or node.meta.get("dynamic"):
                found[ReplicatedOp(str(node.target), node.meta.get("source"), size, why)] = None
            continue
        for operand, value, dim, why in _gathered(node):
            if operand not in seen:
                seen.add(operand)
                val = operand.meta["val"]
                size = (
                    math.prod(operand.meta["spec"].local_shape(val.shape, mesh))
                    * val.element_size()
                )
                found[
                    ReplicatedOp(str(node.target), node.meta.get("source"), size, why, value, dim)
                ] = None
    return tuple(found)


def _gathered(node: fx.Node) -> Iterator[tuple[fx.Node, str, int, str]]:
    """Operands that were gathered, the name of what they were gathered from, the dimension, and why
    that was needed.
    """
    rule, used = node.meta["rule"], _divided_by(node)
    for operand, dims in zip(operands_of(node), rule.operands):
        before = operand
        while "step" in before.meta and before.meta["step"].kind == "all_gather":
            before = before.args[0]
        if before is operand:
            continue
        for d, (was, now) in enumerate(zip(before.meta["spec"].dims, operand.meta["spec"].dims)):
            lost = [a for a in was if a not in now and a not in used]
            if lost:
                why = (
                    "it has to be whole in"
                    if set(dims[d]) & rule.whole
                    else "it is cheaper, and nothing else is divided by it, in"
                )
                yield (
                    operand,
                    before.name,
                    d,
                    f"dimension {d} of %{before.name} is gathered over {'+'.join(lost)}: {why} '{rule}'",
                )


def _divided_by(node: fx.Node) -> set[str]:
    """Axes whose devices do not all compute the same there; where rows are only moved, then of all
    operations that use them.
    """
    rule = node.meta.get("rule")
    if rule is None or "assignment" not in node.meta:
        return set()
    own = {a for axes in node.meta["assignment"].values() for a in axes}
    return (
        own | set.intersection(*map(_divided_by, node.users))
        if rule.moves is not None and node.users
        else own
    )
