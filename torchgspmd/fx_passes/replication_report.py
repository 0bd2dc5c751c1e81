"""Unrequested replicated work in a partitioned graph.

Three kinds are listed. An operation is computed whole by every device. An operand is gathered, and
then all devices along an axis compute the same. A weight is gathered along an axis in its mark.

Gathers that marks or outputs ask for are not listed. Neither is a gather for an operation that
shards another dimension over the same axis: sequences are gathered so. For a weight a mark has to
ask for that other dimension. No weight is listed that is gathered over an axis which also shards
the batch, or which shard_updates names: FSDP weights are stored so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..capture import ARGUMENT, PARAMETER, Captured, Input
from ..layout.mark import mark_sharding_op
from ..layout.mesh import Mesh
from ..layout.sub_axes import whole_axis
from ..shard_spec import ShardSpec
from .digest import module_path
from .ir import operands_of, other_shapes, tensors_of
from .propagate.layouts import Layouts


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
    weight: str | None = None  # Name of the parameter that is gathered against its mark.
    module: str = ""  # Path of the module that computes it.


def replication_report(
    graph: fx.Graph,
    mesh: Mesh,
    inputs: Sequence[Input] = (),
    data_axes: Collection[str] = frozenset(),
    layouts: Layouts | None = None,
) -> tuple[ReplicatedOp, ...]:
    """Return a partitioned graph's replicated operations, in program order.

    inputs: those of the captured graph; without them no weight is listed. data_axes: see there.
    layouts: the propagated ones.
    """
    weights = _Weights(graph, inputs, data_axes, layouts)
    report: dict[ReplicatedOp, None] = {}
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        rule = node.meta.get("rule")
        if rule is None or "mark" in node.meta:
            continue
        op, source, module = str(node.target), node.meta.get("source"), module_path(node)
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
                report[ReplicatedOp(op, source, size, why, module=module)] = None
            continue
        for operand, value, dim, why, weight in _gathered_operands(node, weights):
            # An operand that several operations read is gathered, and listed, once.
            if operand not in seen:
                seen.add(operand)
                val = operand.meta["val"]
                size = (
                    math.prod(operand.meta["spec"].local_shape(val.shape, mesh))
                    * val.element_size()
                )
                report[
                    ReplicatedOp(
                        op=op,
                        source=source,
                        bytes=size,
                        why=why,
                        value=value,
                        dim=dim,
                        weight=weight,
                        module=module,
                    )
                ] = None
    return tuple(report)


def data_axes(captured: Captured, arguments: Sequence[ShardSpec | None]) -> frozenset[str]:
    """Return the axes that shard arguments: weights may be stored in parts over these (FSDP).

    arguments: the layout, or None, that is required for each argument.
    """
    nodes = captured.graph.find_nodes(op="placeholder")
    specs = [*arguments, *(i.mark for i in captured.inputs if i.kind == ARGUMENT)]
    for node, each in zip(nodes, captured.inputs):
        if each.kind == ARGUMENT:
            # A mark on an argument within forward says as much as in_specs.
            marks = [user for user in node.users if user.target is mark_sharding_op._opoverload]
            specs += [ShardSpec.parse(str(mark.args[2])) for mark in marks]
    return frozenset(axis for spec in specs if spec is not None for axis in spec.sharding_axes)


def overruled_marks(
    graph: fx.Graph, inputs: Sequence[Input], row_axes: Collection[str]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return each axis that the batch leaves for weights which it divides too, and these weights.

    Few rows cost less to send than such weights, whose marks were to store them in parts. row_axes:
    those that are to divide the leading dimension of arguments.
    """
    marked = {
        i: (each.name, each.mark.sharding_axes)
        for i, each in enumerate(inputs)
        if each.kind == PARAMETER and each.mark and {*row_axes} & {*each.mark.sharding_axes}
    }
    if not marked:
        return ()
    placeholders = graph.find_nodes(op="placeholder")
    weights = {placeholders[i]: weight for i, weight in marked.items()}
    found: dict[str, dict[str, None]] = {}
    for node in graph.nodes:
        if (rule := node.meta.get("rule")) is None or not rule.contraction:
            continue
        sides = [(value, {*sum(dims, ())}) for value, dims in zip(operands_of(node), rule.operands)]
        results = [{*sum(dims, ())} for dims in rule.results]
        for factor, axes in node.meta["assignment"].items():
            # A factor of all operands and results multiplies parts each by itself, as experts.
            if all(factor in own for own in (*results, *(own for _, own in sides))):
                continue
            origins = [weights.get(origin_input(v), ("", ())) for v, own in sides if factor in own]
            for axis in {*map(whole_axis, axes)} & {*row_axes}:
                names = [name for name, of_weight in origins if axis in of_weight]
                moved = [v for v, _ in sides if origin_input(v) not in weights and _leaves(v, axis)]
                if names and moved:
                    found.setdefault(axis, {}).update(dict.fromkeys(names))
    return tuple((axis, tuple(names)) for axis, names in found.items())


def _leaves(value: fx.Node, axis: str) -> bool:
    """Return whether the steps up to a value take an axis from one of its dimensions."""
    before: Any = value
    while "step" in before.meta:
        before = before.args[0]
    old, new = ([{*map(whole_axis, d)} for d in n.meta["spec"].dims] for n in (before, value))
    return any(axis in was and axis not in now for was, now in zip(old, new))


class _Weights:
    """A graph's marked parameters, and which gathers of them the marks do not ask for."""

    def __init__(
        self,
        graph: fx.Graph,
        inputs: Sequence[Input],
        data_axes: Collection[str],
        layouts: Layouts | None,
    ) -> None:
        self.layouts = layouts
        self.nodes = {value.name: value for value in layouts.spec} if layouts else {}
        parameters = [
            (node, each)
            for node, each in zip(graph.find_nodes(op="placeholder"), inputs)
            if each.kind == PARAMETER
        ]
        self.parameters = {node.name for node, _ in parameters}
        self.marked = {
            node: (each.name, frozenset(each.mark.sharding_axes).difference(data_axes))
            for node, each in parameters
            if each.mark is not None
        }

    def against(self, node: fx.Node, value: fx.Node, axes: Sequence[str]) -> tuple[str, list[str]]:
        """Return a weight's name, and the axes in its mark along which it is gathered.

        value: the weight, a cast or another arrangement, which is gathered over `axes` for a node.
        An axis does not count if a mark on another value asks the node to divide by it.
        """
        name, marked = self.marked.get(origin_input(value), ("", frozenset()))
        return name, [a for a in axes if whole_axis(a) in marked and not self._asked(node, a)]

    def _asked(self, node: fx.Node, axis: str) -> bool:
        """Return whether a mark asks a node to be divided over an axis, as it is."""
        value, rule = self.nodes.get(node.name), node.meta["rule"]
        if self.layouts is None or value is None or len(rule.results) != 1:
            return False
        divided = {f for f, axes in node.meta["assignment"].items() if axis in axes}
        return any(
            divided.intersection(factors)
            and axis in axes
            and self.layouts.root(value, axis).name not in self.parameters
            for factors, axes in zip(rule.results[0], self.layouts.spec[value].dims)
        )


def _gathered_operands(
    node: fx.Node, weights: _Weights
) -> Iterator[tuple[fx.Node, str, int, str, str | None]]:
    """Yield every gathered operand.

    (operand, name before the gather, dimension, reason, name of the weight against whose mark)
    """
    rule, used = node.meta["rule"], _sharding_axes(node)
    for operand, dims in zip(operands_of(node), rule.operands):
        before: Any = operand
        # Several gathers may stand in sequence: the layout before the first one counts.
        while "step" in before.meta and before.meta["step"].target.gathers:
            before = before.args[0]
        if before is operand:
            continue
        for d, (old, new) in enumerate(zip(before.meta["spec"].dims, operand.meta["spec"].dims)):
            gathered = [a for a in old if a not in new]
            weight, against = weights.against(node, before, gathered)
            unasked = [a for a in gathered if a not in used]
            if not (unasked or against):
                continue
            instead = [f for f, axes in node.meta["assignment"].items() if {*against} & {*axes}]
            reason = (
                f"it is cheaper to divide {' '.join(instead)} by it, in"
                if not unasked and instead
                else "it has to be whole in"
                if set(dims[d]) & rule.replicated
                else "it is cheaper, and nothing else is divided by it, in"
            )
            why = (
                f"dimension {d} of %{before.name} is gathered over "
                f"{'+'.join(unasked or against)}: {reason} '{rule}'"
            )
            yield operand, before.name, d, why, weight if against else None


def origin_input(value: fx.Node) -> fx.Node:
    """Return the input that a value is a cast or another arrangement of, else the value."""
    origin = value
    while origin.op == "call_function" and len(origin.all_input_nodes) == 1:
        (operand,) = origin.all_input_nodes
        sizes = [getattr(n.meta.get("val"), "shape", ()) for n in (origin, operand)]
        # With another element count it is no arrangement, but a slice, a sum or a repetition.
        if math.prod(sizes[0]) != math.prod(sizes[1]):
            break
        origin = operand
    return origin


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
