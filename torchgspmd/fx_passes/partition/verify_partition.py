"""Verify a partitioned program.

needs    the graph that `partition` returns, on its own mesh; after `merge_axes` on the whole one
ensures  every value has one layout, with its rank, on mesh axes, each axis once; every operand has
         the layout that its operation's strategy needs; every inserted step leads where it says;
         every output has its promised layout

For sizes that depend on values `check_open_sizes` runs always: a collective that pads or divides
such a dimension would leave rows that no run has.
"""

from __future__ import annotations

from torch import Tensor, fx

from ...errors import ShardingError
from ...layout.mesh import Mesh, sub_axis
from ...layout.open_sizes import is_whole
from ...rules import FactorRule
from ..ir import operands_of, planned_shape


def check_open_sizes(graph: fx.Graph) -> None:
    """Raise ShardingError if a layout shards a dimension whose size depends on values.

    A step leads from one layout to another, so that none divides such a dimension, nor pads it.
    """
    for node in graph.nodes:
        if faults := _open_size_faults(node):
            raise ShardingError(
                f"{faults[0]}: a run of another size would have rows of padding",
                where=node.meta.get("source"),
                why="this is a fault of torchgspmd; please report it",
                fix="make a plan for each size: leave out dynamic=, or call "
                "parallelize(dynamic=False)",
            )


def verify_partition(graph: fx.Graph, mesh: Mesh) -> None:
    """Raise AssertionError if a graph is illegal, which is a bug in torchgspmd."""
    faults = [
        fault
        for node in graph.nodes
        for fault in (*_value_faults(node, mesh), *_operand_faults(node))
    ]
    for value, spec in zip(graph.output_node().args[0], graph.output_node().meta["specs"]):
        if spec is not None and value.meta["spec"] != spec:
            faults.append(f"the output %{value} is [{value.meta['spec']}], promised is [{spec}]")
    if faults:
        raise AssertionError(
            "partition made an illegal program; please report this:\n  " + "\n  ".join(faults)
        )


def _value_faults(node: fx.Node, mesh: Mesh) -> list[str]:
    value, spec, step = node.meta.get("val"), node.meta.get("spec"), node.meta.get("step")
    if node.op == "output" or not isinstance(value, Tensor):
        return []
    if spec is None:
        # A result without users needs no layout.
        return [] if not node.users else [f"%{node} has no layout"]
    axes = [*spec.sharding_axes, *spec.pending]
    faults = [
        f"%{node} is [{spec}], which names axis {a} that mesh {mesh} does not have"
        for a in axes
        # A part of an axis counts as the axis, also where the mesh has other parts.
        if a not in mesh.names and (sub_axis(a) or (a,))[0] not in mesh.names
    ]
    if len(spec.dims) != value.dim():
        faults.append(f"%{node} has {value.dim()} dimensions, its layout [{spec}] {len(spec.dims)}")
    if len(axes) != len(set(axes)):
        faults.append(f"%{node} is [{spec}], which uses an axis twice")
    faults += _open_size_faults(node)
    if step is not None and step.spec != spec:
        faults.append(f"%{node} is [{spec}], its {step.kind} leads to [{step.spec}]")
    return faults


def _open_size_faults(node: fx.Node) -> list[str]:
    """Return the faults in the layout for a value with a size that only a run knows."""
    spec = node.meta.get("spec")
    if spec is None or "other" not in node.meta:
        return []
    if not any(axes and is_whole(n) for n, axes in zip(planned_shape(node), spec.dims)):
        return []
    return [f"%{node} is [{spec}], but the size of a sharded dimension depends on values"]


def _operand_faults(node: fx.Node) -> list[str]:
    rule: FactorRule | None = node.meta.get("rule")
    if rule is None:
        return []
    faults = []
    for i, (value, need) in enumerate(zip(operands_of(node), node.meta["operand_specs"])):
        have = value.meta["spec"]
        if have != need:
            faults.append(f"%{node} needs %{value} as [{need}], it is [{have}]")
        # A pending value has one term per device: only a linear operation may read terms.
        elif have.pending and not any(i in group for group in rule.linear):
            faults.append(f"%{node} is not linear in %{value}, which is [{have}]")
    return faults
