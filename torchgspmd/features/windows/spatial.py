"""Operations that need replicated spatial dimensions: padding by content, unpooling, grids.

Batch and channels may be sharded. If a spatial dimension is sharded, reflection and replication
pads are split into slices, flips and concatenations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, fx

from ...compat.operators import aten
from ...rules.algebra import inserted_call, replacement_call
from ...rules.algebra_rows import concat_of, pads_of
from ...rules.notation import Call, FactorRule, Sentence, Split, factors
from ...rules.ops.slicing import ring_rows
from ...rules.registry import ordered, rule, rule_for
from ...rules.rewrites import DECLINED, Declined, rewrite

_DIMS = {
    1: {"x": "... w", "y": "... v"},
    2: {"x": "... h w", "y": "... u v"},
    3: {"x": "... d h w", "y": "... t u v"},
}


def _spatial(name: str, spatial: int, operands: str, results: str, split: Callable | None) -> None:
    """Register an operation from spatial sizes x to y.

    operands, results: x or y for each tensor, such as "yx".
    """
    dims, op = _DIMS[spatial], getattr(aten, name).default
    rule(
        op,
        f"{', '.join(dims[t] for t in operands)} -> {', '.join(dims[t] for t in results)}",
        replicated=" ".join(dims.values()).replace("...", ""),
        linear=[[0]] if split else (),
        split=Split() if split else None,
    )
    if split:
        rewrite("split", op)(split)


def _pad_dims(x: Tensor, pads: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return pads as (dimension, rows before, rows behind); pads begin with the last dimension."""
    return [
        (x.dim() - 1 - i // 2, pads[i], pads[i + 1])
        for i in range(0, len(pads), 2)
        if pads[i] or pads[i + 1]
    ]


def _reflection_pad(x: Tensor, pads: Sequence[int]) -> Tensor:
    """Compute F.pad in mode "reflect" by slices, flips and concatenations. Negative pads cut."""
    for d, before, behind in _pad_dims(x, pads):
        # A reflection leaves out the border row itself.
        front = x.narrow(d, 1, max(before, 0)).flip(d)
        back = x.narrow(d, x.shape[d] - 1 - max(behind, 0), max(behind, 0)).flip(d)
        x = _surround(d, [front], x, [back], before, behind)
    return x


def _replication_pad(x: Tensor, pads: Sequence[int]) -> Tensor:
    """Compute F.pad in mode "replicate" by slices and concatenations. Negative pads cut."""
    for d, before, behind in _pad_dims(x, pads):
        front = [x.narrow(d, 0, 1)] * max(before, 0)
        back = [x.narrow(d, x.shape[d] - 1, 1)] * max(behind, 0)
        x = _surround(d, front, x, back, before, behind)
    return x


def _surround(
    d: int, front: list[Tensor], x: Tensor, back: list[Tensor], before: int, behind: int
) -> Tensor:
    """Concatenate x with pieces around it, without the rows that negative pads cut."""
    start = max(-before, 0)
    # Only negative pads cut; the others add pieces below.
    x = x.narrow(d, start, x.shape[d] - start - max(-behind, 0))
    return torch.cat([piece for piece in (*front, x, *back) if piece.shape[d]], d)


def _reflection_pad_backward(grad: Tensor, x: Tensor, pads: Sequence[int]) -> Tensor:
    """Return the gradient: each row sums its readers' gradients."""
    # The forward's steps in reverse.
    for d, before, behind in reversed(_pad_dims(x, pads)):
        n, total = x.shape[d], grad.shape[d]
        front = grad.narrow(d, 0, max(before, 0)).flip(d)
        back = grad.narrow(d, total - max(behind, 0), max(behind, 0)).flip(d)
        grad = _add_pieces(d, n, grad, before, behind, [(front, 1), (back, n - 1 - max(behind, 0))])
    return grad


def _replication_pad_backward(grad: Tensor, x: Tensor, pads: Sequence[int]) -> Tensor:
    """Return the gradient: the first and last row sum their readers' gradients."""
    for d, before, behind in reversed(_pad_dims(x, pads)):
        n, total = x.shape[d], grad.shape[d]
        pieces = [(grad.narrow(d, i, 1), 0) for i in range(max(before, 0))]
        pieces += [(grad.narrow(d, total - 1 - i, 1), n - 1) for i in range(max(behind, 0))]
        grad = _add_pieces(d, n, grad, before, behind, pieces)
    return grad


def _add_pieces(
    d: int, n: int, grad: Tensor, before: int, behind: int, pieces: list[tuple[Tensor, int]]
) -> Tensor:
    """Add pieces to the middle's gradient. Piece (x, i) starts at row i of n."""

    def pad_to_size(piece: Tensor, start: int) -> Tensor:
        pads = [0, 0] * (grad.dim() - 1 - d) + [start, n - start - piece.shape[d]]
        return aten.constant_pad_nd(piece, pads)

    first = max(before, 0)
    middle = grad.narrow(d, first, grad.shape[d] - first - max(behind, 0))
    result = pad_to_size(middle, max(-before, 0))
    for piece, start in pieces:
        result = result + pad_to_size(piece, start) if piece.shape[d] else result
    return result


for _n in (2, 3):
    _spatial(f"max_unpool{_n}d", _n, "xx", "y", None)
for _n in (1, 2, 3):
    for _mode, _forward, _backward in (
        ("reflection", _reflection_pad, _reflection_pad_backward),
        ("replication", _replication_pad, _replication_pad_backward),
    ):
        _spatial(f"{_mode}_pad{_n}d", _n, "x", "y", _forward)
        _spatial(f"{_mode}_pad{_n}d_backward", _n, "yx", "x", _backward)

for _op, _in, _out in (
    (aten.fractional_max_pool2d, "h w", "u v"),
    (aten.fractional_max_pool3d, "d h w", "t u v"),
):
    # Without and with a batch dimension.
    _sentences = [
        Sentence.parse(f"{_n}c {_in}, {_n or '1 '}c r -> {_n}c {_out}, {_n}c {_out}")
        for _n in ("", "n ")
    ]
    rule_for(_op.default)(
        lambda call, sentences=_sentences, n=len(_in.split()), names=f"{_in} r {_out}": sentences[
            call.tensors[0].dim() - n - 1
        ].bind(call, replicated=names)
    )
rule(
    aten.fractional_max_pool2d_backward.default,
    "... u v, ... h w, ... u v -> ... h w",
    replicated="h w u v",
)
rule(
    aten.fractional_max_pool3d_backward.default,
    "... t u v, ... d h w, ... t u v -> ... d h w",
    replicated="d h w t u v",
)
for _op in (
    aten.fractional_max_pool2d_backward.default,
    aten.fractional_max_pool3d_backward.default,
):
    ordered(_op, "indices")  # read as if they were contiguous

rule(aten.grid_sampler_2d.default, "n c h w, n u v r -> n c u v", replicated="h w r", linear=[[0]])
rule(
    aten.grid_sampler_3d.default,
    "n c d h w, n t u v r -> n c t u v",
    replicated="d h w r",
    linear=[[0]],
)


@rule_for(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def _grid_backward(call: Call) -> FactorRule:
    """Return the rule for the gradients of image and grid.

    The grid's gradient is a sum over channels, the image's a sum over the grid.
    """
    image, spatial = call.tensors[1], call.tensors[1].dim() - 2
    inner, outer = factors("x", spatial), factors("h", spatial)
    dims = [["n", "c", *outer], ["n", "c", *inner], ["n", *outer, "t"]]
    asked = [dims[1 if r.shape == image.shape else 2] for r in call.results]
    return call.rule(
        dims, dims[1:] if len(asked) == 2 else asked, replicated=[*inner, "t"], reduce=["c", *outer]
    )


# Rows around the end of a dimension, as in longitude: F.pad(mode="circular"), and by hand.
#
# cat([%x[.., 63:], %x, %x[.., :1]], -1)          ring_rows(%x, -1, -1, 66)
#
# The gradient of such a pad adds the rows at both ends to those at the opposite ends. If they are a
# convolution's gradient %g, of %dy with as many positions a row of %x, the convolution does so
# itself where it reads %dy around the end:
#
#     %g[.., 1:-1] + (%g's ends)          convolution(ring_rows(%dy, ..), transposed)
#
# Each is one halo exchange round the ring.


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
