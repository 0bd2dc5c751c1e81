"""Slices, pads and concatenations in a row, simplified before there are layouts.

    %s = stack([%a, %b, %c, %d])       %t = slice(%s, 0, 2, 4)          %t = stack([%c, %d])
    %z = full([3, 8], 0)               %u = cat([%x, %z])               %u[4] = full([8], 0)

A pipeline discards its first outputs. So neither they nor their gradients are collected.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import fx

from ..compat.operators import aten
from .algebra import constant_of, inserted_call, replacement_call
from .notation import Ints
from .ops.concat_slice import FEWEST_PARTS, is_plain_sum
from .ops.pointwise import named
from .rewrites import DECLINED, Declined, rewrite

MOVEMENTS = named("""
    roll flip slice.Tensor select.int unsqueeze squeeze.dim squeeze.dims view permute transpose.int
    clone
""")
# Each adds rows around its operand.
PADDING_OPS = named("constant_pad_nd slice_backward select_backward")
SLICES = (aten.slice.Tensor, aten.select.int)
CONCATENATIONS = (aten.cat.default, aten.stack.default)


@rewrite("simplify", *MOVEMENTS, *PADDING_OPS)
def _moved_constant(node: fx.Node) -> fx.Node | Declined:
    """Simplify an operation that moves a constant's rows: the result is constant."""
    number = constant_of(node.args[0])
    # A pad leaves a constant constant only if it adds the same number.
    put = (*node.args[2:], 0)[0] if node.target is aten.constant_pad_nd.default else 0
    if number is None or node.target in PADDING_OPS and number != put:
        return DECLINED
    return _full(node, number)


def _full(node: fx.Node, number: float | None) -> fx.Node:
    val = node.meta["val"]
    return replacement_call(
        node,
        aten.full.default,
        (list(val.shape), number),
        {"dtype": val.dtype, "device": val.device},
    )


# ------------------------------------------------------------------------------- concatenations


@rewrite("simplify", aten.select.int)
def _select(node: fx.Node) -> fx.Node | Declined:
    return _read_row(node, *node.args)


@rewrite("simplify", operator.getitem)
def _getitem_of_unbind(node: fx.Node) -> fx.Node | Declined:
    rows, index = node.args
    return (
        _read_row(node, rows.args[0], (*rows.args[1:], 0)[0], index)
        if rows.target is aten.unbind.int
        else DECLINED
    )


def _read_row(node: fx.Node, x: fx.Node, dim: int, index: int) -> fx.Node | Declined:
    """Return row `index` of x, read from x's operands, if that is possible."""
    shape = x.meta["val"].shape
    dim, is_constant = dim % len(shape), type(index) is int
    if constant_of(x) is not None:
        return _full(node, constant_of(x))
    if not is_constant or node.meta.get("dynamic"):
        return DECLINED
    index %= shape[dim]
    if x.target in CONCATENATIONS and (concat := concat_of(x)) and concat[0] == dim:
        operands, borders = concat[1:]
        i = next(i for i, (first, end) in enumerate(pairwise(borders)) if first <= index < end)
        return (
            operands[i]
            if x.target is aten.stack.default
            else _read_or_select(node, operands[i], dim, index - borders[i])
        )
    if flipped_dim(x) == dim:
        return _read_or_select(node, x.args[0], dim, shape[dim] - 1 - index)
    pads = pads_of(x)
    # Rows added or removed along another dimension would change the row itself.
    if pads is None or any(d != dim and any(rows) for d, rows in pads[1].items()):
        return DECLINED
    source, index = pads[0], index - pads[1].get(dim, (0, 0))[0]
    if 0 <= index < source.meta["val"].shape[dim]:
        return _read_or_select(node, source, dim, index)
    return _full(node, pads[2])


def _read_or_select(node: fx.Node, x: fx.Node, dim: int, index: int) -> fx.Node:
    """Return row `index` of x, by a new select if x has no operand to read it from."""
    row = _read_row(node, x, dim, index)
    return replacement_call(node, aten.select.int, (x, dim, index)) if row is DECLINED else row


@rewrite("simplify", aten.slice.Tensor)
def _slice_of_concat(node: fx.Node) -> fx.Node | Declined:
    """Concatenate only the operands that the slice covers, if all users of x take slices."""
    x, concat = node.args[0], concat_of(node.args[0])
    cut = pads_of(node)
    if concat is None or cut is None or concat[0] not in cut[1]:
        return DECLINED
    dim, operands, borders = concat
    before, behind = cut[1][dim]
    first, end = -before, borders[-1] + behind
    # Only whole operands: a cut through one would need a new slice.
    if first not in borders or end not in borders or first >= end:
        return DECLINED
    covered = list(operands[borders.index(first) : borders.index(end)])
    if len(covered) == 1 and x.target is aten.cat.default:
        return covered[0]
    # Another reader needs all rows, so the concatenation would stay.
    sliced = all(user.target in SLICES for user in x.users)
    return replacement_call(node, x.target, (covered, dim)) if sliced else DECLINED


def concat_of(x: fx.Node) -> tuple[int, Sequence[fx.Node], list[int]] | None:
    """Return a concatenation's (dimension, operands, borders); None for any other call.

    Operand i has the rows borders[i]:borders[i + 1].
    """
    if x.target not in CONCATENATIONS or x.kwargs or not all("val" in n.meta for n in x.args[0]):
        return None
    operands, val, dim = x.args[0], x.meta["val"], (*x.args[1:], 0)[0] % x.meta["val"].dim()
    vals = [operand.meta["val"] for operand in operands]
    if any(v.dtype != val.dtype or v.dim() != vals[0].dim() for v in vals):
        return None  # cat also takes empty tensors of one dimension
    sizes = [1 if x.target is aten.stack.default else v.shape[dim] for v in vals]
    return (dim, operands, list(accumulate(sizes, initial=0))) if all(sizes) else None


# ------------------------------------------------------------------------------ rows from behind


@rewrite("simplify", aten.flip.default)
def _rows_from_behind(node: fx.Node) -> fx.Node | Declined:
    """Put rows together from behind, as a loop over `x.flip(1)` does: a flip would exchange them.

    So its result is stack([...]), and its gradient a sum of rows among zeros, each flipped.
    """
    d, root = flipped_dim(node), node.args[0]
    if d is not None and flipped_dim(root) == d:
        return root.args[0]
    leaves, sums, stack = list[tuple[fx.Node, tuple]](), list[fx.Node](), [root]
    while stack:
        x = stack.pop()
        if d is None or len(x.users) > 1 or x.kwargs or x.meta.get("dynamic"):
            return DECLINED
        if is_plain_sum(x.target, x.kwargs) and _keeps_shape(x):
            sums.append(x)
            stack += x.args[:2]
            continue
        args = _args_from_behind(x, d)
        if args is None:
            return DECLINED
        leaves.append((x, args))
    for x in sums:  # Each is read by the next one alone, which is to have its rows from behind.
        x.meta.pop("captured", None)
    for x, args in leaves:
        new = replacement_call(x, x.target, args)
        x.replace_all_uses_with(new)
        root = new if x is root else root
    return root


def _keeps_shape(x: fx.Node) -> bool:
    shapes = [v.meta["val"].shape for v in x.args[:2] if isinstance(v, fx.Node)]
    return len(shapes) == 2 and all(shape == x.meta["val"].shape for shape in shapes)


def flipped_dim(x: fx.Node) -> int | None:
    """Return the only dimension that a call flips; None for other calls."""
    if x.target is not aten.flip.default or len(x.args[1]) != 1 or x.meta.get("dynamic"):
        return None
    return x.args[1][0] % x.meta["val"].dim()


def _args_from_behind(x: fx.Node, d: int) -> tuple | None:
    """Return arguments with which a call puts its rows together from behind, if there are some."""
    if x.target is aten.select_backward.default:
        row, sizes, dim, index = x.args
        at = sizes[d] - 1 - index % sizes[d]
        return (row, sizes, dim, at) if dim % len(sizes) == d else None
    concat = concat_of(x)
    if concat is None or concat[0] != d or concat[2] != [*range(len(concat[1]) + 1)]:
        return None
    return [*concat[1]][::-1], d


# ------------------------------------------------------------------- rows that are written in turn


@rewrite("simplify", aten.slice_scatter.default)
def _written_rows(node: fx.Node) -> fx.Node | Declined:
    """Concatenate parts that a loop writes into a tensor one by one: `out[:, i] = y`."""
    write = _write_of(node)
    if write is None or any(_write_of(u) and u.args[0] is node for u in node.users):
        return DECLINED
    d, start, end = write
    x, size, width = node, node.meta["val"].shape[d], end - start
    if size % width or size // width < FEWEST_PARTS:
        return DECLINED
    parts: dict[int, fx.Node] = {}
    while (write := _write_of(x)) is not None:
        if write[0] != d or write[2] - write[1] != width or write[1] % width:
            return DECLINED
        parts.setdefault(write[1], x.args[1])  # a later one hides those before
        x = x.args[0]
    missing = [*{*range(0, size, width)} - parts.keys()]
    if len(missing) > 1:
        return DECLINED
    for start in missing:
        shape = [*node.meta["val"].shape]
        shape[d] = width
        parts[start] = inserted_call(node, aten.slice.Tensor, (x, d, start, start + width), shape)
    numbers = {constant_of(part) for part in parts.values()}
    if len(numbers) == 1 and None not in numbers:
        return _full(node, *numbers)
    rows = [_row_of(parts[i], d) for i in sorted(parts)]
    if None not in rows:
        return replacement_call(node, aten.stack.default, (rows, d))
    return replacement_call(node, aten.cat.default, ([parts[i] for i in sorted(parts)], d))


def _row_of(part: fx.Node, d: int) -> fx.Node | None:
    """Return the row that a part of one row is made of, without its dimension d."""
    while part.target is aten.clone.default:
        part = part.args[0]
    if part.target is not aten.unsqueeze.default or part.args[1] % part.meta["val"].dim() != d:
        return None
    return part.args[0]


@rewrite("simplify", aten.slice.Tensor, aten.select.int)
def _read_written_rows(node: fx.Node) -> fx.Node | Declined:
    """Read rows from the tensor before a write to other rows, or what was written."""
    x, rest = node.args[0], node.args[1:]
    if node.kwargs or node.meta.get("dynamic") or _write_of(x) is None:
        return DECLINED
    shape = x.meta["val"].shape
    if node.target is aten.slice.Tensor:
        dim, *cut = _cut(shape, *rest)
        if not cut:
            return DECLINED
        first, last = -cut[0], shape[dim] + cut[1]
    else:
        dim, first = rest[0] % len(shape), rest[1] % shape[rest[0]]
        last = first + 1
    while (write := _write_of(x)) is not None and write[0] == dim:
        _, start, end = write
        if start <= first and last <= end:
            source, first, last = x.args[1], first - start, last - start
            if last - first == end - start and node.target is aten.slice.Tensor:
                return source
            return replacement_call(node, node.target, _places(node, source, dim, first, last))
        if start < last and first < end:
            break
        x = x.args[0]
    if x is node.args[0]:
        return DECLINED
    return replacement_call(node, node.target, _places(node, x, dim, first, last))


def _places(node: fx.Node, x: fx.Node, dim: int, first: int, last: int) -> tuple:
    return (x, dim, first, last) if node.target is aten.slice.Tensor else (x, dim, first)


def _write_of(node: fx.Node) -> tuple[int, int, int] | None:
    """Return (dimension, start, end) for a call that writes rows into a tensor, else None."""
    if node.target is not aten.slice_scatter.default or node.kwargs or node.meta.get("dynamic"):
        return None
    x, rows = (n.meta["val"] for n in node.args[:2])
    d, *cut = _cut(x.shape, *node.args[2:])
    if not cut or rows.dtype != x.dtype:
        return None
    start, end = -cut[0], x.shape[d] + cut[1]
    sizes = [*x.shape[:d], end - start, *x.shape[d + 1 :]]
    return (d, start, end) if end > start and [*rows.shape] == sizes else None


# ---------------------------------------------------------------------------- slices and pads


@rewrite("simplify", aten.slice.Tensor, aten.slice_backward.default)
def _full_slice(node: fx.Node) -> fx.Node | Declined:
    """Simplify a slice that takes all rows."""
    cut = pads_of(node)
    return (
        cut[0] if cut and not any(rows for ends in cut[1].values() for rows in ends) else DECLINED
    )


Pads = dict[int, tuple[int, int]]  # dimension -> rows added before and behind; negative: removed


@rewrite("simplify", aten.slice.Tensor, aten.slice_backward.default, aten.constant_pad_nd.default)
def _pad_and_slice(node: fx.Node) -> fx.Node | Declined:
    """Merge a pad at one end and a slice at the other, as pipelines shift their states.

    The result is one pad with a negative end.
    """
    second = pads_of(node)
    first = pads_of(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    if not first or not second or first[2] is not None and second[2] is not None:  # both add rows
        return DECLINED
    x, pads, val = (
        first[0],
        {d: (*first[1].get(d, (0, 0)), *second[1].get(d, (0, 0))) for d in first[1] | second[1]},
        node.meta["val"],
    )
    if not any(
        min(a, b) < 0 < max(c, d) or max(a, b) > 0 > min(c, d) for a, b, c, d in pads.values()
    ) or any(
        a < 0 < c or b < 0 < d for a, b, c, d in pads.values()
    ):  # one end is both cut and padded
        return DECLINED
    pads = {d: (before + more, behind + also) for d, (before, behind, more, also) in pads.items()}
    flat = [n for d in reversed(range(val.dim())) for n in pads.get(d, (0, 0))]
    if 0 in val.shape or any(
        sum(-n for n in rows if n < 0) > x.meta["val"].shape[d] for d, rows in pads.items()
    ):
        return DECLINED  # the result would be empty, or have no row of x
    return replacement_call(
        node, aten.constant_pad_nd.default, (x, flat, first[2] or second[2] or 0)
    )


def pads_of(node: fx.Node) -> tuple[fx.Node, Pads, float | None] | None:
    """Return a pad's or slice's (operand, pads, fill); None for any other call.

    fill: None if the call only removes rows.
    """
    if node.kwargs or node.op != "call_function" or node.meta.get("dynamic"):
        return None
    if node.target is aten.constant_pad_nd.default:
        rank, flat, *number = node.meta["val"].dim(), *node.args[1:]
        pads = {rank - 1 - i // 2: tuple(flat[i : i + 2]) for i in range(0, len(flat), 2)}
        return node.args[0], pads, (*number, 0)[0] if max(flat) > 0 else None
    if node.target is aten.slice.Tensor:
        d, *cut = _cut(node.args[0].meta["val"].shape, *node.args[1:])
        return (node.args[0], {d: (cut[0], cut[1])}, None) if cut else None
    if node.target is aten.slice_backward.default:
        d, *cut = _cut(node.args[1], *node.args[2:])
        return (node.args[0], {d: (-cut[0], -cut[1])}, 0) if cut else None
    return None


def _cut(
    shape: Ints, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[int, ...]:
    """Return a slice as (dimension, pad before, pad behind): x[2:7] of 8 rows is (0, -2, -1).

    A slice with a step is no pad: (dimension,).
    """
    dim %= len(shape)
    first, last, _ = slice(start, end, step).indices(shape[dim])
    return (dim, -first, last - shape[dim]) if step == 1 else (dim,)
