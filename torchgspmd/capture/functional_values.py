"""The values that functional tensors have at some moment in the trace."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..compat.private_apis import FunctionalTensor, _from_functional_tensor, _sync


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
