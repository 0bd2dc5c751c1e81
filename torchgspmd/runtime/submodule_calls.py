"""Submodules of a model on a mesh that are called by themselves: `model.encoder(x)`, or from a
method of it such as `generate`.

In a program their forward is part of it, as it is written. Outside it is a program of its own, on
the same parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from ..capture import is_capturing

_PARAMETRIZATIONS = (
    "parametrizations"  # torch.nn.utils.parametrize: what computes parameters runs on these
)


def stand_alone(model: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Lets every submodule compute by itself; wrap: makes a module of it that is called in its
    place.
    """
    for name, module in model.named_modules():
        has_forward = type(module).forward is not nn.Module.forward or "forward" in module.__dict__
        if module is not model and has_forward and _PARAMETRIZATIONS not in name.split("."):
            module.__dict__["forward"] = SubmoduleCall(module, wrap, module.__dict__.get("forward"))


class SubmoduleCall:
    """In the place of a submodule's forward. written: the one that was put into the instance
    before; None: that of its class.
    """

    def __init__(
        self, module: nn.Module, wrap: Callable[[nn.Module], nn.Module], written: Callable | None
    ):
        self.module, self.wrap, self.written, self.wrapped = module, wrap, written, None
        self.__wrapped__ = written or MethodType(
            type(module).forward, module
        )  # whose signature this has

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_capturing():
            return (
                self.written(*args, **kwargs)
                if self.written
                else type(self.module).forward(self.module, *args, **kwargs)
            )
        if self.wrapped is None:
            self.wrapped = self.wrap(self.module)
        self.wrapped.training = self.module.training
        return self.wrapped.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> SubmoduleCall:
        return SubmoduleCall(
            copy.deepcopy(self.module, memo), self.wrap, copy.deepcopy(self.written, memo)
        )
