"""Calls whose result the graph has already, so that they need no communication.

add(%x, full([4, 8], 0))        %x
flip(cumsum(flip(%x, 0), 0), 0) suffix_scan(%x, 0, cumsum)
scatter_add(0, 0, %cummax[1], %dy) extreme_gradient(%dy, %cummax[1], 0)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.operators import aten
from ..layout.mark import mark_sharding_op
from .custom_ops.scaled_mm import plain_scales
from .ops.cumulative import EXTREMES, FROM_BEHIND, extreme_gradient, suffix_scan
from .ops.pointwise import named
from .rewrites import DECLINED, Declined, apply_first, rewrite

MARK = mark_sharding_op._opoverload


def simplified(node: fx.Node) -> fx.Node | Declined:
    """Return another node with the same value. The node and its inputs have `val`."""
    return apply_first("simplify", node.target, node)


def constant_of(node: fx.Node) -> Any:
    """Return the number that all elements have, or None."""
    # A mark changes no value.
    while node.target is MARK:
        node = node.args[0]
    if node.target is aten.zeros.default:
        return 0
    return node.args[1] if node.target is aten.full.default else None


def replacement_call(
    node: fx.Node, target: Any, args: tuple, kwargs: dict | None = None
) -> fx.Node:
    """Return a new call with the node's meta, inserted before it; it may be another value."""
    with node.graph.inserting_before(node):
        replacement = node.graph.call_function(target, args, kwargs)
    replacement.meta = {key: v for key, v in node.meta.items() if key != "captured"}
    return replacement


@rewrite("simplify", aten.add.Tensor)
def _sum_with_zeros(node: fx.Node) -> fx.Node | Declined:
    """Simplify x + 0. A pipeline's first and last stage take in zeros."""
    val, summands = node.meta["val"], node.args[:2]
    if node.kwargs or not all(isinstance(n, fx.Node) and "val" in n.meta for n in summands):
        return DECLINED
    for one, other in (summands, summands[::-1]):
        same = one.meta["val"]
        if constant_of(other) == 0 and same.shape == val.shape and same.dtype == val.dtype:
            return one
    return DECLINED


@rewrite("simplify", aten.flip.default)
def _flipped_scan(node: fx.Node) -> fx.Node | Declined:
    """Simplify flip(cumsum(flip(x))), the gradient of cumsum: a scan from behind needs no flip."""
    scan, rank = node.args[0], node.meta["val"].dim()
    names = {op: name for name, op in FROM_BEHIND.items()}
    from_behind = scan.target is suffix_scan._opoverload
    if (
        not (from_behind or scan.target in names)
        or scan.kwargs
        or scan.args[0].target is not aten.flip.default
    ):
        return DECLINED
    groups = (node.args[1], scan.args[1:2], scan.args[0].args[1])
    dims = {d % rank for group in groups for d in group}
    x, val = scan.args[0].args[0], node.meta["val"]
    # suffix_scan has no dtype: cumsum of int32 is int64.
    if len(dims) > 1 or x.meta["val"].dtype != val.dtype:
        return DECLINED
    if from_behind:
        return replacement_call(node, FROM_BEHIND[scan.args[2]], (x, *dims))
    return replacement_call(node, suffix_scan._opoverload, (x, *dims, names[scan.target]))


@rewrite("simplify", aten.clone.default)
def _copy_of_what_nobody_else_reads(node: fx.Node) -> fx.Node | Declined:
    """Simplify a new value's copy: copy_ leaves one, to a tensor that the program returns."""
    x = node.args[0]
    owner = x.args[0] if x.target is operator.getitem else x
    schema = getattr(owner.target, "_schema", None)
    is_new = schema is not None and not any(r.alias_info for r in schema.returns)
    # If another node reads x too, the two values need memory of their own.
    readers = [user for user in x.users if user.users or user.op == "output"]
    return x if is_new and readers == [node] and not node.kwargs else DECLINED


@rewrite("simplify", aten._fft_c2c.default)
def _transform_of_real_numbers(node: fx.Node) -> fx.Node | Declined:
    """Simplify a Fourier transform whose operand was real: half as many bytes to move."""
    cast, dims, normalization, forward = node.args
    x = cast.args[0] if cast.target is aten._to_copy.default else cast
    if not forward or x.meta["val"].dtype != cast.meta["val"].dtype.to_real():
        return DECLINED
    return replacement_call(node, aten._fft_r2c.default, (x, dims, normalization, False))


@rewrite("simplify", aten.scatter_add.default)
def _gradient_of_extremes(node: fx.Node) -> fx.Node | Declined:
    """Simplify rows that are added to zeros at the places of cummax or cummin: its gradient."""
    zeros, dim, places, grad = node.args
    if places.target is not operator.getitem or places.args[1] != 1:
        return DECLINED
    scan, val = places.args[0], node.meta["val"]
    fits = (
        scan.target in EXTREMES
        and (scan.args[1] - dim) % max(val.dim(), 1) == 0
        and constant_of(zeros) == 0
        and grad.meta["val"].shape == places.meta["val"].shape == val.shape
    )
    if not fits:
        return DECLINED
    return replacement_call(node, extreme_gradient._opoverload, (grad, places, dim))


# Each row indexed by its own indices, as torch.vmap writes it: x[arange(n), i] is a gather. So is
# x[arange(m)[:, None], arange(n), i], where rows are in several dimensions.


_RESHAPES = named("view reshape unsqueeze _unsafe_view")
_ARANGES = named("arange arange.start arange.start_step")


@rewrite("simplify", aten.index.Tensor)
def _gather_of_each(node: fx.Node) -> fx.Node | Declined:
    """Read each batch row's entries by gather, whose batch may be sharded."""
    index = _index_of_each(node)
    if index is None:
        return DECLINED
    # As indices, the dimensions before would be indexed ones, whose shards give terms of a sum.
    x, val, dim = node.args[0], node.meta["val"], len(node.args[1]) - 1
    shape = list(index.meta["val"].shape)
    rows = inserted_call(node, aten.gather.default, (x, dim, index), shape, val.dtype)
    return inserted_call(
        node, aten.reshape.default, (rows, list(val.shape)), list(val.shape), val.dtype
    )


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
    rows = inserted_call(
        node, aten.reshape.default, (values, list(shape)), shape, x.meta["val"].dtype
    )
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
    is_negative = inserted_call(node, aten.lt.Scalar, (index, 0), val.shape, torch.bool)
    from_end = inserted_call(node, aten.add.Scalar, (index, rows), val.shape, val.dtype)
    both = (is_negative, from_end, index)
    places = inserted_call(node, aten.where.self, both, val.shape, val.dtype)
    places = inserted_call(node, aten.reshape.default, (places, column), column, val.dtype)
    return inserted_call(node, aten.expand.default, (places, whole), whole, val.dtype)


def inserted_call(
    node: fx.Node, op: object, args: tuple, shape: Sequence[int], dtype: torch.dtype | None = None
) -> fx.Node:
    """Insert a call before a node; its result has this shape, and this dtype or the node's."""
    call = replacement_call(node, op, args)
    call.meta["val"] = node.meta["val"].new_empty(list(shape), dtype=dtype)
    return call


def _counts_to(node: fx.Node, n: int) -> bool:
    """Return whether a node is 0, 1, ... n - 1 along its first dimension."""
    if math.prod(node.meta["val"].shape) != n or node.meta["val"].shape[0] != n:
        return False
    while node.target in _RESHAPES:
        node = node.args[0]
    if node.target not in _ARANGES:
        return False
    start, *step = node.args[:1] if node.target is aten.arange.default else node.args[:3:2]
    return node.target is aten.arange.default or start == 0 and step in ([], [1])


# Scales that a library put into a card's order by views, pads and copies, and that are read back,
# are the scales before. The moves are run on the scales' positions, once for calls that are alike.
#
#     %f = reshape(transpose(reshape(permute(reshape(%s, [1, 128, 2, 4]), ...))), [1024])
#     %p = plain_scales(%f, 128, 8)           %s


_MOVES = {
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.permute.default),
    *(aten.transpose.int, aten.t.default, aten.clone.default, aten.slice.Tensor),
    *(aten.slice_scatter.default, aten.constant_pad_nd.default, aten.alias.default),
}
_SOURCE = "source"


@rewrite("simplify", plain_scales._opoverload)
def _read_back(node: fx.Node) -> fx.Node | Declined:
    """Return the scales before their order was changed."""
    flat, rows, columns = node.args
    found: list[fx.Node] = []
    recipe = _recipe(flat, (rows, columns), found)
    if recipe is None or len({*found}) != 1 or found[0].meta["val"].dtype != node.meta["val"].dtype:
        return DECLINED
    return found[0] if _is_order(recipe, rows, columns) else DECLINED


def _recipe(value: Any, shape: tuple[int, int], found: list[fx.Node]) -> Any:
    """Return how a value is made from a tensor with a shape, which `found` gets; None: otherwise.

    A recipe is a tuple that can be hashed: an operation and its arguments' recipes.
    """
    if not isinstance(value, fx.Node):
        return ("is", tuple(value) if isinstance(value, list) else value)
    if (number := constant_of(value)) is not None:
        return ("full", tuple(value.meta["val"].shape)) if number == 0 else None
    if tuple(value.meta["val"].shape) == shape:
        found.append(value)
        return (_SOURCE,)
    if (
        value.target is aten.view.dtype
        and value.args[1].itemsize == value.args[0].meta["val"].itemsize
    ):
        return _recipe(value.args[0], shape, found)
    if value.target not in _MOVES:
        return None
    parts = [_recipe(x, shape, found) for x in value.args]
    return None if None in parts else (value.target, *parts)


@cache
def _is_order(recipe: tuple, rows: int, columns: int) -> bool:
    """Return whether a recipe puts scales into the order from which plain_scales reads them."""
    positions = torch.arange(1, rows * columns + 1, dtype=torch.int32).view(rows, columns)
    made = _made(recipe, positions)
    return torch.equal(plain_scales(made.contiguous(), rows, columns), positions)


def _made(recipe: tuple, positions: Tensor) -> Any:
    match recipe:
        case ("is", value):
            return value
        case ("full", shape):
            return torch.zeros(shape, dtype=torch.int32)
        case ("source",):
            return positions
        case (op, *parts):
            return op(*(_made(part, positions) for part in parts))
