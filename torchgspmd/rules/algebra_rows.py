"""Rows that are taken, put around or joined: known of what they are made of, before any layout is.

    %s = stack([%a, %b, %c, %d])       %t = slice(%s, 0, 2, 4)          %t = stack([%c, %d])
    %z = full([3, 8], 0)               %u = cat([%x, %z])               %u[4] = full([8], 0)

So a pipeline's outputs of which the first ones are thrown away are not collected, neither is a
gradient of them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import fx

from ..compat.operators import aten
from .algebra import filled, instead, simplification

MOVING = (
    aten.roll.default,
    aten.flip.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.clone.default,
)
PUTTING = (
    aten.constant_pad_nd.default,
    aten.slice_backward.default,
    aten.select_backward.default,
)  # rows of zeros around
TAKING = (aten.slice.Tensor, aten.select.int)
JOINING = (aten.cat.default, aten.stack.default)


def _moved_number(node: fx.Node) -> fx.Node | None:
    """Whatever is moved, if it is one number everywhere."""
    number = filled(node.args[0])
    put = (*node.args[2:], 0)[0] if node.target is aten.constant_pad_nd.default else 0
    if number is None or node.target in PUTTING and number != put:
        return None
    return _full(node, number)


for _op in MOVING + PUTTING:
    simplification(_op)(_moved_number)


def _full(node: fx.Node, number: float) -> fx.Node:
    val = node.meta["val"]
    return instead(
        node,
        aten.full.default,
        (list(val.shape), number),
        {"dtype": val.dtype, "device": val.device},
    )


# ------------------------------------------------------------------------------------------ joined rows


@simplification(aten.select.int)
def _row(node: fx.Node) -> fx.Node | None:
    return _row_of(node, *node.args)


@simplification(operator.getitem)
def _row_by_row(node: fx.Node) -> fx.Node | None:
    rows, index = node.args
    return (
        _row_of(node, rows.args[0], (*rows.args[1:], 0)[0], index)
        if rows.target is aten.unbind.int
        else None
    )


def _row_of(node: fx.Node, x: fx.Node, dim: int, index: int) -> fx.Node | None:
    """The node's value, which is a row of x, made of what x is made of."""
    shape = x.meta["val"].shape
    dim, known = dim % len(shape), type(index) is int
    if filled(x) is not None:
        return _full(node, filled(x))
    if not known or node.meta.get("dynamic"):
        return None
    index %= shape[dim]
    if x.target in JOINING and (joined := _joined(x)) and joined[0] == dim:
        parts, borders = joined[1:]
        i = next(i for i, (first, end) in enumerate(pairwise(borders)) if first <= index < end)
        return (
            parts[i]
            if x.target is aten.stack.default
            else _taken(node, parts[i], dim, index - borders[i])
        )
    pads = _pads(x)
    if pads is None or any(d != dim and any(rows) for d, rows in pads[1].items()):
        return None
    source, index = pads[0], index - pads[1].get(dim, (0, 0))[0]
    if 0 <= index < source.meta["val"].shape[dim]:
        return _taken(node, source, dim, index)
    return _full(node, pads[2])


def _taken(node: fx.Node, x: fx.Node, dim: int, index: int) -> fx.Node:
    return _row_of(node, x, dim, index) or instead(node, aten.select.int, (x, dim, index))


@simplification(aten.slice.Tensor)
def _some_of_the_joined(node: fx.Node) -> fx.Node | None:
    """Only those parts, if nothing else asks for the others."""
    x, joined = node.args[0], _joined(node.args[0])
    taken = _pads(node)
    if (
        joined is None
        or taken is None
        or not all(user.target in TAKING for user in x.users)
        or joined[0] not in taken[1]
    ):
        return None
    dim, parts, borders = joined
    before, behind = taken[1][dim]
    first, end = -before, borders[-1] + behind
    if first not in borders or end not in borders or first >= end:
        return None
    some = list(parts[borders.index(first) : borders.index(end)])
    return (
        some[0]
        if len(some) == 1 and x.target is aten.cat.default
        else instead(node, x.target, (some, dim))
    )


def _joined(x: fx.Node) -> tuple[int, Sequence[fx.Node], list[int]] | None:
    """The dimension along which tensors are joined, these, and where each begins in it, and where
    the last one ends.
    """
    if x.target not in JOINING or x.kwargs or not all("val" in part.meta for part in x.args[0]):
        return None
    parts, val, dim = x.args[0], x.meta["val"], (*x.args[1:], 0)[0] % x.meta["val"].dim()
    vals = [part.meta["val"] for part in parts]
    if any(v.dtype != val.dtype or v.dim() != vals[0].dim() for v in vals):
        return None  # cat takes tensors of no rows and no dimensions too
    sizes = [1 if x.target is aten.stack.default else v.shape[dim] for v in vals]
    return (dim, parts, list(accumulate(sizes, initial=0))) if all(sizes) else None


# ------------------------------------------------------------------------------------------ rows cut off, and put around


@simplification(aten.slice.Tensor)
@simplification(aten.slice_backward.default)
def _all_rows(node: fx.Node) -> fx.Node | None:
    """What a slice is taken of that takes all of it."""
    taken = _pads(node)
    return (
        taken[0] if taken and not any(rows for cut in taken[1].values() for rows in cut) else None
    )


Pads = dict[int, tuple[int, int]]  # dimension -> rows put before and behind; negative: cut off


@simplification(aten.slice.Tensor)
@simplification(aten.slice_backward.default)
@simplification(aten.constant_pad_nd.default)
def _moved_rows(node: fx.Node) -> fx.Node | None:
    """Rows that are put to one end and cut off at the other one, as pipelines shift their states:
    one operation, of one size.
    """
    second = _pads(node)
    first = _pads(node.args[0]) if second and isinstance(node.args[0], fx.Node) else None
    if first is None or first[2] is not None and second[2] is not None:  # both put rows
        return None
    x, pads, val = (
        first[0],
        {d: (*first[1].get(d, (0, 0)), *second[1].get(d, (0, 0))) for d in first[1] | second[1]},
        node.meta["val"],
    )
    if not any(
        min(a, b) < 0 < max(c, d) or max(a, b) > 0 > min(c, d) for a, b, c, d in pads.values()
    ) or any(
        a < 0 < c or b < 0 < d for a, b, c, d in pads.values()
    ):  # rows are cut off an end, and others put there
        return None
    pads = {d: (before + more, behind + also) for d, (before, behind, more, also) in pads.items()}
    flat = [n for d in reversed(range(val.dim())) for n in pads.get(d, (0, 0))]
    if 0 in val.shape or any(
        sum(-n for n in rows if n < 0) > x.meta["val"].shape[d] for d, rows in pads.items()
    ):
        return None  # nothing is left, or nothing of x
    return instead(node, aten.constant_pad_nd.default, (x, flat, first[2] or second[2] or 0))


def _pads(node: fx.Node) -> tuple[fx.Node, Pads, float | None] | None:
    """What rows are put around, or cut off (then there is no number), how many, and what they hold;
    None if something else is done.
    """
    if node.kwargs or node.op != "call_function" or node.meta.get("dynamic"):
        return None
    if node.target is aten.constant_pad_nd.default:
        rank, flat, *number = node.meta["val"].dim(), *node.args[1:]
        pads = {rank - 1 - i // 2: tuple(flat[i : i + 2]) for i in range(0, len(flat), 2)}
        return node.args[0], pads, (*number, 0)[0] if max(flat) > 0 else None
    if node.target is aten.slice.Tensor:
        d, *cut = _cut(node.args[0].meta["val"].shape, *node.args[1:])
        return (node.args[0], {d: tuple(cut)}, None) if cut else None
    if node.target is aten.slice_backward.default:
        d, *cut = _cut(node.args[1], *node.args[2:])
        return (node.args[0], {d: tuple(-rows for rows in cut)}, 0) if cut else None
    return None


def _cut(
    shape: Sequence[int],
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> tuple[int, ...]:
    """The dimension of a slice, and, unless it leaves rows out between, what it takes from the
    ends, as negative numbers.
    """
    dim %= len(shape)
    first, last, _ = slice(start, end, step).indices(shape[dim])
    return (dim, -first, last - shape[dim]) if step == 1 else (dim,)
