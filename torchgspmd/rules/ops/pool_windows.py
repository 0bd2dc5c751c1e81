"""The windows that pooling reads, as convolutions do.

avg_pool1d, kernel 3, stride 2, padding 1       ... w[2p-1:2p+2] -> ... w
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...compat.operators import aten
from ...halo import Reach
from ..local_builder import LocalBuilder
from ..notation import Call, Rule, make_rule
from .spread_windows import Cut, cut


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
        """Return the rows that a position reads. fill: what the padding holds."""
        return Reach(-self.padding, self.span - self.padding, self.stride, fill=fill)


def pool_windows(
    x: Any,
    y: Any,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1,),
) -> list[PoolWindow]:
    """Return the window along every spatial dimension. x, y: shapes before and after pooling."""
    count = 3 if len(kernel) == 3 else 2
    options = [
        list(v) * (count if len(v) == 1 else 1)
        for v in (kernel, stride or kernel, padding, dilation)
    ]
    return [
        PoolWindow(*four, rows, positions)
        for four, rows, positions in zip(zip(*options), x[-count:], y[-count:])
    ]


def pool_rule(
    call: Call,
    windows: Sequence[PoolWindow],
    reaches: Sequence[Reach],
    windowed: Sequence[int],
    positions: Any,
    **keywords: Any,
) -> Rule:
    """Return a rule in which all tensors have the dimensions d0, d1, ... of shape `positions`.

    windowed: the operands with a halo along the last dimensions.
    """
    names = [(f"d{i}",) for i in range(len(positions))]
    lead = len(positions) - len(windows)
    halo = {(operand, lead + i): reach for operand in windowed for i, reach in enumerate(reaches)}
    return make_rule(
        [names] * len(call.tensors),
        [names] * len(call.results),
        {f"d{i}": n for i, n in enumerate(positions)},
        halo=halo,
        **keywords,
    )


def forward_windows(call: Call) -> list[PoolWindow]:
    """Return the windows of a pooling call that is no gradient."""
    options = call.argument(2, "stride", ()), call.argument(3, "padding", (0,))
    more = () if _averages(call.target) else (call.argument(4, "dilation", (1,)),)
    return pool_windows(call.tensors[0].shape, call.results[0].shape, call.args[1], *options, *more)


def _averages(target: Any) -> bool:
    return "avg" in target._schema.name


def remaining_padding(local: LocalBuilder, windows: Sequence[PoolWindow]) -> list[int]:
    """Return the padding of whole dimensions. Windows of sharded ones include theirs."""
    lead = len(local.results[0].shape) - len(windows)
    return [0 if local.sharded(f"d{lead + i}") else w.padding for i, w in enumerate(windows)]


def renumber(
    local: LocalBuilder, index: Any, old: Sequence[int], new: Sequence[int], moves: Sequence[Any]
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
    """The rows of x that a device's positions touch. The device's own rows are some of them."""

    windows: tuple[PoolWindow, ...]
    shape: list[int]
    cuts: dict[int, Cut]

    @classmethod
    def from_windows(cls, local: LocalBuilder, windows: Sequence[PoolWindow]) -> Spread:
        """Return the rows that the device's halo of positions touches."""
        shape, cuts = list(local.results[0].shape), {}
        lead = len(shape) - len(windows)
        for i, w in enumerate(windows):
            if local.sharded(f"d{lead + i}"):
                cuts[lead + i] = cut(local, 0, lead + i, w.stride, w.padding, w.span, crop=False)
                shape[lead + i] = (local.window(0, lead + i).length - 1) * w.stride + w.span + 1
        return cls(tuple(windows), shape, cuts)

    def first(self, local: LocalBuilder, i: int) -> Any:
        """Return the global number of the first row, along spatial dimension i."""
        dim, w = len(self.shape) - len(self.windows) + i, self.windows[i]
        return (
            local.window(0, dim).first(local.index(f"d{dim}")) * w.stride - w.padding
            if dim in self.cuts
            else 0
        )

    def cut(self, local: LocalBuilder, value: Any) -> Any:
        """Return the device's own rows of a value."""
        for dim, own in self.cuts.items():
            value = own.apply(local, value, dim)
        return value
