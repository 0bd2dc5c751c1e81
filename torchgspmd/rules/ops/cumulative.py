"""Cumulative operations.

Along a sharded dimension, each device scans its block. The blocks' totals are gathered, and their
exclusive scan is added (Blelloch, Prefix sums and their applications, 1990). XLA's associative scan
does the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...compat.operators import aten
from ..notation import Call, Rule, make_rule
from ..registry import BLOCKWISE, SPLITS, rule_for


@torch.library.custom_op("torchgspmd::suffix_sums", mutates_args=())
def suffix_sums(x: Tensor, dim: int) -> Tensor:
    """Return flip(cumsum(flip(x))): sums of every row and all later ones, for cumsum's gradient."""
    return x.flip(dim).cumsum(dim).flip(dim)


@suffix_sums.register_fake
def _(x: Tensor, dim: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def count_blocks(size: int, shards: int) -> int:
    """Return into how many equal blocks to cut a dimension, or raise NotImplementedError.

    shards: 1 if unknown. Then it is the largest divisor below 25.
    """
    divisors = [
        n for n in ([shards] if shards > 1 else range(24, 1, -1)) if size % n == 0 and size > n
    ]
    if not divisors:
        raise NotImplementedError("left as it is")
    return divisors[0]


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


@rule_for(
    suffix_sums._opoverload,
    aten.cumsum.default,
    aten.cumprod.default,
    aten.logcumsumexp.default,
    aten.cummax.default,
    aten.cummin.default,
)
def _scan(call: Call) -> Rule:
    x = call.tensors[0]
    dim = call.args[1] % x.dim() if x.dim() else 0
    names = [(f"d{i}",) for i in range(x.dim())]
    return make_rule(
        [names],
        [names] * len(call.results),
        {f"d{i}": n for i, n in enumerate(x.shape)},
        whole=f"d{dim}",
        splits=True,
        linear=[[0]] if call.target in (aten.cumsum.default, suffix_sums._opoverload) else (),
    )


def _exclusive_scan(totals: Tensor, scan: Callable, dim: int, start: float) -> Tensor:
    """Return the scan of all totals before each block, as [..., blocks, 1, ...]."""
    before = scan(totals.narrow(dim, 0, totals.shape[dim] - 1), dim)
    return aten.constant_pad_nd(
        before, [0, 0] * (totals.dim() - 1 - dim) + [1, 0], start
    ).unsqueeze(dim + 1)


def _blockwise(scan: Callable, join: Callable, start: float) -> Callable:
    """Return a decomposition into scans of blocks, joined with the totals before them."""

    def split(x: Tensor, dim: int, *, dtype: torch.dtype | None = None, shards: int = 1) -> Tensor:
        dim %= max(x.dim(), 1)
        x_blocks = cut(
            x if dtype is None else x.to(dtype),
            dim,
            count_blocks(x.shape[dim] if x.dim() else 1, shards),
        )
        inner = scan(x_blocks, dim + 1)
        totals = inner.select(dim + 1, x_blocks.shape[dim + 1] - 1)
        return join(inner, _exclusive_scan(totals, scan, dim, start)).reshape(x.shape)

    return split


def _blockwise_suffix_sums(x: Tensor, dim: int, *, shards: int = 1) -> Tensor:
    """Compute suffix sums by blocks."""
    x_blocks = cut(x, dim, count_blocks(x.shape[dim], shards))
    inner = suffix_sums(x_blocks, dim + 1)
    later = suffix_sums(inner.select(dim + 1, 0).narrow(dim, 1, x_blocks.shape[dim] - 1), dim)
    later = aten.constant_pad_nd(later, [0, 0] * (x.dim() - 1 - dim) + [0, 1], 0)
    return (inner + later.unsqueeze(dim + 1)).reshape(x.shape)


def _blockwise_extreme(scan: Callable, wins: Callable, lowest: Callable) -> Callable:
    """Return a decomposition of cummax or cummin into scans of blocks."""

    def split(x: Tensor, dim: int, *, shards: int = 1) -> tuple[Tensor, Tensor]:
        dim %= max(x.dim(), 1)
        x_blocks = cut(x, dim, count_blocks(x.shape[dim] if x.dim() else 1, shards))
        values, places = scan(x_blocks, dim + 1)
        places = places + block_starts(
            x_blocks.shape[dim], x_blocks.shape[dim + 1], x_blocks.dim() - 1 - dim, x.device
        )
        last = x_blocks.shape[dim + 1] - 1
        best, at = scan(values.select(dim + 1, last).narrow(dim, 0, x_blocks.shape[dim] - 1), dim)
        pads = [0, 0] * (x.dim() - 1 - dim) + [1, 0]
        best = aten.constant_pad_nd(best, pads, lowest(x.dtype)).unsqueeze(dim + 1)
        at = aten.constant_pad_nd(places.select(dim + 1, last).gather(dim, at), pads).unsqueeze(
            dim + 1
        )
        own = values.isnan() | wins(values, best) if x.is_floating_point() else wins(values, best)
        return torch.where(own, values, best).reshape(x.shape), torch.where(
            own, places, at
        ).reshape(x.shape)

    return split


def _lowest(dtype: torch.dtype) -> float | int:
    return (
        -math.inf
        if dtype.is_floating_point
        else 0
        if dtype == torch.bool
        else torch.iinfo(dtype).min
    )


def _highest(dtype: torch.dtype) -> float | int:
    return (
        math.inf
        if dtype.is_floating_point
        else 1
        if dtype == torch.bool
        else torch.iinfo(dtype).max
    )


_SCANS = {
    aten.cumsum.default: _blockwise(torch.cumsum, torch.add, 0),
    aten.cumprod.default: _blockwise(torch.cumprod, torch.mul, 1),
    aten.logcumsumexp.default: _blockwise(torch.logcumsumexp, torch.logaddexp, -math.inf),
    suffix_sums._opoverload: _blockwise_suffix_sums,
    aten.cummax.default: _blockwise_extreme(torch.cummax, torch.ge, _lowest),
    aten.cummin.default: _blockwise_extreme(torch.cummin, torch.le, _highest),
}
SPLITS.update(_SCANS)
BLOCKWISE.update(_SCANS)
