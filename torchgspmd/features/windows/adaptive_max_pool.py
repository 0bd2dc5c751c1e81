"""Adaptive max pooling.

    adaptive_max_pool2d of 9 columns to 4       ... w[2p:2p+2] -> ... w, ... w

The windows are those for adaptive average pooling, so a device needs the same halo. The maximum is
taken over columns, then over rows; pooling.py says why ties make no difference. For the
gradient, a device receives the windows around its rows, and their maxima's positions.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...compat.operators import aten
from ...rules.local_builder import LocalBuilder
from ...rules.notation import Call, FactorRule, Ints, LocalForm, Split
from ...rules.registry import ordered, rule_for
from ...rules.rewrites import rewrite
from .interpolate import Line, adaptive_lines, is_identity, read_line, rule_along
from .window_rule import renumber


def _global(x: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Pool to one position: the largest element and its first position.

    With NaN, PyTorch's position is the last NaN's, and so is this one.
    """
    dims = list(range(-len(size), 0))
    value, place = x.amax(dims, keepdim=True), _places(x, len(size))
    # -1 - place puts NaN before all numbers, and the last NaN first.
    position = torch.where(
        x.isnan(), -1 - place, torch.where(x == value, place, place.numel())
    ).amin(dims, keepdim=True)
    return value, torch.where(position < 0, -1 - position, position)


def _global_backward(grad: Tensor, x: Tensor, index: Tensor) -> Tensor:
    # How many dimensions are pooled. Those before may have one row, too.
    pooled = next(i for i in range(x.dim(), 0, -1) if all(n == 1 for n in grad.shape[-i:]))
    return torch.where(_places(x, pooled) == index, grad, 0)


def _places(x: Tensor, dims: int) -> Tensor:
    """Return each element's flat position in the last `dims` dimensions."""
    size = x.shape[-dims:]
    return torch.arange(size.numel(), device=x.device).reshape(size)


FORWARD = (aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
BACKWARD = (aten.adaptive_max_pool2d_backward.default, aten.adaptive_max_pool3d_backward.default)
ordered(aten.adaptive_max_pool3d_backward.default, "indices")  # read as if they were contiguous
rewrite("split", *FORWARD)(_global)
rewrite("split", *BACKWARD)(_global_backward)


@rule_for(*FORWARD)
def _maximum(call: Call) -> FactorRule:
    lines = adaptive_lines(call, call.tensors[0], call.results[0], back=False)

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
        value, index, shape, size = args[0], None, list(local.shape(args[0])), 1
        # Columns first, then rows: a window's first maximum wins (pooling.py).
        for d, line in reversed(list(enumerate(lines, start=len(shape) - len(lines)))):
            value, index = _pool_dimension(
                local, value, index, shape=shape, d=d, line=line, size=size
            )
            shape[d] = local.results[0].shape[d]
            size *= line.rows
        return [value, local.call(aten.expand.default, index, list(local.results[0].shape))]

    return rule_along(call, lines, [0], LocalForm(emit), split=_split(lines))


@rule_for(*BACKWARD)
def _maximum_backward(call: Call) -> FactorRule:
    """Return the rule for (gradient, input, indices). The input only gives its shape."""
    lines = adaptive_lines(call, call.tensors[1], call.tensors[0], back=True)

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
        """Scatter the gradients whose maximum is in the device's shard."""
        grad, index, shape = args[0], args[2], local.results[0].shape
        lead, grad_shape = len(shape) - len(lines), local.shape(args[0])
        first = [local.start(f"d{d}") for d in range(lead, len(shape))]
        rows, own_sizes = [line.rows for line in lines], shape[lead:]
        place = renumber(local, index, rows, own_sizes, [-f for f in first])
        # An index outside the shard was clamped, so it does not come back.
        inside = local.call(aten.eq.Tensor, renumber(local, place, own_sizes, rows, first), index)
        grad = local.call(aten.where.ScalarOther, inside, grad, 0)
        flat = [*grad_shape[:lead], -1]
        zeros = local.call(aten.new_zeros.default, grad, [*shape[:lead], math.prod(own_sizes)])
        place, grad = (local.call(aten.reshape.default, t, flat) for t in (place, grad))
        total = local.call(aten.scatter_add.default, zeros, lead, place, grad)
        return local.call(aten.reshape.default, total, list(shape))

    return rule_along(call, lines, [0, 2], LocalForm(emit), split=_split(lines))


def _split(lines: Sequence[Line]) -> Split | None:
    return Split() if all(line.positions == 1 for line in lines) else None


def _pool_dimension(
    local: LocalBuilder, value: object, index: object, shape: Ints, d: int, line: Line, size: int
) -> tuple[Any, Any]:
    """Return a local value's maxima along one dimension, and their positions.

    shape: the value's local shape. index: positions in the later dimensions, which have `size`
    elements in all.
    """
    result, device = local.results[0], local.index(f"d{d}")
    count, trailing = result.shape[d], [1] * (len(shape) - d - 1)
    if is_identity(line):
        row = local.call(
            aten.arange.start, device * count, (device + 1) * count, device=result.device
        )
        row = local.call(
            aten.mul.Scalar, local.call(aten.reshape.default, row, [count, *trailing]), size
        )
        return value, row if index is None else local.call(aten.add.Tensor, row, index)
    rows, weight, width, first = read_line(local, line, d, shape[d], torch.float32)
    # The windows' rows behind one another, so that plain pooling takes windows of any start.
    windows = [math.prod(shape[:d]), count * width, math.prod(shape[d + 1 :])]
    after = [*shape[:d], count, *shape[d + 1 :]]

    def read(tensor: object) -> Any:
        return local.call(
            aten.reshape.default, local.call(aten.index_select.default, tensor, d, rows), windows
        )

    # Rows without a weight fill the window, and must not win.
    is_read = local.call(aten.ne.Scalar, local.call(aten.reshape.default, weight, [-1, 1]), 0)
    values = local.call(aten.where.ScalarOther, is_read, read(value), float("-inf"))
    pair = local.call(aten.max_pool2d_with_indices.default, values, [width, 1], [width, 1])
    value, argmax = (local.call(operator.getitem, pair, i) for i in range(2))
    # A flat index into [rows, trailing elements] becomes the row.
    argmax = local.call(aten.floor_divide.default, argmax, max(windows[-1], 1))
    place = local.call(
        aten.mul.Scalar,
        local.call(aten.add.Tensor, local.call(aten.take.default, rows, argmax), first),
        size,
    )
    if index is not None:
        index = read(local.call(aten.expand.default, index, shape))
        place = local.call(
            aten.add.Tensor, place, local.call(aten.gather.default, index, 1, argmax)
        )
    value = local.call(aten.reshape.default, value, after)
    return value, local.call(aten.reshape.default, place, after)
