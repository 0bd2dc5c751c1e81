"""Operations that only rearrange dimensions: view, permute, expand, select, stack, ..."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.operators import aten
from ..flat_call import FlatCall
from ..local_builder import LocalBuilder
from ..notation import Call, Dims, FactorRule, LocalForm, Split, factors
from ..registry import ordered, rule_for, shape_argument
from ..rewrites import DECLINED, Declined, SplitRequest, rewrite
from .concat_slice import view_by_slices
from .lookup import zero_outside
from .pointwise import broadcast_dims
from .uneven_reshape import uneven_view

VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def reshape_factors(
    before: Sequence[int], after: Sequence[int]
) -> tuple[Dims, Dims, dict[str, int]]:
    """Return the factors of a reshape's two shapes, and their sizes.

    [6, 4] -> [2, 12] is (a b) c -> a (b c) with a=2, b=3, c=4: both are split at every common
    border, from the major end. If sizes do not nest, each side of a group gets its own factors. A
    group is the fewest dimensions with as many elements on both sides.
    """
    sizes: dict[str, int] = {}
    left, right = [[] for _ in before], [[] for _ in after]
    i = j = 0
    while i < len(before) and j < len(after):
        start = (i, j)
        a, b = before[i], after[j]
        i, j = i + 1, j + 1
        while a != b:  # the smallest group with equal products
            if a < b:
                a, i = a * before[i], i + 1
            else:
                b, j = b * after[j], j + 1
        _add_factors(
            [(before, range(start[0], i), left), (after, range(start[1], j), right)], sizes
        )
    return tuple(map(tuple, left)), tuple(map(tuple, right)), sizes


def _add_factors(
    sides: Sequence[tuple[Sequence[int], range, list[list[str]]]], sizes: dict[str, int]
) -> None:
    """Append one group's factors. sides: the shape, the group's dimensions and all factors."""
    # Products over trailing dimensions: 4, 12, 24 for [2, 3, 4].
    products = (accumulate((s[d] for d in reversed(dims)), operator.mul) for s, dims, _ in sides)
    borders = sorted({n for each in products for n in each})
    nested = all(y % x == 0 for x, y in zip(borders, borders[1:]))
    # No common factors: each side keeps factors of its own, and the reshape gathers.
    if not nested:
        for side, (shape, dims, factors) in zip("ab", sides):
            for d in dims:
                name = f"{side}{d}"
                sizes[name] = shape[d]
                factors[d].append(name)
        return
    names = {}
    for x, y in zip([1, *borders], borders):
        if y > x:
            names[x] = f"f{len(sizes)}"
            sizes[names[x]] = y // x
    for shape, dims, factors in sides:
        product = math.prod(shape[d] for d in dims)
        for d in dims:
            upper = product  # products are counted from the minor end
            product //= shape[d]
            factors[d].extend(names[x] for x in sorted(names, reverse=True) if product <= x < upper)


@rewrite("split", *VIEWS)
def _uneven_reshape(x: Tensor, shape: Sequence[int], *, cuts: SplitRequest) -> Tensor | Declined:
    """Compute a reshape along dimensions that the mesh does not divide."""
    result = view_by_slices(x, shape, cuts)
    return uneven_view(x, shape) if result is DECLINED else result


@rule_for(*VIEWS)
def _view(call: Call) -> FactorRule | Declined:
    before, after = call.tensors[0].shape, call.results[0].shape
    # Without elements no product tells which dimensions belong together.
    if 0 in before:
        return DECLINED
    left, right, sizes = reshape_factors(before, after)
    private = [name for name in sizes if not name.startswith("f")]
    return call.rule(
        [left],
        [right],
        sizes,
        replicated=private,
        linear=[[0]],
        local=shape_argument(1),
        split=None if private else Split(),
    )


@rewrite("keep", *VIEWS)
def _kept_view(flat: FlatCall, x: Any, _: object) -> tuple[Any, ...]:
    return x, [n for parts in flat.results[0] for n in parts]


@rule_for(aten.sym_size.int)
def _size(call: Call) -> FactorRule:
    """Return a rule for a size that only a run knows: it is the global size on every device."""
    return call.rule([factors("d", call.tensors[0].dim())], [], linear=[[0]])


@rule_for(aten.permute.default)
def _permute(call: Call) -> FactorRule:
    return _permuted(call, call.args[1])


@rule_for(aten.t.default)
def _t(call: Call) -> FactorRule:
    return _permuted(call, [1, 0] if call.tensors[0].dim() == 2 else [0][: call.tensors[0].dim()])


@rule_for(aten.transpose.int)
def _transpose(call: Call) -> FactorRule:
    order = list(range(call.tensors[0].dim()))
    if order:
        a, b = call.args[1:]
        order[a], order[b] = order[b], order[a]
    return _permuted(call, order)


def _permuted(call: Call, order: Sequence[int]) -> FactorRule:
    names = factors("d", len(order))
    return call.rule([names], [[names[d] for d in order]], linear=[[0]])


@rule_for(aten.expand.default)
def _expand(call: Call) -> FactorRule:
    shape = call.results[0].shape
    names = factors("d", len(shape))
    return call.rule(
        [broadcast_dims(call.tensors[0].shape, shape)],
        [names],
        dict(zip(names, shape)),
        linear=[[0]],
        local=shape_argument(1),
    )


@rule_for(aten.unsqueeze.default, aten.squeeze.dims)
def _unsqueeze(call: Call) -> FactorRule:
    x, y = call.tensors[0], call.results[0]
    names = factors("d", x.dim())
    long = iter([name for name, n in zip(names, x.shape) if n > 1])
    return call.rule([names], [[next(long) if n > 1 else "" for n in y.shape]], linear=[[0]])


@rewrite("decompose", aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(x: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    """Squeeze the dimensions with global size 1. Local shards of others may have size 1 too."""
    dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    ones = [d for d in dims if x.dim() and x.shape[d] == 1]
    return aten.squeeze.dims(x, ones) if ones else x.view(x.shape)


def keep_rule(call: Call, dims: Iterable[int], **keywords: object) -> FactorRule:
    """Return a rule in which all tensors have the same dimensions, and `dims` are whole."""
    tensors, count = (*call.tensors, *call.results), len(call.tensors)
    rank, largest = max(t.dim() for t in tensors), max((t.shape for t in tensors), key=math.prod)
    whole = {d % rank for d in dims} if rank else set()
    names = [
        [f"w{index}_{d}" if d in whole else f"d{d}" for d in range(tensor.dim())]
        for index, tensor in enumerate(tensors)
    ]
    return call.rule(
        names[:count],
        names[count:],
        {f"d{d}": n for d, n in enumerate(largest) if d not in whole},
        replicated=[name for row in names for name in row if name[0] == "w"],
        **keywords,
    )


ordered(aten.view.dtype)  # refuses bytes that are not neighbors


@rule_for(aten.view.dtype)
def _bits(call: Call) -> FactorRule:
    """Return a rule in which the last dimension is whole if elements get another size."""
    # Elements of another size take their bytes from neighbors.
    same = call.tensors[0].itemsize == call.results[0].itemsize
    return keep_rule(call, [] if same else [-1])


@rewrite("decompose", aten.cat.default)
def _cat_without_empty(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | Declined:
    """Drop empty one-dimensional tensors, which PyTorch accepts beside any tensors."""
    nonempty = [t for t in tensors if t.dim() != 1 or t.numel()]
    # Beside other 1-d tensors an empty one fits the rule.
    if len(nonempty) == len(tensors) or not nonempty or nonempty[0].dim() == 1:
        return DECLINED
    return torch.cat(nonempty, dim)


@rule_for(aten.split.Tensor, aten.split_with_sizes.default)
def _split(call: Call) -> FactorRule:
    return keep_rule(call, [call.argument(2, "dim", 0)], linear=[[0]])


@rule_for(aten.tril.default, aten.triu.default)
def _triangle(call: Call) -> FactorRule:
    rank, diagonal = call.tensors[0].dim(), call.argument(1, "diagonal", 0)
    is_kept = aten.le.Scalar if call.target == aten.tril.default else aten.ge.Scalar

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> fx.Node:
        """Compare the global positions of columns and rows."""
        ahead = local.call(aten.sub.Tensor, local.position(rank - 1), local.position(rank - 2))
        return zero_outside(local, local.call(is_kept, ahead, diagonal), args[0])

    local = LocalForm(emit, when=factors("d", rank)[-2:], positional=False)
    return keep_rule(call, [], linear=[[0]], local=local)


def _without(names: list[str], dim: int) -> list[str]:
    return names[:dim] + names[dim + 1 :]


@rule_for(aten.select.int)
def _select(call: Call) -> FactorRule:
    """Return a rule that reduces the dimension: devices without the row add zeros."""
    dim, names = call.dim(1), factors("d", call.tensors[0].dim())

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> fx.Node:
        """Select the row on the device that has it; 0 on all others."""
        # All shards have the same padded size, so the owner is a quotient.
        rows, row = local.size(names[dim]), args[2] % local.global_shape(0)[dim]
        owner, place = row // rows, row % rows
        index = local.scalar(local.index(names[dim]), torch.int64)
        is_owner = local.call(aten.eq.Scalar, index, owner)
        return zero_outside(local, is_owner, local.call(aten.select.int, args[0], dim, place))

    return call.rule(
        [names],
        [_without(names, dim)],
        reduce=names[dim],
        linear=[[0]],
        local=LocalForm(emit, when=names[dim]),
    )


@rule_for(aten.select_backward.default)
def _select_backward(call: Call) -> FactorRule:
    y = call.results[0]
    dim, names = call.args[2] % y.dim(), factors("d", y.dim())
    return call.rule(
        [_without(names, dim)],
        [names],
        dict(zip(names, y.shape)),
        replicated=names[dim],
        linear=[[0]],
        local=shape_argument(1),
    )


@rule_for(aten.unbind.int)
def _unbind(call: Call) -> FactorRule:
    dim, names = call.dim(1, 0), factors("d", call.tensors[0].dim())
    results = [_without(names, dim)] * len(call.results)
    return call.rule([names], results, replicated=names[dim], linear=[[0]])


@rule_for(aten.stack.default)
def _stack(call: Call) -> FactorRule:
    y, count = call.results[0], len(call.tensors)
    dim, names = call.argument(1, "dim", 0) % y.dim(), factors("d", y.dim())
    return call.rule(
        [_without(names, dim)] * count,
        [names],
        dict(zip(names, y.shape)),
        replicated=names[dim],
        linear=[range(count)],
    )
