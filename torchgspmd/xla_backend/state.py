"""Place a module's parameters and buffers, arguments and all hosts' batches on XLA."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..capture.state.dependencies import named_tensors, slot_of
from ..errors import ShardingError
from ..layout.mark import copy_mark
from ..layout.mesh import Coordinates, Mesh
from ..shard_spec import ShardSpec, SpecLike
from .runtime import start
from .sharding import annotate, check, device_order, in_xla, layout_text, op_sharding, text_of

# (a module's table, of parameters or buffers; the name in that table; the layout)
Slot = tuple[dict, str, ShardSpec]


def place(
    model: nn.Module, specs: dict[str, ShardSpec], mesh: Mesh, device: torch.device
) -> list[Slot]:
    """Replace a module's parameters and buffers by XLA tensors.

    Tied ones stay tied. Those on meta stay there.
    """
    placed: dict[int, Tensor] = {}
    slots: dict[int, Slot] = {}
    for name, tensor in named_tensors(model):
        table, key = slot_of(model, name)
        # By id: tied parameters become one tensor.
        if id(tensor) not in placed:
            stored = (
                tensor.detach()
                if tensor.is_meta
                else place_tensor(tensor.detach(), specs[name], mesh, device)
            )
            placed[id(tensor)] = (
                nn.Parameter(stored, tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else stored
            )
            copy_mark(tensor, placed[id(tensor)])
            slots[id(tensor)] = (table, key, specs[name])
        table[key] = placed[id(tensor)]
    return list(slots.values())


def place_tensor(tensor: Tensor, spec: ShardSpec, mesh: Mesh, device: torch.device) -> Tensor:
    """Send every device its shard. A tensor on XLA stays as it is."""
    import torch_xla.distributed.spmd as xs

    if isinstance(tensor, DTensor):
        raise ShardingError.here(
            "a DTensor is given to a program on XLA",
            fix="pass the global batch as a plain tensor, or call shard_batch",
        )
    if tensor.device == device:
        return tensor
    moved = tensor.to(device)
    xs.mark_sharding(moved, *in_xla(mesh, spec))
    return moved


def pin(tensor: Tensor, mesh: Mesh, spec: ShardSpec) -> None:
    """Give a tensor a layout, unless it has it.

    torch_xla may give another layout to a tensor that is assigned or copied to.
    """
    if layout_text(tensor) != text_of(spec, mesh, tuple(device_order())):
        tensor.data = annotate(tensor.detach(), str(mesh), str(spec))


def sync() -> None:
    """Run all lazy operations, as one program."""
    import torch_xla

    torch_xla.sync()


def program_text(tensors: list[Tensor]) -> str:
    """Return lazy tensors' partitioned and optimized program, without running it."""
    import torch_xla

    before = os.environ.get("XLA_DUMP_POST_OPTIMIZATIONS")
    # Else the text is that before XLA's partitioner.
    os.environ["XLA_DUMP_POST_OPTIMIZATIONS"] = "1"
    try:
        return torch_xla._XLAC._get_xla_tensors_hlo(tensors)
    finally:
        if before is None:
            del os.environ["XLA_DUMP_POST_OPTIMIZATIONS"]


# Join all hosts' batches to one tensor: a host sends its rows to its devices.


def place_batch(local: Tensor, mesh: Mesh, spec: SpecLike) -> Tensor:
    """Return the global batch on XLA. local: this host's rows."""
    import torch_xla

    start(mesh, backward=False)
    parsed = check(
        ShardSpec.parse(spec).check(mesh, local.shape, "the batch").closed(), mesh, "the batch"
    )
    # The mesh counts devices slice by slice, torch_xla by their ids.
    rank = {id: i for i, id in enumerate(device_order())}
    shape, shards = parts(
        local.detach().cpu(), parsed, mesh, [mesh.coordinates(rank[id]) for id in own_devices()]
    )
    return torch_xla._XLAC._global_tensor_from_cpu_shards(
        shards, op_sharding(str(mesh), str(parsed)), shape
    )


def own_devices() -> list[int]:
    """Return the ids of this host's devices, in torch_xla's order for shards that it sends."""
    import torch_xla

    return [int(name.split(":")[1]) for name in torch_xla._XLAC._xla_get_runtime_devices()]


def parts(
    local: Tensor, spec: ShardSpec, mesh: Mesh, devices: Sequence[Coordinates]
) -> tuple[list[int], list[Tensor]]:
    """Return (global shape, the shards on this host's devices).

    local: the rows in the shards that this host's devices hold, in order. devices: their
    coordinates. A dimension's global size is this host's rows * all shards / this host's shards.
    The last shards are padded with zeros.
    """
    places = [tuple(mesh.index(axes, device) for axes in spec.dims) for device in devices]
    own = [sorted(set(indices)) for indices in zip(*places)]  # this host's shards, by dimension
    shape = []
    for d, (size, axes) in enumerate(zip(local.shape, spec.dims)):
        # A host with all shards may have a short last one: the global size is its own.
        if len(own[d]) < mesh.count(axes) and size % len(own[d]):
            raise ShardingError.here(
                f"dimension {d} of a host's batch has {size} rows, "
                f"which its {len(own[d])} shards do not divide",
                fix="give every device the same number of rows, on every host",
            )
        shape.append(size * mesh.count(axes) // len(own[d]))
    rows = spec.local_shape(shape, mesh)
    return shape, [
        _shard(local, rows, [indices.index(i) for indices, i in zip(own, place)])
        for place in places
    ]


def _shard(local: Tensor, rows: Sequence[int], place: Sequence[int]) -> Tensor:
    """Return the shard at a place in a grid; each has `rows` rows, padded with zeros."""
    part = local
    for d, (count, index) in enumerate(zip(rows, place)):
        begin = min(index * count, local.shape[d])
        part = part.narrow(d, begin, min(count, local.shape[d] - begin))
    shard = torch.zeros(tuple(rows), dtype=local.dtype)
    shard[tuple(slice(n) for n in part.shape)] = part
    return shard
