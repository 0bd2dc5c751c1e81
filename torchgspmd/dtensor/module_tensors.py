"""A module's parameters and buffers: their names, and the tables that hold them."""

from __future__ import annotations

from torch import Tensor, nn


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
