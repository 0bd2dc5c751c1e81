"""Cumulative operations.

Along a sharded dimension, each device scans its block. The blocks' totals are gathered, and their
exclusive scan is added (Blelloch, Prefix sums and their applications, 1990). XLA's associative scan
does the same.

A running maximum that a block did not change is that of an earlier block's last row. So the
gradient of cummax needs one sum of each block, for that row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...compat.operators import aten, custom_op
from ...compat.private_apis import OpOverload
from ..notation import Call, FactorRule, Split, factors
from ..registry import rule_for
from ..rewrites import DECLINED, Declined, rewrite

# scan -> how two results are joined, and the result without rows
_JOINS: dict[OpOverload, tuple[Callable, float]] = {
    aten.cumsum.default: (torch.add, 0),
    aten.cumprod.default: (torch.mul, 1),
    aten.logcumsumexp.default: (torch.logaddexp, -math.inf),
}
EXTREMES = aten.cummax.default, aten.cummin.default
FROM_BEHIND = {op.name().removeprefix("aten::"): op for op in _JOINS}


@custom_op("suffix_scan")
def suffix_scan(x: Tensor, dim: int, scan: str) -> Tensor:
    """Return flip(scan(flip(x))): each row with all later ones, for the gradients of scans."""
    return FROM_BEHIND[scan](x.flip(dim), dim).flip(dim)


@suffix_scan.register_fake
def _(x: Tensor, dim: int, scan: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@suffix_scan.register_vmap
def _(info: object, in_dims: tuple, x: Tensor, dim: int, scan: str) -> tuple[Tensor, int]:
    x = x.movedim(in_dims[0], 0)
    return suffix_scan(x, dim % max(x.dim() - 1, 1) + 1, scan), 0


@custom_op("extreme_gradient")
def extreme_gradient(grad: Tensor, places: Tensor, dim: int) -> Tensor:
    """Return the gradient of cummax or cummin: each row's goes to the extreme before it."""
    return torch.zeros_like(grad).scatter_add_(dim, places, grad)


@custom_op("carried_gradient")
def carried_gradient(sums: Tensor, changed: Tensor, dim: int) -> Tensor:
    """Add each row to the last row before it that changed the extreme; the first one always did."""
    count = sums.shape[dim]
    places = torch.arange(count, device=sums.device).reshape([count] + [1] * (sums.dim() - 1 - dim))
    last = torch.where(changed, places, 0).narrow(dim, 0, count - 1).cummax(dim).values
    return torch.zeros_like(sums).scatter_add_(dim, last, sums.narrow(dim, 1, count - 1))


@extreme_gradient.register_fake
@carried_gradient.register_fake
def _(grad: Tensor, places: Tensor, dim: int) -> Tensor:
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


def count_blocks(size: int, shards: int) -> int:
    """Return the number of equal blocks to cut a dimension into, 0 if it cannot be cut.

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
    """Return each block's first position, as [blocks, 1, ...]."""
    return (torch.arange(blocks, device=device, dtype=dtype) * size).reshape(
        [blocks] + [1] * trailing
    )


def _split_scan(scan: Callable) -> Callable:
    """Return a decomposition that calls scan(x in blocks, dim, x's shape)."""

    def split(
        x: Tensor, dim: int, *, dtype: torch.dtype | None = None, shards: int = 1
    ) -> Tensor | tuple[Tensor, ...] | Declined:
        dim %= max(x.dim(), 1)
        blocks = count_blocks(x.shape[dim] if x.dim() else 1, shards)
        if not blocks:
            return DECLINED
        return scan(cut(x if dtype is None else x.to(dtype), dim, blocks), dim, x.shape)

    return split


def _blockwise(scan: Callable, join: Callable, start: float, behind: bool = False) -> Callable:
    """Return a decomposition into blockwise scans, joined with the totals before them.

    behind: the scan joins each row with all later ones.
    """

    def split(x: Tensor, dim: int, shape: torch.Size) -> Tensor:
        inner = scan(x, dim + 1)
        # A block's total is its scan's last row; from behind it is the first.
        totals = inner.select(dim + 1, 0 if behind else x.shape[dim + 1] - 1)
        others = scan(totals.narrow(dim, int(behind), x.shape[dim] - 1), dim)
        # The exclusive scan: a block gets the blocks before it, the first one `start`.
        pads = [0, 0] * (len(shape) - 1 - dim) + [int(not behind), int(behind)]
        return join(inner, aten.constant_pad_nd(others, pads, start).unsqueeze(dim + 1)).reshape(
            shape
        )

    return _split_scan(split)


def _blockwise_suffix_scan(x: Tensor, dim: int, scan: str, *, shards: int = 1) -> Tensor | Declined:
    split = _blockwise(partial(suffix_scan, scan=scan), *_JOINS[FROM_BEHIND[scan]], behind=True)
    return split(x, dim, shards=shards)


def _blockwise_extreme(scan: Callable, wins: Callable, lowest: Callable) -> Callable:
    """Return a decomposition for cummax or cummin into blockwise scans."""

    def split(x: Tensor, dim: int, shape: torch.Size) -> tuple[Tensor, Tensor]:
        blocks, size = x.shape[dim : dim + 2]
        values, places = scan(x, dim + 1)
        pads = [0, 0] * (len(shape) - 1 - dim) + [1, 0]

        def before(rows: Tensor, scan: Callable, start: float) -> Tensor:
            """Return the scan of blocks' last rows over the blocks before each."""
            totals = rows.select(dim + 1, size - 1).narrow(dim, 0, blocks - 1)
            return aten.constant_pad_nd(scan(totals, dim)[0], pads, start).unsqueeze(dim + 1)

        best = before(values, scan, lowest(x.dtype))
        # NaN wins, as in PyTorch's cummax.
        own = values.isnan() | wins(values, best) if x.is_floating_point() else wins(values, best)
        small = torch.int32 if blocks * size < 2**31 else torch.int64  # fewer bytes to send
        places = places.to(small) + block_starts(blocks, size, len(shape) - dim, x.device, small)
        # The last block that changed the extreme has the largest place.
        at = before(torch.where(own, places, 0), torch.cummax, 0)
        best = torch.where(own, values, best).reshape(shape)
        return best, torch.where(own, places, at).reshape(shape).to(torch.int64)

    return _split_scan(split)


def _blockwise_extreme_gradient(
    grad: Tensor, places: Tensor, dim: int, *, shards: int = 1
) -> Tensor | Declined:
    """Add rows up within blocks, and those for extremes of earlier blocks once a block."""
    dim %= max(grad.dim(), 1)
    shape, blocks = grad.shape, count_blocks(grad.shape[dim] if grad.dim() else 1, shards)
    if not blocks:
        return DECLINED
    size = shape[dim] // blocks
    grad, places = cut(grad, dim, blocks), cut(places, dim, blocks)
    places = places - block_starts(blocks, size, grad.dim() - dim - 1, grad.device)
    own = places >= 0  # else the extreme is in an earlier block
    places = places.clamp_min(0)
    last = size - 1
    carried = torch.where(own, 0, grad).sum(dim + 1, dtype=grad.dtype)
    carried = carried_gradient(carried, own.select(dim + 1, last), dim).unsqueeze(dim + 1)
    total = extreme_gradient(torch.where(own, grad, 0), places, dim + 1)
    rows = torch.arange(size, device=grad.device).reshape([size] + [1] * (len(shape) - 1 - dim))
    here = rows == places.narrow(dim + 1, last, 1)
    return torch.where(here, total + carried, total).reshape(shape)


def _extreme(dtype: torch.dtype, sign: int) -> float | int:
    """Return a type's largest (sign 1) or smallest number (-1)."""
    if dtype.is_floating_point:
        return sign * math.inf
    if dtype == torch.bool:
        return max(sign, 0)
    return torch.iinfo(dtype).max if sign > 0 else torch.iinfo(dtype).min


_SCANS = {
    suffix_scan._opoverload: _blockwise_suffix_scan,
    **{op: _blockwise(op, *_JOINS[op]) for op in _JOINS},
    aten.cummax.default: _blockwise_extreme(torch.cummax, torch.ge, partial(_extreme, sign=-1)),
    aten.cummin.default: _blockwise_extreme(torch.cummin, torch.le, partial(_extreme, sign=1)),
}
for _op, _function in _SCANS.items():
    rewrite("split", _op)(_function)
rewrite("split", extreme_gradient._opoverload)(_blockwise_extreme_gradient)


@rule_for(*_SCANS)
def _scan(call: Call) -> FactorRule:
    dim, names = call.args[1] % max(call.tensors[0].dim(), 1), factors("d", call.tensors[0].dim())
    return call.rule(
        [names],
        [names] * len(call.results),
        replicated=names[dim : dim + 1],
        split=Split(),
        # Sums alone commute with a pending sum.
        linear=[[0]] if call.target is aten.cumsum.default or "cumsum" in call.args else (),
    )


@rule_for(extreme_gradient._opoverload, carried_gradient._opoverload)
def _gradient(call: Call) -> FactorRule:
    dim, names = call.args[2] % max(call.tensors[0].dim(), 1), factors("d", call.tensors[0].dim())
    split = Split() if call.target is extreme_gradient._opoverload else None
    whole = names[dim : dim + 1]
    return call.rule([names, names], [names], replicated=whole, split=split, linear=[[0]])
