"""Cumulative operations. Along a sharded dimension: a scan of each device's block, and an exclusive
scan of the blocks' totals, which are gathered (Blelloch, Prefix sums and their applications, 1990;
XLA's associative scan does the same).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...compat.operators import aten
from ..notation import Call, Rule, make_rule
from ..registry import BLOCKWISE, SPLITS, computed


@torch.library.custom_op("torchgspmd::suffix_sums", mutates_args=())
def suffix_sums(x: Tensor, dim: int) -> Tensor:
    """Sums of every row and all behind it, as the gradient of cumsum needs them:
    flip(cumsum(flip(x))).
    """
    return x.flip(dim).cumsum(dim).flip(dim)


@suffix_sums.register_fake
def _(x: Tensor, dim: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def blocks_of(size: int, shards: int) -> int:
    """Into how many equal blocks a dimension is cut; shards 1: a guess that many meshes divide.
    NotImplementedError if it cannot be.
    """
    found = [
        n for n in ([shards] if shards > 1 else range(24, 1, -1)) if size % n == 0 and size > n
    ]
    if not found:
        raise NotImplementedError("left as it is")
    return found[0]


def cut(x: Tensor, dim: int, blocks: int) -> Tensor:
    """[..., size, ...] as [..., blocks, size / blocks, ...]."""
    return x.reshape([*x.shape[:dim], blocks, x.shape[dim] // blocks, *x.shape[dim + 1 :]])


def place_of_block(
    blocks: int, size: int, trailing: int, device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Where each block starts, as [blocks, 1, ...]."""
    return (torch.arange(blocks, device=device, dtype=dtype) * size).reshape(
        [blocks] + [1] * trailing
    )


@computed(
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


def _exclusive(totals: Tensor, scan: Callable, dim: int, start: float) -> Tensor:
    """The scan of what comes before each block, as [..., blocks, 1, ...]."""
    before = scan(totals.narrow(dim, 0, totals.shape[dim] - 1), dim)
    return aten.constant_pad_nd(
        before, [0, 0] * (totals.dim() - 1 - dim) + [1, 0], start
    ).unsqueeze(dim + 1)


def _along(scan: Callable, join: Callable, start: float) -> Callable:
    def split(x: Tensor, dim: int, *, dtype: torch.dtype | None = None, shards: int = 1) -> Tensor:
        dim %= max(x.dim(), 1)
        parts = cut(
            x if dtype is None else x.to(dtype),
            dim,
            blocks_of(x.shape[dim] if x.dim() else 1, shards),
        )
        inner = scan(parts, dim + 1)
        totals = inner.select(dim + 1, parts.shape[dim + 1] - 1)
        return join(inner, _exclusive(totals, scan, dim, start)).reshape(x.shape)

    return split


def _suffixes(x: Tensor, dim: int, *, shards: int = 1) -> Tensor:
    """As _along, from behind."""
    parts = cut(x, dim, blocks_of(x.shape[dim], shards))
    inner = suffix_sums(parts, dim + 1)
    behind = suffix_sums(inner.select(dim + 1, 0).narrow(dim, 1, parts.shape[dim] - 1), dim)
    behind = aten.constant_pad_nd(behind, [0, 0] * (x.dim() - 1 - dim) + [0, 1], 0)
    return (inner + behind.unsqueeze(dim + 1)).reshape(x.shape)


def _extreme(scan: Callable, wins: Callable, lowest: Callable) -> Callable:
    def split(x: Tensor, dim: int, *, shards: int = 1) -> tuple[Tensor, Tensor]:
        dim %= max(x.dim(), 1)
        parts = cut(x, dim, blocks_of(x.shape[dim] if x.dim() else 1, shards))
        values, places = scan(parts, dim + 1)
        places = places + place_of_block(
            parts.shape[dim], parts.shape[dim + 1], parts.dim() - 1 - dim, x.device
        )
        last = parts.shape[dim + 1] - 1
        best, at = scan(values.select(dim + 1, last).narrow(dim, 0, parts.shape[dim] - 1), dim)
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
    aten.cumsum.default: _along(torch.cumsum, torch.add, 0),
    aten.cumprod.default: _along(torch.cumprod, torch.mul, 1),
    aten.logcumsumexp.default: _along(torch.logcumsumexp, torch.logaddexp, -math.inf),
    suffix_sums._opoverload: _suffixes,
    aten.cummax.default: _extreme(torch.cummax, torch.ge, _lowest),
    aten.cummin.default: _extreme(torch.cummin, torch.le, _highest),
}
SPLITS.update(_SCANS)
BLOCKWISE.update(_SCANS)
