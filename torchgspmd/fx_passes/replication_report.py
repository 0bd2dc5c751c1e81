"""Replicated work that the user did not ask for, in a partitioned graph.

Two kinds are listed. An operation is computed whole by every device. An operand is gathered, and
then all devices of an axis compute the same.

Gathers that marks or outputs ask for are not listed. Neither is a gather for an operation that
shards another dimension over the same axis: weights of FSDP and sequences are gathered so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from ..mesh import Mesh
from .ir import operands_of, other_shapes, tensors_of


@dataclass(frozen=True)
class ReplicatedOp:
    """An operation that every device computes whole, or an operand gathered for one."""

    op: str
    source: str | None
    # Size on one device of the results, or of the gathered operand; a size that depends on values
    # counts as 1.
    bytes: int
    why: str
    value: str | None = None  # Name of the gathered value.
    dim: int = 0  # The dimension that was gathered.


def replication_report(graph: fx.Graph, mesh: Mesh) -> tuple[ReplicatedOp, ...]:
    """Return the replicated operations of a partitioned graph, in program order."""
    report: dict[ReplicatedOp, None] = {}
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        rule = node.meta.get("rule")
        if rule is None or "mark" in node.meta:
            continue
        if not rule.described:
            size = sum(
                math.prod(n for n, m in zip(t.shape, other) if n == m) * t.element_size()
                for t, other in zip(tensors_of(node), other_shapes(node))
            )
            why = (
                "its sizes depend on values"
                if node.meta.get("dynamic")
                else "no rule and no decomposition"
            )
            if size or node.meta.get("dynamic"):
                report[ReplicatedOp(str(node.target), node.meta.get("source"), size, why)] = None
            continue
        for operand, value, dim, why in _gathered_operands(node):
            if operand not in seen:
                seen.add(operand)
                val = operand.meta["val"]
                size = (
                    math.prod(operand.meta["spec"].local_shape(val.shape, mesh))
                    * val.element_size()
                )
                report[
                    ReplicatedOp(str(node.target), node.meta.get("source"), size, why, value, dim)
                ] = None
    return tuple(report)


def _gathered_operands(node: fx.Node) -> Iterator[tuple[fx.Node, str, int, str]]:
    """Yield (operand, name before the gather, dimension, reason) for every gathered operand."""
    rule, used = node.meta["rule"], _sharding_axes(node)
    for operand, dims in zip(operands_of(node), rule.operands):
        before = operand
        while "step" in before.meta and before.meta["step"].target.gathers:
            before = before.args[0]
        if before is operand:
            continue
        for d, (old, new) in enumerate(zip(before.meta["spec"].dims, operand.meta["spec"].dims)):
            gathered = [a for a in old if a not in new and a not in used]
            if gathered:
                why = (
                    "it has to be whole in"
                    if set(dims[d]) & rule.replicated
                    else "it is cheaper, and nothing else is divided by it, in"
                )
                yield (
                    operand,
                    before.name,
                    d,
                    f"dimension {d} of %{before.name} is gathered over {'+'.join(gathered)}: "
                    f"{why} '{rule}'",
                )


def _sharding_axes(node: fx.Node) -> set[str]:
    """Return the axes whose devices compute different shards of a node.

    An operation that only moves rows also has the axes that all its users share.
    """
    rule = node.meta.get("rule")
    if rule is None or "assignment" not in node.meta:
        return set()
    own = {a for axes in node.meta["assignment"].values() for a in axes}
    return (
        own | set.intersection(*map(_sharding_axes, node.users))
        if rule.moves and node.users
        else own
    )
