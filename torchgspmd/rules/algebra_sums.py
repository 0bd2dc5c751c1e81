"""Sums along a dimension that follow from smaller values, or from a sum that the graph has.

sum(scatter_add(0, -1, %i, %g), [-1], True)     sum(%g, [-1], True)
sum(mul(%e / %s, %w), [-1], True)               %s / %s * %w      with %s = sum(%e, [-1], True)
sum(exp(%x - log(%s)), [-1], True)              %s / %s           with %s = sum(exp(%x), [-1], True)

The backward of a loss on log-probabilities has such sums, over a vocabulary that may be sharded.
%s / %s is 1, or NaN where the row has NaN.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import fx

from ..compat.operators import aten
from .algebra import constant_of, replacement_call
from .ops.pointwise import is_float_cast
from .rewrites import DECLINED, Declined, rewrite

_SUM, _MUL, _DIV, _CAST = (
    *(aten.sum.dim_IntList, aten.mul.Tensor),
    *(aten.div.Tensor, aten._to_copy.default),
)
_SIGNS = {aten.add.Tensor: 1, aten.sub.Tensor: -1}  # the second operand's sign
_FACTORS = {_MUL: 2, _DIV: 1, aten.neg.default: 1}  # linear in each of the first operands
_ROWWISE = {*_SIGNS, *_FACTORS, aten.where.self, aten.masked_fill.Scalar}
_MOST_NODES = 64  # A longer search would walk through all layers of a residual stream.
# Inserts the calls for a value. None is inserted before all of them are known.
Build = Callable[[], Any]


@rewrite("simplify", _SUM)
def _known_sum(node: fx.Node) -> fx.Node | Declined:
    x, dims, *options = node.args
    val = node.meta["val"]
    fits = len(dims or ()) == 1 and options == [True] and not node.kwargs and val.dim()
    if not fits or not val.is_floating_point() or x.meta["val"].dtype != val.dtype:
        return DECLINED
    # From behind: an operand that broadcasts may have fewer dimensions.
    search = _Search(node, dims[0] % val.dim() - val.dim())
    build = search.sum_of(x)
    if build is None:
        return DECLINED
    known = search.cast(build())
    if known.meta["val"].shape == val.shape:
        return known
    return search.call(aten.expand.default, known, list(val.shape))


class _Search:
    """A search for the parts of a sum along one dimension, counted from behind."""

    def __init__(self, node: fx.Node, dim: int, visits: int = 0) -> None:
        self.node, self.dim, self.visits = node, dim, visits

    def sum_of(self, x: Any) -> Build | None:
        """Return how to build the sum of x, or None if it is not known."""
        self.visits += 1
        if not self.is_open(x):
            return None
        if (row := self.row_of(x)) is not None:
            return lambda: self.call(_MUL, row(), self.size(x))
        for known in (self.present, self.scattered, self.softmax, self.linear):
            if (build := known(x)) is not None:
                return build
        return None

    def row_of(self, x: Any) -> Build | None:
        """Return how to build the one row of x if all its rows are equal, else None."""
        self.visits += 1
        if not isinstance(x, fx.Node) or self.size(x) == 1:
            return lambda: x
        if not self.is_open(x):
            return None
        if x.target is aten.full.default:
            sizes = _with_one(x.args[0], self.dim)
            return lambda: self.call(x.target, sizes, *x.args[1:], **x.kwargs)
        if x.target is aten.expand.default and self.size(x.args[0]) == 1:
            return lambda: x.args[0]
        if is_float_cast(x):
            return self.row_of(x.args[0])
        if x.target not in _ROWWISE or x.kwargs:
            return None
        return self.applied(x, [self.row_of(operand) for operand in x.args])

    def is_open(self, x: Any) -> bool:
        """Return whether the search goes on to a value."""
        has_fixed_sizes = isinstance(x, fx.Node) and not x.meta.get("dynamic")
        return has_fixed_sizes and self.visits <= _MOST_NODES

    def present(self, x: fx.Node) -> Build | None:
        """Find a node that sums x already."""
        found = next(filter(self.is_sum, x.users), None)
        return found and (lambda: self.cast(found))

    def is_sum(self, node: fx.Node) -> bool:
        """Return whether an earlier node sums its operand along the dimension."""
        if node.target is not _SUM or node.kwargs or not node < self.node:
            return False
        _, dims, *options = node.args
        rank = node.meta["val"].dim()
        return options == [True] and [d % rank - rank for d in dims or ()] == [self.dim]

    def scattered(self, x: fx.Node) -> Build | None:
        """Sum the entries that are scattered into zeros."""
        if x.target not in (aten.scatter.src, aten.scatter_add.default) or x.kwargs:
            return None
        zeros, dim, index, entries = x.args
        shape, rows = x.meta["val"].shape, entries.meta["val"].shape
        if (
            constant_of(zeros) != 0
            or dim % len(shape) != len(shape) + self.dim
            or index.meta["val"].shape != rows
            or _with_one(rows, self.dim) != _with_one(shape, self.dim)
            # Of two entries at one position, scatter keeps the last.
            or (self.size(entries) != 1 and x.target is aten.scatter.src)
        ):
            return None
        if self.size(entries) == 1:
            return lambda: self.cast(entries)
        return lambda: self.call(_SUM, self.cast(entries), [self.dim], True)

    def softmax(self, x: fx.Node) -> Build | None:
        """Find exp(y - log(s)) with s = sum(exp(y))."""
        terms = _terms(x.args[0]) if x.target is aten.exp.default else Counter()
        for log in [term for term in terms if term.target is aten.log.default]:
            total = log.args[0]
            if not self.is_sum(total) or total.args[0].target is not aten.exp.default:
                continue
            logits = _terms(total.args[0].args[0])
            logits[log] -= 1
            if terms == logits:
                return partial(self.call, _DIV, total, total)
        return None

    def linear(self, x: fx.Node) -> Build | None:
        """Apply an operation to the sum of the operand in which it is linear."""
        if is_float_cast(x):
            return self.sum_of(x.args[0])
        if x.target in (aten.view.default, aten.reshape.default):
            return self.view(x)
        if x.target in _SIGNS and not x.kwargs:
            # A summand that broadcasts along the dimension would count once a row.
            return self.applied(x, [self.sum_of(a) if self.size(a) > 1 else None for a in x.args])
        for i, factor in enumerate(x.args[: _FACTORS.get(x.target, 0)]):
            rows = [self.row_of(other) for j, other in enumerate(x.args) if j != i]
            if None not in rows and (build := self.sum_of(factor)) is not None:
                return self.applied(x, [*rows[:i], build, *rows[i:]])
        return None

    def view(self, x: fx.Node) -> Build | None:
        """Sum a view's operand, if that has the dimension too."""
        before, after = x.args[0].meta["val"].shape, x.meta["val"].shape
        d, lead = len(after) + self.dim, math.prod(after[: len(after) + self.dim])
        same = (i for i, n in enumerate(before) if n == after[d] and math.prod(before[:i]) == lead)
        i = next(same, None)
        if i is None:
            return None
        build = _Search(self.node, i - len(before), self.visits).sum_of(x.args[0])
        return build and (lambda: self.call(aten.reshape.default, build(), _with_one(after, d)))

    def applied(self, x: fx.Node, operands: Sequence[Build | None]) -> Build | None:
        """Return how to call x's operation with other operands, or None if one is not known."""
        known = [build for build in operands if build is not None]
        if len(known) < len(operands):
            return None
        return lambda: self.call(x.target, *(build() for build in known))

    def size(self, x: Any) -> int:
        """Return x's size along the dimension; 1 if it lacks the dimension."""
        shape = getattr(x.meta["val"], "shape", ()) if isinstance(x, fx.Node) else ()
        return shape[self.dim] if len(shape) >= -self.dim else 1

    def cast(self, x: fx.Node) -> fx.Node:
        dtype = self.node.meta["val"].dtype
        return x if x.meta["val"].dtype == dtype else self.call(_CAST, x, dtype=dtype)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = replacement_call(self.node, op, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["val"] = op(*values[0], **values[1])
        return node


def _terms(x: fx.Node) -> Counter[fx.Node]:
    """Return the terms that an expression adds (1) and subtracts (-1)."""
    while is_float_cast(x):
        x = x.args[0]
    if x.target not in _SIGNS or x.kwargs or not all(isinstance(a, fx.Node) for a in x.args):
        return Counter({x: 1})
    terms, others = map(_terms, x.args)
    for term, count in others.items():
        terms[term] += count * _SIGNS[x.target]
    return terms


def _with_one(shape: Sequence[int], dim: int) -> list[int]:
    sizes = list(shape)
    sizes[dim] = 1
    return sizes
