"""Operations that move rows along a dimension: slices, pads, flips, rolls, concatenations.

    x[1:61]     h[p+1:p+2] -> h         flip        h[-p+63:-p+64] -> h
    x[::2]      h[2p:2p+1] -> h         cat         h[p:p+1], h[p-8:p-7] -> h
    pad         h[p-2:p-1] -> h

Along a sharded dimension, a device needs the rows that its positions come from (halo.py). Most are
its own, a few are its neighbours'. Reflection and replication pads are concatenations of slices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...compat.operators import aten
from ...halo import Reach
from ..local_builder import LocalBuilder
from ..notation import Call, Rule, Shapes, make_rule
from ..registry import rule_for, shape_argument
from .view import keep_rule


def movement_rule(
    call: Call, reaches: Sequence[Mapping[int, Reach]], only: bool = True, **keywords: Any
) -> Rule:
    """Return the rule of an operation that moves rows. reaches: dimension -> Reach, by operand.

    All tensors have the result's dimensions. A result of one row has no positions to shard, so
    there the operand is whole. only: whether each row of the result is a row of an operand, or a
    pad.
    """
    shape = call.results[0].shape
    names = [(f"d{i}",) for i in range(len(shape))]
    sizes = {f"d{i}": n for i, n in enumerate(shape)}
    operands, whole = [], []
    for i, (tensor, reach) in enumerate(zip(call.tensors, reaches)):
        single = [d for d in reach if shape[d] == 1]
        operands.append([(f"w{i}_{d}",) if d in single else names[d] for d in range(len(shape))])
        sizes |= {f"w{i}_{d}": tensor.shape[d] for d in single}
        whole += [f"w{i}_{d}" for d in single]
    moves = {(i, d): r for i, reach in enumerate(reaches) for d, r in reach.items()}
    halo = {(i, d): r for (i, d), r in moves.items() if shape[d] > 1}
    return make_rule(
        operands,
        [names],
        sizes,
        whole=" ".join(whole),
        halo=halo,
        moves=moves if only else None,
        **keywords,
    )


@rule_for(aten.cat.default)
def _cat(call: Call) -> Rule | None:
    rank = call.results[0].dim()
    if any(t.dim() != rank for t in call.tensors):
        return None
    dim, start, reaches = call.argument(1, "dim", 0) % rank, 0, []
    for tensor in call.tensors:
        reaches.append({dim: Reach(-start, -start)})
        start += tensor.shape[dim]
    return movement_rule(call, reaches, linear=[list(range(len(call.tensors)))], emit=_emit_cat)


def _emit_cat(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
    """Select from windows of all operands, each of which has all of the device's positions."""
    tensors, rank = args[0], len(local.results[0].shape)
    dim = ((args[1] if len(args) > 1 else kwargs.get("dim", 0)) or 0) % rank
    if not local.sharded(f"d{dim}"):
        return [local.call(aten.cat.default, tensors, dim)]
    place, result = local.position(dim), tensors[0]
    for i, tensor in enumerate(tensors[1:], 1):
        result = local.call(
            aten.where.self,
            local.call(aten.lt.Scalar, place, -local.rule.moves[i, dim].low),
            result,
            tensor,
        )
    return [result]


@rule_for(aten.slice_scatter.default)
def _slice_scatter(call: Call) -> Rule:
    x, dim = call.tensors[0], call.argument(2, "dim", 0) % call.tensors[0].dim()
    start, end, step = _bounds(call, dim, 3, x.shape[dim])
    if step != 1 or call.tensors[1].dim() != x.dim():
        return keep_rule(call, [dim], linear=[[0, 1]])
    if end - start == x.shape[dim]:
        return keep_rule(call, [], linear=[[0, 1]], local=_whole_scatter)
    return movement_rule(
        call,
        [{dim: Reach(0, 0)}, {dim: Reach(-start, -start)}],
        linear=[[0, 1]],
        emit=_emit_slice_scatter,
    )


def _whole_scatter(args: tuple, kwargs: dict, shapes: Shapes) -> tuple[tuple, dict]:
    return (*args[:2], 0, 0, shapes.operands[0][0]), {}


def _emit_slice_scatter(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % len(local.results[0].shape)
    if not local.sharded(f"d{dim}"):
        return [local.call(aten.slice_scatter.default, *args, **kwargs)]
    start = -local.rule.moves[1, dim].low
    end = start + local.global_shape(1)[dim]
    place = local.position(dim)
    inside = local.call(
        aten.logical_and.default,
        local.call(aten.ge.Scalar, place, start),
        local.call(aten.lt.Scalar, place, end),
    )
    return [local.call(aten.where.self, inside, args[1], args[0])]


@rule_for(aten.flip.default)
def _flip(call: Call) -> Rule:
    x = call.tensors[0]
    dims = {d % x.dim() for d in call.args[1]} if x.dim() else set()
    return movement_rule(
        call, [{d: Reach(x.shape[d] - 1, x.shape[d] - 1, -1) for d in dims}], linear=[[0]]
    )


@rule_for(aten.roll.default)
def _roll(call: Call) -> Rule:
    x, shifts, dims = call.tensors[0], call.args[1], call.argument(2, "dims", ())
    if not dims:  # a roll of the flattened tensor
        return keep_rule(call, range(x.dim()), linear=[[0]])
    total: dict[int, int] = {}
    for shift, d in zip(shifts, dims):
        total[d % x.dim()] = total.get(d % x.dim(), 0) - shift
    # Roll in the shorter direction.
    rows = {d: (shift + n // 2) % n - n // 2 for d, shift in total.items() if (n := x.shape[d])}
    return movement_rule(
        call,
        [{d: Reach(row, row, wrap=True) for d, row in rows.items()}],
        linear=[[0]],
        emit=_emit_roll,
    )


def _emit_roll(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
    """Roll the dimensions that are whole. Along others the window is the result already."""
    rank = len(local.results[0].shape)
    rest = [(shift, d) for shift, d in zip(args[1], args[2]) if not local.sharded(f"d{d % rank}")]
    return [
        local.call(aten.roll.default, args[0], [shift for shift, _ in rest], [d for _, d in rest])
        if rest
        else local.call(aten.alias.default, args[0])
    ]


def _bounds(call: Call, dim: int, at: int, size: int) -> tuple[int, int, int]:
    """Return start, end and step of a slice. at: which argument is its start."""
    start, end, step = (
        call.argument(at + i, name) for i, name in enumerate(("start", "end", "step"))
    )
    return slice(start, end, step or 1).indices(size)


@rule_for(aten.slice.Tensor)
def _slice(call: Call) -> Rule:
    x, dim = call.tensors[0], call.argument(1, "dim", 0) % call.tensors[0].dim()
    if call.results[0].shape == x.shape:
        return keep_rule(call, [], linear=[[0]], local=_whole_slice, moves={})
    start, _, step = _bounds(call, dim, 2, x.shape[dim])
    return movement_rule(
        call, [{dim: Reach(start, start, step)}], linear=[[0]], only=step == 1, emit=_emit_slice
    )


def _whole_slice(args: tuple, kwargs: dict, shapes: Shapes) -> tuple[tuple, dict]:
    return (args[0], 0, 0, shapes.operands[0][0] if shapes.operands[0] else 0), {}


def _emit_slice(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(local.results[0].shape)
    if not local.sharded(f"d{dim}"):
        return [local.call(aten.slice.Tensor, *args, **kwargs)]
    return [
        local.call(aten.slice.Tensor, args[0], dim, 0, local.shape(args[0])[dim], _step(local, dim))
    ]


def _step(local: LocalBuilder, dim: int) -> int:
    return local.rule.halo[0, dim].stride if (0, dim) in local.rule.halo else 1


@rule_for(aten.slice_backward.default)
def _slice_backward(call: Call) -> Rule:
    rank, dim = call.results[0].dim(), call.args[2] % call.results[0].dim()
    start, _, step = _bounds(call, dim, 3, call.results[0].shape[dim])
    if call.tensors[0].shape[dim] == 1 and rank:
        return keep_rule(call, [dim], linear=[[0]], local=shape_argument(1))
    return movement_rule(
        call,
        [{dim: Reach(start, start, step).inverse(0.0)}],
        only=False,
        linear=[[0]],
        local=shape_argument(1),
        emit=_emit_slice_backward,
    )


def _emit_slice_backward(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
    """Spread the window's rows, then take the device's positions out of the result."""
    dim = args[2] % len(local.results[0].shape)
    window, length, step = (
        local.window(0, dim),
        local.size(f"d{dim}"),
        local.rule.halo[0, dim].every,
    )
    start = -local.rule.halo[0, dim].high
    if step == 1:
        return [local.call(aten.alias.default, args[0])]
    shape = list(local.results[0].shape)
    shape[dim] = step * window.length + step - 1
    spread = local.call(
        aten.slice_backward.default, args[0], shape, dim, step - 1, shape[dim], step
    )
    index = local.index(f"d{dim}")
    return [
        local.narrow(
            spread, dim, index * length - start + (step - 1) - window.first(index) * step, length
        )
    ]


@rule_for(aten.constant_pad_nd.default)
def _pad(call: Call) -> Rule | None:
    rank, pads, value = call.tensors[0].dim(), call.args[1], call.argument(2, "value", 0)
    if isinstance(value, complex) and value.imag:
        return None  # the fill of a window is a real number
    fill = float(value.real)
    reaches = {
        rank - 1 - i // 2: Reach(-pads[i], -pads[i], fill=fill)
        for i in range(0, len(pads), 2)
        if pads[i] or pads[i + 1]
    }
    return movement_rule(call, [reaches], linear=[[0]] if value == 0 else (), emit=_emit_pad)


def _emit_pad(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
    """Pad the dimensions that are whole. Along others the window is the result already."""
    rank, pads = len(local.results[0].shape), list(args[1])
    for i in range(0, len(pads), 2):
        if local.sharded(f"d{rank - 1 - i // 2}"):
            pads[i : i + 2] = [0, 0]
    return [local.call(aten.constant_pad_nd.default, args[0], pads, *args[2:], **kwargs)]


def _pad_dims(x: Tensor, pads: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (dimension, rows before, rows behind) of pads, which begin with the last dimension."""
    return [
        (x.dim() - 1 - i // 2, pads[i], pads[i + 1])
        for i in range(0, len(pads), 2)
        if pads[i] or pads[i + 1]
    ]


def reflection_pad(x: Tensor, pads: Sequence[int]) -> Tensor:
    """Compute F.pad in mode "reflect" by slices, flips and concatenations. Negative pads cut."""
    for d, before, behind in _pad_dims(x, pads):
        n = x.shape[d]
        front, back = (
            x.narrow(d, 1, max(before, 0)).flip(d),
            x.narrow(d, n - 1 - max(behind, 0), max(behind, 0)).flip(d),
        )
        x = _concat(
            d, [front], x.narrow(d, max(-before, 0), n - max(-before, 0) - max(-behind, 0)), [back]
        )
    return x


def replication_pad(x: Tensor, pads: Sequence[int]) -> Tensor:
    """Compute F.pad in mode "replicate" by slices and concatenations. Negative pads cut."""
    for d, before, behind in _pad_dims(x, pads):
        n = x.shape[d]
        front, back = [x.narrow(d, 0, 1)] * max(before, 0), [x.narrow(d, n - 1, 1)] * max(behind, 0)
        x = _concat(
            d, front, x.narrow(d, max(-before, 0), n - max(-before, 0) - max(-behind, 0)), back
        )
    return x


def _concat(d: int, front: list, x: Tensor, back: list) -> Tensor:
    return torch.cat([piece for piece in (*front, x, *back) if piece.shape[d]], d)


def reflection_pad_backward(grad: Tensor, x: Tensor, pads: Sequence[int]) -> Tensor:
    """Return the gradient: each row sums what was read from it."""
    for d, before, behind in reversed(_pad_dims(x, pads)):
        n, total = x.shape[d], grad.shape[d]
        front = grad.narrow(d, 0, max(before, 0)).flip(d)
        back = grad.narrow(d, total - max(behind, 0), max(behind, 0)).flip(d)
        grad = _add_pieces(d, n, grad, before, behind, [(front, 1), (back, n - 1 - max(behind, 0))])
    return grad


def replication_pad_backward(grad: Tensor, x: Tensor, pads: Sequence[int]) -> Tensor:
    """Return the gradient: the first and last row sum what was read from them."""
    for d, before, behind in reversed(_pad_dims(x, pads)):
        n, total = x.shape[d], grad.shape[d]
        pieces = [(grad.narrow(d, i, 1), 0) for i in range(max(before, 0))]
        pieces += [(grad.narrow(d, total - 1 - i, 1), n - 1) for i in range(max(behind, 0))]
        grad = _add_pieces(d, n, grad, before, behind, pieces)
    return grad


def _add_pieces(
    d: int,
    n: int,
    grad: Tensor,
    before: int,
    behind: int,
    pieces: list[tuple[Tensor, int]],
) -> Tensor:
    """Add pieces to the gradient of the middle. Piece (x, i) starts at row i of n."""

    def pad_to_size(piece: Tensor, start: int) -> Tensor:
        return aten.constant_pad_nd(
            piece, [0, 0] * (grad.dim() - 1 - d) + [start, n - start - piece.shape[d]]
        )

    result = pad_to_size(
        grad.narrow(d, max(before, 0), grad.shape[d] - max(before, 0) - max(behind, 0)),
        max(-before, 0),
    )
    for piece, start in pieces:
        result = result + pad_to_size(piece, start) if piece.shape[d] else result
    return result
