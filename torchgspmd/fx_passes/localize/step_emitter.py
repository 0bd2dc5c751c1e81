"""Local nodes for a step between layouts: the builder passed to a kind's `localize`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

from torch import fx

from ...comm.collective import split_axes
from ...comm.local_ops import pad_rows
from ...compat.operators import aten
from ...layout.mesh import Mesh
from ...layout.open_sizes import OpenSize
from ...shard_spec import Axes, ShardSpec
from ..ir import planned_shape
from .sizes_in_a_run import RunSizes


class StepLocalizer(Protocol):
    """Builder for the whole program: localize._Localizer."""

    graph: fx.Graph
    mesh: Mesh
    sizes: RunSizes

    def rows(self, size: OpenSize, axes: Axes, node: fx.Node) -> fx.Node:
        """Return a shard's rows along `axes`, for a size known in a run; () for all rows."""
        ...

    def index(self, axes: Axes) -> fx.Node:
        """Return the node with the device's position along `axes`."""
        ...

    def local_meta(self, node: fx.Node) -> dict[str, Any]:
        """Return a local node's metadata, taken from the global one."""
        ...

    def add_at_top(self, op: object, a: fx.Node, b: object) -> fx.Node:
        """Add arithmetic on coordinates right after the inputs."""
        ...


class StepEmitter:
    """Builder for one step's local nodes, the first argument to a kind's `localize`."""

    def __init__(self, localizer: StepLocalizer, node: fx.Node) -> None:
        self.localizer, self.node = localizer, node
        self.shape = tuple(node.meta["val"].shape)

    def sizes(self, x: fx.Node) -> tuple[Any, ...]:
        """Return the global shape, with nodes for sizes that only a run knows."""
        sizes: list[Any] = list(self.shape)
        have = self.node.args[0].meta["spec"].dims
        for d, size in enumerate(planned_shape(self.node)):
            if isinstance(size, OpenSize):
                # A whole dimension has its size in the shard; a sharded one needs the size from
                # outside.
                is_sharded = have[d] or self.node.meta["spec"].dims[d]
                sizes[d] = (
                    self.localizer.rows(size, (), self.node)
                    if is_sharded
                    else self.call(aten.sym_size.int, x, d)
                )
        return tuple(sizes)

    def padded(self, x: fx.Node, dim: int) -> fx.Node:
        """Pad a dimension so that its shards after the step have whole row groups."""
        if dim not in self._groups():
            return x
        axes, localizer = self.node.meta["spec"].dims[dim], self.localizer
        count = localizer.mesh.count(axes)
        total = localizer.add_at_top(operator.mul, self.shard_rows(dim), count)
        padded = self.call(pad_rows, x, dim, total)
        padded.meta = dict(x.meta)
        return padded

    def shard_rows(self, dim: int) -> fx.Node:
        """Return a shard's rows after the step, for a size that only a run knows."""
        size, axes = planned_shape(self.node)[dim], self.node.meta["spec"].dims[dim]
        assert isinstance(size, OpenSize), "a run knows the rows"
        return self.localizer.rows(size, axes, self.node)

    def _groups(self) -> dict[int, Any]:
        """Return the dimensions whose shards have row groups, with the rows per group."""
        sizes, groups = self.localizer.sizes, {}
        have, need = self.node.args[0].meta["spec"].dims, self.node.meta["spec"].dims
        for d, size in enumerate(planned_shape(self.node)):
            if isinstance(size, OpenSize) and (have[d] or need[d]):
                rows = sizes.group(int(size), size.other)
                groups |= {} if rows == 1 else {d: rows}
        return groups

    def exchange(self, x: fx.Node, before: str, after: str) -> fx.Node:
        """Add the step, which leads from one layout to another; row groups stay whole."""
        groups, sizes = self._groups(), list(self.sizes(x))
        specs, metas = [before, after], [self.localizer.local_meta(self.node)]
        spec: ShardSpec = self.node.meta["spec"]
        metas[0]["shape"] = spec.local_shape(self.shape, self.localizer.mesh)
        # From the last dimension on, so that the numbers of the others stay.
        for d in sorted(groups, reverse=True):
            size = planned_shape(self.node)[d]
            assert isinstance(size, OpenSize), "groups are of sizes of a run"
            leading = self.localizer.sizes.leading(int(size), size.other)
            sizes[d : d + 1] = leading, groups[d]
            specs = [str(_with_dim_behind(ShardSpec.parse(text), d)) for text in specs]
            meta = _with_groups(x.meta, d)
            # Groups become a dimension of their own, so that the step divides groups and cuts none.
            x = self.call(aten.unflatten.int, x, d, [-1, groups[d]])
            x.meta = meta
            metas.append(_with_groups(metas[-1], d))
        moved = self.collective(x, *specs, tuple(sizes))
        moved.meta = metas.pop()
        for d in sorted(groups):
            moved = self.call(aten.flatten.using_ints, moved, d, d + 1)
            moved.meta = metas.pop() | {"step": None}
        return moved

    def call(self, op: Callable[..., object], *args: object) -> fx.Node:
        """Add a call to the local graph."""
        return self.localizer.graph.call_function(op, args)

    def collective(self, *args: object) -> fx.Node:
        """Add the step itself to the local graph."""
        return self.call(self.node.target, *args)

    def index(self, axes: str) -> fx.Node:
        """Return the node with the device's position along `axes`."""
        return self.localizer.index(split_axes(axes))

    def count(self, axes: str) -> int:
        """Count the devices along `axes`."""
        return self.localizer.mesh.count(split_axes(axes))

    def trimmed(self, gathered: fx.Node, dim: int) -> fx.Node:
        """Cut off the padding from a dimension that has been gathered whole."""
        size, spec = planned_shape(self.node)[dim], self.node.meta["spec"]
        count = self.localizer.mesh.count(self.node.args[0].meta["spec"].dims[dim])
        is_open = isinstance(size, OpenSize)
        if spec.dims[dim] or size % count == 0 and not is_open:
            return gathered
        padded = list(spec.local_shape(self.shape, self.localizer.mesh))
        padded[dim] = -(-size // count) * count
        gathered.meta = self.localizer.local_meta(self.node) | {"shape": tuple(padded)}
        rows = self.localizer.rows(size, (), self.node) if is_open else size
        trimmed = self.call(aten.narrow.default, gathered, dim, 0, rows)
        if is_open:
            local = spec.local_shape(self.shape, self.localizer.mesh)
            trimmed.meta = self.localizer.local_meta(self.node) | {"shape": local, "step": None}
        # aten.native_layer_norm_backward returns wrong gradients for operands that are not
        # contiguous.
        return self.call(aten.contiguous.default, trimmed)


def _with_dim_behind(spec: ShardSpec, dim: int) -> ShardSpec:
    """Return a layout with one more dimension, which every device has completely."""
    return ShardSpec((*spec.dims[: dim + 1], (), *spec.dims[dim + 1 :]), pending=spec.pending)


def _with_groups(meta: dict[str, Any], dim: int) -> dict[str, Any]:
    """Return a value's metadata after its dimension is split into groups and their rows."""
    shapes = {
        key: (*meta[key][:dim], meta[key][dim], 1, *meta[key][dim + 1 :])
        for key in ("shape", "unknown")
        if meta.get(key) is not None
    }
    return {**meta, **shapes}
