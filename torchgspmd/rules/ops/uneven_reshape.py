"""Reshapes where the mesh does not divide a dimension with r rows, w elements each.

    flatten     r w -> p        h[(p - w + 1):p/w] w -> h       a position reads one row
    unflatten   p -> r w        h[wp:wp+w] -> h w               a row reads its elements

As factors (r w) -> r w, only a layout that divides r is kept. Take 7 rows with 7 elements on 2
devices. The first device has 4 rows: 28 elements. Its shard of 49 elements is 25. So it sends 3
elements to its neighbour, and nothing is gathered. `uneven_view` decomposes a reshape into such
steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...compat.operators import aten, custom_op
from ...layout.halo_window import Reach
from ..local_builder import LocalBuilder
from ..notation import Call, FactorRule, LocalForm, factors
from ..registry import rule_for
from ..rewrites import DECLINED, Declined


@custom_op("join_rows")
def join_rows(x: Tensor, dim: int) -> Tensor:
    """Reshape [..., r, w, ...] to [..., r * w, ...]. dim: of r."""
    # A custom operation may not return a view of its operand.
    return x.flatten(dim, dim + 1).clone()


@join_rows.register_fake
def _(x: Tensor, dim: int) -> Tensor:
    return x.new_empty([*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :]])


@custom_op("split_rows")
def split_rows(x: Tensor, dim: int, width: int) -> Tensor:
    """Reshape [..., r * w, ...] to [..., r, w, ...]. dim: of r * w; width: w."""
    return x.unflatten(dim, (-1, width)).clone()


@split_rows.register_fake
def _(x: Tensor, dim: int, width: int) -> Tensor:
    return x.new_empty([*x.shape[:dim], x.shape[dim] // width, width, *x.shape[dim + 1 :]])


def _names(rank: int, dim: int) -> tuple[list[str], list[str]]:
    """Return the flat tensor's factors, and those if dimension `dim` is rows."""
    flat = factors("d", rank)
    return flat, [*flat[: dim + 1], "w", *flat[dim + 1 :]]


@rule_for(join_rows._opoverload)
def _join(call: Call) -> FactorRule:
    shape, dim = call.results[0].shape, call.args[1]
    width = call.tensors[0].shape[dim + 1]
    flat, rows = _names(len(shape), dim)

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
        """Flatten the rows that the device's positions touch, then take its positions."""
        x = args[0]
        shape, length = local.shape(x), local.size(flat[dim])
        joined = [*shape[:dim], shape[dim] * width, *shape[dim + 2 :]]
        x = local.call(aten.reshape.default, x, joined)
        # The window's first row may begin before the device's first position.
        first = local.start(flat[dim]) - local.first_row(0, dim) * width
        return local.narrow(x, dim, first, length)

    return call.rule(
        [rows],
        [flat],
        dict(zip(flat, shape)),
        replicated="w",
        linear=[[0]],
        # Position p reads row p / w, rounded down.
        row_access={(0, dim): Reach(1 - width, 0, every=width)},
        local=LocalForm(emit),
    )


@rule_for(split_rows._opoverload)
def _split(call: Call) -> FactorRule:
    dim, width = call.args[1:]
    shape = call.tensors[0].shape
    flat, rows = _names(len(shape), dim)

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
        return local.call(aten.reshape.default, args[0], list(local.results[0].shape))

    return call.rule(
        [flat],
        [rows],
        dict(zip(flat, shape)) | {flat[dim]: shape[dim] // width},
        replicated="w",
        linear=[[0]],
        row_access={(0, dim): Reach(0, width - 1, width)},
        local=LocalForm(emit),
    )


def uneven_view(x: Tensor, shape: Sequence[int]) -> Tensor | Declined:
    """Compute a reshape that flattens, or unflattens, dimensions by join_rows and split_rows.

    The first dimension is the rows, the others are their elements.
    """
    flat, long = sorted((tuple(x.shape), tuple(shape)), key=lambda s: len([n for n in s if n > 1]))
    pairs, at = [], []
    for n, dims in zip(flat, _groups_of_sizes(flat, long) or ()):
        if len(dims) > 1:
            at.append(len(pairs))
            pairs += [dims[0], n // dims[0]]
        else:
            pairs.append(n)
    if not at:
        return DECLINED
    if flat == tuple(x.shape):
        for dim in at:
            x = split_rows(x, dim, pairs[dim + 1])
        return x if x.shape == tuple(shape) else x.reshape(shape)
    x = x if x.shape == tuple(pairs) else x.reshape(pairs)
    # From behind, so that the earlier dimensions keep their numbers.
    for dim in reversed(at):
        x = join_rows(x, dim)
    return x


def _groups_of_sizes(flat: Sequence[int], long: Sequence[int]) -> list[list[int]] | None:
    """Return the sizes above 1 that multiply to each flat dimension.

    None if a size belongs to two flat dimensions.
    """
    rest, groups = [n for n in long if n > 1], []
    for n in flat:
        dims, product = [], 1
        while product < n:
            if not rest or n % (product * rest[0]):
                return None
            product *= rest[0]
            dims.append(rest.pop(0))
        groups.append(dims)
    return groups
