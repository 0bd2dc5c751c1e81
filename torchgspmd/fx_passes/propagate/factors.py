"""Translate between the axes of a tensor's dimensions and the axes of a rule's factors.

reshape  b(hd)->bhd     x[b, h*d] sharded as [_, model]     <->     {h: model}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...layout.halo_window import sent_rows
from ...layout.mesh import Mesh
from ...layout.open_sizes import OpenSize, is_whole
from ...rules import FactorRule
from ...rules.notation import Dims
from ...shard_spec import Axes, ShardSpec
from ..ir import Op

Assignment = Mapping[str, Axes]  # factor -> axes that shard it, major first
Crowded = frozenset[tuple[int, frozenset[str]]]


def crowded(layouts: Iterable[tuple[Sequence[int], ShardSpec]], mesh: Mesh) -> Crowded:
    """Return (size, axes) for dimensions that are sharded over more devices than they have rows.

    Only marks ask for such layouts.
    """
    return frozenset(
        (size, frozenset(axes))
        for shape, spec in layouts
        for size, axes in zip(shape, spec.dims)
        if mesh.count(axes) > size
    )


def is_roomy(size: int, axes: Axes, mesh: Mesh, marked: Crowded) -> bool:
    """Return whether every device gets a row, or a mark shards a dimension of this size so.

    Nobody knows that for an open size; an argument size is taken to have rows enough.
    """
    if is_whole(size):
        return mesh.count(axes) == 1
    return mesh.count(axes) <= size or (size, frozenset(axes)) in marked


def project(dims: Dims, spec: ShardSpec, sizes: Mapping[str, int], mesh: Mesh) -> dict[str, Axes]:
    """Return the axes of a tensor's factors, given those of its dimensions.

    A dimension's axes fill its factors from the major one on. The next factor gets axes only when
    the one before it is fully sharded. Only a factor that is alone in its dimension may be uneven.
    Otherwise an axis that does not divide the rest of a factor is dropped, with all axes after it.
    """
    assignment: dict[str, Axes] = {}
    for factors, axes in zip(dims, spec.dims):
        if len(factors) == 1:
            if axes:
                assignment[factors[0]] = axes
            continue
        rest = list(axes) if _is_divided_first(factors, sizes) else []
        for factor in factors:
            left, taken = sizes[factor], []
            while rest and left % mesh.count(rest[:1]) == 0:
                left //= mesh.count(rest[:1])
                taken.append(rest.pop(0))
                # Fully sharded: further axes go to the next factor.
                if left == 1:
                    break
            if taken:
                assignment[factor] = tuple(taken)
            if left != 1:
                break
    return assignment


def _is_divided_first(factors: Sequence[str], sizes: Mapping[str, int]) -> bool:
    """Return whether a dimension's shards are its major factor's, in every run.

    Where a factor has a size known in a run, shards have whole groups along the leading one.
    """
    leading = {n.leading for f in factors if isinstance(n := sizes[f], OpenSize)}
    first = sizes[factors[0]] if factors else 0
    return not leading or isinstance(first, OpenSize) and min(leading) == first.leading >= 0


def assemble(
    dims: Dims, assignment: Assignment, sizes: Mapping[str, int], mesh: Mesh
) -> tuple[Axes, ...] | None:
    """Return the axes of a tensor's dimensions, given those of its factors.

    The inverse of `project`; None if no layout of the dimensions expresses the assignment.
    """
    result = []
    for factors in dims:
        if len(factors) == 1:
            result.append(assignment.get(factors[0], ()))
            continue
        axes: Axes = ()
        open_end = True
        if any(map(assignment.get, factors)) and not _is_divided_first(factors, sizes):
            return None
        for factor in factors:
            here = assignment.get(factor, ())
            # An axis behind a factor with rows left would make shards that are no intervals.
            if here and not open_end:
                return None
            axes += here
            count = mesh.count(here)
            # Uneven shards of one factor would cut groups of the others apart.
            if sizes[factor] % count:
                return None
            open_end = open_end and count == sizes[factor]
        result.append(axes)
    return tuple(result)


def operand_layout(
    rule: FactorRule, operand: int, shape: Sequence[int], assignment: Assignment, mesh: Mesh
) -> ShardSpec | None:
    """Return the layout that an operation needs for an operand, with the windows that it reads.

    None if no layout expresses the assignment.
    """
    axes = assemble(rule.operands[operand], assignment, rule.sizes, mesh)
    if axes is None:
        return None
    spec = ShardSpec(axes)
    for d, names in enumerate(axes):
        if names and (reach := rule.halo.get((operand, d))):
            window = reach.bind(
                rule.sizes[rule.operands[operand][d][0]], shape[d], mesh.count(names)
            )
            # A window that is the plain shard would be another layout by name only.
            if not window.is_block(shape[d], mesh.count(names)):
                spec = spec.with_window(d, window)
    return spec


def layouts_behind(op: Op, need: ShardSpec, mesh: Mesh) -> tuple[ShardSpec, ...] | None:
    """Return the operand windows from which an operation computes its result's windows.

    None if the operation does more than move rows, or the windows cannot be expressed.
    """
    result = op.results[0]
    if not op.rule.moves or need.pending or result is None:
        return None
    shape, operand_specs = result.meta["val"].shape, []
    for i, value in enumerate(op.operands):
        spec = need.plain()
        for d, axes in enumerate(need.dims):
            reach, size, count = (
                op.rule.row_access.get((i, d)),
                value.meta["val"].shape[d],
                mesh.count(axes),
            )
            window = need.window(d)
            if window is not None and window.open:
                return None
            if axes and reach is not None:
                window = (
                    reach.through(window, size) if window else reach.bind(shape[d], size, count)
                )
                if window is None:
                    return None
            if window is not None:
                spec = spec.with_window(d, None if window.is_block(size, count) else window)
        operand_specs.append(spec)
    return tuple(operand_specs)


def is_far(op: Op, factor: str, axes: Axes, mesh: Mesh) -> bool:
    """Return whether some device's whole window comes from others, as for one half of an operand.

    Only for operands that lose rows in the operation.
    """
    count = mesh.count(axes)
    for (operand, d), reach in op.rule.halo.items():
        size = op.operands[operand].meta["val"].shape[d]
        if op.rule.operands[operand][d] == (factor,):
            window = reach.bind(op.rule.sizes[factor], size, count)
            if sent_rows(window, size, count) >= window.length and op.rule.sizes[factor] < size:
                return True
    return False


def result_pending(rule: FactorRule, dims: Dims, assignment: Assignment) -> tuple[Axes, str]:
    """Return the axes over which a result with these dimensions is pending, and the reduction."""
    own = {factor for dim in dims for factor in dim}
    axes: Axes = ()
    kind = "sum"
    for factor, reduction in rule.reduce.items():
        # A factor in the result's dimensions is sharded there, and not summed over.
        if factor not in own and assignment.get(factor):
            axes += assignment[factor]
            kind = reduction
    return axes, kind
