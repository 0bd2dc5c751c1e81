"""Computations under torch.vmap whose positions become one more leading dimension.

    vmap(gather)(x [s, u0, m], i [s, u0])     gather(x, i) along the next dimension

torch.vmap asks for sizes if it maps PyTorch's operators along a dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function

from ...capture.traced_values import is_transforming
from ...compat.private_apis import is_functorch_wrapped_tensor


class _WithPositions(Function):
    """A computation at one torch.vmap level, with positions as one more leading dimension."""

    @staticmethod
    def forward(run: Callable[..., Tensor], front: int, *tensors: Tensor) -> Tensor:
        raise AssertionError("the level of torch.vmap is not entered")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: the operation that `run` calls is differentiated."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, run: Callable[..., Tensor], front: int, *tensors: Tensor
    ) -> tuple[Tensor, int]:
        """Run with the positions in front."""
        # An operand that torch.vmap does not map is the same at all positions.
        batched = (
            x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(tensors, in_dims[2:])
        )
        return with_positions(run, front + 1, *batched), 0


def with_positions(run: Callable[..., Tensor], front: int, *tensors: Tensor) -> Tensor:
    """Return run(front, *tensors). front: the number of position dimensions that lead."""
    # Operands that torch.vmap does not map have no positions at its level.
    if is_transforming() and any(map(is_functorch_wrapped_tensor, tensors)):
        return _WithPositions.apply(run, front, *tensors)  # pyright: ignore
    return run(front, *tensors)
