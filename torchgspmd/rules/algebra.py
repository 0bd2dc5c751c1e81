"""Calls whose result the graph has already, so that they need no communication.

add(%x, full([4, 8], 0))        %x
flip(cumsum(flip(%x, 0), 0), 0) suffix_scan(%x, 0, cumsum)
scatter_add(0, 0, %cummax[1], %dy) extreme_gradient(%dy, %cummax[1], 0)
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from ..compat.operators import aten
from ..layout.mark import mark_sharding_op
from .ops.cumulative import EXTREMES, FROM_BEHIND, extreme_gradient, suffix_scan
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
