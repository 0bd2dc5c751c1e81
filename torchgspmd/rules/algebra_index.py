"""Each row indexed by its own indices, as torch.vmap writes it: x[arange(n), i] is a gather.

So is x[arange(m)[:, None], arange(n), i], where rows are in several dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from ..compat.operators import aten
from .algebra import replacement_call
from .rewrites import DECLINED, Declined, rewrite

_VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten._unsafe_view.default,
)
_ARANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)


@rewrite("simplify", aten.index.Tensor)
def _gather_of_each(node: fx.Node) -> fx.Node | Declined:
    """Read each batch row's entries by gather, whose batch may be sharded."""
    index = _index_of_each(node)
    if index is None:
        return DECLINED
    # As indices, the dimensions before would be indexed ones, whose shards give terms of a sum.
    x, val, dim = node.args[0], node.meta["val"], len(node.args[1]) - 1
    shape = list(index.meta["val"].shape)
    rows = _call(node, aten.gather.default, (x, dim, index), shape, val.dtype)
    return _call(node, aten.reshape.default, (rows, list(val.shape)), list(val.shape), val.dtype)


@rewrite("simplify", aten.index_put.default)
def _scatter_of_each(node: fx.Node) -> fx.Node | Declined:
    """Write, or add to, each batch row's entries by scatter."""
    index = _index_of_each(node)
    if index is None:
        return DECLINED
    x, indices, values, *rest = node.args
    shape = index.meta["val"].shape
    # Values that broadcast have no entry for each index.
    if values.meta["val"].numel() != math.prod(shape):
        return DECLINED
    op = aten.scatter_add.default if rest and rest[0] else aten.scatter.src
    rows = _call(node, aten.reshape.default, (values, list(shape)), shape, x.meta["val"].dtype)
    return replacement_call(node, op, (x, len(indices) - 1, index, rows))


def _index_of_each(node: fx.Node) -> fx.Node | None:
    """Return the index [*n, k, *rest] for a gather from x [*n, r, *rest], along r.

    None unless 0, 1, ... index each dimension of n, and a tensor [*n, ...] the next one.
    """
    x, indices = node.args[:2]
    sized = not node.meta.get("dynamic")
    if not sized or len(indices) < 2 or not all(isinstance(i, fx.Node) for i in indices):
        return None
    *counts, index = indices
    shape, val = x.meta["val"].shape, index.meta["val"]
    n, rows, rest = list(shape[: len(counts)]), shape[len(counts)], list(shape[len(indices) :])
    if list(val.shape[: len(n)]) != n or val.dtype is torch.bool:
        return None
    # Indices broadcast from the right: each counts along its own dimension of the others.
    alone = all(val.dim() - count.meta["val"].dim() == d for d, count in enumerate(counts))
    if not alone or not all(map(_counts_to, counts, n)):
        return None
    count = val.numel() // max(math.prod(n), 1)
    column, whole = [*n, count, *[1] * len(rest)], [*n, count, *rest]
    # gather takes no negative places; those behind the last row are its error.
    is_negative = _call(node, aten.lt.Scalar, (index, 0), val.shape, torch.bool)
    from_end = _call(node, aten.add.Scalar, (index, rows), val.shape, val.dtype)
    both = (is_negative, from_end, index)
    places = _call(node, aten.where.self, both, val.shape, val.dtype)
    places = _call(node, aten.reshape.default, (places, column), column, val.dtype)
    return _call(node, aten.expand.default, (places, whole), whole, val.dtype)


def _call(
    node: fx.Node, op: object, args: tuple[object, ...], shape: Sequence[int], dtype: torch.dtype
) -> fx.Node:
    """Insert a call before a node; its result has this shape and dtype."""
    call = replacement_call(node, op, args)
    call.meta["val"] = node.meta["val"].new_empty(list(shape), dtype=dtype)
    return call


def _counts_to(node: fx.Node, n: int) -> bool:
    """Return whether a node is 0, 1, ... n - 1 along its first dimension."""
    if math.prod(node.meta["val"].shape) != n or node.meta["val"].shape[0] != n:
        return False
    while node.target in _VIEWS:
        node = node.args[0]
    if node.target not in _ARANGES:
        return False
    start, *step = node.args[:1] if node.target is aten.arange.default else node.args[:3:2]
    return node.target is aten.arange.default or start == 0 and step in ([], [1])
