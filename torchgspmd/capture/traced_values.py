"""A trace's tensors: functional ones' values now, and transforms of torch.func around them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..compat.private_apis import (
    FunctionalTensor,
    _from_functional_tensor,
    _sync,
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
)


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


def unwrap(tensor: Any) -> Tensor:
    """Return a functional tensor's current value."""
    _sync(tensor)
    return _from_functional_tensor(tensor.elem)


def was_mutated(tensor: Tensor, before: Tensor) -> bool:
    """Return whether a functional tensor has another value than before."""
    return unwrap(tensor) is not before


class SavedValue:
    """Replaces torch.utils.checkpoint._VersionWrapper by the tensor's value when it is saved.

    Values saved by a selective checkpoint stay, though a later operation writes over the tensor.
    """

    def __init__(self, value: object) -> None:
        self.value = unwrap(value) if isinstance(value, FunctionalTensor) else value

    def get_val(self, allow_cache_entry_mutation: bool) -> Any:
        """Return the value, as a new functional tensor."""
        value = self.value
        return FunctionalTensor.to_functional(value) if isinstance(value, Tensor) else value
