"""A module's parameters and buffers: their names, their tables, and others in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

T = TypeVar("T")


def with_tensors(module: nn.Module, tensors: Mapping[str, Tensor], call: Callable[[], T]) -> T:
    """Call a function while these tensors replace a module's parameters and buffers, by name.

    A tensor with several names is replaced under all of them.
    """
    # Not torch.func.functional_call: it visits the slot of a module with two names twice, and
    # restores the stand-in there.
    slots: list[tuple[Any, str, Tensor]] = [
        (table, name, tensor)
        for each in module.modules()
        for table in (each._parameters, each._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]
    present = dict(named_tensors(module))
    stand_ins = {id(present[name]): tensor for name, tensor in tensors.items()}
    slots = [slot for slot in slots if id(slot[2]) in stand_ins]
    try:
        for table, name, tensor in slots:
            table[name] = stand_ins[id(tensor)]
        return call()
    finally:
        for table, name, tensor in slots:
            table[name] = tensor


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return parameters and buffers under all their names."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def slot_of(model: nn.Module, name: str) -> tuple[dict, str]:
    """Return the table (dict) that holds a parameter or buffer, and its name in it."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    return (owner._parameters if last in owner._parameters else owner._buffers), last
