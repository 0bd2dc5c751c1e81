"""Parts of axes: where a reshape or a group of heads can take a part of an axis only.

before   %q : f32[4, 8@model, 16]    on model=4
         %r : f32[4, 2, 4, 16]                                   = reshape(%q)          model does not divide the 2
after    %r : f32[4, 2@model:(1)2, 4@model:(2)2, 16]             = reshape(%q)
needs    a propagated graph
source   sub-axes are Shardy's; to split only where propagation is stopped is ours

The passes work on a mesh in which such an axis is several; then a part of it is an axis like any
other. Afterwards names are merged again where all parts of an axis stand together.
"""

from __future__ import annotations

import math

from torch import fx

from ...mesh import Mesh
from ...shard_spec import ShardSpec
from ..ir import Op, Rules
from ..partition.step import Step
from ..propagate.propagate import Layouts


def required_splits(graph: fx.Graph, layouts: Layouts, rules: Rules) -> dict[str, tuple[int, ...]]:
    """The axes that stop at a factor which they do not divide, though a part of them would; into
    which parts.
    """
    borders: dict[str, set[int]] = {}
    for op in rules.ops(graph):
        if any(
            len(factors) > 1 for dims in (*op.rule.operands, *op.rule.results) for factors in dims
        ):
            for axis, part in _stopped(op, layouts):
                borders.setdefault(axis, set()).add(part)
    found = {}
    for axis, parts in borders.items():
        size, before = layouts.mesh.count((axis,)), 1
        found[axis] = ()
        for border in (*sorted(parts), size):
            if border % before == 0 and border > before:  # those that nest
                found[axis] += (border // before,)
                before = border
    return {axis: parts for axis, parts in found.items() if len(parts) > 1}


def _stopped(op: Op, layouts: Layouts) -> list[tuple[str, int]]:
    """(axis, size of its major part that fits) for the axes that end in the middle of a dimension's
    factors.
    """
    found, mesh = [], layouts.mesh
    for value, dims in zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results)):
        for factors, axes in zip(dims, layouts.spec[value].dims if value is not None else ()):
            rest = list(axes)
            for factor in factors if len(factors) > 1 else ():
                left = op.rule.sizes[factor]
                while rest and left % mesh.count(rest[:1]) == 0:
                    left //= mesh.count((rest.pop(0),))
                if left > 1:
                    part = math.gcd(left, mesh.count(rest[:1]))
                    if 1 < part < mesh.count(rest[:1]):
                        found.append((rest[0], part))
                    break
    return found


def merge_axes(graph: fx.Graph, mesh: Mesh) -> fx.Graph:
    """Names the axes of a graph that was partitioned on a split mesh as users know them, where no
    mere part is meant.
    """
    for node in graph.nodes if mesh != mesh.unsplit() else ():
        meta = node.meta
        for key in ("spec", "mark"):
            if key in meta:
                meta[key] = meta[key].map_axes(mesh.merge)
        for key in ("result_specs", "operand_specs", "specs"):
            if key in meta:
                meta[key] = tuple(spec and spec.map_axes(mesh.merge) for spec in meta[key])
        if "assignment" in meta:
            meta["assignment"] = {
                factor: mesh.merge(axes) for factor, axes in meta["assignment"].items()
            }
        if "step" in meta:
            meta["step"] = _merged(meta["step"], mesh)
            node.args = (node.args[0], *meta["step"].args)
    return graph


def _merged(step: Step, mesh: Mesh) -> Step:
    spec, axes, args = step.spec.map_axes(mesh.merge), mesh.merge(step.axes), step.args
    if step.kind == "permute":
        args = tuple(str(ShardSpec.parse(text).map_axes(mesh.merge)) for text in args)
    else:
        args = tuple("+".join(axes) if arg == "+".join(step.axes) else arg for arg in args)
    return Step(step.kind, args, spec, axes, step.payload, step.sent)
