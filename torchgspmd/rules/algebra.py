"""Operations whose result is there already: what a graph of several of them computes, known without
any communication.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from ..annotate import mark_sharding_op
from ..compat.operators import aten
from .ops.cumulative import suffix_sums

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
    """The sum over rows of zeros with one entry put into each: the entries. (Of a label's gradient,
    in a softmax's backward.)
    """
    x, dims = node.args[0], node.args[1]
    if (
        x.target is not aten.scatter.src
        or not dims
        or len(dims) != 1
        or len(node.args) < 3
        or not node.args[2]
        or node.kwargs
    ):
        return None
    zeros, dim, index, entries = x.args
    shape = list(x.meta["val"].shape)
    dim %= len(shape)
    one = [*shape[:dim], 1, *shape[dim + 1 :]]
    fits = (
        dims[0] % len(shape) == dim
        and list(index.meta["val"].shape) == list(entries.meta["val"].shape) == one
    )
    return entries if fits and zeros.target is aten.full.default and zeros.args[1] == 0 else None


def filled(node: fx.Node) -> Any:
    """The number that a value has everywhere; None if it has none."""
    while node.target is MARK:
        node = node.args[0]
    return node.args[1] if node.target is aten.full.default else None


def instead(node: fx.Node, target: Any, args: tuple, kwargs: dict | None = None) -> fx.Node:
    """A new call that makes the node's value."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, args, kwargs)
    made.meta = dict(node.meta)
    return made


@simplification(aten.add.Tensor)
def _sum_with_zeros(node: fx.Node) -> fx.Node | None:
    """The other summand: a pipeline's steps take rows of zeros in at its ends, and so do their
    gradients.
    """
    val, summands = node.meta["val"], node.args[:2]
    if node.kwargs or not all(isinstance(n, fx.Node) and "val" in n.meta for n in summands):
        return None
    for one, other in (summands, summands[::-1]):
        same = one.meta["val"]
        if filled(other) == 0 and same.shape == val.shape and same.dtype == val.dtype:
            return one
    return None


@simplification(aten.flip.default)
def _sums_from_behind(node: fx.Node) -> fx.Node | None:
    """The gradient of cumsum turns rows around twice; a device need not have any but its own for
    that.
    """
    scan, rank = node.args[0], node.meta["val"].dim()
    if (
        scan.target is not aten.cumsum.default
        or scan.kwargs
        or scan.args[0].target is not aten.flip.default
    ):
        return None
    dims = {
        d % rank for found in (node.args[1], scan.args[1:], scan.args[0].args[1]) for d in found
    }
    x, val = scan.args[0].args[0], node.meta["val"]
    if len(dims) > 1 or x.meta["val"].dtype != val.dtype:
        return None
    return instead(node, suffix_sums._opoverload, (x, *dims))
