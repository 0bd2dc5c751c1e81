"""manual: a region whose communication the user writes.

Along the region's axes the function sees one device's shards, and calls `collectives`; along all
others propagation and partition go on. The shards become a dimension. For example, [8, 6] divided
along model=2 at dimension 0 is [2, 4, 6], whose first dimension is marked `model`. The function
runs under torch.vmap over it. Source: JAX's shard_map. Its types, varying or replicated along an
axis, are batched or not batched here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError
from ..layout.layout_rules import mesh_of
from ..layout.mark import mark_sharding
from ..layout.mesh import Mesh
from ..layout.prefix_specs import spread, spread_inputs
from ..layout.spec_notation import UNCONSTRAINED
from ..shard_spec import ShardSpec
from .collectives import entered, varies


def manual(
    fn: Callable[..., Any],
    mesh: Mesh | DeviceMesh,
    in_specs: Any,
    out_specs: Any,
    axes: Sequence[str],
) -> Callable[..., object]:
    """Return a function whose communication along some axes is its own.

    It runs on one device too, with the same numbers, and may be called in a model, in another
    region, and be differentiated. The gradient for an argument that is replicated along an axis is
    the sum over all devices along it.

    Args:
        fn: Sees its arguments' shards along `axes`, and calls `torchgspmd.collectives`.
        mesh: The devices, also as torch's DeviceMesh.
        in_specs: How the arguments are divided along `axes`: a pytree prefix.
        out_specs: How the results are put together: a pytree prefix. A result whose spec lacks an
            axis is the same on all devices along it.
        axes: The axes along which fn communicates itself. Others are propagated as ever.

    Returns:
        A function that takes and returns whole tensors.

    Raises:
        ShardingError: A spec names another axis, the devices do not divide a dimension, or a
            result varies along an axis that its spec lacks.

    Example:
        >>> mesh = Mesh(data=2, model=2)
        >>> def product(x, w):
        ...     return collectives.all_reduce(x @ w, "model")
        >>> f = manual(product, mesh, ("_ model", "model _"), "_ _", axes=("model",))
        >>> x, w = torch.ones(4, 6), torch.ones(6, 8)
        >>> f(x, w).equal(x @ w)
        True
        >>> plan(f, x, w, mesh=mesh, in_specs=("data model", "model _")).collectives[0].kind
        'all_reduce'
    """
    devices, own = mesh_of(mesh), tuple(axes)
    for axis in own:
        devices.check_axis(axis)

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        specs = [_own(spec, own) for spec in spread_inputs(in_specs, args, kwargs, devices, fn)]
        region = _Region(fn, devices, own, tree, leaves, out_specs)
        parts = [
            _divide(tensor, spec, devices, own) if spec else tensor
            for tensor, spec in zip(tensors, specs)
        ]
        return region.run(parts, [spec.sharding_axes if spec else () for spec in specs])

    return run


def _own(spec: ShardSpec | None, axes: tuple[str, ...]) -> ShardSpec | None:
    """Return the spec; raise ShardingError if it names an axis outside the region."""
    other = [axis for axis in spec.sharding_axes if axis not in axes] if spec else []
    if other:
        raise ShardingError.here(
            f"spec '{spec}' of a manual region names '{other[0]}', which is not among its axes",
            why="along other axes layouts are propagated",
            fix=f"write '_' in its place, or axes={(*axes, *other)}",
        )
    return spec


def _divide(x: Tensor, spec: ShardSpec, mesh: Mesh, order: tuple[str, ...]) -> Tensor:
    """Split a tensor: one leading dimension for each axis in its spec, in the order given."""
    # Checked before the reshape, whose error would not name the dimension.
    for d in reversed(range(spec.rank)):
        if x.shape[d] % mesh.count(spec.dims[d]):
            raise ShardingError.here(
                f"dimension {d} of an argument of shape {list(x.shape)} is not divided by "
                f"{mesh.count(spec.dims[d])} devices along {'+'.join(spec.dims[d])}",
                fix="pad it, or leave this part to propagation",
            )
    names: list[str] = []  # an axis for each leading dimension; "" for a shard's own
    sizes: list[int] = []
    for n, dim_axes in zip(x.shape, spec.dims):
        names += [*dim_axes, ""]
        sizes += [*(mesh.count((a,)) for a in dim_axes), n // mesh.count(dim_axes)]
    x = x.reshape(sizes)
    # In the region's order, not the spec's: each vmap takes the first dimension that is left.
    leading = [axis for axis in order if axis in names]
    x = x.movedim([names.index(axis) for axis in leading], list(range(len(leading))))
    return _marked(x, mesh, leading)


def _join(x: Tensor, spec: ShardSpec, mesh: Mesh, order: tuple[str, ...]) -> Tensor:
    """Join a tensor that has a leading dimension for each axis in its spec."""
    leading = [axis for axis in order if axis in spec.sharding_axes]
    x = _marked(x, mesh, leading)
    shape = x.shape[len(leading) :]
    names: list[str] = []
    for dim_axes in spec.dims:
        names += [*dim_axes, ""]
    x = x.movedim(list(range(len(leading))), [names.index(axis) for axis in leading])
    return x.reshape([n * mesh.count(dim_axes) for n, dim_axes in zip(shape, spec.dims)])


def _marked(x: Tensor, mesh: Mesh, leading: Sequence[str]) -> Tensor:
    if not leading:
        return x
    return mark_sharding(x, mesh, (*leading, *[UNCONSTRAINED] * (x.dim() - len(leading))))


@dataclass
class _Region:
    """One run through a region: a vmap for each axis, the first one outermost.

    result, others: the function's result, once it has run: its structure, and its leaves. specs:
    for its tensors.
    """

    fn: Callable[..., Any]
    mesh: Mesh
    axes: tuple[str, ...]
    tree: Any
    leaves: list[Any]
    out_specs: Any
    result: Any = None
    others: list[Any] = field(default_factory=list[Any])
    specs: list[ShardSpec] = field(default_factory=list[ShardSpec])

    def run(self, tensors: list[Tensor], along: Sequence[Sequence[str]]) -> Any:
        """Return the joined result. along: for each tensor, the axes of its leading dimensions."""
        values = self.enter(0, tensors, along)
        joined = iter([_join(x, spec, self.mesh, self.axes) for x, spec in zip(values, self.specs)])
        leaves = [next(joined) if isinstance(leaf, Tensor) else leaf for leaf in self.others]
        return pytree.tree_unflatten(leaves, self.result)

    def enter(
        self, depth: int, tensors: list[Tensor], along: Sequence[Sequence[str]]
    ) -> list[Tensor]:
        """Return the result's tensors, with dimensions for the axes from `depth` on."""
        if depth == len(self.axes):
            return self.call(tensors)
        axis = self.axes[depth]
        size = self.mesh.count((axis,))
        whole: dict[int, Tensor] = {}  # results that are the same along the axis

        def body(index: Tensor, *shards: Tensor) -> tuple[Tensor, ...]:
            with entered(self.mesh, axis, index) as level:
                results = self.enter(depth + 1, list(shards), along)
            for i, (result, spec) in enumerate(zip(results, self.specs)):
                if axis not in spec.sharding_axes:
                    self.check_same(i, result, level.level, axis)
                    whole[i] = result
            # A replicated result leaves the vmap by `whole`, so that no dimension is added to it.
            return (index, *(r for i, r in enumerate(results) if i not in whole))

        in_dims = (0, *(0 if axis in axes else None for axes in along))
        device = tensors[0].device if tensors else None
        positions = torch.arange(size, device=device)
        _, *varying = torch.vmap(body, in_dims, randomness="different")(positions, *tensors)
        rest = iter(varying)
        return [whole[i] if i in whole else next(rest) for i in range(len(self.specs))]

    def call(self, tensors: list[Tensor]) -> list[Tensor]:
        """Call the function on one device's shards; return its tensors."""
        shards = iter(tensors)
        leaves = [next(shards) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        result = self.fn(*args, **kwargs)
        self.others, self.result = pytree.tree_flatten(result)
        specs = spread(self.out_specs, result, self.mesh, "the result of a manual region")
        results = [leaf for leaf in self.others if isinstance(leaf, Tensor)]
        self.specs = [
            _own(spec, self.axes) or ShardSpec.replicated(x.dim())
            for spec, x in zip(specs, results)
        ]
        return results

    def check_same(self, i: int, result: Tensor, level: int, axis: str) -> None:
        """Raise ShardingError if a result varies along an axis that its spec lacks."""
        if varies(result, level):
            raise ShardingError.here(
                f"result {i} of a manual region may differ along '{axis}', which its spec "
                f"'{self.specs[i]}' lacks",
                why="it depends on a shard, and no collective made it equal",
                fix=f'call all_reduce(x, "{axis}") if devices have terms of a sum, all_gather if '
                "they have parts, or name the axis in out_specs",
            )
