"""as_strided and unfold.

    as_strided(x[8, 4], [8, 2], [4, 1])     x.narrow(1, 0, 2)

Strides that step along the base's dimensions become slices, so that the other dimensions keep their
layout. Any other strides read single elements from the flattened tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from ...compat.operators import aten, prims
from ...errors import ShardingError
from ..notation import Ints
from ..registry import memory_order
from ..rewrites import DECLINED, Declined, rewrite

_STEPS = 16  # so many slices read a block of `unfold`, at most


@dataclass
class StridedWindow:
    """A dimension in the base, and the result's dimensions that read it.

    stride: from row to row in memory. start: the first row that is read.
    """

    size: int
    stride: int
    start: int
    readers: list[tuple[int, int]]  # (result dimension, steps)


def _storage_order(x: Tensor) -> list[int] | None:
    """Return the dimensions in memory order; None for a tensor with gaps or overlaps."""
    order = sorted(range(x.dim()), key=lambda d: (-x.stride(d), d))
    return order if x.permute(order).is_contiguous() else None


def _windows(
    shape: list[int], size: Sequence[int], stride: Sequence[int], offset: int
) -> list[StridedWindow] | None:
    """Return the windows that strides read along a contiguous tensor's dimensions, or None.

    Adjacent dimensions are merged until every stride stays within one.
    """
    shape = list(shape)
    while shape:
        windows, rest, step = [], offset, math.prod(shape)
        for n in shape:
            step //= n
            windows.append(StridedWindow(n, step, rest // step, []))
            rest %= step
        for d, (n, t) in enumerate(zip(size, stride)):
            # Size 1 or stride 0 reads a single row: it is expanded at the end.
            if n > 1 and t:
                window = next((w for w in windows if t % w.stride == 0), None)
                if window is None:
                    return None
                window.readers.append((d, t // window.stride))
        over = next(
            (
                i
                for i, w in enumerate(windows)
                if w.start + sum((size[d] - 1) * c for d, c in w.readers) >= w.size
            ),
            None,
        )
        if over is None:
            return windows
        if not over:
            return None
        # A window that leaves its dimension goes on in the one before.
        shape[over - 1 : over + 1] = [shape[over - 1] * shape[over]]
    return None


def _read(base: Tensor, dim: int, window: StridedWindow, size: Sequence[int]) -> Tensor:
    """Replace one base dimension by the dimensions that read it."""
    if not window.readers:
        return base.select(dim, window.start)
    if len(window.readers) == 1 and window.readers[0][1] == 1:
        return base.narrow(dim, window.start, size[window.readers[0][0]])
    shape = [size[d] for d, _ in window.readers]
    place = torch.full([], window.start, dtype=torch.int64, device=base.device)
    for d, steps in window.readers:
        place = place.unsqueeze(-1) + torch.arange(size[d], device=base.device) * steps
    return base.index_select(dim, place.reshape(-1)).unflatten(dim, shape)


@rewrite("decompose", aten.as_strided.default, aten.as_strided_copy.default)
def _as_strided(
    x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor | Declined:
    if not x.numel() or not math.prod(size):
        return DECLINED
    offset, storage = _offset(x, storage_offset), _storage_order(x)
    _check_inside(x, size, stride, offset)
    if storage is None:
        places = _places(size, stride, offset, x.device).reshape(-1)
        return x.reshape(-1)[_without_gaps(x, places)].reshape(list(size))
    base = x.permute(storage)
    windows = _windows([n for n in base.shape if n > 1], size, stride, offset)
    if windows is None:
        return base.reshape(-1)[_places(size, stride, offset, x.device).reshape(-1)].reshape(
            list(size)
        )
    result = base.reshape([w.size for w in windows])
    order: list[int] = []
    for window in windows:  # windows already read stand before those to read
        result = _read(result, len(order), window, size)
        order += [d for d, _ in window.readers]
    result = result.permute([order.index(d) for d in sorted(order)])
    return (
        result.reshape([n if d in order else 1 for d, n in enumerate(size)])
        .expand(list(size))
        .clone()
    )


@rewrite("decompose", aten.as_strided_scatter.default, prims.as_strided_scatter.default)
def _as_strided_scatter(
    x: Tensor, source: Tensor, size: Ints, stride: Ints, storage_offset: int | None = None
) -> Tensor | Declined:
    offset = _offset(x, storage_offset)
    _check_inside(x, size, stride, offset)
    places = _places(size, stride, offset, x.device).reshape(-1)
    if (order := _storage_order(x)) is None:
        places, order = _without_gaps(x, places), list(range(x.dim()))
    base = x.permute(order)
    result = aten.index_put.default(base.reshape(-1), [places], source.reshape(-1))
    return result.reshape(base.shape).permute([order.index(d) for d in range(x.dim())])


def _offset(x: Tensor, storage_offset: int | None) -> int:
    """Return how many elements behind the tensor's first one as_strided begins."""
    return 0 if storage_offset is None else storage_offset - int(x.storage_offset())


def _check_inside(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> None:
    """Raise ShardingError if as_strided reads memory that is no element of the tensor."""
    read, own = (
        sum(
            (numpy.arange(n).reshape([-1] + [1] * (len(sizes) - 1 - d)) * t)
            for d, (n, t) in enumerate(zip(sizes, strides))
            if n > 1
        )
        for sizes, strides in ((size, stride), (x.shape, x.stride()))
    )
    if not numpy.isin(read + offset, own).all():
        raise ShardingError.here(
            "as_strided reads memory beside the elements of its tensor",
            why=f"a program knows the {x.numel()} elements of the tensor, and nothing around them",
            fix="call it on the tensor whose memory it reads, or index that tensor",
        )


def _without_gaps(x: Tensor, places: Tensor) -> Tensor:
    """Return the positions, among a tensor's elements in order, of places in its memory."""
    position = torch.zeros_like(places)
    for d in memory_order(x):
        if x.shape[d] > 1 and x.stride(d):
            steps = math.prod(x.shape[d + 1 :])
            position = position + (places // x.stride(d)) * steps
            places = places % x.stride(d)
    return position


def _places(
    size: Sequence[int], stride: Sequence[int], offset: int, device: torch.device
) -> Tensor:
    """Return each result element's position in memory."""
    place = torch.full([], offset, dtype=torch.int64, device=device)
    for n, t in zip(size, stride):
        place = place.unsqueeze(-1) + torch.arange(n, device=device) * t
    return place


@rewrite("decompose", aten.unfold.default, aten.unfold_copy.default)
def _unfold(x: Tensor, dimension: int, size: int, step: int) -> Tensor | Declined:
    if not x.dim():
        return DECLINED
    dim = dimension % x.dim()
    count = (x.shape[dim] - size) // step + 1
    # Steps side by side are a reshape, which may be sharded, and a block has the next ones, too: a
    # halo. Those of many steps are read by index.
    steps = -(-size // step)
    if not 1 <= steps <= _STEPS:
        rows = x.index_select(dim, _blocks(count, size, step, x.device))
        return rows.unflatten(dim, (count, size)).movedim(dim + 1, -1)
    total = (count - 1 + steps) * step
    x = _with_rows(x, dim, total).unflatten(dim, (count - 1 + steps, step))
    rows = [x.narrow(dim, first, count) for first in range(steps)]
    x = torch.cat(rows, dim + 1) if steps > 1 else rows[0].clone()
    return x.narrow(dim + 1, 0, size).movedim(dim + 1, -1)


@rewrite("decompose", aten.unfold_backward.default)
def _unfold_backward(
    grad: Tensor, shape: Sequence[int], dimension: int, size: int, step: int
) -> Tensor | Declined:
    if not shape:
        return DECLINED
    dim = dimension % len(shape)
    count, steps = grad.shape[dim], -(-size // step)
    grad = grad.movedim(-1, dim + 1)
    if 1 <= steps <= _STEPS:
        parts = _with_rows(grad, dim + 1, steps * step).unflatten(dim + 1, (steps, step))
        parts = [
            _with_rows(part, dim, count - 1 + steps, first)
            for first, part in enumerate(parts.unbind(dim + 1))
        ]
        return _with_rows(sum(parts[1:], parts[0]).flatten(dim, dim + 1), dim, shape[dim])
    rows = grad.flatten(dim, dim + 1)
    # Added, since a row may be in several blocks.
    return grad.new_zeros(shape).index_add(
        dim, _blocks(grad.shape[dim], size, step, grad.device), rows
    )


def _with_rows(x: Tensor, dim: int, count: int, before: int = 0) -> Tensor:
    """Return a tensor with so many rows in all, and some zeros before its own."""
    pads = [0, 0] * (x.dim() - 1 - dim) + [before, count - before - x.shape[dim]]
    return aten.constant_pad_nd.default(x, pads) if any(pads) else x


def _blocks(count: int, size: int, step: int, device: torch.device) -> Tensor:
    """Number the rows in `count` blocks with `size` rows each, which begin `step` rows apart."""
    return (
        torch.arange(count, device=device).unsqueeze(-1) * step + torch.arange(size, device=device)
    ).reshape(-1)
