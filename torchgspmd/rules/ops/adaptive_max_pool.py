"""Adaptive max pooling. The windows are those of adaptive average pooling, so a device needs the
same rows of its neighbours:

    adaptive_max_pool2d of 9 columns to 4       ... w[2p:2p+2] -> ... w, ... w

The maximum is that over columns, then over rows (pool_stages.py says why equals make no
difference). The gradient of a row is what the windows around it give to it: those windows, and the
places of their maxima, are what the device is sent.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...compat.operators import aten
from ...custom_ops.resampling import Line, band, bands
from ..local_builder import LocalBuilder
from ..notation import Call, Rule
from ..registry import computed
from .interpolate import is_same, rule_along
from .pooling import renumbered


def _global(x: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """To one position: the largest element, and the first place that has it, or as PyTorch has it
    the last one that is NaN.
    """
    dims = list(range(-len(size), 0))
    value, place = x.amax(dims, keepdim=True), _places(x, len(size))
    found = torch.where(x.isnan(), -1 - place, torch.where(x == value, place, place.numel())).amin(
        dims, keepdim=True
    )
    return value, torch.where(found < 0, -1 - found, found)


def _global_backward(grad: Tensor, x: Tensor, index: Tensor) -> Tensor:
    pooled = next(
        i for i in range(x.dim(), 0, -1) if all(n == 1 for n in grad.shape[-i:])
    )  # dimensions: those before have one row too
    return torch.where(_places(x, pooled) == index, grad, 0)


def _places(x: Tensor, dims: int) -> Tensor:
    """Of the elements of the last dimensions."""
    size = x.shape[-dims:]
    return torch.arange(size.numel(), device=x.device).reshape(size)


@computed(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default, splits=_global)
def _maximum(call: Call) -> Rule:
    lines = _lines(call, call.tensors[0].shape, call.results[0].shape, back=False)

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
        value, index, shape, size = args[0], None, list(local.shape(args[0])), 1
        for d, line in reversed(list(enumerate(lines, start=len(shape) - len(lines)))):
            value, index = _along(local, value, index, shape, d, line, size)
            shape[d] = local.results[0].shape[d]
            size *= line.rows
        return [value, local.call(aten.expand.default, index, list(local.results[0].shape))]

    return rule_along(call, lines, [0], emit, splits=_to_one(lines))


@computed(
    aten.adaptive_max_pool2d_backward.default,
    aten.adaptive_max_pool3d_backward.default,
    splits=_global_backward,
)
def _maximum_backward(call: Call) -> Rule:
    """Operands: gradient, input, indices. The input takes part by its shape alone."""
    lines = _lines(call, call.tensors[1].shape, call.tensors[0].shape, back=True)

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
        grad, index, shape = args[0], args[2], local.results[0].shape
        lead, here = len(shape) - len(lines), local.shape(args[0])
        first = [local.index(f"d{d}") * shape[d] for d in range(lead, len(shape))]
        rows, mine = [line.rows for line in lines], shape[lead:]
        place = renumbered(local, index, rows, mine, [-f for f in first])
        inside = local.call(
            aten.eq.Tensor, renumbered(local, place, mine, rows, first), index
        )  # it was not moved to the border
        grad = local.call(aten.where.ScalarOther, inside, grad, 0)
        flat = [*here[:lead], -1]
        nothing = local.call(aten.new_zeros.default, grad, [*shape[:lead], math.prod(mine)])
        place, grad = (local.call(aten.reshape.default, t, flat) for t in (place, grad))
        return [
            local.call(
                aten.reshape.default,
                local.call(aten.scatter_add.default, nothing, lead, place, grad),
                list(shape),
            )
        ]

    return rule_along(call, lines, [0, 2], emit, splits=_to_one(lines))


def _lines(call: Call, before: Sequence[int], behind: Sequence[int], back: bool) -> list[Line]:
    spatial = 3 if "3d" in call.target._schema.name else 2
    return [
        Line(f"_adaptive_avg_pool{spatial}d", d, n, m, back=back)
        for d, (n, m) in enumerate(zip(before[-spatial:], behind[-spatial:]))
    ]


def _to_one(lines: Sequence[Line]) -> bool:
    return all(line.positions == 1 for line in lines)


def _along(
    local: LocalBuilder, value: Any, index: Any, shape: Sequence[int], d: int, line: Line, size: int
) -> tuple[Any, Any]:
    """Values and places along one dimension of a value of a device, whose shape is given. index: of
    the dimensions behind, which have `size` elements in all.
    """
    result, device = local.results[0], local.index(f"d{d}")
    count, behind = result.shape[d], [1] * (len(shape) - d - 1)
    if is_same(line):
        row = local.call(
            aten.arange.start, device * count, (device + 1) * count, device=result.device
        )
        row = local.call(
            aten.mul.Scalar, local.call(aten.reshape.default, row, [count, *behind]), size
        )
        return value, row if index is None else local.call(aten.add.Tensor, row, index)
    first = local.window(0, d).first(device) if local.sharded(f"d{d}") else 0
    width = bands(line, torch.float32)[2].shape[1]
    both = local.call(
        band._opoverload,
        line.op,
        line.dim,
        line.rows,
        line.positions,
        line.corners,
        line.scale,
        line.back,
        device * count,
        count,
        first,
        shape[d],
        width,
        torch.float32,
        result.device,
    )
    rows, weight = (local.call(operator.getitem, both, i) for i in range(2))
    windows = [math.prod(shape[:d]), count * width, math.prod(shape[d + 1 :])]
    after = [*shape[:d], count, *shape[d + 1 :]]

    def read(tensor: Any) -> Any:
        return local.call(
            aten.reshape.default, local.call(aten.index_select.default, tensor, d, rows), windows
        )

    counts = local.call(aten.ne.Scalar, local.call(aten.reshape.default, weight, [-1, 1]), 0)
    values = local.call(aten.where.ScalarOther, counts, read(value), float("-inf"))
    both = local.call(aten.max_pool2d_with_indices.default, values, [width, 1], [width, 1])
    value, chosen = (local.call(operator.getitem, both, i) for i in range(2))
    chosen = local.call(aten.floor_divide.default, chosen, max(windows[-1], 1))
    place = local.call(
        aten.mul.Scalar,
        local.call(aten.add.Tensor, local.call(aten.take.default, rows, chosen), first),
        size,
    )
    if index is not None:
        index = read(local.call(aten.expand.default, index, shape))
        place = local.call(
            aten.add.Tensor, place, local.call(aten.gather.default, index, 1, chosen)
        )
    return (local.call(aten.reshape.default, t, after) for t in (value, place))
