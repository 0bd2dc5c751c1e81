"""Rows around the end of a dimension, as in longitude: F.pad(mode="circular"), and by hand.

cat([%x[.., 63:], %x, %x[.., :1]], -1)          ring_rows(%x, -1, -1, 66)

The gradient of such a pad adds the rows at both ends to those at the opposite ends. If they are a
convolution's gradient %g, of %dy with as many positions a row of %x, the convolution does so itself
where it reads %dy around the end:

    %g[.., 1:-1] + (%g's ends)          convolution(ring_rows(%dy, ..), transposed)

Each is one halo exchange round the ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import fx

from ...compat.operators import aten
from ...rules.algebra import inserted_call, replacement_call
from ...rules.algebra_rows import concat_of, pads_of
from ...rules.ops.slicing import ring_rows
from ...rules.rewrites import DECLINED, Declined, rewrite

_CONVOLUTION = aten.convolution.default


@rewrite("simplify", aten.cat.default)
def _rows_around_the_end(node: fx.Node) -> fx.Node | Declined:
    """Join consecutive rows of one tensor, whose first row follows its last, by one operation."""
    concat = concat_of(node)
    if concat is None or len(concat[1]) < 2:
        return DECLINED
    dim, operands, _ = concat
    pieces = [_rows_of(operand, dim) for operand in operands]
    source = next((x for x, *_ in pieces if x in operands), pieces[0][0])
    size = source.meta["val"].shape[dim]
    # Rows start:end of the source; the source itself is all its rows.
    rows = [(0, size) if operand is source else cut for operand, (_, *cut) in zip(operands, pieces)]
    known = (operand is source or piece[0] is source for operand, piece in zip(operands, pieces))
    if not all(known) or any((end - start) % size for (_, end), (start, _) in pairwise(rows)):
        return DECLINED
    if not any(end == size for _, end in rows[:-1]):
        return DECLINED  # it does not go around the end
    count = node.meta["val"].shape[dim]
    # In the shorter direction.
    start = (rows[0][0] + size // 2) % size - size // 2
    return _ring(node, source, dim, start, count)


def _rows_of(x: fx.Node, dim: int) -> tuple[fx.Node, int, int]:
    """Return (tensor, start, end) if x is a slice of rows, else x with all its rows."""
    pads = pads_of(x)
    if pads is None or {*pads[1]} != {dim} or max(pads[1][dim]) > 0:
        return x, 0, x.meta["val"].shape[dim]
    before, behind = pads[1][dim]
    return pads[0], -before, pads[0].meta["val"].shape[dim] + behind


def _ring(node: fx.Node, x: fx.Node, dim: int, start: int, count: int) -> fx.Node:
    """Insert a call of ring_rows before a node."""
    shape = list(x.meta["val"].shape)
    shape[dim] = count
    return inserted_call(node, ring_rows._opoverload, (x, dim, start, count), shape)


@rewrite("simplify", aten.add.Tensor)
def _gradient_around_the_end(node: fx.Node) -> fx.Node | Declined:
    """Replace a pad's gradient by a convolution that adds the rows at the ends itself."""
    if node.kwargs or _is_summand(node):
        return DECLINED
    terms = list(_terms(node))
    for term in terms:
        pad = _one_pad(term)
        if pad is None:
            continue
        source, ((dim, (before, behind)),) = pad[0], pad[1].items()
        size = node.meta["val"].shape[dim]
        # The middle, and the ends that a pad has: rows before the first, and behind the last.
        parts = [(before, behind)]
        parts += [(before + size, behind - size)] * (before < 0)
        parts += [(before - size, behind + size)] * (behind < 0)
        if max(before, behind) > 0 or len(parts) < 2:
            continue
        found = [
            next((t for t in terms if _one_pad(t) == (source, {dim: part})), None) for part in parts
        ]
        if None in found:
            continue
        total = _convolved(node, source, dim, -before, size)
        if total is None:
            continue
        for other in (t for t in terms if t not in found):
            total = replacement_call(node, aten.add.Tensor, (other, total))
        return total
    return DECLINED


def _is_summand(node: fx.Node) -> bool:
    """Return whether a node is read by one other addition of its size: that has all terms."""
    users = [*node.users]
    return (
        len(users) == 1
        and users[0].target is aten.add.Tensor
        and not users[0].kwargs
        and users[0].meta["val"].shape == node.meta["val"].shape
    )


def _terms(node: fx.Node) -> Iterator[fx.Node]:
    for x in node.args:
        if isinstance(x, fx.Node) and x.target is aten.add.Tensor and not x.kwargs:
            if _is_summand(x):
                yield from _terms(x)
                continue
        yield x


def _one_pad(term: object) -> tuple[fx.Node, dict[int, tuple[int, int]]] | None:
    """Return (tensor, pads) if a term is a tensor with rows cut off, or with zeros instead."""
    pads = pads_of(term) if isinstance(term, fx.Node) else None
    if pads is None or pads[2] not in (None, 0):
        return None
    changed = {d: rows for d, rows in pads[1].items() if any(rows)}
    return (pads[0], changed) if len(changed) == 1 else None


def _convolved(node: fx.Node, grad: fx.Node, dim: int, before: int, size: int) -> fx.Node | None:
    """Return the gradient with its ends added, by a convolution that reads around the end.

    grad: of the padded rows. before: rows that the pad put before `size` rows.
    """
    pads = pads_of(grad) if grad.target is aten.constant_pad_nd.default else None
    if pads is not None and pads[2] in (None, 0) and not any(pads[1].get(dim, ())):
        # A pad along other dimensions.
        inner = _convolved(node, pads[0], dim, before, size)
        shape = list(grad.meta["val"].shape)
        shape[dim] = size
        return inner and inserted_call(node, grad.target, (inner, *grad.args[1:]), shape)
    if grad.target is not _CONVOLUTION or not grad.args[6]:
        return None
    y, w, bias, stride, padding, dilation, _, rest, groups = grad.args
    i, rank = dim - 2, grad.meta["val"].dim()
    if i < 0 or bias is not None or grad.meta["val"].dim() != w.meta["val"].dim():
        return None
    stride, padding, dilation, rest = (
        list(v) * (rank - 2 if len(v) == 1 else 1) for v in (stride, padding, dilation, rest)
    )
    count, s = y.meta["val"].shape[dim], stride[i]
    span = dilation[i] * (w.meta["val"].shape[dim] - 1)
    # Positions and rows go around together only if a turn has `count` positions.
    if padding[i] or size != s * count:
        return None
    first, last = -(-max(span - before, 0) // s), -(-before // s)
    # The convolution leaves out as many rows at both ends, and at the end `more` fewer.
    crop = before + first * s
    more = crop + before - s * (last - 1) - span - 1
    if not 0 <= more < max(s, dilation[i]) or max(first, last) > count:
        return None
    padding[i], rest[i] = crop, more
    ring = _ring(node, y, dim, -first, first + count + last)
    shape = list(grad.meta["val"].shape)
    shape[dim] = size
    options = (bias, stride, padding, dilation, True, rest, groups)
    return inserted_call(node, _CONVOLUTION, (ring, w, *options), shape)
