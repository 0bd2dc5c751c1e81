"""Scales that were put into a card's order, and are read back: they are the scales before.

    %f = reshape(transpose(reshape(permute(reshape(%s, [1, 128, 2, 4]), ...))), [1024])
    %p = plain_scales(%f, 128, 8)           %s

A library writes the order by views, pads and copies. These are run on the positions of %s, once for
calls that are alike.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.operators import aten
from .algebra import constant_of
from .custom_ops.scaled_mm import plain_scales
from .rewrites import DECLINED, Declined, rewrite

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
    if value.target is aten.view.dtype and value.args[1].itemsize == _itemsize(value.args[0]):
        return _recipe(value.args[0], shape, found)
    if value.target not in _MOVES:
        return None
    parts = [_recipe(x, shape, found) for x in value.args]
    return None if None in parts else (value.target, *parts)


def _itemsize(node: fx.Node) -> int:
    return node.meta["val"].dtype.itemsize


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
