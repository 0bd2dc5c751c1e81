"""Interpolation and adaptive pooling as what they are along one dimension: every position is a
weighted sum of a few rows.

The weights are those that PyTorch's own operation gives, applied to the unit matrix: one definition
for all of its modes, and the same rounding of places.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..compat.operators import aten


@dataclass(frozen=True)
class Line:
    """One dimension of such an operation: number `dim` of its spatial ones. corners: align_corners,
    None where there is none. scale: the factor that places are counted by, if it is not positions /
    rows. back: the gradient, so of `positions` by row.
    """

    op: str
    dim: int
    rows: int
    positions: int
    corners: bool | None = None
    scale: float | None = None
    back: bool = False


@lru_cache(maxsize=256)
def weights(line: Line, dtype: torch.dtype) -> Tensor:
    """[positions, rows], or for a gradient [rows, positions]."""
    count = int(re.search(r"(\d)d", line.op)[1])  # of spatial dimensions: upsample_nearest2d
    shape, size, scales = (
        [1] * count,
        [2] * count,
        [None] * count,
    )  # 2: with 1, upsampling with antialias is wrong on CPUs
    shape[line.dim], size[line.dim], scales[line.dim] = line.rows, line.positions, line.scale
    unit = torch.eye(line.rows, dtype=dtype, device="cpu").view(line.rows, 1, *shape)
    unit = unit.expand(
        -1, -1, *(line.rows if d == line.dim else 2 for d in range(count))
    ).contiguous()
    options = (
        ()
        if "avg" in line.op
        else tuple(scales)
        if line.corners is None
        else (line.corners, *scales)
    )
    found = getattr(aten, line.op).default(unit, size, *options)
    for d in range(count):
        found = found if d == line.dim else found.narrow(2 + d, 0, 1)
    found = found.reshape(line.rows, line.positions)
    return found.contiguous() if line.back else found.T.contiguous()


@lru_cache(maxsize=256)
def bands(line: Line, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """For every position: the first row that counts, the last one (before the first: none does),
    and the weights [p, k] of those from the first on, as many as any position has.
    """
    dense = weights(line, dtype)
    counts, place = dense != 0, torch.arange(dense.shape[1], device="cpu")
    some = counts.any(1)
    first = torch.where(some, counts.int().argmax(1), 0)
    last = torch.where(some, dense.shape[1] - 1 - counts.flip(1).int().argmax(1), -1)
    rows = first[:, None] + place[: max(int((last - first).max()) + 1, 1)]  # [p, k]
    inside = rows < dense.shape[1]
    return first, last, dense.gather(1, torch.where(inside, rows, 0)) * inside


def kind_of(dtype: torch.dtype) -> torch.dtype:
    """In which places and weights are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@torch.library.custom_op("torchgspmd::band", mutates_args=())
def band(
    op: str,
    dim: int,
    rows: int,
    positions: int,
    corners: bool | None,
    scale: float | None,
    back: bool,
    start: int,
    count: int,
    first: int,
    length: int,
    width: int,
    kind: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """For positions start:start+count, which rows [count * width] of first:first+length each reads,
    counted from `first`, and their weights [count, width]. Positions that there are not read some
    row.
    """
    begin, _, weight = bands(Line(op, dim, rows, positions, corners, scale, back), kind)
    place = torch.arange(start, start + count, device="cpu").clamp(max=len(begin) - 1)
    index = begin[place][:, None] + torch.arange(width, device="cpu") - first  # [count, width]
    index = index.clamp(0, length - 1)
    return index.flatten().to(device), weight[place].to(device)


@band.register_fake
def _(
    op, dim, rows, positions, corners, scale, back, start, count, first, length, width, kind, device
):
    return (
        torch.empty(count * width, dtype=torch.int64, device=device),
        torch.empty(count, width, dtype=kind, device=device),
    )
