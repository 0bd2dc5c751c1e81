"""Split mesh axes where a reshape or a group of heads can use only a part of one.

before   %q : f32[4, 8@model, 16]    on model=4
         %r : f32[4, 2, 4, 16]       = reshape(%q)      model does not divide the 2
after    %r : f32[4, 2@model:(1)2, 4@model:(2)2, 16]      = reshape(%q)
needs    a propagated graph
source   sub-axes are Shardy's; splitting only where propagation is blocked is ours

On the mesh that the passes work on, several axes replace such an axis; each part is an axis like
any other. Afterwards names are merged again where all parts stand together. In the communication
suite a reshape that splits heads (20) sends 4,096 bytes, 12,288 without; grouped heads (24.d)
411,648, else 606,208.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import fx

from ..ir import Op, Rules
from ..program import Program
from ..propagate.layouts import Layouts


def split_axes(p: Program) -> fx.Graph | None:
    """Continue with a mesh whose axes are split, where an operation can use only a part."""
    splits = _required_splits(p.graph, p.layouts, p.rules)
    if not splits:
        return None
    mesh = p.mesh = p.mesh.split(splits)
    # Requirements name axes as the user wrote them, which the finer mesh lacks.
    p.inputs, p.results = (
        [spec and spec.map_axes(mesh.refine) for spec in specs] for specs in (p.inputs, p.results)
    )
    return p.graph


def _required_splits(graph: fx.Graph, layouts: Layouts, rules: Rules) -> dict[str, tuple[int, ...]]:
    """Return the axes to split, with their part sizes.

    Such an axis does not divide a factor, though a part would.
    """
    sizes: dict[str, set[int]] = {}
    for op in rules.ops(graph):
        if any(
            len(factors) > 1 for dims in (*op.rule.operands, *op.rule.results) for factors in dims
        ):
            for axis, part in _blocked_axes(op, layouts):
                sizes.setdefault(axis, set()).add(part)
        for axis, part in _shared_axes(op, layouts):
            sizes.setdefault(axis, set()).add(part)
    splits: dict[str, tuple[int, ...]] = {}
    for axis, part_sizes in sizes.items():
        size, before = layouts.mesh.count((axis,)), 1
        splits[axis] = ()
        for major_size in (*sorted(part_sizes), size):
            if major_size % before == 0 and major_size > before:  # Sizes have to nest.
                splits[axis] += (major_size // before,)
                before = major_size
    return {axis: factors for axis, factors in splits.items() if len(factors) > 1}


def _blocked_axes(op: Op, layouts: Layouts) -> list[tuple[str, int]]:
    """Return (axis, size of its major part that fits) for axes that a factor blocks."""
    blocked, mesh = [], layouts.mesh
    for value, dims in op.tensors:
        for factors, axes in zip(dims, layouts.spec[value].dims):
            rest = list(axes)
            for factor in factors if len(factors) > 1 else ():
                left = op.rule.sizes[factor]
                while rest and left % mesh.count(rest[:1]) == 0:
                    left //= mesh.count((rest.pop(0),))
                if left > 1:
                    part = math.gcd(left, mesh.count(rest[:1]))
                    if 1 < part < mesh.count(rest[:1]):
                        blocked.append((rest[0], part))
                    break
    return blocked


def _shared_axes(op: Op, layouts: Layouts) -> list[tuple[str, int]]:
    """Return (axis, size of its major part) for an axis that another factor may share.

    The other factor gets the minor part, if the whole axis does not divide it, and if that sends
    less.
    """
    instead, mesh = op.rule.instead, layouts.mesh
    if instead is None:
        return []
    axes: dict[str, set[str]] = {instead.factor: set(), instead.other: set()}
    for value, dims in op.tensors:
        for factors, along in zip(dims, layouts.spec[value].dims):
            if factors and factors[0] in axes:
                axes[factors[0]] |= {*along}
    if len(axes[instead.factor]) != 1 or axes[instead.factor] & axes[instead.other]:
        return []
    (axis,) = axes[instead.factor]
    # The largest part that still divides the other factor; the rest stays with the first.
    count = mesh.count((axis,))
    part = math.gcd(
        op.rule.sizes.get(instead.other, 1) // mesh.count((*axes[instead.other],)), count
    )
    if not 1 < part < count or instead.sent(count, part) >= instead.sent(count, 1):
        return []
    return [(axis, count // part)]


def merge_axes(p: Program) -> fx.Graph | None:
    """Go back to the request's mesh: axes have their own names where all parts stand together."""
    mesh, p.mesh = p.mesh, p.request.mesh
    if mesh == p.mesh:
        return None
    for node in p.graph.nodes:
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
            step = meta["step"]
            meta["step"] = replace(
                step,
                args=step.target.rename(step.args, step.axes, mesh.merge),
                spec=step.spec.map_axes(mesh.merge),
                axes=mesh.merge(step.axes),
            )
            node.args = (node.args[0], *meta["step"].args)
    return p.graph
