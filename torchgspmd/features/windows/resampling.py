"""The weights for interpolation and adaptive pooling along one dimension.

    linear interpolation from 2 rows to 4     [[1, 0], [.75, .25], [.25, .75], [0, 1]]

Each position is a weighted sum over a few rows. PyTorch's own operation, applied to the unit
matrix, gives the weights. So all modes have one definition, and positions round as in PyTorch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...compat.operators import aten, custom_op


@dataclass(frozen=True)
class Line:
    """Spatial dimension number `dim` in such an operation.

    corners: align_corners, None if the operation has no such argument. scale: the scale factor, if
    it is not positions / rows. back: whether it is the gradient, from positions to rows.
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
    """Return the weights [positions, rows]; for a gradient [rows, positions]."""
    # The number of spatial dimensions, such as 2 in upsample_nearest2d.
    count = int(re.findall(r"(\d)d", line.op)[0])
    # The other dimensions get 2 positions. With 1, upsampling with antialias is wrong on CPUs.
    shape, size = [1] * count, [2] * count
    scales: list[float | None] = [None] * count
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
    result = getattr(aten, line.op).default(unit, size, *options)
    # Positions along the other dimensions are equal: the first one is enough.
    for d in range(count):
        result = result if d == line.dim else result.narrow(2 + d, 0, 1)
    result = result.reshape(line.rows, line.positions)
    return result.contiguous() if line.back else result.T.contiguous()


@lru_cache(maxsize=256)
def bands(line: Line, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return each position's first row, its last row and the weights [p, k] between.

    A position without rows has a last row before its first. k: the most rows at any position.
    """
    dense = weights(line, dtype)
    is_read, place = dense != 0, torch.arange(dense.shape[1], device="cpu")
    has_rows = is_read.any(1)
    first = torch.where(has_rows, is_read.int().argmax(1), 0)
    last = torch.where(has_rows, dense.shape[1] - 1 - is_read.flip(1).int().argmax(1), -1)
    rows = first[:, None] + place[: max(int((last - first).max()) + 1, 1)]  # [p, k]
    # Rows past the end have the weight 0.
    inside = rows < dense.shape[1]
    return first, last, dense.gather(1, torch.where(inside, rows, 0)) * inside


def computation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which to compute positions and weights."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@custom_op("band")
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
    """Return the row numbers [count * width] and weights [count, width] for some positions.

    Positions: start:start+count; those past the end read an arbitrary row. Row numbers count from
    `first`, in rows first:first+length.
    """
    line = Line(
        op=op, dim=dim, rows=rows, positions=positions, corners=corners, scale=scale, back=back
    )
    kept = _part_on_device(line, start, count, first, length, width, kind=kind, device=device)
    # Programs write over results, and the cached tensors have to stay.
    return kept[0].clone(), kept[1].clone()


@lru_cache(maxsize=256)
def _part_on_device(
    line: Line,
    start: int,
    count: int,
    first: int,
    length: int,
    width: int,
    kind: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return `band`'s results. A GPU gets them once: a copy makes the host wait for it."""
    begin, _, weight = bands(line, kind)
    # The last device may have padding behind the last position.
    place = torch.arange(start, start + count, device="cpu").clamp(max=len(begin) - 1)
    index = begin[place][:, None] + torch.arange(width, device="cpu") - first  # [count, width]
    index = index.clamp(0, length - 1)
    return index.flatten().to(device), weight[place].to(device)


@band.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    count, _, _, width, kind, device = args[-6:]
    rows = torch.empty(count * width, dtype=torch.int64, device=device)
    return rows, torch.empty(count, width, dtype=kind, device=device)
