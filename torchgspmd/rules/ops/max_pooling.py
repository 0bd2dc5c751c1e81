"""Max pooling and its gradient. Along a sharded spatial dimension they read a halo."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from ...compat.operators import aten
from ..local_builder import LocalBuilder
from ..notation import Call, Rule
from ..registry import BLOCKWISE, rule_for
from .max_pool_stages import max_pool, max_pool_backward, stages
from .pool_windows import (
    Spread,
    forward_windows,
    pool_rule,
    pool_windows,
    remaining_padding,
    renumber,
)


def _has_several_stages(kernel: Sequence[int], *options: Any) -> bool:
    """Return whether the decomposition pools several dimensions. Then its indices differ."""
    return len(stages(len(kernel), kernel, *options)) > 1


@rule_for(
    aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default, splits=max_pool
)
def _maximum(call: Call) -> Rule:
    windows = forward_windows(call)

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
        """Pool a halo, then convert its indices to those of the whole input."""
        stride, dilation = [w.stride for w in windows], [w.dilation for w in windows]
        pair = local.call(
            call.target,
            args[0],
            args[1],
            stride,
            remaining_padding(local, windows),
            dilation,
            call.argument(5, "ceil_mode", False),
        )
        index = local.call(operator.getitem, pair, 1)
        lead, shape = len(local.results[0].shape) - len(windows), local.shape(args[0])
        old = [shape[lead + i] for i in range(len(windows))]
        moves = [
            local.window(0, d).first(local.index(f"d{d}")) if local.sharded(f"d{d}") else 0
            for d in range(lead, lead + len(old))
        ]
        return [
            local.call(operator.getitem, pair, 0),
            renumber(local, index, old, [w.rows for w in windows], moves),
        ]

    has_stages = _has_several_stages(*call.args[1:5])
    return pool_rule(
        call,
        windows,
        [w.reach(-math.inf) for w in windows],
        [0],
        call.results[0].shape,
        emit=emit,
        splits=has_stages,
        hands=1 if has_stages else None,
    )


@rule_for(
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    splits=max_pool_backward,
)
def _maximum_backward(call: Call) -> Rule:
    """Return the rule of (gradient, input, indices). Only the shape of the input is used."""
    windows = pool_windows(call.tensors[1].shape, call.tensors[0].shape, *call.args[2:6])

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
        """Compute the gradient of all rows that the halo touches, then cut."""
        grad, x, index = args[0], args[1], args[-1]
        spread = Spread.from_windows(local, windows)
        moves = [-spread.first(local, i) for i in range(len(windows))]
        index = renumber(
            local, index, [w.rows for w in windows], spread.shape[-len(windows) :], moves
        )
        x = local.call(aten.expand.default, local.call(aten.new_zeros.default, x, []), spread.shape)
        spread_grad = local.call(
            call.target,
            grad,
            x,
            args[2],
            [w.stride for w in windows],
            remaining_padding(local, windows),
            *args[5:-1],
            index,
        )
        return [spread.cut(local, spread_grad)]

    return pool_rule(
        call,
        windows,
        [w.reach(0.0).inverse(0.0) for w in windows],
        [0, 2],
        call.tensors[1].shape,
        emit=emit,
        splits=True,
        takes=2 if _has_several_stages(*call.args[2:6]) else None,
    )


BLOCKWISE.update(
    (aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
)
