"""Cumulative operations.

Along a sharded dimension, each device scans its block. The blocks' totals are gathered, and their
exclusive scan is added (Blelloch, Prefix sums and their applications, 1990). XLA's associative scan
does the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...compat.operators import aten
from ..notation import Call, FactorRule, Split, factors
from ..registry import rule_for
from ..rewrites import DECLINED, Declined, rewrite


@torch.library.custom_op("torchgspmd::suffix_sums", mutates_args=())
def suffix_sums(x: Tensor, dim: int) -> Tensor:
    """Return flip(cumsum(flip(x))): sums of every row and all later ones, for cumsum's gradient."""
    return x.flip(dim).cumsum(dim).flip(dim)


@suffix_sums.register_fake
def _(x: Tensor, dim: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def count_blocks(size: int, shards: int) -> int:
    """Return into how many equal blocks to cut a dimension, 0 if it cannot be cut.

    shards: 1 if unknown. Then it is the largest divisor below 25.
    """
    counts = [shards] if shards > 1 else range(24, 1, -1)
    return next((n for n in counts if size % n == 0 and size > n), 0)


def cut(x: Tensor, dim: int, blocks: int) -> Tensor:
    """Reshape [..., size, ...] to [..., blocks, size / blocks, ...]."""
    return x.reshape([*x.shape[:dim], blocks, x.shape[dim] // blocks, *x.shape[dim + 1 :]])


def block_starts(
    blocks: int, size: int, trailing: int, device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Return the first position of each block, as [blocks, 1, ...]."""
    return (torch.arange(blocks, device=device, dtype=dtype) * size).reshape(
        [blocks] + [1] * trailing
    )


def _split_scan(scan: Callable) -> Callable:
    """Return a decomposition by scan(x in blocks, dim, shape of x)."""

    def split(
        x: Tensor, dim: int, *, dtype: torch.dtype | None = None, shards: int = 1
    ) -> Tensor | tuple[Tensor, ...] | Declined:
        dim %= max(x.dim(), 1)
        blocks = count_blocks(x.shape[dim] if x.dim() else 1, shards)
        if not blocks:
            return DECLINED
        return scan(cut(x if dtype is None else x.to(dtype), dim, blocks), dim, x.shape)

    return split


def _exclusive_scan(totals: Tensor, scan: Callable, dim: int, start: float) -> Tensor:
    """Return the scan of all totals before each block, as [..., blocks, 1, ...]."""
    before = scan(totals.narrow(dim, 0, totals.shape[dim] - 1), dim)
    return aten.constant_pad_nd(
        before, [0, 0] * (totals.dim() - 1 - dim) + [1, 0], start
    ).unsqueeze(dim + 1)


def _blockwise(scan: Callable, join: Callable, start: float) -> Callable:
    """Return a decomposition into scans of blocks, joined with the totals before them."""

    def split(x: Tensor, dim: int, shape: torch.Size) -> Tensor:
        inner = scan(x, dim + 1)
        totals = inner.select(dim + 1, x.shape[dim + 1] - 1)
        return join(inner, _exclusive_scan(totals, scan, dim, start)).reshape(shape)

    return _split_scan(split)


@_split_scan
def _blockwise_suffix_sums(x: Tensor, dim: int, shape: torch.Size) -> Tensor:
    """Compute suffix sums by blocks."""
    inner = suffix_sums(x, dim + 1)
    later = suffix_sums(inner.select(dim + 1, 0).narrow(dim, 1, x.shape[dim] - 1), dim)
    later = aten.constant_pad_nd(later, [0, 0] * (len(shape) - 1 - dim) + [0, 1], 0)
    return (inner + later.unsqueeze(dim + 1)).reshape(shape)


def _blockwise_extreme(scan: Callable, wins: Callable, lowest: Callable) -> Callable:
    """Return a decomposition of cummax or cummin into scans of blocks."""

    def split(x: Tensor, dim: int, shape: torch.Size) -> tuple[Tensor, Tensor]:
        blocks, size = x.shape[dim : dim + 2]
        values, places = scan(x, dim + 1)
        places = places + block_starts(blocks, size, len(shape) - dim, x.device)
        best, at = scan(values.select(dim + 1, size - 1).narrow(dim, 0, blocks - 1), dim)
        pads = [0, 0] * (len(shape) - 1 - dim) + [1, 0]
        best = aten.constant_pad_nd(best, pads, lowest(x.dtype)).unsqueeze(dim + 1)
        at = places.select(dim + 1, size - 1).gather(dim, at)
        at = aten.constant_pad_nd(at, pads).unsqueeze(dim + 1)
        own = values.isnan() | wins(values, best) if x.is_floating_point() else wins(values, best)
        best = torch.where(own, values, best).reshape(shape)
        return best, torch.where(own, places, at).reshape(shape)

    return _split_scan(split)


def _extreme(dtype: torch.dtype, sign: int) -> float | int:
    """Return the largest (sign 1) or smallest number (-1) of a type."""
    if dtype.is_floating_point:
        return sign * math.inf
    if dtype == torch.bool:
        return max(sign, 0)
    return torch.iinfo(dtype).max if sign > 0 else torch.iinfo(dtype).min


_SCANS = {
    suffix_sums._opoverload: _blockwise_suffix_sums,
    aten.cumsum.default: _blockwise(torch.cumsum, torch.add, 0),
    aten.cumprod.default: _blockwise(torch.cumprod, torch.mul, 1),
    aten.logcumsumexp.default: _blockwise(torch.logcumsumexp, torch.logaddexp, -math.inf),
    aten.cummax.default: _blockwise_extreme(torch.cummax, torch.ge, partial(_extreme, sign=-1)),
    aten.cummin.default: _blockwise_extreme(torch.cummin, torch.le, partial(_extreme, sign=1)),
}
for _op, _function in _SCANS.items():
    rewrite("split", _op)(_function)


@rule_for(*_SCANS)
def _scan(call: Call) -> FactorRule:
    dim, names = call.args[1] % max(call.tensors[0].dim(), 1), factors("d", call.tensors[0].dim())
    return call.rule(
        [names],
        [names] * len(call.results),
        replicated=names[dim : dim + 1],
        split=Split(),
        linear=[[0]] if call.target in (aten.cumsum.default, suffix_sums._opoverload) else (),
    )
