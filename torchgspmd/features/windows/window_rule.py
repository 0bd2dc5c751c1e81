"""Windows that pooling and convolutions read, or spread over the result's positions.

avg_pool1d, kernel 3, stride 2, padding 1       ... w[2p-1:2p+2] -> ... w

Transposed convolutions and pooling gradients spread their windows. A device computes all positions
that its window touches, then takes its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...compat.operators import aten
from ...layout.halo_window import Reach
from ...rules.local_builder import LocalBuilder
from ...rules.notation import Call, FactorRule, Ints, LocalForm, factors


@dataclass(frozen=True)
class WindowCut:
    """The device's own positions, among those that its window touches.

    They begin at `start`. The operation already leaves out `spare` positions at both ends. If the
    stride exceeds the kernel, `front` and `back` zeros are added: positions that no row touches.
    """

    start: Any
    length: int
    spare: int
    front: int
    back: int

    def apply(self, local: LocalBuilder, y: object, dim: int) -> object:
        if self.front or self.back:
            y = local.call(
                aten.constant_pad_nd.default,
                y,
                [0, 0] * (len(local.results[0].shape) - 1 - dim) + [self.front, self.back],
            )
        return local.narrow(y, dim, self.start, self.length)


def cut(
    local: LocalBuilder,
    operand: int,
    dim: int,
    stride: int,
    padding: int,
    span: int,
    crop: bool = True,
) -> WindowCut:
    """Return the WindowCut for an operand dimension's window.

    span: the distance between the kernel's first and last elements. crop: whether the operation can
    leave out `spare` positions.
    """
    factor = local.rule.operands[operand][dim][0]
    window, length = local.window(operand, dim), local.size(factor)

    def start(device: Any) -> Any:
        return device * length + padding - window.first(device) * stride

    # The start repeats after `stride` devices.
    starts = {start(device) for device in range(stride)}
    end = (window.length - 1) * stride + span + 1
    front, back = max(0, -min(starts)), max(0, max(starts) + length - end)
    # The operation leaves out as many positions at the end as at the start.
    spare = min(min(starts), end - max(starts) - length) if crop and not front and not back else 0
    own_start = start(local.index(factor)) if len(starts) > 1 else starts.pop()
    return WindowCut(own_start + (front - spare), length, spare, front, back)


@dataclass(frozen=True)
class PoolWindow:
    """The window along one dimension. rows, positions: global sizes before and after pooling."""

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
        """Return the rows that a position reads. fill: the padding's value."""
        return Reach(-self.padding, self.span - self.padding, self.stride, fill=fill)


def pool_windows(
    x: Any, y: Any, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints = (1,)
) -> list[PoolWindow]:
    """Return the window along every spatial dimension. x, y: shapes before and after pooling."""
    count = 3 if len(kernel) == 3 else 2
    options = [
        list(v) * (count if len(v) == 1 else 1)
        for v in (kernel, stride or kernel, padding, dilation)
    ]
    return [PoolWindow(*window) for window in zip(*options, x[-count:], y[-count:])]


def pool_rule(
    call: Call,
    windows: Sequence[PoolWindow],
    emit: Any,
    fill: float = 0.0,
    is_gradient: bool = False,
    windowed: Sequence[int] = (0,),
    **keywords: Any,
) -> FactorRule:
    """Return a rule in which all tensors have dimensions d0, d1, ...

    fill: rows outside of the input. is_gradient: of (gradient, input, ...). windowed: the operands
    with a halo along the last dimensions.
    """
    reaches = [w.reach(fill).inverse(fill) if is_gradient else w.reach(fill) for w in windows]
    after = call.tensors[1].shape if is_gradient else call.results[0].shape
    names, lead = factors("d", len(after)), len(after) - len(windows)
    return call.rule(
        [names] * len(call.tensors),
        [names] * len(call.results),
        dict(zip(names, after)),
        row_access={(i, lead + d): reach for i in windowed for d, reach in enumerate(reaches)},
        local=LocalForm(emit),
        **keywords,
    )


def forward_windows(call: Call) -> list[PoolWindow]:
    """Return the windows in a pooling call that is no gradient."""
    options = call.argument(2, "stride", ()), call.argument(3, "padding", (0,))
    more = () if "avg" in call.target._schema.name else (call.argument(4, "dilation", (1,)),)
    return pool_windows(call.tensors[0].shape, call.results[0].shape, call.args[1], *options, *more)


def remaining_padding(local: LocalBuilder, windows: Sequence[PoolWindow]) -> list[int]:
    """Return the padding along replicated dimensions. Windows along sharded ones include theirs."""
    lead = len(local.results[0].shape) - len(windows)
    return [0 if local.sharded(f"d{lead + i}") else w.padding for i, w in enumerate(windows)]


def renumber(
    local: LocalBuilder, index: object, old: Ints, new: Ints, moves: Sequence[object]
) -> Any:
    """Convert flat indices into the last dimensions from sizes `old` to sizes `new`.

    moves: how far each dimension moves. Indices are clamped to the new sizes.
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
class Spread:
    """The rows of x that a device's positions touch. The device's own rows are among them."""

    windows: tuple[PoolWindow, ...]
    shape: list[int]
    cuts: dict[int, WindowCut]

    @classmethod
    def from_windows(cls, local: LocalBuilder, windows: Sequence[PoolWindow]) -> Spread:
        shape, cuts = list(local.results[0].shape), {}
        lead = len(shape) - len(windows)
        for i, w in enumerate(windows):
            if local.sharded(f"d{lead + i}"):
                cuts[lead + i] = cut(local, 0, lead + i, w.stride, w.padding, w.span, crop=False)
                # From the first window's first row to the last window's last row.
                shape[lead + i] = (local.window(0, lead + i).length - 1) * w.stride + w.span + 1
        return cls(tuple(windows), shape, cuts)

    def first(self, local: LocalBuilder, i: int) -> Any:
        """Return the global number of the first row, along spatial dimension i."""
        dim, w = len(self.shape) - len(self.windows) + i, self.windows[i]
        return local.first_row(0, dim) * w.stride - w.padding if dim in self.cuts else 0

    def gradient(self, local: LocalBuilder, args: tuple, rest: list) -> Any:
        """Return the device's own rows of (gradient, input, kernel, stride, padding, *rest)."""
        # Only the input's shape counts: that of all touched rows.
        x = local.call(aten.new_zeros.default, args[1], [])
        value = local.call(
            local.target,
            args[0],
            local.call(aten.expand.default, x, self.shape),
            args[2],
            [w.stride for w in self.windows],
            remaining_padding(local, self.windows),
            *rest,
        )
        for dim, own in self.cuts.items():
            value = own.apply(local, value, dim)
        return value
