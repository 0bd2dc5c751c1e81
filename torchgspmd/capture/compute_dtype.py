"""The dtype that a program computes in, if it is not its parameters' own."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ShardingError
from .functional_values import unwrap, was_mutated


class Casts:
    """Copies of parameters and arguments in another floating dtype, for a whole trace.

    dtype: None leaves all tensors as they are.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self.copies: list[tuple[str, Tensor, Tensor]] = []  # name, copy, its value at first

    def cast(self, name: str, tensor: Tensor) -> Tensor:
        """Return a floating tensor in the dtype, any other as it is."""
        if self.dtype in (None, tensor.dtype) or not tensor.is_floating_point():
            return tensor
        copy = tensor.to(self.dtype)
        self.copies.append((name, copy, unwrap(copy)))
        return copy

    def check_unchanged(self) -> None:
        """Raise ShardingError if forward changed a copy in place: the change would be lost."""
        for name, copy, before in self.copies:
            if was_mutated(copy, before):
                raise self.change_error(name)

    def change_error(self, name: str) -> ShardingError:
        """Return the error about a tensor that forward changes."""
        return ShardingError.here(
            f"forward changes {name}",
            why=f"with param_dtype it computes with a copy in {self.dtype}: "
            "the change would be lost",
            fix="make it a buffer, which keeps its dtype, or use torch.autocast",
        )


def check_dtypes(**dtypes: object) -> None:
    """Raise ShardingError unless each is None or a real floating dtype."""
    for name, dtype in dtypes.items():
        if dtype is not None and not (
            isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
        ):
            raise ShardingError.here(
                f"{name}={dtype!r} is no floating dtype that gradients can be computed in",
                fix=f"give {name}=torch.bfloat16, torch.float16, torch.float32 or torch.float64",
            )
