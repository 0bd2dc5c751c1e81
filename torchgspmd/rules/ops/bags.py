"""The largest rows of a table, by bag: nn.EmbeddingBag(mode="max").

    bag_max       v e, b l, b l -> b e              max over v and l
    bag_first     v e, b l, b l, b e -> b e         min over v and l

With rows of the table sharded, a device takes the maximum of the rows that it has. So the bags are
reduced, not the rows in them. The gradient goes to the first of equal rows, as in PyTorch: their
positions are reduced too, in the backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.operators import aten, custom_op
from ..local_builder import LocalBuilder
from ..notation import Call, FactorRule, LocalForm
from ..registry import rule_for
from .lookup import shard_index


class _Eager:
    """Calls operations where a LocalBuilder adds them to a device's program."""

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    def shape(self, value: Any) -> tuple[int, ...]:
        return tuple(value.shape)


@custom_op("bag_max")
def bag_max(table: Tensor, index: Tensor, counts: Tensor, bag: Tensor | None, bags: int) -> Tensor:
    """Return the largest rows of table [v, e] in each bag, [b, e]; -inf for an empty bag.

    index: [b, l]; or [n], with the bag [n] of each. counts: like index, False for rows to skip.
    """
    return _largest(_Eager(), table, index, counts, bag, bags)


@custom_op("bag_first")
def bag_first(
    table: Tensor,
    index: Tensor,
    counts: Tensor,
    bag: Tensor | None,
    best: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return the first positions [b, e] of the largest rows `best`; the last size for none."""
    count = index.shape[-1]
    places = torch.arange(count, dtype=dtype, device=index.device)
    return _first(_Eager(), table, index, counts, bag, best, places, count)


@bag_max.register_fake
def _(table: Tensor, index: Tensor, counts: Tensor, bag: Tensor | None, bags: int) -> Tensor:
    return table.new_empty([bags, table.shape[1]])


@bag_first.register_fake
def _(table: Tensor, *args: Any) -> Tensor:
    *_, best, dtype = args
    return best.new_empty(best.shape, dtype=dtype)


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    table, index, counts, bag, _ = inputs
    ctx.save_for_backward(table, index, counts, bag, output)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    table, index, counts, bag, best = ctx.saved_tensors
    count = index.shape[-1]
    # Of few positions one byte each is reduced; a size that only a run knows is no int.
    dtype = torch.int8 if isinstance(count, int) and count < 128 else torch.int32
    first = bag_first(table, index, counts, bag, best, dtype)
    # An empty bag has no first row.
    places = first.clamp(max=count - 1).long()
    rows = index.gather(1, places) if bag is None else index[places.flatten()].view(places.shape)
    grad = grad.masked_fill(first == count, 0)
    return table.new_zeros(table.shape).scatter_add(0, rows.long(), grad), None, None, None, None


bag_max.register_autograd(_backward, setup_context=_save)


def _largest(local: Any, table: Any, index: Any, counts: Any, bag: Any, bags: int) -> Any:
    """Compute bag_max. local: calls operations."""
    rows = local.call(aten.embedding.default, table, index)
    skipped = local.call(aten.logical_not.default, local.call(aten.unsqueeze.default, counts, -1))
    rows = local.call(aten.masked_fill.Scalar, rows, skipped, -math.inf)
    shape = bags, local.shape(table)[1]
    return _by_bag(local, rows, bag, shape, -math.inf, "amax")


def _first(
    local: Any, table: Any, index: Any, counts: Any, bag: Any, best: Any, places: Any, none: int
) -> Any:
    """Compute bag_first. places: the positions of index in its last dimension."""
    rows = local.call(aten.embedding.default, table, index)
    of_bag = (
        local.call(aten.unsqueeze.default, best, 1)
        if bag is None
        else local.call(aten.index_select.default, best, 0, bag)
    )
    # A bag with NaN has NaN as its maximum.
    same, nan = local.call(aten.eq.Tensor, rows, of_bag), local.call(aten.isnan.default, rows)
    same = local.call(aten.logical_or.default, same, nan)
    counts = local.call(aten.unsqueeze.default, counts, -1)
    same = local.call(aten.logical_and.default, same, counts)
    places = local.call(aten.unsqueeze.default, places, -1)
    places = local.call(aten.where.ScalarOther, same, places, none)
    return _by_bag(local, places, bag, local.shape(best), none, "amin")


def _by_bag(local: Any, x: Any, bag: Any, shape: Sequence[int], start: float, how: str) -> Any:
    """Reduce x [b, l, e] or [n, e] to [b, e]. shape: of the result."""
    if bag is None:
        return local.call(aten.amax.default if how == "amax" else aten.amin.default, x, [1])
    columns = [*local.shape(bag), shape[1]]
    bag = local.call(aten.expand.default, local.call(aten.unsqueeze.default, bag, -1), columns)
    empty = local.call(aten.new_full.default, x, [*shape], start)
    return local.call(aten.scatter_reduce.two, empty, 0, bag, x, how)


@rule_for(bag_max._opoverload)
def _bag_max(call: Call) -> FactorRule:
    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> fx.Node:
        index, counts = _in_shard(local, *args[1:3])
        return _largest(local, args[0], index, counts, *args[3:])

    return _bag_rule(call, "max", emit)


@rule_for(bag_first._opoverload)
def _bag_first(call: Call) -> FactorRule:
    count = call.tensors[1].shape[-1]

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> fx.Node:
        index, counts = _in_shard(local, *args[1:3])
        bag, best, dtype = args[3:]
        options = {"dtype": dtype, "device": local.results[0].device}
        places = local.call(aten.arange.default, local.size("l"), **options)
        places = local.call(aten.add.Tensor, places, local.start("l"))
        return _first(local, args[0], index, counts, bag, best, places, count)

    return _bag_rule(call, "min", emit)


def _bag_rule(call: Call, kind: str, emit: Any) -> FactorRule:
    """Return the rule in which devices have rows of the table, or positions in the bags."""
    ragged = call.tensors[1].dim() == 1
    index, result = ["l"] if ragged else ["b", "l"], ["b", "e"]
    rest = [["l"]] * ragged + [result] * (len(call.tensors) - 3 - ragged)
    return call.rule(
        [["v", "e"], index, index, *rest],
        [result],
        reduce={"v": kind, "l": kind},
        # A position may be in any bag.
        replicated="b" if ragged else "",
        local=LocalForm(emit, when="v l", fill={1: 0.0, 2: 0.0, **({3: 0.0} if ragged else {})}),
    )


def _in_shard(local: LocalBuilder, index: Any, counts: Any) -> tuple[fx.Node, fx.Node]:
    """Return index into the device's rows, and which positions count: those whose row it has."""
    dim = len(local.shape(index)) - 1
    index, counts = (local.masked(x, dim, "l", 0) for x in (index, counts))
    place, inside = shard_index(local, "v", index)
    return place, local.call(aten.logical_and.default, inside, counts)
