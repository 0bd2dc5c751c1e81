"""Average pooling and its gradient. Along a sharded spatial dimension they read a halo."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...compat.operators import aten
from ..local_builder import LocalBuilder
from ..notation import Call, Rule
from ..registry import rule_for
from .pool_windows import (
    PoolWindow,
    Spread,
    forward_windows,
    pool_rule,
    pool_windows,
    remaining_padding,
)


@rule_for(aten.avg_pool2d.default, aten.avg_pool3d.default)
def _average(call: Call) -> Rule:
    windows = forward_windows(call)
    ceil, padded, divisor = (
        call.argument(4 + i, name, default)
        for i, (name, default) in enumerate(
            (("ceil_mode", False), ("count_include_pad", True), ("divisor_override", None))
        )
    )

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
        """Pool a halo. Where divisors differ, sum it, then divide by the row counts."""
        stride, padding, uniform = (
            [w.stride for w in windows],
            remaining_padding(local, windows),
            divisor or _uniform_divisor(windows, padded),
        )
        y = local.call(call.target, args[0], args[1], stride, padding, ceil, True, uniform or 1)
        return [
            y
            if uniform
            else local.call(
                aten.div.Tensor,
                y,
                _row_counts(local, windows, local.results[0].shape, padded, None),
            )
        ]

    return pool_rule(
        call,
        windows,
        [w.reach(0.0) for w in windows],
        [0],
        call.results[0].shape,
        linear=[[0]],
        emit=emit,
    )


@rule_for(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def _average_backward(call: Call) -> Rule:
    """Return the rule of (gradient, input). Only the shape of the input is used."""
    windows = pool_windows(call.tensors[1].shape, call.tensors[0].shape, *call.args[2:5])
    ceil, padded, divisor = call.args[5:8]

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
        """Compute the gradient of all rows that the halo touches, then cut."""
        grad, x, uniform, spread = (
            args[0],
            args[1],
            divisor or _uniform_divisor(windows, padded),
            Spread.from_windows(local, windows),
        )
        if not uniform:
            grad = local.call(
                aten.div.Tensor, grad, _row_counts(local, windows, local.shape(grad), padded, 0)
            )
        x = local.call(aten.expand.default, local.call(aten.new_zeros.default, x, []), spread.shape)
        stride, padding = [w.stride for w in windows], remaining_padding(local, windows)
        return [
            spread.cut(
                local,
                local.call(
                    call.target, grad, x, args[2], stride, padding, ceil, True, uniform or 1
                ),
            )
        ]

    return pool_rule(
        call,
        windows,
        [w.reach(0.0).inverse(0.0) for w in windows],
        [0],
        call.tensors[1].shape,
        linear=[[0]],
        emit=emit,
    )


def _uniform_divisor(windows: Sequence[PoolWindow], padded: bool) -> int | None:
    """Return the divisor of every position if it is the same for all, else None."""
    for w in windows:
        margin = w.padding if padded else 0
        if (
            (w.positions - 1) * w.stride - w.padding + w.kernel > w.rows + margin
            or w.padding
            and not padded
        ):
            return None
    return math.prod(w.kernel for w in windows)


def _row_counts(
    local: LocalBuilder,
    windows: Sequence[PoolWindow],
    shape: Sequence[int],
    padded: bool,
    operand: int | None,
) -> Any:
    """Return how many rows each position averages over. padded: whether padding counts.

    The positions are those of the local result, or of an operand's halo.
    """
    result, dtype, device = None, local.results[0].dtype, local.results[0].device
    for i, w in enumerate(windows):
        dim, margin = len(shape) - len(windows) + i, w.padding if padded else 0
        index = local.index(f"d{dim}")
        if operand is None or not local.sharded(f"d{dim}"):
            first = index * shape[dim]
        else:
            first = local.window(operand, dim).first(index)
        start = local.call(aten.arange.default, shape[dim], device=device)
        start = local.call(
            aten.add.Scalar,
            local.call(aten.mul.Scalar, local.call(aten.add.Scalar, start, first), w.stride),
            -w.padding,
        )
        end = local.call(
            aten.clamp.default, local.call(aten.add.Scalar, start, w.kernel), None, w.rows + margin
        )
        count = local.call(aten.sub.Tensor, end, local.call(aten.clamp.default, start, -margin))
        count = local.call(aten.clamp.default, count, 1)  # positions past the end
        count = local.call(
            aten._to_copy.default,
            local.call(aten.view.default, count, [-1] + [1] * (len(shape) - 1 - dim)),
            dtype=dtype,
        )
        result = count if result is None else local.call(aten.mul.Tensor, result, count)
    return result
