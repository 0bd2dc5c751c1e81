"""Parameters as DTensors, and the boundary between what a DTensor stores and what the program
computes on.

DTensor keeps the last shards of a dimension that does not divide short; the program has equal
shards with padding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ..annotate import copy_mark
from ..comm.local_ops import take_part
from ..compat.operators import aten
from ..compat.private_apis import _will_engine_execute_node
from ..errors import ShardingError, user_line
from ..mesh import Coordinates, Mesh
from ..shard_spec import ShardSpec


def storable(spec: ShardSpec, shape: tuple[int, ...], mesh: Mesh) -> ShardSpec:
    """The nearest layout that a DTensor expresses: several axes on one dimension in mesh order and
    only if they divide it.

    Where it is coarser than the spec, the program slices (for free) and gathers the gradient.
    """
    dims = []
    for size, axes in zip(shape, spec.dims):
        kept = axes
        while len(kept) > 1 and (
            size % mesh.count(kept) or list(kept) != [a for a in mesh.names if a in kept]
        ):
            kept = kept[:-1]
        dims.append(kept)
    return ShardSpec(tuple(dims))


def placements(spec: ShardSpec, mesh: Mesh) -> list[Placement]:
    """One placement a mesh axis."""
    of = {axis: d for d, axes in enumerate(spec.dims) for axis in axes}
    return [Shard(of[name]) if name in of else Replicate() for name in mesh.names]


def spec_of(tensor: DTensor, mesh: Mesh) -> ShardSpec:
    """The layout of a DTensor on the plan's mesh; ShardingError for one on another mesh or with a
    pending sum.
    """
    if (
        tuple(tensor.device_mesh.shape) != mesh.shape
        or tensor.device_mesh.mesh_dim_names != mesh.names
    ):
        raise ShardingError(
            f"a DTensor on mesh {tensor.device_mesh} is given to a program on mesh {mesh}",
            where=user_line(),
        )
    dims: list[tuple[str, ...]] = [()] * tensor.dim()
    for name, placement in zip(mesh.names, tensor.placements):
        if isinstance(placement, Shard):
            dims[placement.dim] += (name,)
        elif not isinstance(placement, Replicate):
            raise ShardingError(
                f"a DTensor with placement {placement} is given; only Shard and Replicate are taken",
                where=user_line(),
                fix="redistribute it first",
            )
    return ShardSpec(tuple(dims))


def distribute(tensor: Tensor, spec: ShardSpec, mesh: Mesh, device_mesh: DeviceMesh) -> DTensor:
    """A tensor that all ranks have (rank 0's values count) as a DTensor; one on meta keeps no
    values.
    """
    where = placements(spec, mesh)
    if tensor.is_meta:
        coordinates = mesh.coordinates(device_mesh.get_rank())
        local = torch.empty(
            stored_shape(spec, tuple(tensor.shape), mesh, coordinates),
            dtype=tensor.dtype,
            device="meta",
        )
        return DTensor.from_local(
            local, device_mesh, where, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return distribute_tensor(
        tensor.detach().contiguous(memory_format=memory_format(tensor)), device_mesh, where
    )


def stored_shape(
    spec: ShardSpec, shape: tuple[int, ...], mesh: Mesh, coordinates: Coordinates
) -> tuple[int, ...]:
    """Shape of the shard that a DTensor keeps on one device: without padding."""
    result = []
    for size, axes in zip(shape, spec.dims):
        rows = -(-size // mesh.count(axes))
        result.append(min(max(size - mesh.index(axes, coordinates) * rows, 0), rows))
    return tuple(result)


def shard_module(
    module: nn.Module, specs: dict[str, ShardSpec], mesh: Mesh, device_mesh: DeviceMesh
) -> None:
    """Puts DTensors in place of a module's parameters and buffers; tied ones stay tied. By
    assignment: a recurrent layer lists its own.
    """
    made: dict[int, Tensor] = {}
    for prefix, owner in module.named_modules():
        for table in (owner._parameters, owner._buffers):
            for name, tensor in list(table.items()):
                if tensor is None or isinstance(tensor, DTensor):
                    continue
                if id(tensor) not in made:
                    stored = distribute(
                        tensor, specs[f"{prefix}.{name}" if prefix else name], mesh, device_mesh
                    )
                    made[id(tensor)] = (
                        nn.Parameter(stored, tensor.requires_grad)
                        if table is owner._parameters
                        else stored
                    )
                    copy_mark(tensor, made[id(tensor)])
                setattr(owner, name, made[id(tensor)])


def local_of(tensor: Tensor) -> Tensor:
    """What a DTensor stores here; a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole_of(tensor: Tensor) -> Tensor:
    """A plain tensor of the values of a DTensor; a plain tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradient_like(local: Tensor, parameter: DTensor) -> DTensor:
    """A gradient as a DTensor laid out as its parameter. (DTensor's `__init__` does nothing, in 3
    of 5 us.)
    """
    return DTensor.__new__(DTensor, local, parameter._spec, requires_grad=False)


def takes_gradient(parameter: DTensor, accumulator: Any) -> bool:
    """Whether all that the running backward does with the parameter's gradient is to make it
    `parameter.grad`.

    accumulator: the node of autograd's graph that would do it. It detaches the gradient first: 14
    us for a DTensor, so that we rather do it ourselves, as FSDP2 does. False under
    torch.autograd.grad, where there is a gradient already, and where there are hooks.
    """
    if (
        not parameter.is_leaf
        or parameter.grad is not None
        or not parameter.requires_grad
        or parameter._backward_hooks
        or parameter._post_accumulate_grad_hooks
    ):
        return False
    try:
        return _will_engine_execute_node(accumulator)
    except RuntimeError:  # torch.autograd.grad asks for this gradient
        return False


def wrap_local(
    local: Tensor, spec: ShardSpec, shape: tuple[int, ...], mesh: Mesh, device_mesh: DeviceMesh
) -> DTensor:
    """A stored shard as a DTensor of global shape; differentiable."""
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(
        local,
        device_mesh,
        placements(spec, mesh),
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


def pad_stored(
    graph: fx.Graph, node: fx.Node, stored: tuple[int, ...], padded: tuple[int, ...]
) -> None:
    """Behind an input that is a stored shard: the padding that the program expects."""
    if stored != padded:
        pads = [p for have, want in reversed(list(zip(stored, padded))) for p in (0, want - have)]
        _behind(
            graph, node, lambda: graph.call_function(aten.constant_pad_nd.default, (node, pads))
        )


def slice_global(
    graph: fx.Graph, node: fx.Node, spec: ShardSpec, mesh: Mesh, coordinates: Coordinates
) -> None:
    """Behind an input that is a global tensor: this device's part of it."""

    def parts() -> fx.Node:
        part = node
        for d, axes in enumerate(spec.dims):
            if axes:
                part = graph.call_function(
                    take_part, (part, d, mesh.index(axes, coordinates), mesh.count(axes))
                )
        return part

    if spec.sharding_axes:
        _behind(graph, node, parts)


def cut_padding(
    graph: fx.Graph, value: fx.Node, stored: tuple[int, ...], padded: tuple[int, ...]
) -> fx.Node:
    """A result without its padding."""
    for d, (have, want) in enumerate(zip(padded, stored)):
        if have != want:
            value = graph.call_function(aten.narrow.default, (value, d, 0, want))
    return graph.call_function(aten.contiguous.default, (value,)) if stored != padded else value


def strided_like(graph: fx.Graph, value: fx.Node, parameter: Tensor) -> fx.Node:
    """A gradient with the order of memory that its parameter has: fused optimizers go through both
    without asking.
    """
    order = memory_format(local_of(parameter))
    return (
        graph.call_function(aten.contiguous.default, (value,), {"memory_format": order})
        if parameter.dim() > 1
        else value
    )


def memory_format(tensor: Tensor) -> torch.memory_format:
    """In which a tensor is without gaps; the usual one where it is in none."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(tensor.dim())
    return (
        last
        if last and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last)
        else torch.contiguous_format
    )


def _behind(graph: fx.Graph, node: fx.Node, make) -> None:
    """Inserts nodes before the first operation and lets all users of `node` but them use the
    result.
    """
    users = list(node.users)
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first):
        made = make()
    for user in users:
        user.replace_input_with(node, made)
