"""Operations whose result is there already: what a graph of several of them computes, known without any communication."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..annotate import mark_sharding_op
from .scan import suffix_sums

aten = torch.ops.aten
MARK = mark_sharding_op._opoverload
SIMPLIFICATIONS: dict[Any, list[Callable[[fx.Node], fx.Node | None]]] = {}


def simplified(node: fx.Node) -> fx.Node | None:
    """The node that holds the same value, if one is known."""
    found = (function(node) for function in SIMPLIFICATIONS.get(node.target, ()))
    return next((same for same in found if same is not None), None)


def simplification(op: Any) -> Callable:
    """Registers a function from a node with val on it and on what it takes."""
    def register(function: Callable) -> Callable:
        SIMPLIFICATIONS.setdefault(op, []).append(function)
        return function
    return register


@simplification(aten.sum.dim_IntList)
def _sum_of_one_entry(node: fx.Node) -> fx.Node | None:
    """The sum over rows of zeros with one entry put into each: the entries. (Of a label's gradient, in a softmax's backward.)"""
    x, dims = node.args[0], node.args[1]
    if x.target is not aten.scatter.src or not dims or len(dims) != 1 or len(node.args) < 3 or not node.args[2] or node.kwargs:
        return None
    zeros, dim, index, entries = x.args
    shape = list(x.meta["val"].shape)
    dim %= len(shape)
    one = [*shape[:dim], 1, *shape[dim + 1:]]
    fits = dims[0] % len(shape) == dim and list(index.meta["val"].shape) == list(entries.meta["val"].shape) == one
    return entries if fits and zeros.target is aten.full.default and zeros.args[1] == 0 else None


def _filled(node: fx.Node) -> Any:
    """The number that a value has everywhere; None if it has none."""
    while node.target is MARK:
        node = node.args[0]
    return node.args[1] if node.target is aten.full.default else None


@simplification(aten.flip.default)
def _sums_from_behind(node: fx.Node) -> fx.Node | None:
    """The gradient of cumsum turns rows around twice; a device need not have any but its own for that."""
    scan, rank = node.args[0], node.meta["val"].dim()
    if scan.target is not aten.cumsum.default or scan.kwargs or scan.args[0].target is not aten.flip.default:
        return None
    dims = {d % rank for found in (node.args[1], scan.args[1:], scan.args[0].args[1]) for d in found}
    x, val = scan.args[0].args[0], node.meta["val"]
    if len(dims) > 1 or x.meta["val"].dtype != val.dtype:
        return None
    with node.graph.inserting_before(node):
        made = node.graph.call_function(suffix_sums._opoverload, (x, *dims))
    made.meta = dict(node.meta)
    return made


@simplification(aten.roll.default)
@simplification(aten.flip.default)
def _moved_rows_of_one_number(node: fx.Node) -> fx.Node | None:
    return node.args[0] if _filled(node.args[0]) is not None else None


@simplification(aten.slice.Tensor)
@simplification(aten.constant_pad_nd.default)
def _rows_of_one_number(node: fx.Node) -> fx.Node | None:
    number, val = _filled(node.args[0]), node.meta["val"]
    if number is None or node.target is aten.constant_pad_nd.default and number != (*node.args[2:], 0)[0]:
        return None
    with node.graph.inserting_before(node):
        made = node.graph.call_function(aten.full.default, (list(val.shape), number), {"dtype": val.dtype, "device": val.device})
    made.meta = dict(node.meta)
    return made


@simplification(aten.slice.Tensor)
@simplification(aten.slice_backward.default)
def _all_rows(node: fx.Node) -> fx.Node | None:
    """What a slice is taken of that takes all of it."""
    taken = _pads(node)
    return taken[0] if taken and not any(rows for cut in taken[1].values() for rows in cut) else None


Pads = dict[int, tuple[int, int]]       # dimension -> rows put before and behind; negative: cut off


@simplification(aten.slice.Tensor)
@simplification(aten.constant_pad_nd.default)
def _moved_rows(node: fx.Node) -> fx.Node | None:
    """Rows that are put to one end and cut off at the other one, as pipelines shift their states: one operation, of one size."""
    second = _pads(node)
    first = _pads(node.args[0]) if second and second[2] is None and isinstance(node.args[0], fx.Node) else None
    if first is None or not any(max(first[1].get(d, (0, 0))) > 0 for d in second[1]):
        return None
    x, pads, val = first[0], dict(first[1]), node.meta["val"]
    for d, (before, behind) in second[1].items():
        pads[d] = tuple(map(sum, zip(pads.get(d, (0, 0)), (before, behind))))
    flat = [n for d in reversed(range(val.dim())) for n in pads.get(d, (0, 0))]
    if 0 in val.shape or any(sum(-n for n in rows if n < 0) > x.meta["val"].shape[d] for d, rows in pads.items()):
        return None                                                         # nothing is left, or nothing of x
    with node.graph.inserting_before(node):
        made = node.graph.call_function(aten.constant_pad_nd.default, (x, flat, first[2] or 0))
    made.meta = dict(node.meta)
    return made


def _pads(node: fx.Node) -> tuple[fx.Node, Pads, float | None] | None:
    """What rows are put around, or cut off (then there is no number), how many, and what they hold; None if something else is done."""
    if node.kwargs or node.op != "call_function" or node.meta.get("dynamic"):
        return None
    if node.target is aten.constant_pad_nd.default:
        rank, flat, *number = node.meta["val"].dim(), *node.args[1:]
        pads = {rank - 1 - i // 2: tuple(flat[i:i + 2]) for i in range(0, len(flat), 2)}
        return node.args[0], pads, (*number, 0)[0] if max(flat) > 0 else None
    if node.target is aten.slice.Tensor:
        d, *cut = _cut(node.args[0].meta["val"].shape, *node.args[1:])
        return (node.args[0], {d: tuple(cut)}, None) if cut else None
    if node.target is aten.slice_backward.default:
        d, *cut = _cut(node.args[1], *node.args[2:])
        return (node.args[0], {d: tuple(-rows for rows in cut)}, 0) if cut else None
    return None


def _cut(shape: Sequence[int], dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> tuple[int, ...]:
    """The dimension of a slice, and, unless it leaves rows out between, what it takes from the ends, as negative numbers."""
    dim %= len(shape)
    first, last, _ = slice(start, end, step).indices(shape[dim])
    return (dim, -first, last - shape[dim]) if step == 1 else (dim,)
