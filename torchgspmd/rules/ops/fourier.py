"""Fourier transforms.

A transformed dimension must be whole, the others may be sharded. Along sharded dimensions:

* A transform over several dimensions is computed one dimension after the other. An all_to_all moves
  the layout to a dimension that is transformed already.
* A transform over one dimension, if no other one can have its layout, becomes a matrix transform:
  the columns, twiddle factors, the rows (Bailey, FFTs in external memory, 1990). It takes three
  all_to_all. With n devices, each moves (n-1)/n^2 of the array, and a gather moves (n-1)/n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...compat.operators import aten
from ..notation import Call, FactorRule, Split
from ..registry import rule_for
from ..rewrites import DECLINED, Declined, SplitRequest, rewrite
from .cumulative import cut
from .view import keep_rule


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
