"""What a device does alone: take its part of a tensor, and overwrite padding."""
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def take_part(x: Tensor, dim: int, index: int, count: int) -> Tensor:
    """Part number `index` of `count` equal ones along a dimension; the last ones are padded with zeros."""
    size = x.shape[dim]
    rows = -(-size // count)
    if rows * count != size:
        x = F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, rows * count - size])
    return x.narrow(dim, index * rows, rows).contiguous()


def mask_padding(x: Tensor, dim: int, index: int, size: int, fill: float) -> Tensor:
    """x, part number `index` of a dimension of global length `size`, with `fill` in the rows past its end.

    By selection and not by multiplication: what stands there may be NaN.
    """
    rows = x.shape[dim]
    inside = torch.arange(rows, device=x.device) + index * rows < size
    return torch.where(inside.view([-1] + [1] * (x.dim() - 1 - dim)), x, as_dtype(fill, x.dtype))


def as_dtype(fill: float, dtype: torch.dtype) -> float | int | bool:
    """A fill value as a number of the type; infinities become the extreme of an integer type."""
    if dtype.is_floating_point or dtype.is_complex or not math.isinf(fill):
        return fill if dtype.is_floating_point or dtype.is_complex else int(fill)
    if dtype == torch.bool:
        return fill > 0
    return torch.iinfo(dtype).max if fill > 0 else torch.iinfo(dtype).min
