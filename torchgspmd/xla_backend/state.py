"""Tensors on XLA in their layouts: a module's parameters and buffers, arguments, and keeping them
so.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..annotate import copy_mark
from ..errors import ShardingError, user_line
from ..mesh import Mesh
from ..runtime.module_proxy import named_tensors, slot_of
from ..shard_spec import ShardSpec
from .sharding import annotate, device_order, in_xla, layout_text, text_of

Slot = tuple[
    dict, str, ShardSpec
]  # a module's table of parameters or buffers, the name there, the layout


def place(
    model: nn.Module, specs: dict[str, ShardSpec], mesh: Mesh, device: torch.device
) -> list[Slot]:
    """Puts XLA tensors in place of a module's parameters and buffers; tied ones stay tied, those on
    meta stay there.
    """
    made: dict[int, Tensor] = {}
    slots: dict[int, Slot] = {}
    for name, tensor in named_tensors(model):
        table, key = slot_of(model, name)
        if id(tensor) not in made:
            stored = (
                tensor.detach()
                if tensor.is_meta
                else place_tensor(tensor.detach(), specs[name], mesh, device)
            )
            made[id(tensor)] = (
                nn.Parameter(stored, tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else stored
            )
            copy_mark(tensor, made[id(tensor)])
            slots[id(tensor)] = (table, key, specs[name])
        table[key] = made[id(tensor)]
    return list(slots.values())


def place_tensor(tensor: Tensor, spec: ShardSpec, mesh: Mesh, device: torch.device) -> Tensor:
    """A tensor on XLA; every device is sent its shard only. What is there already stays as it is."""
    import torch_xla.distributed.spmd as xs

    if isinstance(tensor, DTensor):
        raise ShardingError(
            "a DTensor is given to a program on XLA",
            where=user_line(),
            fix="the global batch as a plain tensor, or shard_batch",
        )
    if tensor.device == device:
        return tensor
    moved = tensor.to(device)
    xs.mark_sharding(moved, *in_xla(mesh, spec))
    return moved


def pin(tensor: Tensor, mesh: Mesh, spec: ShardSpec) -> None:
    """Lays a tensor out, unless it is so already. What is assigned or copied to it, torch_xla may
    lay out otherwise.
    """
    if layout_text(tensor) != text_of(spec, mesh, tuple(device_order())):
        tensor.data = annotate(tensor.detach(), str(mesh), str(spec))


def sync() -> None:
    """Runs everything that is pending, as one program."""
    import torch_xla

    torch_xla.sync()


def program_text(tensors: list[Tensor]) -> str:
    """The partitioned and optimized program that computes tensors that are still lazy; it is not
    run.
    """
    import torch_xla

    before = os.environ.get("XLA_DUMP_POST_OPTIMIZATIONS")
    os.environ["XLA_DUMP_POST_OPTIMIZATIONS"] = "1"
    try:
        return torch_xla._XLAC._get_xla_tensors_hlo(tensors)
    finally:
        if before is None:
            del os.environ["XLA_DUMP_POST_OPTIMIZATIONS"]
