"""Linear algebra on matrix batches, and Fourier transforms.

A matrix's own dimensions must be whole, batch dimensions may be sharded. An all_to_all moves a
layout from one to the other. Right-hand sides of a system are solved each by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...compat.operators import aten
from ...compat.private_apis import OpOverload
from ..custom_ops.host import linear_sum_assignment
from ..notation import Call, FactorRule, LocalForm, Split, factors
from ..registry import ordered, rule_for
from ..rewrites import DECLINED, Declined, SplitRequest, rewrite
from .cumulative import cut
from .pointwise import broadcast_dims
from .view import keep_rule


def batched_rule(call: Call, trailing: list[int], sides: int | None = None) -> FactorRule:
    """Return a rule in which each tensor's last `trailing` dimensions are whole.

    Those before are the batch, and broadcast. Padding holds 0, because factorizing NaN may raise.
    Padding of pivots holds 1, because they count from 1. sides: the operand with the right-hand
    sides of a system.
    """
    tensors, count = [*call.tensors, *call.results], len(call.tensors)
    leads = [max(t.dim() - n, 0) for t, n in zip(tensors, trailing, strict=True)]
    batch = torch.broadcast_shapes(*(t.shape[:lead] for t, lead in zip(tensors, leads)))
    names = factors("b", len(batch))
    dims = [
        broadcast_dims(t.shape[:lead], batch, names) + factors(f"w{k}_", t.dim() - lead)
        for k, (t, lead) in enumerate(zip(tensors, leads))
    ]
    if sides is not None:
        column = -1 if call.kwargs.get("left", True) else -2
        dims[sides][column] = dims[count][column] = "side"
    fill = {i: 1.0 if t.dtype == torch.int32 else 0.0 for i, t in enumerate(call.tensors)}
    return call.rule(
        dims[:count],
        dims[count:],
        dict(zip(names, batch)),
        replicated=[name for row in dims for name in row if name[:1] == "w"],
        linear=[] if sides is None else [[sides]],
        local=LocalForm(fill=fill),
    )


def register_batched(op: OpOverload, operands: str, results: str, sides: int | None = None) -> None:
    """Register an operation by its tensors' whole trailing dimensions (2: a matrix)."""
    trailing = [int(n) for n in (operands + " " + results).split()]
    rule_for(op)(lambda call: batched_rule(call, trailing, sides))


# The whole trailing dimensions of each operand, and of each result.
register_batched(aten._linalg_det.default, "2", "0 2 1")
register_batched(aten._linalg_eigh.default, "2", "1 2")
register_batched(aten._linalg_slogdet.default, "2", "0 0 2 1")
register_batched(aten.cholesky_solve.default, "2 2", "2", sides=0)
register_batched(aten.geqrf.default, "2", "2 1")
register_batched(aten.linalg_cholesky_ex.default, "2", "2 0")
register_batched(aten.linalg_eig.default, "2", "1 2")
register_batched(aten.linalg_householder_product.default, "2 1", "2")
register_batched(aten.linalg_inv_ex.default, "2", "2 0")
register_batched(aten.linalg_ldl_factor_ex.default, "2", "2 1 0")
register_batched(aten.linalg_ldl_solve.default, "2 1 2", "2", sides=2)
register_batched(aten.linalg_lu.default, "2", "2 2 2")
register_batched(aten.linalg_lu_factor_ex.default, "2", "2 1 0")
register_batched(aten.linalg_lu_solve.default, "2 1 2", "2", sides=2)
register_batched(aten.linalg_matrix_exp.default, "2", "2")
register_batched(aten.linalg_qr.default, "2", "2 2")
register_batched(aten.linalg_solve_triangular.default, "2 2", "2", sides=1)
register_batched(aten.lu_unpack.default, "2 1", "2 2 2")
register_batched(aten.ormqr.default, "2 1 2", "2")
register_batched(aten.triangular_solve.default, "2 2", "2 2")
register_batched(linear_sum_assignment._opoverload, "2", "1 1")


# They factor a contiguous real matrix by its transpose, and so do the formulas of their gradients.
for _op in (aten._linalg_det.default, aten._linalg_slogdet.default):
    ordered(_op, "A")


@rewrite("decompose", aten.cholesky.default)
def _cholesky(x: Tensor, upper: bool = False) -> Tensor:
    """Factorize without checking values: padding would fail."""
    return aten.linalg_cholesky_ex.default(x, upper=upper)[0]


@rewrite("decompose", aten.cholesky_inverse.default)
def _cholesky_inverse(x: Tensor, upper: bool = False) -> Tensor:
    return aten.cholesky_solve.default(
        torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand(x.shape), x, upper
    )


@rule_for(aten._linalg_solve_ex.default)
def _solve(call: Call) -> FactorRule:
    a, b = call.tensors
    # PyTorch reads b as a batch of vectors if it has a's shape without the columns.
    columns = 1 if b.dim() == 1 or b.shape == a.shape[:-1] else 2
    return batched_rule(call, [2, columns, columns, 2, 1, 0])


@rule_for(aten._linalg_svd.default)
def _svd(call: Call) -> FactorRule:
    with_vectors = call.argument(2, "compute_uv", True)
    # Without vectors PyTorch returns two empty tensors in their place.
    return batched_rule(call, [2, 2, 1, 2] if with_vectors else [2, 1, 1, 1])


# Fourier transforms.
#
# A transformed dimension must be whole, the others may be sharded. Along sharded dimensions:
#
# * A transform over several dimensions is computed one dimension after the other. An all_to_all
#   moves the layout to a dimension that is transformed already.
# * A transform over one dimension, if no other one can have its layout, becomes a matrix transform:
#   the columns, twiddle factors, the rows (Bailey, FFTs in external memory, 1990). It takes three
#   all_to_all. With n devices, each moves (n-1)/n^2 of the array, and a gather moves (n-1)/n.


@rule_for(aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default)
def _fourier(call: Call) -> FactorRule:
    dims = call.args[1]
    return keep_rule(call, list(dims), linear=[[0]], split=Split(tried=len(dims) == 1))


def _local_first(dims: Sequence[int], cuts: SplitRequest) -> list[int]:
    """Sort dimensions into the order of their transforms: those with fewer shards first.

    A sharded dimension's axes then go to one that is transformed already. The result's axes are on
    a dimension that was transformed before.
    """
    operand, result = cuts.operands[0], cuts.results[0] or ()
    return sorted(dims, key=lambda d: (operand[d], -result[d]))


@rewrite("split", aten._fft_c2c.default)
def _complex(
    x: Tensor, dim: Sequence[int], normalization: int, forward: bool, *, cuts: SplitRequest
) -> Tensor | Declined:
    if len(dim) == 1:
        return _as_matrix(x, dim[0], normalization, forward, cuts.shards)
    for d in _local_first(dim, cuts):
        x = aten._fft_c2c.default(x, [d], normalization, forward)
    return x


@rewrite("split", aten._fft_r2c.default)
def _from_real(
    x: Tensor, dim: Sequence[int], normalization: int, onesided: bool, *, cuts: SplitRequest
) -> Tensor | Declined:
    if len(dim) == 1:
        return DECLINED if onesided else _as_matrix(x, dim[0], normalization, True, cuts.shards)
    # Only the last dimension can be onesided.
    first, *rest = (
        [*dim[-1:], *_local_first(dim[:-1], cuts)] if onesided else _local_first(dim, cuts)
    )
    x = aten._fft_r2c.default(x, [first], normalization, onesided)
    for d in rest:
        x = aten._fft_c2c.default(x, [d], normalization, True)
    return x


@rewrite("split", aten._fft_c2r.default)
def _to_real(
    x: Tensor, dim: Sequence[int], normalization: int, last_size: int, *, cuts: SplitRequest
) -> Tensor | Declined:
    if len(dim) == 1:
        return DECLINED
    for d in _local_first(dim[:-1], cuts):
        x = aten._fft_c2c.default(x, [d], normalization, False)
    return aten._fft_c2r.default(x, dim[-1:], normalization, last_size)


def _as_matrix(
    x: Tensor, dim: int, normalization: int, forward: bool, rows: int
) -> Tensor | Declined:
    """Compute a transform over one dimension as a matrix transform, for shards along its rows.

    Positions are p n + q, with m rows p and n columns q; frequencies are r + m s. The transform is

        sum_q e(q s / n) e(q r / (m n)) sum_p e(p r / m) x[p, q]      where e(t) = exp(-2 pi i t)
    """
    columns = x.shape[dim] // rows
    # The devices, as many as rows, have to divide the columns, too.
    if x.shape[dim] % rows**2:
        return DECLINED
    matrix = cut(x, dim, rows)  # [.., rows/n, columns]
    if x.is_complex():
        matrix = aten._fft_c2c.default(matrix, [dim], normalization, forward)
    else:
        matrix = aten._fft_r2c.default(matrix, [dim], normalization, False)
    after = [1] * (x.dim() - 1 - dim)
    r, q = (torch.arange(n, device=x.device, dtype=torch.float64) for n in (rows, columns))
    # Angles in float64: r q has more digits than float32 keeps.
    turn = (-2 if forward else 2) * math.pi / x.shape[dim]
    angle = r.reshape(rows, 1, *after) * q.reshape(columns, *after) * turn
    twiddle = torch.polar(torch.ones_like(angle), angle).to(matrix.dtype)
    matrix = aten._fft_c2c.default(matrix * twiddle, [dim + 1], normalization, forward)
    return matrix.transpose(dim, dim + 1).reshape(x.shape)
