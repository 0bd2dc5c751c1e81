"""What a device does alone: take its part of a tensor, and overwrite padding."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..halo import Window


def take_part(x: Tensor, dim: int, index: int, count: int) -> Tensor:
    """Part number `index` of `count` equal ones along a dimension; the last ones are padded with
    zeros.
    """
    size = x.shape[dim]
    rows = -(-size // count)
    if rows * count != size:
        x = F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, rows * count - size])
    return x.narrow(dim, index * rows, rows).contiguous()


def take_window(x: Tensor, dim: int, index: int, text: str) -> Tensor:
    """The rows of a device's window out of a dimension that it has whole."""
    window, size = Window.parse(text), x.shape[dim]
    pieces = [
        (place, x.narrow(dim, row, rows)) for _, row, place, rows in window.pieces(index, size, 1)
    ]
    return join_pieces(pieces, window, dim, x)


def join_pieces(
    pieces: list[tuple[int, Tensor]],
    window: Window,
    dim: int,
    like: Tensor,
    unspecified: float = 0.0,
) -> Tensor:
    """A window of pieces that start at given rows of it, in order; its fill where there is none."""
    shape, parts, row = list(like.shape), [], 0
    fill = as_dtype(unspecified if window.fill is None else window.fill, like.dtype)
    for place, piece in [*pieces, (window.length, None)]:
        if place > row:
            parts.append(like.new_full([*shape[:dim], place - row, *shape[dim + 1 :]], fill))
        if piece is not None:
            parts.append(piece)
            row = place + piece.shape[dim]
    return torch.cat(parts, dim)


def only_first(x: Tensor, index: int) -> Tensor:
    """x on the device with index 0, zeros on the others."""
    return x if index == 0 else torch.zeros_like(x)


def mask_padding(x: Tensor, dim: int, index: int, size: int, fill: float) -> Tensor:
    """x, part number `index` of a dimension of global length `size`, with `fill` in the rows past
    its end.

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
