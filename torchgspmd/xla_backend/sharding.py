"""Convert a ShardSpec to torch_xla's annotation and to XLA's text for a layout, and back.

XLA writes `{devices=[4,1,2]0,1,2,3,4,5,6,7 last_tile_dim_replicate}`. The first list has the tiles
along every dimension. The second list has the devices, tile by tile in row-major order. With
last_tile_dim_replicate the last number counts devices that hold equal tiles.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import Tensor, fx

from ..compat.operators import aten
from ..errors import ShardingError
from ..layout.mesh import Mesh
from ..shard_spec import Axes, ShardSpec

MOST_DIMS = 5  # torch_xla 2.9 cannot shard tensors with more dimensions


def check(spec: ShardSpec, mesh: Mesh, what: str, where: str | None = None) -> ShardSpec:
    """Return the spec without size-1 axes. Raise if torch_xla cannot express it."""
    if spec.pending:
        raise ShardingError(
            f"{what}: XLA has no layout '{spec}' with a pending reduction", where=where
        )
    trimmed = ShardSpec(tuple(tuple(a for a in axes if mesh.count((a,)) > 1) for axes in spec.dims))
    if not expressible(trimmed):
        raise ShardingError(
            f"{what}: torch_xla shards tensors of at most {MOST_DIMS} dimensions, not '{spec}'",
            where=where,
            fix="merge dimensions that are not sharded, or mark it before they are split",
        )
    return trimmed


def expressible(spec: ShardSpec) -> bool:
    """True if torch_xla can express this layout."""
    return not spec.pending and (spec.rank <= MOST_DIMS or not spec.sharding_axes)


def annotate(x: Tensor, mesh: str, spec: str) -> Tensor:
    """Return a copy of x with a layout: a mark's form in a graph for XLA."""
    import torch_xla

    y = x.clone()  # x keeps its own layout
    torch_xla._XLAC._xla_annotate_custom_sharding(y, op_sharding(mesh, spec))
    return y


@cache
def op_sharding(mesh: str, spec: str) -> Any:
    """Return a layout in XLA's own form, an OpSharding."""
    grid, entries = in_xla(Mesh.parse(mesh), ShardSpec.parse(spec))
    return grid.get_op_sharding(entries)


def in_xla(mesh: Mesh, spec: ShardSpec) -> tuple[Any, tuple]:
    """Return torch_xla's mesh and spec: None, a name, or a names tuple (major first)."""
    fine = mesh.divided(spec.sharding_axes)  # sub-axes are axes there
    dims = spec.map_axes(fine.refine).dims
    return _xla_mesh(fine), tuple(
        None if not axes else axes[0] if len(axes) == 1 else axes for axes in dims
    )


@cache
def _xla_mesh(mesh: Mesh) -> Any:
    """Return one object for equal meshes, since torch_xla caches by identity."""
    import numpy
    import torch_xla.distributed.spmd as xs

    return xs.Mesh(numpy.array(device_order()), mesh.shape, mesh.names)


def device_order() -> list[int]:
    """Return all device ids, one slice after the other.

    So a mesh's first axes run over the slow network between slices.
    """
    import torch_xla.runtime as xr

    attributes = xr.global_runtime_device_attributes()
    return sorted(range(len(attributes)), key=lambda i: (attributes[i].get("slice_index", 0), i))


def layout_text(tensor: Tensor) -> str:
    """Return XLA's text for a tensor's layout.

    It is empty for a lazy value without an annotation.
    """
    import torch_xla

    return torch_xla._XLAC._get_xla_sharding_spec(tensor)


@cache
def text_of(spec: ShardSpec, mesh: Mesh, order: tuple[int, ...]) -> str:
    """Return XLA's text for a layout. order: device_order()."""
    if not spec.sharding_axes:
        return "{replicated}"
    mesh = mesh.divided(spec.sharding_axes)
    spec = spec.map_axes(mesh.refine)
    rest = tuple(name for name in mesh.names if name not in spec.sharding_axes)
    tiles = [mesh.count(axes) for axes in spec.dims] + (
        [mesh.count(rest)] if mesh.count(rest) > 1 else []
    )
    major_first = (*spec.sharding_axes, *rest)
    # Row-major over the axes of the layout, which need not be those of the mesh.
    devices = [
        order[mesh.rank(dict(zip(major_first, place)))]
        for place in itertools.product(*(range(mesh.count((a,))) for a in major_first))
    ]
    suffix = " last_tile_dim_replicate" if mesh.count(rest) > 1 else ""
    return f"{{devices=[{','.join(map(str, tiles))}]{','.join(map(str, devices))}{suffix}}}"


def spec_of_text(text: str, rank: int, mesh: Mesh, order: tuple[int, ...]) -> ShardSpec | None:
    """Return the layout that XLA's text says; None if no axes or sub-axes express it."""
    if text == "{replicated}":
        return ShardSpec.replicated(rank)
    tiles = re.match(r"\{devices=\[([\d,]+)\]", text)
    if tiles is None:
        return None
    counts = [int(n) for n in tiles[1].split(",")][:rank]
    # Tiles along the last, replicated entry alone.
    if math.prod(counts) == 1:
        return ShardSpec.replicated(rank)
    # The mesh itself first: most layouts need no sub-axes, and there are fewer candidates.
    fine = mesh.split({name: tuple(_primes(size)) for name, size in mesh.axes})
    matches = (
        spec
        for grid in (mesh, fine)
        for spec in _candidates(counts, grid)
        if text_of(spec, mesh, order) == text
    )
    return next((spec.map_axes(mesh.merge) for spec in matches), None)


def _primes(size: int) -> Iterator[int]:
    """Yield a number's prime factors."""
    for n in range(2, size + 1):
        while size % n == 0:
            size //= n
            yield n


def _candidates(counts: list[int], mesh: Mesh) -> Iterator[ShardSpec]:
    """Yield the layouts with `counts` tiles along the dimensions."""
    names = [name for name in mesh.names if mesh.count((name,)) > 1]
    choices: list[list[Axes]] = [
        [
            axes
            for k in range(len(names) + 1)
            for axes in itertools.permutations(names, k)
            if mesh.count(axes) == n
        ]
        for n in counts
    ]
    for dims in itertools.product(*choices):
        flat = [a for axes in dims for a in axes]
        # An axis shards one dimension only.
        if len(set(flat)) == len(flat):
            yield ShardSpec(dims)


def operand_specs(node: fx.Node, mesh: Mesh) -> dict[fx.Node, ShardSpec]:
    """Return the layouts in which XLA computes a convolution right, for its operands.

    A weight's gradient is summed over all devices if a spatial dimension is sharded, also over
    those that have the same parts. On a mesh `time=4,model=2` a convolution sharded along time
    alone has a gradient twice too large. So the axes that no spatial dimension has shard the batch,
    and no two devices have the same parts.

    A convolution whose output channels, windows and batch (or other windows) are sharded at once
    gets rows from wrong devices in its windows. So its weight is whole, and XLA takes the part that
    a device needs.

    before   %w = convolution_backward(%grad, %x, ...)    grad, x: _ _ time _
    after    %g = annotate(%grad, 'time=4,model=2', 'model _ time _'), x alike
    """
    if node.target is aten.convolution_backward.default:
        grad, x = node.args[:2]
        spec = _of_weight_gradient(_spec(grad), _spec(x), node.args[9], mesh)
        return {} if spec is None else {grad: spec, x: spec}
    if node.target is aten.convolution.default and _is_sharded_thrice(node, mesh):
        return {node.args[1]: ShardSpec.replicated(_spec(node.args[1]).rank)}
    return {}


def _of_weight_gradient(grad: ShardSpec, x: ShardSpec, groups: int, mesh: Mesh) -> ShardSpec | None:
    """Return one layout for both operands; None if no spatial dimension is sharded."""
    # Sub-axes as axes of their own, so that "taken" is exact.
    fine = mesh.divided(grad.sharding_axes + x.sharding_axes)
    grads, xs = (spec.map_axes(fine.refine).dims for spec in (grad, x))
    taken: set[str] = set()
    spatial = [_untaken(a or b, taken) for a, b in zip(grads[2:], xs[2:])]
    if fine.count(taken) == 1:
        return None
    in_groups = grads[1] == xs[1] and groups % fine.count(xs[1]) == 0
    channels = _untaken(xs[1] if in_groups else (), taken)
    rest = tuple(name for name, size in fine.axes if size > 1)
    batch = _untaken(xs[0] + grads[0] + rest, taken)
    return ShardSpec((batch, channels, *spatial)).map_axes(fine.merge)


def _untaken(axes: Axes, taken: set[str]) -> Axes:
    """Return the axes that no other dimension has taken, and take them."""
    free = tuple(dict.fromkeys(a for a in axes if a not in taken))
    taken.update(free)
    return free


def _is_sharded_thrice(node: fx.Node, mesh: Mesh) -> bool:
    """Return whether output channels, windows and a further dimension may all be sharded."""
    x, w, y = (_spec(each) for each in (*node.args[:2], node))
    window = node.args[1].meta["val"].shape[2:]
    rows = [size > 1 for n, size in enumerate(window) if _shards(mesh, x, y, n + 2) > 1]
    outer = max(mesh.count(w.dims[1 if node.args[6] else 0]), mesh.count(y.dims[1]))
    # A window of one row needs no neighbours, so it does not count.
    return outer > 1 and any(rows) and len(rows) + (_shards(mesh, x, y, 0) > 1) > 1


def _shards(mesh: Mesh, x: ShardSpec, y: ShardSpec, dim: int) -> int:
    return max(mesh.count(spec.dims[dim]) for spec in (x, y))


def _spec(node: fx.Node) -> ShardSpec:
    return node.meta["spec"].plain().closed()
