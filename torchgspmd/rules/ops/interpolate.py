"""Interpolation and adaptive average pooling.

    upsample_linear1d of 8 rows to 16       ... w[p-3:p+2/2] -> ... w

Positions read nearby rows, so a sharded dimension needs a halo. Along it the result is computed
with the weights of custom_ops/resampling.py. Otherwise it is the operation itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch

from ...compat.operators import aten
from ...custom_ops.resampling import Line, band, bands, computation_dtype, weights
from ...halo import Reach
from ..local_builder import LocalBuilder
from ..notation import Call, Rule, make_rule
from ..registry import rule_for, shape_argument

_WITHOUT_CORNERS = {
    1: ("upsample_nearest1d", "_upsample_nearest_exact1d"),
    2: ("upsample_nearest2d", "_upsample_nearest_exact2d"),
    3: ("upsample_nearest3d", "_upsample_nearest_exact3d"),
}
_WITH_CORNERS = {
    1: ("upsample_linear1d",),
    3: ("upsample_trilinear3d",),
    2: (
        "upsample_bilinear2d",
        "upsample_bicubic2d",
        "_upsample_bilinear2d_aa",
        "_upsample_bicubic2d_aa",
    ),
}


def _register(name: str, count: int, aligned: bool) -> None:
    """Register an operation with `count` spatial dimensions.

    aligned: whether it has an argument align_corners.
    """

    def lines(
        call: Call, before: Sequence[int], after: Sequence[int], rest: Sequence[Any], back: bool
    ) -> list[Line]:
        corners, scales = (rest[0], rest[1:]) if aligned else (None, rest)
        scales = [*scales, *[None] * (count - len(scales))]
        return [
            Line(name, d, n, m, corners, scales[d], back)
            for d, (n, m) in enumerate(zip(before[-count:], after[-count:]))
        ]

    @rule_for(getattr(aten, name).default)
    def _forward(call: Call) -> Rule:
        return _rule(
            call, lines(call, call.tensors[0].shape, call.results[0].shape, call.args[2:], False)
        )

    @rule_for(getattr(aten, f"{name}_backward").default)
    def _backward(call: Call) -> Rule:
        return _rule(
            call, lines(call, call.results[0].shape, call.tensors[0].shape, call.args[3:], True), 2
        )


for _n in (1, 2, 3):
    for _name in _WITHOUT_CORNERS[_n]:
        _register(_name, _n, False)
    for _name in _WITH_CORNERS[_n]:
        _register(_name, _n, True)


@rule_for(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def _average(call: Call) -> Rule:
    return _rule(
        call, _average_lines(call.target, call.tensors[0].shape, call.results[0].shape, False)
    )


@rule_for(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default)
def _average_backward(call: Call) -> Rule:
    """Return the rule of (gradient, input). Only the shape of the input is used."""
    return _rule(
        call, _average_lines(call.target, call.results[0].shape, call.tensors[0].shape, True)
    )


def _average_lines(op: Any, before: Sequence[int], after: Sequence[int], back: bool) -> list[Line]:
    name = op._schema.name.removeprefix("aten::").removesuffix("_backward")
    pairs = list(zip(before, after))[-int(name[-2]) :]
    return [Line(name, d, n, m, back=back) for d, (n, m) in enumerate(pairs)]


def _rule(call: Call, lines: Sequence[Line], shape_at: int | None = None) -> Rule:
    """Return the rule of an operation. shape_at: which argument is the global result shape."""

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
        return [_resample(local, args[0], lines)]

    return rule_along(
        call,
        lines,
        [0],
        emit,
        linear=[[0]],
        local=None if shape_at is None else shape_argument(shape_at),
    )


def rule_along(
    call: Call, lines: Sequence[Line], windowed: Sequence[int], emit: Callable, **keywords: Any
) -> Rule:
    """Return a rule in which all tensors have the dimensions d0, d1, ... of the result.

    windowed: operands that have a halo along `lines`, or are whole where they cannot.
    """
    y = call.results[0]
    lead, halo, whole = y.dim() - len(lines), {}, set()
    names = [(f"d{i}",) for i in range(y.dim())]
    operands, sizes = (
        [list(names) for _ in call.tensors],
        {f"d{i}": n for i, n in enumerate(y.shape)},
    )
    for d, line in enumerate(lines, start=lead):
        if not y.is_floating_point() or min(line.rows, line.positions) == 1 < max(
            line.rows, line.positions
        ):
            whole |= {f"w{d}", f"d{d}"}
            sizes[f"w{d}"] = call.tensors[0].shape[d]
            for operand in windowed:
                operands[operand][d] = (f"w{d}",)
        elif not is_identity(line):
            halo |= {
                (operand, d): _reach(line).inverse(0.0) if line.back else _reach(line)
                for operand in windowed
            }
    return make_rule(
        operands,
        [names] * len(call.results),
        sizes,
        whole=frozenset(whole),
        halo=halo,
        emit=emit,
        emits=" ".join(f"d{d}" for d in range(lead, y.dim())),
        **keywords,
    )


@lru_cache(maxsize=1024)
def is_identity(line: Line) -> bool:
    """Return whether every position is the row of the same number."""
    unit = torch.eye(line.rows, dtype=torch.float64, device="cpu")
    return line.rows == line.positions and torch.equal(weights(line, torch.float64), unit)


@lru_cache(maxsize=1024)
def _reach(line: Line) -> Reach:
    """Return the reach of the forward operation.

    Positions may follow several slopes. The one with the narrowest windows is taken.
    """
    first, last, _ = (t.tolist() for t in bands(replace(line, back=False), torch.float32))
    slopes = {Fraction(line.rows, line.positions), Fraction(line.rows - 1, line.positions - 1)}
    slopes |= {Fraction(1 / line.scale).limit_denominator(64)} if line.scale else set()
    reaches = []
    for slope in (s for s in slopes if s > 0):
        ahead = [slope.numerator * p for p in range(line.positions)]
        low, high = (
            pick(slope.denominator * r - a for r, a in zip(rows, ahead))
            for pick, rows in ((min, first), (max, last))
        )
        reaches.append(Reach(low, high, slope.numerator, slope.denominator, fill=0.0))
    return min(reaches, key=lambda reach: ((reach.high - reach.low) / reach.every, reach.every))


def _resample(local: LocalBuilder, x: Any, lines: Sequence[Line]) -> Any:
    """Resample one dimension after the other, beginning with those that shrink most."""
    result, shape = local.results[0], list(local.shape(x))
    lead, dtype = len(result.shape) - len(lines), computation_dtype(result.dtype)
    value = x if result.dtype == dtype else local.call(aten._to_copy.default, x, dtype=dtype)
    pending = [
        (result.shape[d] / shape[d], d, line)
        for d, line in enumerate(lines, start=lead)
        if not is_identity(line)
    ]
    for _, d, line in sorted(pending, key=lambda entry: entry[:2]):
        value = _resample_dimension(local, value, shape, d, line)
        shape[d] = result.shape[d]
    return (
        value
        if result.dtype == dtype
        else local.call(aten._to_copy.default, value, dtype=result.dtype)
    )


def _resample_dimension(
    local: LocalBuilder, value: Any, shape: Sequence[int], d: int, line: Line
) -> Any:
    """Resample one dimension of a local value of this shape."""
    result, index = local.results[0], local.index(f"d{d}")
    count, kind = result.shape[d], computation_dtype(result.dtype)
    first = local.window(0, d).first(index) if local.sharded(f"d{d}") else 0
    width = bands(line, kind)[2].shape[1]
    pair = local.call(
        band._opoverload,
        line.op,
        line.dim,
        line.rows,
        line.positions,
        line.corners,
        line.scale,
        line.back,
        index * count,
        count,
        first,
        shape[d],
        width,
        kind,
        result.device,
    )
    rows, weight = (local.call(operator.getitem, pair, i) for i in range(2))
    value = local.call(aten.index_select.default, value, d, rows)
    value = local.call(aten.reshape.default, value, [*shape[:d], count, width, *shape[d + 1 :]])
    weight = local.call(aten.reshape.default, weight, [count, width, *[1] * (len(shape) - d - 1)])
    return local.call(aten.sum.dim_IntList, local.call(aten.mul.Tensor, value, weight), [d + 1])
