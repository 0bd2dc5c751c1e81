"""A float8 matrix product that takes every size and every memory order.

`torch._scaled_mm` on a card wants contiguous rows on the left, contiguous columns on the right, and
sizes that 16 divides. A shard may have neither.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_TILE = 16


@torch.library.custom_op("torchgspmd::scaled_mm", mutates_args=())
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
    # The kernel takes any m; k and n are padded with zeros, which add nothing.
    left = _tiled(a, rows=False)
    product = torch._scaled_mm(
        left, by_column.t(), scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast
    )
    return product[:rows, :columns].contiguous()


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
