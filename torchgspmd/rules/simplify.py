"""Operations whose result is there already: what a graph of several of them computes, known without any communication."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
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
