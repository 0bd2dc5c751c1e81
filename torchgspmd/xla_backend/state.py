"""Place a module's parameters and buffers, and arguments, on XLA in their layouts."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..capture.state.dependencies import named_tensors, slot_of
from ..errors import ShardingError
from ..layout.mark import copy_mark
from ..layout.mesh import Mesh
from ..shard_spec import ShardSpec
from .sharding import annotate, device_order, in_xla, layout_text, text_of

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
