"""Operations whose result is there already: what a graph of several of them computes, known without any communication."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..annotate import mark_sharding_op

aten = torch.ops.aten
MARK = mark_sharding_op._opoverload
SIMPLIFICATIONS: dict[Any, Callable[[fx.Node], fx.Node | None]] = {}


def simplified(node: fx.Node) -> fx.Node | None:
    """The node that holds the same value, if one is known."""
    found = SIMPLIFICATIONS.get(node.target)
    return found(node) if found else None


def simplification(op: Any) -> Callable:
    """Registers a function from a node with val on it and on what it takes."""
    def register(function: Callable) -> Callable:
        SIMPLIFICATIONS[op] = function
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


@simplification(aten.roll.default)
@simplification(aten.flip.default)
def _moved_rows_of_one_number(node: fx.Node) -> fx.Node | None:
    return node.args[0] if _filled(node.args[0]) is not None else None


@simplification(aten.slice.Tensor)
def _part_of_one_number(node: fx.Node) -> fx.Node | None:
    number, val = _filled(node.args[0]), node.meta["val"]
    if number is None:
        return None
    with node.graph.inserting_before(node):
        made = node.graph.call_function(aten.full.default, (list(val.shape), number), {"dtype": val.dtype, "device": val.device})
    made.meta = dict(node.meta)
    return made
