"""Interpolation and adaptive average pooling.

    upsample_linear1d of 8 rows to 16       ... w[p-3:p+2/2] -> ... w

Positions read nearby rows, so a sharded dimension needs a halo. Along it, the
weights are those of PyTorch's own operation, applied to the unit matrix: all modes have one
definition, and positions round as in PyTorch. Without a sharded dimension it is the operation.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.operators import aten, custom_op
from ...layout.halo_window import Reach
from ...rules.local_builder import LocalBuilder
from ...rules.notation import Call, FactorRule, LocalForm, factors
from ...rules.registry import rule_for, shape_argument


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
    return torch.float64 if dtype == torch.float64 else torch.float32


@custom_op(
    "band",
    schema="(str op, SymInt dim, SymInt rows, SymInt positions, bool? corners, float? scale, "
    "bool back, SymInt start, SymInt count, SymInt first, SymInt length, SymInt width, "
    "ScalarType kind, Device device) -> (Tensor, Tensor)",
)
def band(*args: Any) -> tuple[Tensor, Tensor]:
    """Return the row numbers [count * width] and weights [count, width] for some positions.

    The arguments are those of a Line, then of `_part_on_device`. Positions: start:start+count;
    those past the end read an arbitrary row. Row numbers count from `first`, in rows
    first:first+length.
    """
    # Programs write over results, and the cached tensors have to stay.
    rows, weight = _part_on_device(Line(*args[:7]), args[7:12], *args[12:])
    return rows.clone(), weight.clone()


@lru_cache(maxsize=256)
def _part_on_device(
    line: Line, part: tuple[int, ...], kind: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return `band`'s results. A GPU gets them once: a copy makes the host wait for it."""
    start, count, first, length, width = part
    begin, _, weight = bands(line, kind)
    # The last device may have padding behind the last position.
    place = torch.arange(start, start + count, device="cpu").clamp(max=len(begin) - 1)
    index = begin[place][:, None] + torch.arange(width, device="cpu") - first  # [count, width]
    return index.clamp(0, length - 1).flatten().to(device), weight[place].to(device)


@band.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    count, _, _, width, kind, device = args[-6:]
    rows = torch.empty(count * width, dtype=torch.int64, device=device)
    return rows, torch.empty(count, width, dtype=kind, device=device)


_INTERPOLATIONS = (  # name, spatial dimensions, whether it takes align_corners
    ("upsample_nearest1d", 1, False),
    ("_upsample_nearest_exact1d", 1, False),
    ("upsample_linear1d", 1, True),
    ("upsample_nearest2d", 2, False),
    ("_upsample_nearest_exact2d", 2, False),
    ("upsample_bilinear2d", 2, True),
    ("upsample_bicubic2d", 2, True),
    ("_upsample_bilinear2d_aa", 2, True),
    ("_upsample_bicubic2d_aa", 2, True),
    ("upsample_nearest3d", 3, False),
    ("_upsample_nearest_exact3d", 3, False),
    ("upsample_trilinear3d", 3, True),
)


def _register(name: str, count: int, aligned: bool) -> None:

    def lines(
        before: Sequence[int], after: Sequence[int], rest: Sequence[Any], back: bool
    ) -> list[Line]:
        corners, scales = (rest[0], rest[1:]) if aligned else (None, rest)
        scales = [*scales, *[None] * (count - len(scales))]
        return [
            Line(op=name, dim=d, rows=n, positions=m, corners=corners, scale=scales[d], back=back)
            for d, (n, m) in enumerate(zip(before[-count:], after[-count:]))
        ]

    @rule_for(getattr(aten, name).default)
    def _forward(call: Call) -> FactorRule:
        x, y = call.tensors[0], call.results[0]
        return _rule(call, lines(x.shape, y.shape, call.args[2:], False))

    @rule_for(getattr(aten, f"{name}_backward").default)
    def _backward(call: Call) -> FactorRule:
        grad, x = call.tensors[0], call.results[0]
        return _rule(call, lines(x.shape, grad.shape, call.args[3:], True), shape_argument(2))


for _entry in _INTERPOLATIONS:
    _register(*_entry)


@rule_for(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def _average(call: Call) -> FactorRule:
    return _rule(call, adaptive_lines(call, call.tensors[0], call.results[0], False))


@rule_for(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default)
def _average_backward(call: Call) -> FactorRule:
    """Return the rule for (gradient, input). The input only gives its shape."""
    return _rule(call, adaptive_lines(call, call.results[0], call.tensors[0], True))


def adaptive_lines(call: Call, x: Tensor, y: Tensor, back: bool) -> list[Line]:
    """Return the spatial dimensions for adaptive pooling from x to y."""
    spatial = 3 if "3d" in call.target._schema.name else 2
    return [
        Line(f"_adaptive_avg_pool{spatial}d", d, n, m, back=back)
        for d, (n, m) in enumerate(zip(x.shape[-spatial:], y.shape[-spatial:]))
    ]


def _rule(call: Call, lines: Sequence[Line], local: LocalForm = LocalForm()) -> FactorRule:
    """Return an operation's rule. local: with the arguments for local shapes."""

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
        return _resample(local, args[0], lines)

    return rule_along(call, lines, [0], replace(local, emit=emit), linear=[[0]])


def rule_along(
    call: Call, lines: Sequence[Line], windowed: Sequence[int], local: LocalForm, **keywords: object
) -> FactorRule:
    """Return a rule in which all tensors have the result's dimensions d0, d1, ...

    windowed: operands that have a halo along `lines`, or are replicated where they cannot.
    """
    y = call.results[0]
    lead, accesses, whole = y.dim() - len(lines), {}, set()
    names = factors("d", y.dim())
    # Before and after resampling a dimension has one factor; its rows are a window.
    operands, sizes = [list(names) for _ in call.tensors], dict(zip(names, y.shape))
    for d, line in enumerate(lines, start=lead):
        # Integers have no weights. A single position reads all rows, so a halo gains nothing.
        if not y.is_floating_point() or min(line.rows, line.positions) == 1 < max(
            line.rows, line.positions
        ):
            whole |= {f"w{d}", f"d{d}"}
            sizes[f"w{d}"] = call.tensors[0].shape[d]
            for operand in windowed:
                operands[operand][d] = f"w{d}"
        elif not is_identity(line):
            reach = _reach(line).inverse(0.0) if line.back else _reach(line)
            accesses |= {(operand, d): reach for operand in windowed}
    return call.rule(
        operands,
        [names] * len(call.results),
        sizes,
        replicated=whole,
        row_access=accesses,
        local=replace(local, when=names[lead:], positional=False),
        **keywords,
    )


@lru_cache(maxsize=1024)
def is_identity(line: Line) -> bool:
    """Return whether every position is the row with the same number."""
    unit = torch.eye(line.rows, dtype=torch.float64, device="cpu")
    return line.rows == line.positions and torch.equal(weights(line, torch.float64), unit)


@lru_cache(maxsize=1024)
def _reach(line: Line) -> Reach:
    """Return the forward operation's reach.

    Positions may follow several slopes. The narrowest windows win.
    """
    first, last, _ = (t.tolist() for t in bands(replace(line, back=False), torch.float32))
    # Two conventions: rows per position, and the same with aligned corners.
    slopes = {Fraction(line.rows, line.positions), Fraction(line.rows - 1, line.positions - 1)}
    slopes |= {Fraction(1 / line.scale).limit_denominator(64)} if line.scale else set()
    reaches = []
    for slope in (s for s in slopes if s > 0):
        # The reach holds the farthest row that any position reads, relative to the slope.
        ahead = [slope.numerator * p for p in range(line.positions)]
        low, high = (
            pick(slope.denominator * r - a for r, a in zip(rows, ahead))
            for pick, rows in ((min, first), (max, last))
        )
        reaches.append(Reach(low, high, slope.numerator, slope.denominator, fill=0.0))
    return min(reaches, key=lambda reach: ((reach.high - reach.low) / reach.every, reach.every))


def _resample(local: LocalBuilder, x: object, lines: Sequence[Line]) -> object:
    """Resample one dimension after the other, beginning with the one that shrinks most."""
    result, shape = local.results[0], list(local.shape(x))
    lead, dtype = len(result.shape) - len(lines), computation_dtype(result.dtype)
    value = x if result.dtype == dtype else local.call(aten._to_copy.default, x, dtype=dtype)
    pending = [
        (result.shape[d] / shape[d], d, line)
        for d, line in enumerate(lines, start=lead)
        if not is_identity(line)
    ]
    # A dimension that shrinks first leaves less work for the others.
    for _, d, line in sorted(pending, key=lambda entry: entry[:2]):
        value = _resample_dimension(local, value, shape, d, line)
        shape[d] = result.shape[d]
    return (
        value
        if result.dtype == dtype
        else local.call(aten._to_copy.default, value, dtype=result.dtype)
    )


def read_line(
    local: LocalBuilder, line: Line, d: int, size: int, kind: torch.dtype
) -> tuple[fx.Node, fx.Node, int, object]:
    """Return (rows, weights, width, first halo row) for the device's positions.

    size: the dimension's local size. Row numbers are [positions * width], weights [positions,
    width]. Row numbers count from the halo's first row.
    """
    result, width = local.results[0], bands(line, kind)[2].shape[1]
    first, start = local.first_row(0, d), local.index(f"d{d}") * result.shape[d]
    part = start, result.shape[d], first, size, width
    pair = local.call(band._opoverload, *astuple(line), *part, kind, result.device)
    rows, weight = (local.call(operator.getitem, pair, i) for i in range(2))
    return rows, weight, width, first


def _resample_dimension(
    local: LocalBuilder, value: object, shape: Sequence[int], d: int, line: Line
) -> object:
    count = local.results[0].shape[d]
    kind = computation_dtype(local.results[0].dtype)
    rows, weight, width, _ = read_line(local, line, d, shape[d], kind)
    value = local.call(aten.index_select.default, value, d, rows)
    value = local.call(aten.reshape.default, value, [*shape[:d], count, width, *shape[d + 1 :]])
    weight = local.call(aten.reshape.default, weight, [count, width, *[1] * (len(shape) - d - 1)])
    return local.call(aten.sum.dim_IntList, local.call(aten.mul.Tensor, value, weight), [d + 1])
