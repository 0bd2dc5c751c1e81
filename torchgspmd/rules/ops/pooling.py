"""Windows over the last dimensions: pooling, padding by content. Batch and channels may be sharded.
Pooling reads windows of neighbours, as convolution does; for the others the spatial dimensions are
whole.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...compat.operators import aten
from ...halo import Reach
from ..local_builder import LocalBuilder
from ..notation import Call, Rule, Sentence, make_rule
from ..registry import BLOCKWISE, computed, rule, shape_argument
from . import slicing
from .max_pool_stages import max_pool, max_pool_backward, stages
from .spread_windows import Cut, cut


def _windowed(
    name: str,
    spatial: int,
    operands: str,
    results: str = "y",
    linear: bool = False,
    shape_at: int | None = None,
    splits: Callable | bool = False,
) -> None:
    """Registers an operation. operands, results: for each tensor x (before the window) or y (behind
    it). shape_at: position of the argument that holds the result's whole shape. splits: what it is
    taken apart to where a spatial dimension is sharded.
    """
    dims = {
        1: {"x": "... w", "y": "... v"},
        2: {"x": "... h w", "y": "... u v"},
        3: {"x": "... d h w", "y": "... t u v"},
    }[spatial]
    whole = " ".join(dims.values()).replace("...", "")
    rule(
        getattr(aten, name).default,
        f"{', '.join(dims[t] for t in operands)} -> {', '.join(dims[t] for t in results)}",
        whole=whole,
        linear=[[0]] if linear else (),
        local=shape_argument(shape_at) if shape_at is not None else None,
        splits=splits,
    )


for _n in (2, 3):
    _windowed(f"max_unpool{_n}d", _n, "xx")
for _n in (1, 2, 3):
    for _mode in ("reflection", "replication"):
        _windowed(
            f"{_mode}_pad{_n}d", _n, "x", linear=True, splits=getattr(slicing, f"{_mode}_pad")
        )
        _windowed(
            f"{_mode}_pad{_n}d_backward",
            _n,
            "yx",
            "x",
            linear=True,
            splits=getattr(slicing, f"{_mode}_pad_backward"),
        )

for _op, _in, _out in (
    (aten.fractional_max_pool2d, "h w", "u v"),
    (aten.fractional_max_pool3d, "d h w", "t u v"),
):
    _sentences = [
        Sentence.parse(f"{_n}c {_in}, {_n or '1 '}c r -> {_n}c {_out}, {_n}c {_out}")
        for _n in ("", "n ")
    ]
    computed(_op.default)(
        lambda call, sentences=_sentences, n=len(_in.split()), whole=f"{_in} r {_out}": sentences[
            call.tensors[0].dim() - n - 1
        ].bind(call, whole=whole)
    )
rule(
    aten.fractional_max_pool2d_backward.default,
    "... u v, ... h w, ... u v -> ... h w",
    whole="h w u v",
)
rule(
    aten.fractional_max_pool3d_backward.default,
    "... t u v, ... d h w, ... t u v -> ... d h w",
    whole="d h w t u v",
)
rule(aten.grid_sampler_2d.default, "n c h w, n u v r -> n c u v", whole="h w r", linear=[[0]])
rule(
    aten.grid_sampler_3d.default, "n c d h w, n t u v r -> n c t u v", whole="d h w r", linear=[[0]]
)


# ------------------------------------------------------------------------------------------ pooling: windows as a convolution's


@dataclass(frozen=True)
class _Window:
    """Of one dimension: kernel, stride, padding, dilation, and the global sizes before and behind."""

    kernel: int
    stride: int
    padding: int
    dilation: int
    rows: int
    positions: int

    @property
    def span(self) -> int:
        return self.dilation * (self.kernel - 1)

    def reach(self, fill: float) -> Reach:
        return Reach(-self.padding, self.span - self.padding, self.stride, fill=fill)


def _windows(
    x: Any,
    y: Any,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1,),
) -> list[_Window]:
    """For every spatial dimension, of the shapes before and behind."""
    count = 3 if len(kernel) == 3 else 2
    options = [
        list(v) * (count if len(v) == 1 else 1)
        for v in (kernel, stride or kernel, padding, dilation)
    ]
    return [
        _Window(*four, rows, positions)
        for four, rows, positions in zip(zip(*options), x[-count:], y[-count:])
    ]


def _rule(
    call: Call,
    windows: Sequence[_Window],
    reaches: Sequence[Reach],
    moved: Sequence[int],
    positions: Any,
    **keywords: Any,
) -> Rule:
    """All tensors have the same dimensions d0, d1, ...; operands number `moved` are read in
    windows; positions: the shape that they are counted in.
    """
    names = [(f"d{i}",) for i in range(len(positions))]
    lead = len(positions) - len(windows)
    halo = {(operand, lead + i): reach for operand in moved for i, reach in enumerate(reaches)}
    return make_rule(
        [names] * len(call.tensors),
        [names] * len(call.results),
        {f"d{i}": n for i, n in enumerate(positions)},
        halo=halo,
        **keywords,
    )


def _forward(call: Call) -> list[_Window]:
    options = call.argument(2, "stride", ()), call.argument(3, "padding", (0,))
    more = () if _averages(call.target) else (call.argument(4, "dilation", (1,)),)
    return _windows(call.tensors[0].shape, call.results[0].shape, call.args[1], *options, *more)


def _averages(target: Any) -> bool:
    return "avg" in target._schema.name


def _unpadded(local: LocalBuilder, windows: Sequence[_Window]) -> list[int]:
    """The padding that is left to the operation: along sharded dimensions the window has it."""
    lead = len(local.results[0].shape) - len(windows)
    return [0 if local.sharded(f"d{lead + i}") else w.padding for i, w in enumerate(windows)]


def _several(kernel: Sequence[int], *options: Any) -> bool:
    """Whether max pooling runs along several dimensions, so that there are other indices once it is
    taken apart.
    """
    return len(stages(len(kernel), kernel, *options)) > 1


@computed(
    aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default, splits=max_pool
)
def _maximum(call: Call) -> Rule:
    windows = _forward(call)

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
        stride, dilation = [w.stride for w in windows], [w.dilation for w in windows]
        both = local.call(
            call.target,
            args[0],
            args[1],
            stride,
            _unpadded(local, windows),
            dilation,
            call.argument(5, "ceil_mode", False),
        )
        index = local.call(operator.getitem, both, 1)
        lead, here = len(local.results[0].shape) - len(windows), local.shape(args[0])
        old = [here[lead + i] for i in range(len(windows))]
        moves = [
            local.window(0, d).first(local.index(f"d{d}")) if local.sharded(f"d{d}") else 0
            for d in range(lead, lead + len(old))
        ]
        return [
            local.call(operator.getitem, both, 0),
            renumbered(local, index, old, [w.rows for w in windows], moves),
        ]

    several = _several(*call.args[1:5])
    return _rule(
        call,
        windows,
        [w.reach(-math.inf) for w in windows],
        [0],
        call.results[0].shape,
        emit=emit,
        splits=several,
        hands=1 if several else None,
    )


@computed(
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    splits=max_pool_backward,
)
def _maximum_backward(call: Call) -> Rule:
    """Operands: gradient, input, indices. The input takes part by its shape alone."""
    windows = _windows(call.tensors[1].shape, call.tensors[0].shape, *call.args[2:6])

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
        grad, x, index = args[0], args[1], args[-1]
        spread = _Spread.of(local, windows)
        moves = [-spread.first(local, i) for i in range(len(windows))]
        index = renumbered(
            local, index, [w.rows for w in windows], spread.shape[-len(windows) :], moves
        )
        x = local.call(aten.expand.default, local.call(aten.new_zeros.default, x, []), spread.shape)
        whole = local.call(
            call.target,
            grad,
            x,
            args[2],
            [w.stride for w in windows],
            _unpadded(local, windows),
            *args[5:-1],
            index,
        )
        return [spread.cut(local, whole)]

    return _rule(
        call,
        windows,
        [w.reach(0.0).inverse(0.0) for w in windows],
        [0, 2],
        call.tensors[1].shape,
        emit=emit,
        splits=True,
        takes=2 if _several(*call.args[2:6]) else None,
    )


BLOCKWISE.update(
    (aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
)


def renumbered(
    local: LocalBuilder, index: Any, old: Sequence[int], new: Sequence[int], moves: Sequence[Any]
) -> Any:
    """Flat indices into the last dimensions of sizes `old` as those into sizes `new`, each moved so
    far, and kept inside.
    """
    result, step = None, 1
    for before, after, move in reversed(list(zip(old, new, moves))):
        place = local.call(aten.remainder.Scalar, index, before)
        index = local.call(aten.floor_divide.default, index, before)
        place = local.call(
            aten.clamp.default, local.call(aten.add.Scalar, place, move), 0, after - 1
        )
        place = local.call(aten.mul.Scalar, place, step)
        result = place if result is None else local.call(aten.add.Tensor, result, place)
        step *= after
    return result


@dataclass(frozen=True)
class _Spread:
    """The rows of x that a device's windows of positions touch, of which its own are a part."""

    windows: tuple[_Window, ...]
    shape: list[int]
    cuts: dict[int, Cut]

    @classmethod
    def of(cls, local: LocalBuilder, windows: Sequence[_Window]) -> _Spread:
        shape, cuts = list(local.results[0].shape), {}
        lead = len(shape) - len(windows)
        for i, w in enumerate(windows):
            if local.sharded(f"d{lead + i}"):
                cuts[lead + i] = cut(local, 0, lead + i, w.stride, w.padding, w.span, crop=False)
                shape[lead + i] = (local.window(0, lead + i).length - 1) * w.stride + w.span + 1
        return cls(tuple(windows), shape, cuts)

    def first(self, local: LocalBuilder, i: int) -> Any:
        """The first of these rows among those of the whole dimension."""
        dim, w = len(self.shape) - len(self.windows) + i, self.windows[i]
        return (
            local.window(0, dim).first(local.index(f"d{dim}")) * w.stride - w.padding
            if dim in self.cuts
            else 0
        )

    def cut(self, local: LocalBuilder, value: Any) -> Any:
        for dim, here in self.cuts.items():
            value = here.apply(local, value, dim)
        return value


@computed(aten.avg_pool2d.default, aten.avg_pool3d.default)
def _average(call: Call) -> Rule:
    windows = _forward(call)
    ceil, padded, divisor = (
        call.argument(4 + i, name, default)
        for i, (name, default) in enumerate(
            (("ceil_mode", False), ("count_include_pad", True), ("divisor_override", None))
        )
    )

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
        stride, padding, plain = (
            [w.stride for w in windows],
            _unpadded(local, windows),
            divisor or _uniform(windows, padded),
        )
        y = local.call(call.target, args[0], args[1], stride, padding, ceil, True, plain or 1)
        return [
            y
            if plain
            else local.call(
                aten.div.Tensor, y, _counts(local, windows, local.results[0].shape, padded, None)
            )
        ]

    return _rule(
        call,
        windows,
        [w.reach(0.0) for w in windows],
        [0],
        call.results[0].shape,
        linear=[[0]],
        emit=emit,
    )


@computed(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def _average_backward(call: Call) -> Rule:
    """Operands: gradient, input. The input takes part by its shape alone."""
    windows = _windows(call.tensors[1].shape, call.tensors[0].shape, *call.args[2:5])
    ceil, padded, divisor = call.args[5:8]

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
        grad, x, plain, spread = (
            args[0],
            args[1],
            divisor or _uniform(windows, padded),
            _Spread.of(local, windows),
        )
        if not plain:
            grad = local.call(
                aten.div.Tensor, grad, _counts(local, windows, local.shape(grad), padded, 0)
            )
        x = local.call(aten.expand.default, local.call(aten.new_zeros.default, x, []), spread.shape)
        stride, padding = [w.stride for w in windows], _unpadded(local, windows)
        return [
            spread.cut(
                local,
                local.call(call.target, grad, x, args[2], stride, padding, ceil, True, plain or 1),
            )
        ]

    return _rule(
        call,
        windows,
        [w.reach(0.0).inverse(0.0) for w in windows],
        [0],
        call.tensors[1].shape,
        linear=[[0]],
        emit=emit,
    )


def _uniform(windows: Sequence[_Window], padded: bool) -> int | None:
    """What every position divides by, if it is the same for all."""
    for w in windows:
        margin = w.padding if padded else 0
        if (
            (w.positions - 1) * w.stride - w.padding + w.kernel > w.rows + margin
            or w.padding
            and not padded
        ):
            return None
    return math.prod(w.kernel for w in windows)


def _counts(
    local: LocalBuilder,
    windows: Sequence[_Window],
    shape: Sequence[int],
    padded: bool,
    operand: int | None,
) -> Any:
    """How many rows, those of the padding too if `padded`, each position averages over; positions
    of the device's part of the result, or of the window of an operand.
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
        count = local.call(aten.clamp.default, count, 1)  # of positions that are none
        count = local.call(
            aten._to_copy.default,
            local.call(aten.view.default, count, [-1] + [1] * (len(shape) - 1 - dim)),
            dtype=dtype,
        )
        result = count if result is None else local.call(aten.mul.Tensor, result, count)
    return result
