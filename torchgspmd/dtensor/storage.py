"""Stores parameters as DTensors, and converts these to the shards that a program computes on.

On a dimension that does not divide, DTensor stores short last shards. A program has equal shards
with padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from ..comm.local_ops import part_order, take_part
from ..compat.operators import aten
from ..compat.private_apis import _will_engine_execute_node
from ..errors import ShardingError
from ..layout.mark import copy_mark
from ..layout.mesh import Coordinates, Mesh
from ..layout.open_sizes import OpenSize
from ..shard_spec import ShardSpec
from .parts import parts_of, placement_of

_SMALL = 1 << 20  # bytes in a tensor that travels with others
_MESSAGE = 1 << 26  # bytes in a message


def storable(spec: ShardSpec, shape: tuple[int, ...], mesh: Mesh) -> ShardSpec:
    """Return the nearest layout that a DTensor can express.

    Several axes shard one dimension only in mesh order and only if they divide it. Where the result
    is coarser than the spec, the program slices (for free) and gathers the gradient.
    """
    dims = []
    for size, axes in zip(shape, spec.dims):
        # DTensor knows mesh order alone, and nests uneven blocks otherwise than a ShardSpec.
        while len(axes) > 1 and (
            isinstance(size, OpenSize)
            or size % mesh.count(axes)
            or list(axes) != [a for a in mesh.names if a in axes]
        ):
            axes = axes[:-1]
        dims.append(axes)
    return ShardSpec(tuple(dims))


def storable_mark(mark: ShardSpec | None, shape: tuple[int, ...], mesh: Mesh) -> ShardSpec:
    """Return the layout in which a marked parameter or buffer is stored."""
    if mark is None:
        return ShardSpec.replicated(len(shape))
    # An axis with one device would only forbid the axes behind it.
    trimmed = ShardSpec(tuple(tuple(a for a in axes if mesh.count((a,)) > 1) for axes in mark.dims))
    return storable(trimmed, shape, mesh)


def placements(spec: ShardSpec, mesh: Mesh) -> list[Placement]:
    """Return a layout's DTensor placements, one per mesh axis."""
    dim_of = {axis: d for d, axes in enumerate(spec.dims) for axis in axes}
    return [
        placement_of(spec, dim_of[name]) if name in dim_of else Replicate() for name in mesh.names
    ]


def spec_of(tensor: DTensor, mesh: Mesh) -> ShardSpec:
    """Return a DTensor's layout on the plan's mesh.

    Raise ShardingError for a DTensor on another mesh or with a pending sum.
    """
    if (
        tuple(tensor.device_mesh.shape) != mesh.shape
        or tensor.device_mesh.mesh_dim_names != mesh.names
    ):
        raise ShardingError.here(
            f"a DTensor on mesh {tensor.device_mesh} is given to a program on mesh {mesh}"
        )
    dims: list[tuple[str, ...]] = [()] * tensor.dim()
    parts = [1] * tensor.dim()
    placed: Any = tensor.placements
    for name, placement in zip(mesh.names, placed):
        count = parts_of(placement)
        # Uneven parts, or parts that several axes divide, are not known to programs.
        fits = (
            count == 1
            or count
            and not (
                dims[placement.dim] or tensor.shape[placement.dim] % (count * mesh.count((name,)))
            )
        )
        if fits and parts[placement.dim] == 1 and (count == 1 or max(parts) == 1):
            dims[placement.dim] += (name,)
            parts[placement.dim] = count
        elif not isinstance(placement, Replicate):
            raise ShardingError.here(
                f"a DTensor with placement {placement} is given; "
                "only Shard and Replicate are taken",
                fix="redistribute it first",
            )
    return ShardSpec(tuple(dims), parts=tuple(parts))


def distribute(tensor: Tensor, spec: ShardSpec, mesh: Mesh, device_mesh: DeviceMesh) -> DTensor:
    """Return a tensor that all ranks have as a DTensor with rank 0's values; meta stays meta."""
    where = placements(spec, mesh)
    if tensor.is_meta:
        return _shard(tensor, spec, mesh, device_mesh)
    return distribute_tensor(
        tensor.detach().contiguous(memory_format=memory_format(tensor)), device_mesh, where
    )


@torch.no_grad()
def _shard(tensor: Tensor, spec: ShardSpec, mesh: Mesh, device_mesh: DeviceMesh) -> DTensor:
    """Return a tensor whose values all ranks have as a DTensor; nothing is sent."""
    # The mesh may be a part of the processes: a rank is no position in it.
    position = device_mesh.mesh.flatten().tolist().index(device_mesh.get_rank())
    coordinates, local = mesh.coordinates(position), part_order(tensor, spec, mesh)
    sizes = stored_shape(spec, tuple(tensor.shape), mesh, coordinates)
    for d, (axes, size) in enumerate(zip(spec.dims, sizes)):
        if axes:
            rows = -(-tensor.shape[d] // mesh.count(axes))
            begin = min(mesh.index(axes, coordinates) * rows, tensor.shape[d])
            local = local.narrow(d, begin, size)
    return DTensor.from_local(
        torch.empty(sizes, dtype=tensor.dtype, device="meta")
        if tensor.is_meta
        else local.clone(memory_format=torch.contiguous_format),
        device_mesh,
        placements(spec, mesh),
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def stored_shape(
    spec: ShardSpec, shape: tuple[int, ...], mesh: Mesh, coordinates: Coordinates
) -> tuple[int, ...]:
    """Return the shard shape that a DTensor stores on one device, without padding."""
    result = []
    for size, axes in zip(shape, spec.dims):
        rows = -(-size // mesh.count(axes))
        result.append(min(max(size - mesh.index(axes, coordinates) * rows, 0), rows))
    return tuple(result)


def shard_module(
    module: nn.Module, specs: dict[str, ShardSpec], mesh: Mesh, device_mesh: DeviceMesh
) -> None:
    """Replace a module's parameters and buffers by DTensors; tied ones stay tied.

    Not by setattr: a module of complex weights may store the real view of a value that is set.
    """
    replacements: dict[int, Tensor] = {}
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    # By id: tied parameters are sent once.
    plain = (t for t in tensors.values() if not isinstance(t, DTensor))
    values = first_values(plain, device_mesh)
    for prefix, owner in module.named_modules():
        for table in (owner._parameters, owner._buffers):
            for name, tensor in list(table.items()):
                if tensor is None or isinstance(tensor, DTensor):
                    continue
                if id(tensor) not in replacements:
                    spec = specs[f"{prefix}.{name}" if prefix else name]
                    value = values.pop(id(tensor), None)
                    stored = (
                        distribute(tensor, spec, mesh, device_mesh)
                        if value is None
                        else _shard(value, spec, mesh, device_mesh)
                    )
                    if table is owner._parameters:
                        # nn.Parameter would detach it: DTensor propagates layouts for that, 3 ms.
                        stored._is_param = True  # pyright: ignore[reportAttributeAccessIssue]
                        stored.requires_grad_(tensor.requires_grad)
                    replacements[id(tensor)] = stored
                    copy_mark(tensor, stored)
                table[name] = replacements[id(tensor)]  # pyright: ignore[reportArgumentType]


def distribute_state(module: nn.Module, state: dict[str, object], prefix: str, *_: object) -> None:
    """Shard a state_dict's whole tensors, the same on every rank; nothing is sent."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        loaded = state.get(prefix + name)
        if (
            isinstance(tensor, DTensor)
            and isinstance(loaded, Tensor)
            and not isinstance(loaded, DTensor)
            and loaded.shape == tensor.shape
        ):
            state[prefix + name] = distribute_tensor(
                loaded.detach(), tensor.device_mesh, tensor.placements, src_data_rank=None
            )


def local_of(tensor: Tensor) -> Tensor:
    """Return a DTensor's local shard, or the plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole_of(tensor: Tensor) -> Tensor:
    """Return a DTensor's whole values, or the plain tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    replicated = [Replicate()] * tensor.device_mesh.ndim
    return tensor.redistribute(placements=replicated).to_local()


def gradient_like(local: Tensor, parameter: DTensor) -> DTensor:
    """Return a gradient as a DTensor with its parameter's layout.

    `__new__` skips `__init__`, which does nothing and takes 3 of 5 us.
    """
    return DTensor.__new__(DTensor, local, parameter._spec, requires_grad=False)


def takes_gradient(parameter: DTensor, accumulator: object) -> bool:
    """Whether the running backward would only assign or add the gradient to `parameter.grad`.

    accumulator: autograd's node for that. It detaches the gradient first, 14 us for a DTensor; so
    we assign it ourselves, as FSDP2 does. False under torch.autograd.grad and with hooks.
    """
    before = parameter.grad
    if (
        not parameter.is_leaf
        or not (before is None or _has_layout(before, parameter._spec))
        or not parameter.requires_grad
        or parameter._backward_hooks
        or parameter._post_accumulate_grad_hooks
    ):
        return False
    try:
        return _will_engine_execute_node(accumulator)
    except RuntimeError:  # torch.autograd.grad computes this gradient.
        return False


def _has_layout(gradient: Tensor, spec: Any) -> bool:
    """Whether a former gradient's shards can be added to, and autograd does not record that."""
    return (
        type(gradient) is DTensor
        and not gradient.requires_grad
        and (gradient._spec is spec or gradient._spec.placements == spec.placements)
    )


def store_gradient(parameter: DTensor, gradient: DTensor) -> None:
    """Assign a gradient to `parameter.grad`, or add it in place, as autograd does."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def wrap_local(
    local: Tensor, spec: ShardSpec, shape: tuple[int, ...], mesh: Mesh, device_mesh: DeviceMesh
) -> DTensor:
    """Return a stored shard as a global DTensor; the conversion is differentiable."""
    # A program's results are contiguous, and so is the global tensor that they stand for.
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
    """Pad an input that is a stored shard to the shape that the program expects."""
    # Most shards divide: their programs get no node more.
    if stored != padded:
        sizes = reversed(list(zip(stored, padded)))
        # F.pad's order: the last dimension first, rows before and behind.
        pads = [p for size, padded_size in sizes for p in (0, padded_size - size)]
        insert_after(
            graph, node, lambda: graph.call_function(aten.constant_pad_nd.default, (node, pads))
        )


def slice_global(
    graph: fx.Graph,
    node: fx.Node,
    spec: ShardSpec,
    mesh: Mesh,
    coordinates: Coordinates,
    group: Callable[[int], int | fx.Node],
) -> None:
    """Slice an input that is a global tensor to this device's shard.

    group: returns how many rows in a dimension stay together; it may insert that node.
    """

    def slices() -> fx.Node:
        local = node
        for d, axes in enumerate(spec.dims):
            if axes:
                place = mesh.index(axes, coordinates), mesh.count(axes)
                together = () if (rows := group(d)) == 1 else (rows,)
                local = graph.call_function(take_part, (local, d, *place, *together))
        return local

    if spec.sharding_axes:
        insert_after(graph, node, slices)


def cut_padding(
    graph: fx.Graph, value: fx.Node, stored: tuple[int, ...], padded: tuple[int, ...]
) -> fx.Node:
    for d, (padded_size, size) in enumerate(zip(padded, stored)):
        if padded_size != size:
            value = graph.call_function(aten.narrow.default, (value, d, 0, size))
    return graph.call_function(aten.contiguous.default, (value,)) if stored != padded else value


def memory_format(tensor: Tensor) -> torch.memory_format:
    """Return the memory format in which a tensor is dense; contiguous if there is none."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(tensor.dim())
    return (
        last
        if last and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last)
        else torch.contiguous_format
    )


def insert_after(graph: fx.Graph, node: fx.Node, create: Callable[[], fx.Node]) -> None:
    """Insert nodes before the first operation; all other users take their result."""
    users = list(node.users)
    # Placeholders stay together at the front, as fx demands of a graph's inputs.
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first):
        replacement = create()
    for user in users:
        user.replace_input_with(node, replacement)


# A message for each tensor takes 0.4 ms on gloo processes: 20 ms for the model in `make demo`.
def first_values(tensors: Iterable[Tensor], device_mesh: DeviceMesh) -> dict[int, Tensor]:
    """Return the first process's values of small tensors, by id. Large ones are left out."""
    values: dict[int, Tensor] = {}
    small = [t for t in tensors if _is_small(t, device_mesh)]
    # Large elements first, so that all are aligned.
    small.sort(key=lambda t: t.element_size(), reverse=True)
    for group in _messages(small):
        message = torch.cat([t.detach().view(-1).view(torch.uint8) for t in group])
        # Along one axis after the other: each message then reaches the ranks of the next one.
        for dim, size in enumerate(device_mesh.shape):
            if size > 1:
                axis = device_mesh.get_group(dim)
                dist.broadcast(message, dist.get_global_rank(axis, 0), axis)
        sizes = [t.numel() * t.element_size() for t in group]
        for tensor, received in zip(group, message.split(sizes)):
            values[id(tensor)] = received.view(tensor.dtype).view(tensor.shape)
    return values


def _is_small(tensor: Tensor, device_mesh: DeviceMesh) -> bool:
    """Return whether a tensor is a small contiguous one on a device in the mesh."""
    return (
        tensor.device.type == device_mesh.device_type
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and tensor.is_contiguous()
        and 0 < tensor.numel() * tensor.element_size() <= _SMALL
    )


def _messages(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors in groups with limited size, each on one device."""
    group: list[Tensor] = []
    size = 0
    for tensor in tensors:
        size += tensor.numel() * tensor.element_size()
        if group and (size > _MESSAGE or tensor.device != group[0].device):
            yield group
            group, size = [], tensor.numel() * tensor.element_size()
        group.append(tensor)
    if group:
        yield group
