"""sort.

The sorted dimension must be whole. If no other dimension can have its layout, columnsort sorts it
(Leighton, Tight bounds on the complexity of parallel sorting, 1985). Each of n devices sorts its
block four times. Between these sorts elements move as in two matrix transpositions and two shifts
by half a block. These move 2 (n-1)/n^2 + 1/n of the array, and a gather moves (n-1)/n. A bitonic
exchange would move log2(n) (log2(n) + 1) / (2 n).
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
from ..rewrites import DECLINED, Declined, SplitRequest, rewrite
from .cumulative import block_starts, count_blocks, cut
from .reduction import reduction_rule
from .view import keep_rule


@rule_for(aten.sort.default, aten.sort.stable)
def _sort(call: Call) -> FactorRule:
    return keep_rule(call, [call.argument(1, "dim", -1)], split=Split(tried=True))


@rewrite("split", aten.sort.default)
def _split_sort(
    x: Tensor, dim: int = -1, descending: bool = False, *, cuts: SplitRequest
) -> tuple[Tensor, Tensor] | Declined:
    """Sort by columnsort. Equal elements keep their order, as in PyTorch's sort on a CPU."""
    size, blocks = x.shape[dim] if x.dim() else 1, cuts.shards
    rows = size // blocks
    # Columnsort needs r rows and s columns with r >= 2 (s - 1)^2; shifts move half a column.
    if size % (2 * blocks) or rows % blocks or rows < 2 * (blocks - 1) ** 2:
        return DECLINED
    if cuts.results[1] is None:
        values = _columnsort(x, dim, blocks, descending)
        return values, values.to(torch.int64)  # nobody reads the second result
    if x.itemsize > 4 or x.is_complex() or size >= 2**31:
        return DECLINED  # a value and its place do not fit into 8 bytes
    keys = _columnsort(_keys(x, dim, descending), dim, blocks, False)
    return _values(keys, x.dtype, descending), keys.bitwise_and(0xFFFFFFFF) >> 1


rewrite("split", aten.sort.stable)(
    lambda x, *, stable=False, dim=-1, descending=False, cuts: _split_sort(
        x, dim, descending, cuts=cuts
    )
)


def _columnsort(x: Tensor, dim: int, blocks: int, descending: bool) -> Tensor:
    """Sort along a dimension, with blocks as matrix columns."""
    rows = x.shape[dim] // blocks

    def sort(columns: Tensor) -> Tensor:
        return columns.sort(-1, descending)[0]

    x = sort(cut(x.movedim(dim, -1), x.dim() - 1, blocks))  # [.., blocks/n, rows]
    x = sort(x.reshape(*x.shape[:-2], rows, blocks).mT)
    x = sort(x.mT.reshape(*x.shape[:-2], blocks, rows))
    x = x.flatten(-2).roll(-rows // 2, -1).unflatten(-1, (blocks, rows))
    last = torch.arange(blocks, device=x.device).reshape(blocks, 1) == blocks - 1
    x = torch.where(last, x, sort(x))  # The last one has both ends, which are in order.
    return x.flatten(-2).roll(rows // 2, -1).movedim(-1, dim)


def _keys(x: Tensor, dim: int, descending: bool) -> Tensor:
    """Return integers ordered by value, then place: 32 bits, 31 bits, one for -0.0."""
    after = [1] * (x.dim() - 1 - dim % x.dim())
    places = torch.arange(x.shape[dim], device=x.device).reshape(-1, *after)
    low, order = places * 2, x
    if x.is_floating_point():
        low = low + (x.signbit() & (x == 0))
        x = torch.where(x == 0, 0.0, x.float())
        order = _flipped(torch.where(x.isnan(), math.nan, x).view(torch.int32))
    order = order.to(torch.int64)
    return (order.bitwise_not() if descending else order) * 2**32 + low


def _values(keys: Tensor, dtype: torch.dtype, descending: bool) -> Tensor:
    order = keys >> 32
    order = order.bitwise_not() if descending else order
    if not dtype.is_floating_point:
        return order.to(dtype)
    values = _flipped(order.to(torch.int32)).view(torch.float32)
    return torch.where(keys.bitwise_and(1) == 1, -values, values).to(dtype)


def _flipped(bits: Tensor) -> Tensor:
    """Turn a float32's bits into an integer in the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


# ------------------------------------------------------------- topk, max, argmax and searchsorted
#
# Along a sharded dimension, max reduces the extreme value, then its position. For topk, each
# device selects the k largest in its block. They are gathered, and the k largest among them are
# the result.


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
