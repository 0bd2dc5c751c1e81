"""The costs of our operations: FLOPs, and bytes that they allocate besides their results.

PyTorch's flop counter has the FLOPs. WORKSPACE has a function for each operation that needs bytes.
It takes the operation's arguments, with meta tensors that have the operands' strides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...compat.private_apis import OpOverload
from .nd import Matrix, einsum, matrix_form, split_equation

_OURS = torch.ops.torchgspmd


def einsum_flops(equation: str, a: Any, b: Any, *_: object, **__: object) -> int:
    """Return the FLOPs in an einsum with two operands, from their shapes."""
    first, second, _out = split_equation(equation)
    # Each pair of entries that meet is multiplied and added: 2 m k n for a matrix product.
    return 2 * math.prod({**dict(zip(first, a)), **dict(zip(second, b))}.values())


register_flop_formula(_OURS.einsum)(einsum_flops)


@register_flop_formula(_OURS.scaled_mm)
def scaled_mm_flops(a: Any, b: Any, *_: object, **__: object) -> int:
    return 2 * a[0] * a[1] * b[1]


# FLOPs of a factorization of an [m, n] matrix, over m n min(m, n). Source: Golub and Van Loan,
# Matrix Computations, and LAPACK's working notes for the iterations.
_FACTORIZATIONS = {
    "_linalg_det": 0.67,
    "_linalg_eigh": 9.0,
    "_linalg_slogdet": 0.67,
    "_linalg_svd": 21.0,
    "geqrf": 1.33,
    "linalg_cholesky_ex": 0.33,
    "linalg_eig": 25.0,
    "linalg_inv_ex": 2.0,
    "linalg_lu_factor_ex": 0.67,
    "linalg_matrix_exp": 20.0,
    "linalg_qr": 2.67,
    "_linalg_solve_ex": 0.67,
}


def _factorization_flops(share: float, a: Any, *_: object, **__: object) -> int:
    return int(share * math.prod(a) * min(a[-2:])) if len(a) > 1 else 0


for _name, _share in _FACTORIZATIONS.items():
    register_flop_formula(getattr(torch.ops.aten, _name))(partial(_factorization_flops, _share))


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
