"""Reshapes of a dimension that the mesh does not divide, of rows r with w elements each.

    flatten     r w -> p        h[(p - w + 1):p/w] w -> h       a position reads one row
    unflatten   p -> r w        h[wp:wp+w] -> h w               a row reads its elements

As factors (r w) -> r w, only a layout that divides r is kept. Take 7 rows of 7 elements on 2
devices. The first device has 4 rows: 28 elements. Its shard of 49 elements is 25. So it sends 3
elements to its neighbour, and nothing is gathered. `uneven_view` decomposes a reshape into such
steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...compat.operators import aten
from ...halo import Reach
from ..local_builder import LocalBuilder
from ..notation import Call, Rule, make_rule
from ..registry import rule_for


@torch.library.custom_op("torchgspmd::join_rows", mutates_args=())
def join_rows(x: Tensor, dim: int) -> Tensor:
    """Reshape [..., r, w, ...] to [..., r * w, ...]. dim: of r."""
    return x.flatten(dim, dim + 1).clone()


@join_rows.register_fake
def _(x: Tensor, dim: int) -> Tensor:
    return x.new_empty([*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :]])


@torch.library.custom_op("torchgspmd::split_rows", mutates_args=())
def split_rows(x: Tensor, dim: int, width: int) -> Tensor:
    """Reshape [..., r * w, ...] to [..., r, w, ...]. dim: of r * w; width: w."""
    return x.unflatten(dim, (-1, width)).clone()


@split_rows.register_fake
def _(x: Tensor, dim: int, width: int) -> Tensor:
    return x.new_empty([*x.shape[:dim], x.shape[dim] // width, width, *x.shape[dim + 1 :]])


def _names(rank: int, dim: int) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Return the factors of the flat tensor, and of the one whose dimension `dim` is rows."""
    flat = [(f"d{i}",) for i in range(rank)]
    return flat, [*flat[: dim + 1], ("w",), *flat[dim + 1 :]]


@rule_for(join_rows._opoverload)
def _join(call: Call) -> Rule:
    shape, dim = call.results[0].shape, call.args[1]
    width = call.tensors[0].shape[dim + 1]
    flat, rows = _names(len(shape), dim)
    sizes = {f"d{i}": n for i, n in enumerate(shape)} | {"w": width}
    return make_rule(
        [rows],
        [flat],
        sizes,
        whole="w",
        linear=[[0]],
        halo={(0, dim): Reach(1 - width, 0, every=width)},
        emit=_emit_join,
    )


def _emit_join(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
    """Flatten the rows that the device's positions touch, then take its positions."""
    x, dim = args
    shape, length, index = local.shape(x), local.size(f"d{dim}"), local.index(f"d{dim}")
    width = local.global_shape(0)[dim + 1]
    flat = local.call(
        aten.reshape.default, x, [*shape[:dim], shape[dim] * width, *shape[dim + 2 :]]
    )
    return [
        local.narrow(flat, dim, index * length - local.window(0, dim).first(index) * width, length)
    ]


@rule_for(split_rows._opoverload)
def _split(call: Call) -> Rule:
    shape, (dim, width) = call.tensors[0].shape, call.args[1:]
    flat, rows = _names(len(shape), dim)
    sizes = {f"d{i}": n for i, n in enumerate(shape)} | {f"d{dim}": shape[dim] // width, "w": width}
    return make_rule(
        [flat],
        [rows],
        sizes,
        whole="w",
        linear=[[0]],
        halo={(0, dim): Reach(0, width - 1, width)},
        emit=_emit_split,
    )


def _emit_split(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
    return [local.call(aten.reshape.default, args[0], list(local.results[0].shape))]


def uneven_view(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Compute a reshape that flattens, or unflattens, dimensions by join_rows and split_rows.

    The first of the dimensions is the rows, the others are their elements.
    """
    flat, long = sorted((tuple(x.shape), tuple(shape)), key=lambda s: len([n for n in s if n > 1]))
    pairs, at = [], []
    for n, dims in zip(flat, _groups_of_sizes(flat, long)):
        if len(dims) > 1:
            at.append(len(pairs))
            pairs += [dims[0], n // dims[0]]
        else:
            pairs.append(n)
    if not at:
        raise NotImplementedError("left as it is")
    if flat == tuple(x.shape):
        for dim in at:
            x = split_rows(x, dim, pairs[dim + 1])
        return x if x.shape == tuple(shape) else x.reshape(shape)
    x = x if x.shape == tuple(pairs) else x.reshape(pairs)
    for dim in reversed(at):
        x = join_rows(x, dim)
    return x


def _groups_of_sizes(flat: Sequence[int], long: Sequence[int]) -> list[list[int]]:
    """Return for each flat dimension the sizes above 1 whose product it is.

    NotImplementedError if a size belongs to two flat dimensions.
    """
    rest, groups = [n for n in long if n > 1], []
    for n in flat:
        dims, product = [], 1
        while product < n:
            if not rest or n % (product * rest[0]):
                raise NotImplementedError("left as it is")
            product *= rest[0]
            dims.append(rest.pop(0))
        groups.append(dims)
    return groups
