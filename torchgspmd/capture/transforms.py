"""Whether transforms of torch.func wrap the current call."""

from __future__ import annotations

from torch import Tensor

from ..compat.private_apis import get_interpreter_stack, get_unwrapped, is_functorch_wrapped_tensor


def is_transforming() -> bool:
    """Return whether torch.func differentiates or vectorizes the current call."""
    return bool(get_interpreter_stack())


def is_vectorizing() -> bool:
    """Return whether torch.vmap, and no other torch.func transform, wraps the current call."""
    stack = get_interpreter_stack() or []
    return bool(stack) and all(level.key().name == "Vmap" for level in stack)


def needs_gradient(x: Tensor) -> bool:
    """Return whether a tensor needs a gradient: torch.vmap's tensors say that they do not."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x.requires_grad
