"""topk, max, argmax and searchsorted.

Along a sharded dimension, max reduces the extreme value, then its position. For topk, each device
selects the k largest in its block. They are gathered, and the k largest among them are the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...compat.operators import aten
from ..local_builder import LocalBuilder
from ..notation import Call, FactorRule, LocalForm, Split, factors
from ..registry import rule_for
from ..rewrites import DECLINED, Declined, rewrite
from .cumulative import block_starts, count_blocks, cut
from .reduction import reduction_rule
from .view import keep_rule


@rule_for(aten.searchsorted.Tensor, aten.bucketize.Tensor)
def _search(call: Call) -> FactorRule:
    """Return a rule in which values and borders may be sharded.

    A value's place counts the borders below it, so it is the sum over the devices' borders. Padding
    is above all borders. Borders that are not in order (`sorter`) are whole.
    """
    values_first = call.target is aten.bucketize.Tensor
    values, borders = call.tensors[:2] if values_first else call.tensors[1::-1]
    names = factors("d", values.dim())
    row = [*names[:-1], "w"] if borders.dim() > 1 else ["w"]
    free = names if borders.dim() == 1 else [*names[:-1], "v"]
    operands = [free, row] if values_first else [row, free]
    sizes, count = dict(zip(free, values.shape)), borders.shape[-1]
    if len(call.tensors) > 2:
        return call.rule([*operands, row], [free], sizes, replicated="w")
    real = borders.is_floating_point()
    highest = math.inf if real else torch.iinfo(borders.dtype).max

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
        tensors = list(args)
        tensors[values_first] = local.masked(args[values_first], borders.dim() - 1, "w", highest)
        places = local.call(call.target, *tensors, **kwargs)
        # An infinite value may be above padding, too.
        places = local.call(aten.clamp_max.default, places, count - local.start("w"))
        return local.call(aten.clamp_min.default, places, 0)

    return call.rule(operands, [free], sizes, reduce={"w": "sum"}, local=LocalForm(emit, when="w"))


@rule_for(aten.topk.default)
def _topk(call: Call) -> FactorRule:
    return keep_rule(call, [call.argument(2, "dim", -1)], split=Split())


@rule_for(aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim)
def _extreme(call: Call) -> FactorRule:
    dim = call.argument(1, "dim")
    return reduction_rule(call, dim, None, split=None if dim is None else Split())


@rewrite("split", aten.topk.default)
def _split_topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *, shards: int = 1
) -> tuple[Tensor, Tensor] | Declined:
    dim %= max(x.dim(), 1)
    blocks = count_blocks(x.shape[dim] if x.dim() else 1, shards)
    # Blocks with k rows or fewer would send all rows, as a gather does.
    if not blocks or k == 0 or x.shape[dim] // blocks <= k:
        return DECLINED
    x_blocks = cut(x, dim, blocks)
    values, places = x_blocks.topk(k, dim + 1, largest, sorted)
    dtype = torch.int32 if x.shape[dim] < 2**31 else torch.int64  # fewer bytes to send
    places = places.to(dtype) + block_starts(
        blocks, x_blocks.shape[dim + 1], x.dim() - dim, x.device, dtype
    )
    shape = [*x.shape[:dim], blocks * k, *x.shape[dim + 1 :]]
    values, at = values.reshape(shape).topk(k, dim, largest, sorted)
    return values, places.reshape(shape).gather(dim, at).to(torch.int64)


def _first_place(reduce: Callable) -> Callable:
    """Return a decomposition for max or min with its position."""

    def split(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        """Return the extreme value and its first position. NaN is the extreme if there is one."""
        dim %= max(x.dim(), 1)
        size = x.shape[dim] if x.dim() else 1
        dtype = torch.int32 if size < 2**31 else torch.int64  # fewer bytes to send
        best = reduce(x, dim, True)
        is_best = (x == best) | x.isnan() if x.is_floating_point() else x == best
        places = torch.arange(size, device=x.device, dtype=dtype).reshape(
            [size] + [1] * (x.dim() - 1 - dim) if x.dim() else []
        )
        place = torch.where(is_best, places, size).to(dtype).amin(dim, keepdim).to(torch.int64)
        return best if keepdim else best.squeeze(dim), place

    return split


for _reduce, _with_place, _place in (
    (torch.amax, aten.max.dim, aten.argmax.default),
    (torch.amin, aten.min.dim, aten.argmin.default),
):
    _split = rewrite("split", _with_place)(_first_place(_reduce))
    rewrite("split", _place)(
        lambda x, dim=None, keepdim=False, split=_split: split(x, dim, keepdim)[1]
    )
