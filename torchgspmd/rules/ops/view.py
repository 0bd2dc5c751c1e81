"""Operations that only rearrange dimensions: view, permute, expand, select, stack, ..."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...compat.operators import aten
from ..local_builder import LocalBuilder
from ..notation import Call, Dims, Rule, make_rule
from ..registry import BLOCKWISE, decomposition, rule_for, shape_argument
from .concat_slice import view_by_slices
from .lookup import zero_outside
from .pointwise import broadcast_dims
from .uneven_reshape import uneven_view

VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
BLOCKWISE.update(VIEWS)


def reshape_factors(
    before: Sequence[int], after: Sequence[int]
) -> tuple[Dims, Dims, dict[str, int]]:
    """Return the factors of both shapes of a reshape, and their sizes.

    [6, 4] -> [2, 12] is (a b) c -> a (b c) with a=2, b=3, c=4: both are split at every common
    border, from the major end. If sizes do not nest, each side of a group gets its own factors. A
    group is the fewest dimensions with the same number of elements on both sides.
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
        _add_factors(before, after, range(start[0], i), range(start[1], j), left, right, sizes)
    return tuple(map(tuple, left)), tuple(map(tuple, right)), sizes


def _add_factors(
    before: Sequence[int],
    after: Sequence[int],
    ins: range,
    outs: range,
    left: list[list[str]],
    right: list[list[str]],
    sizes: dict[str, int],
) -> None:
    """Append the factors of one group of dimensions: `ins` of `before`, `outs` of `after`."""
    a, b = [before[i] for i in ins], [after[j] for j in outs]
    borders = sorted(set(_products(a)) | set(_products(b)))
    nested = all(y % x == 0 for x, y in zip(borders, borders[1:]))
    if not nested:
        for dims, factors, shape in ((ins, left, before), (outs, right, after)):
            for d in dims:
                name = f"{'a' if factors is left else 'b'}{d}"
                sizes[name] = shape[d]
                factors[d].append(name)
        return
    names = {}
    for x, y in zip([1, *borders], borders):
        if y > x:
            names[x] = f"f{len(sizes)}"
            sizes[names[x]] = y // x
    for dims, factors, shape in ((ins, left, before), (outs, right, after)):
        product = math.prod(shape[d] for d in dims)
        for d in dims:
            upper = product  # products are counted from the minor end
            product //= shape[d]
            factors[d].extend(names[x] for x in sorted(names, reverse=True) if product <= x < upper)


def _products(shape: Sequence[int]) -> list[int]:
    """Return the products of the trailing dimensions: 4, 12, 24 for [2, 3, 4]."""
    result, product = [], 1
    for size in reversed(shape):
        product *= size
        result.append(product)
    return result


def _uneven_reshape(x: Tensor, shape: Sequence[int], shards: int) -> Tensor:
    """Compute a reshape along dimensions that `shards` does not divide."""
    try:
        return view_by_slices(x, shape, shards)
    except NotImplementedError:
        return uneven_view(x, shape)


@rule_for(*VIEWS, splits=_uneven_reshape)
def _view(call: Call) -> Rule | None:
    before, after = call.tensors[0].shape, call.results[0].shape
    if 0 in before:
        return None
    left, right, sizes = reshape_factors(before, after)
    private = frozenset(name for name in sizes if not name.startswith("f"))
    return make_rule(
        [left],
        [right],
        sizes,
        whole=private,
        linear=[[0]],
        local=shape_argument(1),
        splits=not private,
    )


@rule_for(aten.permute.default)
def _permute(call: Call) -> Rule:
    names = [(f"d{i}",) for i in range(call.tensors[0].dim())]
    sizes = {f"d{i}": n for i, n in enumerate(call.tensors[0].shape)}
    return make_rule([names], [[names[d] for d in call.args[1]]], sizes, linear=[[0]])


@rule_for(aten.t.default)
def _t(call: Call) -> Rule:
    return _transposed(call, 0, 1) if call.tensors[0].dim() == 2 else _transposed(call, 0, 0)


@rule_for(aten.transpose.int)
def _transpose(call: Call) -> Rule:
    return _transposed(call, call.args[1], call.args[2])


def _transposed(call: Call, a: int, b: int) -> Rule:
    names = [(f"d{i}",) for i in range(call.tensors[0].dim())]
    out = list(names)
    if names:
        out[a], out[b] = out[b], out[a]
    return make_rule(
        [names], [out], {f"d{i}": n for i, n in enumerate(call.tensors[0].shape)}, linear=[[0]]
    )


@rule_for(aten.expand.default)
def _expand(call: Call) -> Rule:
    shape = call.results[0].shape
    return make_rule(
        [broadcast_dims(call.tensors[0].shape, shape)],
        [[(f"d{i}",) for i in range(len(shape))]],
        {f"d{i}": n for i, n in enumerate(shape)},
        linear=[[0]],
        local=shape_argument(1),
    )


@rule_for(aten.unsqueeze.default, aten.squeeze.dims)
def _unsqueeze(call: Call) -> Rule:
    x, y = call.tensors[0], call.results[0]
    long = [(f"d{i}",) for i, n in enumerate(x.shape) if n > 1]
    sizes = {f"d{i}": n for i, n in enumerate(x.shape)}
    names = iter(long)
    return make_rule(
        [[(f"d{i}",) for i in range(x.dim())]],
        [[next(names) if n > 1 else () for n in y.shape]],
        sizes,
        linear=[[0]],
    )


@decomposition(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(x: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    """Squeeze the dimensions of global size 1. Local shards of others may have size 1 too."""
    dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    ones = [d for d in dims if x.dim() and x.shape[d] == 1]
    return aten.squeeze.dims(x, ones) if ones else x.view(x.shape)


def keep_rule(call: Call, dims: Sequence[int], **keywords: Any) -> Rule:
    """Return a rule in which all tensors have the same dimensions, and `dims` are whole."""
    rank = max(t.dim() for t in (*call.tensors, *call.results))
    shape = max((t.shape for t in (*call.tensors, *call.results)), key=math.prod)
    sizes = {f"d{i}": n for i, n in enumerate(shape)}
    whole = {d % rank for d in dims} if rank else set()
    extra: dict[str, int] = {}

    def names(index: int, tensor: Tensor) -> list[tuple[str, ...]]:
        result = []
        for i, n in enumerate(tensor.shape):
            if i in whole:
                extra[f"w{index}_{i}"] = n
                result.append((f"w{index}_{i}",))
            else:
                result.append((f"d{i}",))
        return result

    operands = [names(i, t) for i, t in enumerate(call.tensors)]
    results = [names(len(operands) + i, t) for i, t in enumerate(call.results)]
    shardable = {name: n for name, n in sizes.items() if int(name[1:]) not in whole}
    return make_rule(operands, results, {**shardable, **extra}, whole=frozenset(extra), **keywords)


@decomposition(aten.cat.default)
def _cat_without_empty(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Drop the empty tensors of one dimension, which PyTorch accepts beside any tensors."""
    nonempty = [t for t in tensors if t.dim() != 1 or t.numel()]
    if len(nonempty) == len(tensors) or not nonempty or nonempty[0].dim() == 1:
        raise NotImplementedError("left as it is")
    return torch.cat(nonempty, dim)


@rule_for(aten.split.Tensor, aten.split_with_sizes.default, aten.tril.default, aten.triu.default)
def _split_or_triangle(call: Call) -> Rule:
    split = call.target in (aten.split.Tensor, aten.split_with_sizes.default)
    return keep_rule(call, [call.argument(2, "dim", 0)] if split else [-2, -1], linear=[[0]])


@rule_for(aten.select.int)
def _select(call: Call) -> Rule:
    """Return a rule that reduces the dimension: devices without the row add zeros."""
    x, dim = call.tensors[0], call.args[1] % call.tensors[0].dim()
    names = [(f"d{i}",) for i in range(x.dim())]
    return make_rule(
        [names],
        [[n for i, n in enumerate(names) if i != dim]],
        {f"d{i}": n for i, n in enumerate(x.shape)},
        reduce=f"d{dim}",
        special=f"d{dim}",
        linear=[[0]],
        emit=_emit_select,
    )


def _emit_select(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
    """Select the row on the device that has it; 0 on all others."""
    shape, dim = local.global_shape(0), args[1] % len(local.global_shape(0))
    owner, place = divmod(args[2] % shape[dim], local.size(f"d{dim}"))
    index = local.call(
        aten.scalar_tensor.default,
        local.index(f"d{dim}"),
        dtype=torch.int64,
        device=local.results[0].device,
    )
    return [
        zero_outside(
            local,
            local.call(aten.eq.Scalar, index, owner),
            local.call(aten.select.int, args[0], dim, place),
        )
    ]


@rule_for(aten.select_backward.default)
def _select_backward(call: Call) -> Rule:
    y = call.results[0]
    dim = call.args[2] % y.dim()
    names = [(f"d{i}",) for i in range(y.dim())]
    return make_rule(
        [[n for i, n in enumerate(names) if i != dim]],
        [names],
        {f"d{i}": n for i, n in enumerate(y.shape)},
        whole=f"d{dim}",
        linear=[[0]],
        local=shape_argument(1),
    )


@rule_for(aten.unbind.int)
def _unbind(call: Call) -> Rule:
    x, dim = call.tensors[0], call.argument(1, "dim", 0) % call.tensors[0].dim()
    names = [(f"d{i}",) for i in range(x.dim())]
    remaining = [n for i, n in enumerate(names) if i != dim]
    return make_rule(
        [names],
        [remaining] * len(call.results),
        {f"d{i}": n for i, n in enumerate(x.shape)},
        whole=f"d{dim}",
        linear=[[0]],
    )


@rule_for(aten.stack.default)
def _stack(call: Call) -> Rule:
    y, dim = call.results[0], call.argument(1, "dim", 0) % call.results[0].dim()
    names = [(f"d{i}",) for i in range(y.dim())]
    remaining = [n for i, n in enumerate(names) if i != dim]
    return make_rule(
        [remaining] * len(call.tensors),
        [names],
        {f"d{i}": n for i, n in enumerate(y.shape)},
        whole=f"d{dim}",
        linear=[list(range(len(call.tensors)))],
    )
