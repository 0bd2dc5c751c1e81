"""Max and average pooling, and their gradients. Along a sharded dimension they read a halo."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...compat.operators import aten
from ...rules.local_builder import LocalBuilder
from ...rules.notation import Call, FactorRule, Ints, Split
from ...rules.registry import rule_for
from ...rules.rewrites import rewrite
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


# Max pooling by one dimension after the other, and its gradient by shifts.
#
#     max_pool2d(x, [3, 3])       max_pool2d(max_pool2d(x, [1, 3]), [3, 1])
#
# This decomposition applies where windows reach over shards. Columns are pooled first, so that the
# halo's rows are as short as the result's. Ties do not matter: a window's first maximum is in the
# first row that has it, and there in the first column.
#
# Window p has its maximum in row s p + a, for some kernel offset a. Row s q + r receives
# gradients from the windows q - m, for all a = s m + r. The device that has the window selects the
# gradient and then moves it by m rows. No index is sent.


@dataclass(frozen=True)
class PoolStage:
    """Pooling along one dimension, which is negative: -1 is the last one."""

    dim: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def changes(self) -> bool:
        return (self.kernel, self.stride, self.padding) != (1, 1, 0)

    def pool(self, x: Tensor, spatial: int, ceil_mode: bool) -> tuple[Tensor, Tensor]:
        """Return the maxima, and their flat positions in the last `spatial` dimensions of x."""

        def options(value: int, others: int) -> list[int]:
            return [value if d == self.dim else others for d in range(-spatial, 0)]

        function = aten.max_pool3d_with_indices if spatial == 3 else aten.max_pool2d_with_indices
        return function(
            x,
            options(self.kernel, 1),
            options(self.stride, 1),
            options(self.padding, 0),
            options(self.dilation, 1),
            ceil_mode,
        )

    def pool_backward(
        self, grad: Tensor, index: Tensor, shape: Sequence[int], shards: int
    ) -> Tensor:
        """Return the gradient for x, with this shape. grad, index: for `pool`'s results.

        It is computed for a multiple of `shards` rows, so that each device interleaves its phases.
        """
        dim, rows, windows = grad.dim() + self.dim, shape[self.dim], grad.shape[self.dim]
        # From the flat position to the row along this dimension.
        row = (index // math.prod(shape[dim + 1 :])) % rows
        first = (torch.arange(windows, device=grad.device) * self.stride - self.padding).reshape(
            [-1] + [1] * (-1 - self.dim)
        )
        size = -(-max(windows, -(-rows // self.stride)) // shards) * shards
        phases: list[dict[int, Tensor]] = [{} for _ in range(self.stride)]
        for tap in range(0, self.kernel * self.dilation, self.dilation):
            # Offset a = s m + r: the phase r, and the move by m rows.
            # Floored, so that a tap in the padding moves backwards.
            move, phase = divmod(tap - self.padding, self.stride)
            phases[phase][move] = _pad(
                torch.where(row - first == tap, grad, 0), dim, 0, size - windows
            )
        zeros = grad.new_zeros([*grad.shape[:dim], size, *grad.shape[dim + 1 :]])
        rows_of_phases = [_sum_of_shifted(terms, dim) if terms else zeros for terms in phases]
        return (
            rows_of_phases[0]
            if self.stride == 1
            else torch.stack(rows_of_phases, dim + 1).flatten(dim, dim + 1)
        ).narrow(dim, 0, rows)


def _pad(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    return (
        aten.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - dim) + [before, after])
        if before or after
        else x
    )


def _sum_of_shifted(terms: Mapping[int, Tensor], dim: int) -> Tensor:
    """Sum all terms, each shifted by its number of rows.

    Terms with one direction are shifted together as far as possible.
    """
    sums = [terms[0]] if 0 in terms else []
    # From the farthest term on, so that each shift takes all sums so far along.
    for moves in (
        sorted((m for m in terms if m > 0), reverse=True),
        sorted(m for m in terms if m < 0),
    ):
        total = None
        for move, following in zip(moves, [*moves[1:], 0]):
            total = terms[move] if total is None else total + terms[move]
            total = _pad(total, dim, move - following, following - move)
        sums += [total] if total is not None else []
    return sum(sums[1:], sums[0])


def stages(
    spatial: int, kernel: Ints, stride: Ints = (), padding: Ints = (0,), dilation: Ints = (1,)
) -> list[PoolStage]:
    """Return a pooling's stages, from the last dimension on; at least one."""
    options = [
        list(v) * (spatial if len(v) == 1 else 1)
        for v in (kernel, stride or kernel, padding, dilation)
    ]
    all_stages = [PoolStage(dim, *(v[dim] for v in options)) for dim in range(-1, -spatial - 1, -1)]
    return [stage for stage in all_stages if stage.changes] or all_stages[-1:]


def max_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the maxima, and their positions in the last stage's input."""
    index = x  # replaced: there is at least one stage
    for stage in stages(len(kernel), kernel, stride, padding, dilation):
        x, index = stage.pool(x, len(kernel), ceil_mode)
    assert index is not None
    return x, index


def max_pool_backward(grad: Tensor, x: Tensor, *options: Any, shards: int = 1) -> Tensor:
    """Return the gradient for x. options: as `max_pool` has them, and its positions.

    shards: see PoolStage.pool_backward.

    The indices in stages before the last are computed again.
    """
    kernel, *geometry, ceil_mode, index = options
    forward, saved = stages(len(kernel), kernel, *geometry), []
    for stage in forward[:-1]:
        pooled, position = stage.pool(x, len(kernel), ceil_mode)
        saved.append((position, x.shape))
        x = pooled
    # The caller has the last stage's index.
    saved.append((index, x.shape))
    for stage, (position, shape) in zip(reversed(forward), reversed(saved)):
        grad = stage.pool_backward(grad, position, shape, shards)
    return grad


rewrite("split", *FORWARD)(max_pool)
rewrite("split", *BACKWARD)(max_pool_backward)
