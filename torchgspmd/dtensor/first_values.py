"""The first process's values for small tensors, on all processes, in one message per axis.

A message for each tensor takes 0.4 ms on gloo processes: 20 ms for the model in `make demo`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_SMALL = 1 << 20  # bytes in a tensor that travels with others
_MESSAGE = 1 << 26  # bytes in a message


def first_values(tensors: Iterable[Tensor], device_mesh: DeviceMesh) -> dict[int, Tensor]:
    """Return the first process's values of small tensors, by id. Large ones are left out."""
    values: dict[int, Tensor] = {}
    small = [t for t in tensors if _is_small(t, device_mesh)]
    # Large elements first, so that all are aligned.
    small.sort(key=lambda t: t.element_size(), reverse=True)
    for group in _messages(small):
        message = torch.cat([_as_bytes(t) for t in group])
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


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
