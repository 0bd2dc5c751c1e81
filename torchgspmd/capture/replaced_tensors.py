"""Run code while other tensors stand in the place of a module's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


class _Caller(nn.Module):
    """A module whose forward is a function, for torch.func.functional_call."""

    def __init__(self, module: nn.Module, call: Callable[[], Any]) -> None:
        super().__init__()
        self.module, self.call = module, call
        self.training = module.training

    def forward(self) -> Any:
        return self.call()


def with_tensors(module: nn.Module, tensors: Mapping[str, Tensor], call: Callable[[], T]) -> T:
    """Call a function while these tensors replace a module's parameters and buffers, by name."""
    state = {f"module.{name}": tensor for name, tensor in tensors.items()}
    return torch.func.functional_call(_Caller(module, call), state, ())
