"""Join all hosts' batches to one tensor on XLA; a host sends its rows to its devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ShardingError
from ..layout.mesh import Coordinates, Mesh
from ..shard_spec import ShardSpec, SpecLike
from .runtime import start
from .sharding import check, device_order, op_sharding


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
