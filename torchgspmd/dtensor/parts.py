"""Weights that are stored by parts: DTensors with torch's _StridedShard.

    c_attn.weight     [3*1024@model, 1024]: each device has rows of queries, of keys and of values
    placements        (_StridedShard(dim=0, sf=3),)

full_tensor(), state_dict and checkpoints have the user's order. torch 2.9 loses the placement in
elementwise operations: weights are not stored by parts there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..compat.patches import wrapping
from ..compat.private_apis import _StridedShard, is_missing
from ..layout.mesh import Mesh
from ..shard_spec import ShardSpec
from .ours import groups_of_ours, is_ours
from .replicated_fallback import distribute_like

# In torch 2.9 it is a Shard, for which operations take and return other Shards.
IS_EXACT = not is_missing(_StridedShard) and not issubclass(_StridedShard, Shard)
_HAS_PROGRAM = "_torchgspmd_has_program"


def placement_of(spec: ShardSpec, dim: int) -> Placement:
    """Return a sharded dimension's placement."""
    parts = spec.parts[dim] if spec.parts else 1
    return Shard(dim) if parts == 1 else _StridedShard(dim, split_factor=parts)


def parts_of(placement: Any) -> int:
    """Return the number of parts that a placement shards; 0 if it shards nothing."""
    if IS_EXACT and isinstance(placement, _StridedShard):
        return placement.split_factor
    return int(isinstance(placement, Shard))


def is_by_parts(tensor: Any) -> bool:
    """Return whether a tensor is one of our DTensors that are stored by parts."""
    return is_ours(tensor) and any(parts_of(p) > 1 for p in tensor.placements)


def bind(tensors: Sequence[Tensor]) -> None:
    """Note that a program takes tensors as they are stored: from now on they stay so."""
    for tensor in tensors:
        setattr(tensor, _HAS_PROGRAM, True)


def is_bound(tensor: Tensor) -> bool:
    """Return whether a program takes a tensor as it is stored."""
    return hasattr(tensor, _HAS_PROGRAM)


@torch.no_grad()
def store_like(tensor: DTensor, like: DTensor | Sequence[Placement]) -> None:
    """Store a DTensor by the placements of another; if its shard is as large, in the same memory.

    It is gathered over the axes whose placements change. All ranks call it.
    """
    new = like.placements if isinstance(like, DTensor) else tuple(like)
    pairs = [*zip(tensor.placements, new)]
    gathered = tensor.redistribute(placements=[b if a == b else Replicate() for a, b in pairs])
    stored = gathered.redistribute(placements=new)
    if tensor._local_tensor.shape == stored._local_tensor.shape:
        tensor._local_tensor.copy_(stored._local_tensor)
    else:  # a view would keep the whole tensor alive
        tensor._local_tensor = stored._local_tensor.clone(memory_format=torch.contiguous_format)
    tensor._spec = stored._spec


def store_by_parts(parameter: DTensor, placements: Sequence[Placement]) -> None:
    """Store a parameter, and its gradient, by parts."""
    for tensor in (parameter, parameter.grad):
        if isinstance(tensor, DTensor) and tensor.placements != tuple(placements):
            store_like(tensor, placements)


def states_follow(parameters: Sequence[Any], *states: Sequence[Any]) -> bool:
    """Store an optimizer's states as their parameters are stored by now.

    Return whether a state was stored otherwise, as one that was loaded before the first step.
    """
    changed = False
    for column in zip(parameters, *states) if any(map(is_by_parts, parameters)) else ():
        parameter, *others = column
        for state in others:
            if (
                is_by_parts(parameter)
                and type(state) is DTensor
                and state.shape == parameter.shape
                and state.device_mesh == parameter.device_mesh
                and state.placements != parameter.placements
                and not any(p.is_partial() for p in state.placements)
            ):
                store_like(state, parameter)
                changed = True
    return changed


# ------------------------------------------------------------------ torch.distributed.checkpoint


def _pieces(tensor: DTensor) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return this device's pieces that are intervals of the whole tensor, with their offsets."""
    groups = groups_of_ours(tensor)
    mesh: Mesh = groups.mesh
    pieces = [((0,) * tensor.dim(), tensor._local_tensor)]
    for axis, placement in zip(mesh.names, tensor.placements):
        if not (parts := parts_of(placement)):
            continue
        d: int = placement.dim  # type: ignore[attr-defined]
        index, count = groups.coordinates[axis], mesh.count((axis,))
        size = tensor.shape[d]
        # Rows of a shard; uneven ones are in the last shards.
        whole = -(-size // (count * parts))
        pieces = [
            (
                (*at[:d], min(part * size // parts + index * whole, size), *at[d + 1 :]),
                local.narrow(d, part * (local.shape[d] // parts), local.shape[d] // parts),
            )
            for at, local in pieces
            for part in range(parts)
        ]
    return pieces


@wrapping
def write_items(before: Callable, self: DTensor, fqn: str, value: Any) -> Any:
    """Wrap DTensor.__create_write_items__: a tensor by parts has an item for each piece."""
    if not is_by_parts(self):
        return before(self, fqn, value)
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    return [
        WriteItem(
            index=MetadataIndex(fqn, torch.Size(at)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(at), piece.shape),
                properties=TensorProperties.create_from_tensor(piece),
                size=self.size(),
            ),
        )
        for at, piece in _pieces(self)
    ]


@wrapping
def chunk_list(before: Callable, self: DTensor) -> Any:
    """Wrap DTensor.__create_chunk_list__: a tensor by parts is read piece by piece."""
    if not is_by_parts(self):
        return before(self)
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(torch.Size(at), piece.shape) for at, piece in _pieces(self)]


@wrapping
def tensor_shard(before: Callable, self: DTensor, index: Any) -> Any:
    """Wrap DTensor.__get_tensor_shard__: return the piece at an offset."""
    if not is_by_parts(self):
        return before(self, index)
    return dict(_pieces(self))[tuple(index.offset)]


@wrapping
def distribute_tensors(
    before: Callable, states: dict[str, Any], keys: list[str], *others: Any
) -> None:
    """Wrap the function that loads whole states: a tensor by parts takes the rows of its parts."""
    rest = []
    for key in keys:
        pair = states.get(key)
        if isinstance(pair, (tuple, list)) and is_by_parts(pair[0]):
            stored = distribute_like(pair[0], pair[1])
            pair[0]._local_tensor.copy_(stored._local_tensor)
            states[key] = pair[0]
        else:
            rest.append(key)
    before(states, rest, *others)
