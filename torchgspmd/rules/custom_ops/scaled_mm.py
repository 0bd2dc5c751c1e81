"""Float8 matrix products that take every size and every memory order.

    scaled_mm(a, b, sa, sb, ...)            one scale for all, or for each row and column
    block_scaled_mm(a, b, sa, sb, ...)      one for 32 numbers of a row or column: MX
    plain_scales(flat, rows, blocks)        such scales, from the order that cards want

`torch._scaled_mm` on a card wants contiguous rows on the left, contiguous columns on the right, and
sizes that 16 divides. A shard may have neither. MX: arXiv 2310.10537.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.operators import custom_op

_TILE = 16
BLOCK = 32  # numbers with one scale
# The GPU expects scales in tiles of so many rows and columns, whose rows stand in four groups.
_ROWS, _COLUMNS, _GROUPS = 128, 4, 4


@custom_op("scaled_mm")
def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Return (a * scale_a) @ (b * scale_b).

    a [m, k], b [k, n]: float8. scale_a [m, 1], scale_b [1, n], or both a single number. fast: sums
    may have fewer bits.
    """
    if a.device.type == "cpu":  # whose kernel takes one number as a scale, on older versions
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(dtype)
    rows, columns = a.shape[0], b.shape[1]
    by_column = _tiled(b.t())
    if scale_a.numel() == scale_b.numel() == 1:
        scale_a, scale_b = scale_a.reshape(()), scale_b.reshape(())
    else:
        scale_b = F.pad(scale_b, (0, by_column.shape[0] - columns))
    return _product(a, by_column, scale_a, scale_b, dtype, fast)[:rows, :columns].contiguous()


def _product(
    a: Tensor, by_column: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Call the card's kernel. by_column: the other matrix, transposed, with whole tiles."""
    # The kernel takes any m; k and n are padded with zeros, which add nothing.
    left = _tiled(a, rows=False)
    return torch._scaled_mm(
        left, by_column.t(), scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast
    )


@custom_op("block_scaled_mm")
def block_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return a @ b, where each number counts as often as its block's scale says.

    a [m, k], b [k, n]: float8. scale_a [m, k / 32], scale_b [n, k / 32]: powers of two in float32.
    """
    if a.device.type == "cpu":  # it has no such kernel
        return (spread(a.float(), scale_a) @ spread(b.float().t(), scale_b).t()).to(dtype)
    left, right = _swizzled(scale_a), _swizzled(scale_b)
    return _product(a, _tiled(b.t()), left, right, dtype, False)[:, : b.shape[1]].contiguous()


def spread(x: Tensor, scale: Tensor) -> Tensor:
    """Return rows [m, k] times their blocks' scales [m, blocks]."""
    return x * scale.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]


def _swizzled(scale: Tensor) -> Tensor:
    """Return scales in the order that a card reads: `plain_scales` is the inverse."""
    rows, columns = scale.shape
    whole = F.pad(scale, (0, -columns % _COLUMNS, 0, -rows % _ROWS), value=1.0)
    tiles = whole.view(-1, _GROUPS, _ROWS // _GROUPS, whole.shape[1] // _COLUMNS, _COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).to(torch.float8_e8m0fnu)


@custom_op("plain_scales")
def plain_scales(flat: Tensor, rows: int, columns: int) -> Tensor:
    """Return scales [rows, columns] from the order that a card reads; padding is left out."""
    across = -(-columns // _COLUMNS)
    tiles = flat.view(-1, across, _ROWS // _GROUPS, _GROUPS, _COLUMNS)
    whole = tiles.permute(0, 3, 2, 1, 4).reshape(-1, across * _COLUMNS)
    return whole[:rows, :columns].clone()


@block_scaled_mm.register_fake
def _(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty([a.shape[0], b.shape[1]], dtype=dtype)


@plain_scales.register_fake
def _(flat: Tensor, rows: int, columns: int) -> Tensor:
    return flat.new_empty([rows, columns])


def _tiled(x: Tensor, rows: bool = True) -> Tensor:
    """Return a contiguous matrix with zeros behind it, up to sizes that the tile divides."""
    missing = (0, -x.shape[1] % _TILE, 0, -x.shape[0] % _TILE if rows else 0)
    # As bytes: PyTorch does not pad float8, where a zero byte is 0, too.
    bits = x.contiguous().view(torch.uint8)
    return (F.pad(bits, missing) if any(missing) else bits).view(x.dtype)


@scaled_mm.register_fake
def _(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    return a.new_empty([a.shape[0], b.shape[1]], dtype=dtype)
