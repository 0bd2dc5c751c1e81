"""Bytes that operations allocate while they run, besides their results.

WORKSPACE has a function for each operation that needs any. It takes the operation's arguments, with
meta tensors that have the operands' strides.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...compat.private_apis import OpOverload
from .matrix_form import Matrix, matrix_form
from .nd import einsum


def einsum_bytes(equation: str, x: Tensor, y: Tensor) -> int:
    """Return the bytes for operands copied into matrices, or for a product to permute."""
    form = matrix_form(equation, x.shape, y.shape)
    if form.exchanged:
        x, y = y, x
    copies = sum(_copied(*pair) for pair in ((x, form.left), (y, form.right)))
    product = x.new_empty(form.shape)
    moved = form.order is not None and not product.permute(form.order).is_contiguous()
    # The copies are freed before the product is permuted, so the larger one counts.
    return max(copies, product.nbytes if moved else 0)


def _copied(x: Tensor, matrix: Matrix) -> int:
    """Return the bytes copied to turn an operand into a matrix, 0 if it can be a view."""
    moved = x if matrix.order is None else x.permute(matrix.order)
    reshaped = moved if matrix.shape is None else moved.reshape(matrix.shape)
    is_view = reshaped.untyped_storage()._cdata == x.untyped_storage()._cdata
    return 0 if is_view else reshaped.nbytes


WORKSPACE: dict[OpOverload, Callable[..., int]] = {einsum._opoverload: einsum_bytes}
