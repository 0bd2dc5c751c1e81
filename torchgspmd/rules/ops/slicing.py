"""Operations that move rows along a dimension: slices, pads, flips, rolls, concatenations.

    x[1:61]     h[p+1:p+2] -> h         flip        h[-p+63:-p+64] -> h
    x[::2]      h[2p:2p+1] -> h         cat         h[p:p+1], h[p-8:p-7] -> h
    pad         h[p-2:p-1] -> h
    ring_rows   h[p-1:p] -> h, with rows counted around the end

Along a sharded dimension, a device needs the rows that its positions come from (halo_window.py).
Most are its own, a few are its neighbours'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ...compat.operators import aten, custom_op
from ...layout.halo_window import Reach
from ..local_builder import LocalBuilder
from ..notation import Call, FactorRule, LocalForm, factors
from ..registry import rule_for, shape_argument
from ..rewrites import DECLINED, Declined, rewrite
from .view import keep_rule


def movement_rule(
    call: Call,
    reaches: Sequence[Mapping[int, Reach]],
    emit: Callable | None = None,
    *,
    moves: bool = True,
    local: LocalForm | None = None,
    **keywords: object,
) -> FactorRule:
    """Return the rule for an operation that moves rows. reaches: dimension -> Reach, by operand.

    All tensors have the result's dimensions. A single result row has no positions to shard, so
    there the operand is whole.
    """
    shape = call.results[0].shape
    names = factors("d", len(shape))
    operands = [
        [f"w{i}_{d}" if d in reach and shape[d] == 1 else names[d] for d in range(len(shape))]
        for i, reach in enumerate(reaches)
    ]
    return call.rule(
        operands,
        [names],
        dict(zip(names, shape)),
        replicated=[name for dims in operands for name in dims if name[0] == "w"],
        row_access={(i, d): r for i, reach in enumerate(reaches) for d, r in reach.items()},
        moves=moves,
        local=local or LocalForm(emit),
        **keywords,
    )


@rule_for(aten.cat.default)
def _cat(call: Call) -> FactorRule | Declined:
    rank, count = call.results[0].dim(), len(call.tensors)
    if any(t.dim() != rank for t in call.tensors):
        return DECLINED
    dim = call.argument(1, "dim", 0) % rank
    starts = list(accumulate((t.shape[dim] for t in call.tensors), initial=0))[:-1]

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
        """Select from windows of all operands; each window has all the device's positions."""
        if not local.sharded(f"d{dim}"):
            return local.call(aten.cat.default, args[0], dim)
        place, result = local.position(dim), args[0][0]
        for tensor, start in zip(args[0][1:], starts[1:]):
            is_before = local.call(aten.lt.Scalar, place, start)
            result = local.call(aten.where.self, is_before, result, tensor)
        return result

    reaches = [{dim: Reach(-start, -start)} for start in starts]
    return movement_rule(call, reaches, emit, linear=[range(count)])


@rule_for(aten.slice_scatter.default)
def _slice_scatter(call: Call) -> FactorRule:
    x, source = call.tensors
    dim, linear = call.dim(2, 0), [[0, 1]]
    start, _, step = _bounds(call, 3, x.shape[dim])
    # Rows that are written with a step have no window in the source.
    if step != 1 or source.dim() != x.dim():
        return keep_rule(call, [dim], linear=linear)
    # Not by the bounds: numbers that stand for an end and a size may be in another order in a run.
    if source.shape == x.shape:
        local = LocalForm(arguments=lambda args, _, to: ((*args[:2], 0, 0, to.operands[0][0]), {}))
        return keep_rule(call, [], linear=linear, local=local)

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
        if not local.sharded(f"d{dim}"):
            return local.call(aten.slice_scatter.default, *args, **kwargs)
        place = local.position(dim)
        inside = local.call(
            aten.logical_and.default,
            local.call(aten.ge.Scalar, place, start),
            local.call(aten.lt.Scalar, place, start + source.shape[dim]),
        )
        return local.call(aten.where.self, inside, args[1], args[0])

    reaches = [{dim: Reach(0, 0)}, {dim: Reach(-start, -start)}]
    return movement_rule(call, reaches, emit, linear=linear)


@rewrite("decompose", aten.select_scatter.default)
def _select_scatter(x: Tensor, row: Tensor, dim: int, index: int) -> Tensor | Declined:
    if not isinstance(index, int):
        return DECLINED
    dim, index = dim % x.dim(), index % x.shape[dim]
    return aten.slice_scatter(x, row.unsqueeze(dim).to(x.dtype), dim, index, index + 1)


@rule_for(aten.flip.default)
def _flip(call: Call) -> FactorRule:
    x = call.tensors[0]
    dims = {d % x.dim() for d in call.args[1]} if x.dim() else set()
    # Position p reads row size - 1 - p: mostly from the opposite device.
    reach = {d: Reach(x.shape[d] - 1, x.shape[d] - 1, -1) for d in dims}
    return movement_rule(call, [reach], linear=[[0]])


@rule_for(aten.roll.default)
def _roll(call: Call) -> FactorRule:
    x, shifts, dims = call.tensors[0], call.args[1], call.argument(2, "dims", ())
    if not dims and x.dim() == 1:
        dims = (0,)
    if not dims:  # it rolls the flattened tensor
        return keep_rule(call, range(x.dim()), linear=[[0]])
    total: dict[int, int] = {}
    for shift, d in zip(shifts, dims):
        total[d % x.dim()] = total.get(d % x.dim(), 0) - shift
    # Roll in the shorter direction.
    rows = {d: (shift + n // 2) % n - n // 2 for d, shift in total.items() if (n := x.shape[d])}

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
        """Roll the dimensions that are whole. Along others the window is the result already."""
        rest = [
            (shift, d) for shift, d in zip(shifts, dims) if not local.sharded(f"d{d % x.dim()}")
        ]
        if not rest:
            return local.call(aten.alias.default, args[0])
        return local.call(aten.roll.default, args[0], *map(list, zip(*rest)))

    reach = {d: Reach(row, row, wrap=True) for d, row in rows.items()}
    return movement_rule(call, [reach], emit, linear=[[0]])


@custom_op("ring_rows")
def ring_rows(x: Tensor, dim: int, start: int, count: int) -> Tensor:
    """Return `count` rows from row `start` on, counted around the end: a circular pad or a roll."""
    size, pieces = x.shape[dim], []
    while count:
        piece = min(count, size - start % size)
        pieces.append(x.narrow(dim, start % size, piece))
        start, count = start + piece, count - piece
    return torch.cat(pieces, dim)


@ring_rows.register_fake
def _(x: Tensor, dim: int, start: int, count: int) -> Tensor:
    return x.new_empty([*x.shape[:dim], count, *x.shape[dim + 1 :]])


@rule_for(ring_rows._opoverload)
def _ring_rows(call: Call) -> FactorRule:
    _, dim, start, _ = call.args

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
        """Return the window: along a sharded dimension, it is the result already."""
        # A window along another dimension leaves these rows to the operation.
        if not local.sharded(f"d{dim % len(call.results[0].shape)}"):
            return local.call(ring_rows._opoverload, *args)
        return local.call(aten.alias.default, args[0])

    return movement_rule(call, [{dim: Reach(start, start, wrap=True)}], emit, linear=[[0]])


def _bounds(call: Call, at: int, size: int) -> tuple[int, int, int]:
    """Return a slice's start, end and step. at: which argument is the start."""
    names = ("start", "end", "step")
    start, end, step = (call.argument(at + i, name) for i, name in enumerate(names))
    return slice(start, end, step or 1).indices(size)


@rule_for(aten.slice.Tensor)
def _slice(call: Call) -> FactorRule:
    x, dim, linear = call.tensors[0], call.dim(1, 0), [[0]]
    if call.results[0].shape == x.shape:
        # Start and end are global rows; a slice of all rows takes all local ones.
        local = LocalForm(
            arguments=lambda args, _, to: ((args[0], 0, 0, (*to.operands[0], 0)[0]), {})
        )
        return keep_rule(call, [], linear=linear, local=local, moves=True)
    start, _, step = _bounds(call, 2, x.shape[dim])

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
        if not local.sharded(f"d{dim}"):
            return local.call(aten.slice.Tensor, *args, **kwargs)
        return local.call(aten.slice.Tensor, args[0], dim, 0, local.shape(args[0])[dim], step)

    reach = {dim: Reach(start, start, step)}
    return movement_rule(call, [reach], emit, moves=step == 1, linear=linear)


@rule_for(aten.slice_backward.default)
def _slice_backward(call: Call) -> FactorRule:
    shape, linear = call.results[0].shape, [[0]]
    dim = call.args[2] % len(shape)
    start, _, step = _bounds(call, 3, shape[dim])
    if call.tensors[0].shape[dim] == 1 and len(shape):
        return keep_rule(call, [dim], linear=linear, local=shape_argument(1))

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
        """Spread the window's rows, then take the device's positions from the result."""
        if step == 1:
            return local.call(aten.alias.default, args[0])
        window, length = local.window(0, dim), local.size(f"d{dim}")
        spread = list(local.results[0].shape)
        spread[dim] = step * window.length + step - 1
        options = (spread, dim, step - 1, spread[dim], step)
        y = local.call(aten.slice_backward.default, args[0], *options)
        index = local.index(f"d{dim}")
        first = index * length - start + (step - 1) - window.first(index) * step
        return local.narrow(y, dim, first, length)

    reach = {dim: Reach(start, start, step).inverse(0.0)}
    local = shape_argument(1, emit)
    return movement_rule(call, [reach], moves=False, local=local, linear=linear)


@rule_for(aten.constant_pad_nd.default)
def _pad(call: Call) -> FactorRule | Declined:
    rank, pads, value = call.tensors[0].dim(), call.args[1], call.argument(2, "value", 0)
    if isinstance(value, complex) and value.imag:
        return DECLINED  # a window's fill is a real number
    dims = {rank - 1 - i // 2: pads[i : i + 2] for i in range(0, len(pads), 2)}

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
        """Pad the dimensions that are whole. Along others the window is the result already."""
        rest = [n for d, pad in dims.items() for n in ([0, 0] if local.sharded(f"d{d}") else pad)]
        return local.call(aten.constant_pad_nd.default, args[0], rest, *args[2:], **kwargs)

    fill = float(value.real)
    reach = {d: Reach(-pad[0], -pad[0], fill=fill) for d, pad in dims.items() if any(pad)}
    return movement_rule(call, [reach], emit, linear=[[0]] if value == 0 else ())
