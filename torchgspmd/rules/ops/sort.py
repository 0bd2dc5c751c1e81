"""sort.

The sorted dimension must be whole. If no other dimension can have its layout, columnsort sorts it
(Leighton, Tight bounds on the complexity of parallel sorting, 1985). Each of n devices sorts its
block four times. Between these sorts elements move as in two matrix transpositions and two shifts
by half a block. These move 2 (n-1)/n^2 + 1/n of the array, and a gather moves (n-1)/n. A bitonic
exchange would move log2(n) (log2(n) + 1) / (2 n).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...compat.operators import aten
from ..notation import Call, FactorRule, Split
from ..registry import rule_for
from ..rewrites import DECLINED, Declined, SplitRequest, rewrite
from .cumulative import cut
from .view import keep_rule


@rule_for(aten.sort.default, aten.sort.stable)
def _sort(call: Call) -> FactorRule:
    return keep_rule(call, [call.argument(1, "dim", -1)], split=Split(tried=True))


@rewrite("split", aten.sort.default)
def _split_sort(
    x: Tensor, dim: int = -1, descending: bool = False, *, cuts: SplitRequest
) -> tuple[Tensor, Tensor] | Declined:
    """Sort by columnsort. Equal elements keep their order, as in PyTorch's sort on a CPU."""
    size, blocks = x.shape[dim] if x.dim() else 1, cuts.shards
    rows = size // blocks
    # Columnsort needs r rows and s columns with r >= 2 (s - 1)^2; shifts move half a column.
    if size % (2 * blocks) or rows % blocks or rows < 2 * (blocks - 1) ** 2:
        return DECLINED
    if cuts.results[1] is None:
        values = _columnsort(x, dim, blocks, descending)
        return values, values.to(torch.int64)  # nobody reads the second result
    if x.itemsize > 4 or x.is_complex() or size >= 2**31:
        return DECLINED  # a value and its place do not fit into 8 bytes
    keys = _columnsort(_keys(x, dim, descending), dim, blocks, False)
    return _values(keys, x.dtype, descending), keys.bitwise_and(0xFFFFFFFF) >> 1


@rewrite("split", aten.sort.stable)
def _split_stable_sort(
    x: Tensor,
    *,
    stable: bool | None = False,
    dim: int = -1,
    descending: bool = False,
    cuts: SplitRequest,
) -> tuple[Tensor, Tensor] | Declined:
    return _split_sort(x, dim, descending, cuts=cuts)


def _columnsort(x: Tensor, dim: int, blocks: int, descending: bool) -> Tensor:
    """Sort along a dimension, with blocks as matrix columns."""
    rows = x.shape[dim] // blocks

    def sort(columns: Tensor) -> Tensor:
        return columns.sort(-1, descending)[0]

    x = sort(cut(x.movedim(dim, -1), x.dim() - 1, blocks))  # [.., blocks/n, rows]
    x = sort(x.reshape(*x.shape[:-2], rows, blocks).mT)
    x = sort(x.mT.reshape(*x.shape[:-2], blocks, rows))
    x = x.flatten(-2).roll(-rows // 2, -1).unflatten(-1, (blocks, rows))
    last = torch.arange(blocks, device=x.device).reshape(blocks, 1) == blocks - 1
    x = torch.where(last, x, sort(x))  # The last one has both ends, which are in order.
    return x.flatten(-2).roll(rows // 2, -1).movedim(-1, dim)


def _keys(x: Tensor, dim: int, descending: bool) -> Tensor:
    """Return integers ordered by value, then place: 32 bits, 31 bits, one for -0.0."""
    after = [1] * (x.dim() - 1 - dim % x.dim())
    places = torch.arange(x.shape[dim], device=x.device).reshape(-1, *after)
    low, order = places * 2, x
    if x.is_floating_point():
        low = low + (x.signbit() & (x == 0))
        x = torch.where(x == 0, 0.0, x.float())
        order = _flipped(torch.where(x.isnan(), math.nan, x).view(torch.int32))
    order = order.to(torch.int64)
    return (order.bitwise_not() if descending else order) * 2**32 + low


def _values(keys: Tensor, dtype: torch.dtype, descending: bool) -> Tensor:
    """Turn keys back into values."""
    order = keys >> 32
    order = order.bitwise_not() if descending else order
    if not dtype.is_floating_point:
        return order.to(dtype)
    values = _flipped(order.to(torch.int32)).view(torch.float32)
    return torch.where(keys.bitwise_and(1) == 1, -values, values).to(dtype)


def _flipped(bits: Tensor) -> Tensor:
    """Turn a float32's bits into an integer in the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
