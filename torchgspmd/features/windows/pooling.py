"""Max and average pooling, and their gradients. Along a sharded dimension they read a halo."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from ...compat.operators import aten
from ...rules.local_builder import LocalBuilder
from ...rules.notation import Call, FactorRule, Split
from ...rules.registry import rule_for
from ...rules.rewrites import rewrite
from .max_pool_stages import max_pool, max_pool_backward, stages
from .window_rule import (
    PoolWindow,
    Spread,
    forward_windows,
    pool_rule,
    pool_windows,
    remaining_padding,
    renumber,
)

FORWARD = (aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
BACKWARD = (
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
)
rewrite("split", *FORWARD)(max_pool)
rewrite("split", *BACKWARD)(max_pool_backward)


def _has_several_stages(kernel: Sequence[int], *options: Any) -> bool:
    """Return whether the decomposition pools several dimensions. Then its indices differ."""
    return len(stages(len(kernel), kernel, *options)) > 1


@rule_for(*FORWARD)
def _maximum(call: Call) -> FactorRule:
    windows = forward_windows(call)

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
        """Pool a halo, then convert its indices to those in the whole input."""
        pair = local.call(
            call.target,
            *args[:2],
            [w.stride for w in windows],
            remaining_padding(local, windows),
            [w.dilation for w in windows],
            call.argument(5, "ceil_mode", False),
        )
        index = local.call(operator.getitem, pair, 1)
        lead, shape = len(local.results[0].shape) - len(windows), local.shape(args[0])
        moves = [local.first_row(0, d) for d in range(lead, len(shape))]
        return [
            local.call(operator.getitem, pair, 0),
            renumber(local, index, shape[lead:], [w.rows for w in windows], moves),
        ]

    has_stages = _has_several_stages(*call.args[1:5])
    split = Split(hands=1) if has_stages else None
    return pool_rule(call, windows, emit, fill=-math.inf, split=split)


@rule_for(*BACKWARD)
def _maximum_backward(call: Call) -> FactorRule:
    """Return the rule for (gradient, input, indices). The input only gives its shape."""
    windows = pool_windows(call.tensors[1].shape, call.tensors[0].shape, *call.args[2:6])

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
        """Compute the gradient for all rows that the halo touches, then cut."""
        spread = Spread.from_windows(local, windows)
        moves = [-spread.first(local, i) for i in range(len(windows))]
        rows = [w.rows for w in windows]
        # Indices count in the whole input; the kernel needs them among the touched rows.
        index = renumber(local, args[-1], rows, spread.shape[-len(windows) :], moves)
        return spread.gradient(local, args, [*args[5:-1], index])

    split = Split(takes=2 if _has_several_stages(*call.args[2:6]) else None)
    return pool_rule(call, windows, emit, is_gradient=True, windowed=[0, 2], split=split)


@rule_for(aten.avg_pool2d.default, aten.avg_pool3d.default)
def _average(call: Call) -> FactorRule:
    windows, ceil = forward_windows(call), call.argument(4, "ceil_mode", False)
    padded = call.argument(5, "count_include_pad", True)
    uniform = call.argument(6, "divisor_override") or _uniform_divisor(windows, padded)

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
        """Pool a halo. Where divisors differ, sum it, then divide by the row counts."""
        stride, padding = [w.stride for w in windows], remaining_padding(local, windows)
        # The halo has padding as rows of zeros, so it counts here; divisors settle the rest.
        y = local.call(call.target, *args[:2], stride, padding, ceil, True, uniform or 1)
        if uniform:
            return y
        counts = _row_counts(local, windows, local.results[0].shape, padded, None)
        return local.call(aten.div.Tensor, y, counts)

    return pool_rule(call, windows, emit, linear=[[0]])


@rule_for(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def _average_backward(call: Call) -> FactorRule:
    """Return the rule for (gradient, input). The input only gives its shape."""
    windows = pool_windows(call.tensors[1].shape, call.tensors[0].shape, *call.args[2:5])
    ceil, padded, divisor = call.args[5:8]
    uniform = divisor or _uniform_divisor(windows, padded)

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
        """Compute the gradient for all rows that the halo touches, then cut."""
        grad, spread = args[0], Spread.from_windows(local, windows)
        if not uniform:
            counts = _row_counts(local, windows, local.shape(grad), padded, 0)
            grad = local.call(aten.div.Tensor, grad, counts)
        return spread.gradient(local, (grad, *args[1:]), [ceil, True, uniform or 1])

    return pool_rule(call, windows, emit, is_gradient=True, linear=[[0]])


def _uniform_divisor(windows: Sequence[PoolWindow], padded: bool) -> int | None:
    """Return the divisor if all positions share it, else None."""
    for w in windows:
        margin = w.padding if padded else 0
        # The last window may hang over the end; padding that does not count shortens the first.
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
    """Return the number of rows that each position averages. padded: whether padding counts.

    The positions are in the local result, or in an operand's halo.
    """
    result, dtype, device = None, local.results[0].dtype, local.results[0].device
    for i, w in enumerate(windows):
        dim, margin = len(shape) - len(windows) + i, w.padding if padded else 0
        if operand is None:
            first = local.index(f"d{dim}") * shape[dim]
        else:
            first = local.first_row(operand, dim)
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
        # Positions past the end would divide by zero.
        count = local.call(aten.clamp.default, count, 1)
        count = local.call(
            aten._to_copy.default,
            local.call(aten.view.default, count, [-1] + [1] * (len(shape) - 1 - dim)),
            dtype=dtype,
        )
        result = count if result is None else local.call(aten.mul.Tensor, result, count)
    return result
