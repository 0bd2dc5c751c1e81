"""Pickling for our DTensors: one that every device has whole is an ordinary tensor, and a sharded
one is refused, since each rank would write its own part.

torch.save(model.state_dict(), path)            on one rank, in every second training script
safetensors.torch.save_file(model.state_dict(), path)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ..compat.patches import wrapping
from ..errors import ShardingError
from .ours import is_called_by, is_ours

_OF_PARTS = "torch.distributed.checkpoint"  # writes each rank's part, and knows it
_FILES = "safetensors"


@wrapping
def reduce_method(before: Callable, self: DTensor, protocol: object) -> Any:
    """Wrap DTensor.__reduce_ex__: our whole DTensors are pickled as ordinary tensors.

    Raise ShardingError for a sharded one.
    """
    # copy.copy's result stays in this process.
    copies = sys._getframe(2).f_globals.get("__name__") == "copy"
    if not is_ours(self) or copies or is_called_by(_OF_PARTS):
        return before(self, protocol)
    return ordinary(self).__reduce_ex__(protocol)


@wrapping
def storage_method(before: Callable, self: DTensor) -> Any:
    """Wrap DTensor.untyped_storage for safetensors, which asks it for the values."""
    is_asked_for = is_ours(self) and is_called_by(_FILES)
    return before(ordinary(self) if is_asked_for else self)


@wrapping
def pointer_method(before: Callable, self: DTensor) -> int:
    """Wrap DTensor.data_ptr: the values' for safetensors, and 0 for others.

    torch's is a gradient's offset in a bucket. copy.deepcopy takes it for memory unless it is 0.
    """
    if not is_ours(self):
        return before(self)
    return before(ordinary(self)) if is_called_by(_FILES) else 0


def ordinary(tensor: DTensor) -> Tensor:
    """Return a DTensor that every device has whole as this device's tensor.

    Raise ShardingError if this device has a part, or a term in a sum.
    """
    if is_sharded(tensor):
        raise _error(tensor)
    local = tensor._local_tensor.detach()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(local, tensor.requires_grad)
    return local.requires_grad_(tensor.requires_grad)


def is_sharded(tensor: DTensor) -> bool:
    """Return whether a device has a DTensor's part, or a term in a sum."""
    # An axis with one device leaves a tensor whole, whatever its placement.
    sizes = zip(tensor.placements, tensor.device_mesh.shape)
    return any(p.is_partial() or not p.is_replicate() and size > 1 for p, size in sizes)


def _error(tensor: DTensor) -> ShardingError:
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or range(mesh.ndim)
    axes = [
        f"{n}={size}"
        for n, p, size in zip(names, tensor.placements, mesh.shape)
        if p != Replicate()
    ]
    return ShardingError.here(
        f"one process saves or pickles a tensor of shape {list(tensor.shape)}, which is sharded "
        f"over {','.join(axes)}",
        why=f"this process has {tensor._local_tensor.numel()} of its {tensor.numel()} elements, "
        "and torch.save, pickle or safetensors would write these alone",
        fix="run `state = gspmd.full_state_dict(model)` on every rank, and `torch.save(state, "
        "path)` on rank 0; or run `torch.distributed.checkpoint.save(model.state_dict(), "
        "checkpoint_id=path)` on every rank; for one tensor, call `tensor.full_tensor()` on "
        "every rank",
    )
