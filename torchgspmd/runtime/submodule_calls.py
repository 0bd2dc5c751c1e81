"""Direct calls to a sharded model and its submodules: `model.encoder(x)`, also from `generate`.

Inside a program, a module's forward is traced as usual. Outside, it is its own program on the same
parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from ..capture import is_capturing

# Modules of torch.nn.utils.parametrize compute parameters, and stay as they are.
_PARAMETRIZATIONS = "parametrizations"


def install_calls(
    model: nn.Module, wrap: Callable[[nn.Module], nn.Module], submodules: bool = True
) -> None:
    """Replace the model's forward, and its submodules'; wrap: returns the new function."""
    for name, module in model.named_modules() if submodules else [("", model)]:
        has_forward = type(module).forward is not nn.Module.forward or "forward" in module.__dict__
        if has_forward and _PARAMETRIZATIONS not in name.split("."):
            module.__dict__["forward"] = SubmoduleCall(module, wrap, module.__dict__.get("forward"))


class SubmoduleCall:
    """Replaces a submodule's forward.

    own_forward: the forward that was set on the instance before; None: its class's.
    """

    def __init__(
        self,
        module: nn.Module,
        wrap: Callable[[nn.Module], nn.Module],
        own_forward: Callable | None,
    ) -> None:
        self.module, self.wrap, self.own_forward = module, wrap, own_forward
        self.wrapped: nn.Module | None = None
        self.__wrapped__ = own_forward or MethodType(type(module).forward, module)  # the signature

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if is_capturing():
            return (
                self.own_forward(*args, **kwargs)
                if self.own_forward
                else type(self.module).forward(self.module, *args, **kwargs)
            )
        # Made at the first direct call: most submodules never get one.
        if self.wrapped is None:
            self.wrapped = self.wrap(self.module)
        return self.wrapped.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> SubmoduleCall:
        return SubmoduleCall(
            copy.deepcopy(self.module, memo), self.wrap, copy.deepcopy(self.own_forward, memo)
        )
