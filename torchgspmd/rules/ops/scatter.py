"""Operations that write by index: scatter, index_add, index_copy, index_fill.

If the indexed dimension is sharded, a device writes the rows that it has. All others go to a spare
row behind its shard, which is cut off. If writing is a reduction (add, max), the values may be
sharded. Then each device writes its own into a neutral value, the first one into the operand. The
reduction stays pending (GSPMD's partitioned scatter).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ...compat.operators import aten
from ..local_builder import LocalBuilder
from ..notation import IDENTITY, Call, FactorRule, LocalForm
from ..registry import rule_for
from ..rewrites import DECLINED, Declined
from .lookup import aligned_factors, in_shard, outside_kept
from .pointwise import named

# scatter_reduce's words for reductions -> those in FactorRule.reduce.
KINDS = {"sum": "sum", "prod": "prod", "amax": "max", "amin": "min"}


def index_or_spare_row(local: LocalBuilder, index: fx.Node, factor: str) -> fx.Node:
    """Return indices into the device's shard. Those outside it point behind its end."""
    shifted, inside = in_shard(local, factor, index)
    spare = local.scalar(local.size(factor), torch.int64)
    return local.call(aten.where.self, inside, shifted, spare)


def with_spare_row(local: LocalBuilder, x: fx.Node, dim: int) -> fx.Node:
    return local.call(
        aten.constant_pad_nd.default, x, [0, 0] * (len(local.results[0].shape) - 1 - dim) + [0, 1]
    )


def only_on_first_shard(local: LocalBuilder, x: fx.Node, factors: list[str], kind: str) -> fx.Node:
    """Return x on the device with the first shard along all factors, else the neutral value."""
    # An operand that all devices hold changes no extreme.
    if kind in ("max", "min"):
        return x
    first = None
    for factor in filter(local.sharded, factors):
        is_first = local.scalar(local.index(factor) == 0, torch.bool)
        first = is_first if first is None else local.call(aten.logical_and.default, first, is_first)
    neutral = local.scalar(IDENTITY[kind])
    return x if first is None else local.call(aten.where.self, first, x, neutral)


def _emit(local: LocalBuilder, args: tuple, kwargs: dict) -> fx.Node:
    """Write into the shard and its spare row, then cut the spare row off."""
    x, dim, index, *rest = args
    dim %= len(local.results[0].shape)
    row, written = f"v{dim}", f"i{dim}"
    place = next((i for i, names in enumerate(local.rule.operands[1]) if names == (written,)), 0)
    masked = local.masked(index, place, written, -1)
    x = only_on_first_shard(local, x, [written], local.rule.reduce.get(written, "sum"))
    if not local.sharded(row) and masked is index:  # all rows are here
        return local.call(local.target, x, dim, index, *rest, **kwargs)
    x, spared = with_spare_row(local, x, dim), index_or_spare_row(local, masked, row)
    # -1 is in the padding of the indices, if there is any.
    index = outside_kept(local, row, masked, spared, least=0 if masked is index else -1)
    result = local.call(local.target, x, dim, index, *rest, **kwargs)
    return local.call(aten.slice.Tensor, result, dim, 0, local.size(row))


def _rule(
    call: Call,
    dim: int,
    names: Sequence[list[str]],
    sizes: dict[str, int],
    whole: list[str],
    kind: str | None,
    linear: Sequence[Sequence[int]] = (),
) -> FactorRule:
    row, written = f"v{dim}", f"i{dim}"
    return call.rule(
        names,
        [names[0]],
        sizes,
        reduce={written: kind} if kind else {},
        replicated=whole if kind else [*whole, written],
        linear=linear,
        local=LocalForm(_emit, when=[row, written] if kind else row, fill={1: 0.0}),
    )


@rule_for(
    *named("scatter.value scatter.src scatter.reduce scatter.value_reduce scatter_add"),
    aten.scatter_reduce.two,
)
def _scatter(call: Call) -> FactorRule | Declined:
    x, index, *source = call.tensors
    if not x.dim() or not index.numel() or not x.numel():
        return DECLINED
    dim = call.dim(1)
    names, sizes, whole = aligned_factors(dim, x, index, *source)
    kind, linear = None, ()
    if call.target is aten.scatter_add.default:
        kind, linear = "sum", [[0, 2]]
    # include_self=False drops the old value of a written row, which only its writers know.
    elif call.target is aten.scatter_reduce.two and call.argument(5, "include_self", True):
        kind = KINDS.get(call.args[4])
    elif call.target is aten.scatter.src:
        linear = [[0, 2]]
    kind = None if f"i{dim}" in whole else kind
    return _rule(call, dim, names, sizes=sizes, whole=whole, kind=kind, linear=linear)


@rule_for(*named("index_add index_copy index_fill.int_Scalar index_fill.int_Tensor"))
def _index_write(call: Call) -> FactorRule | Declined:
    x, index, *source = call.tensors
    if not x.dim() or not index.dim() or not index.numel() or not x.numel():
        return DECLINED
    dim, kind = call.dim(1), "sum" if call.target is aten.index_add.default else None
    table = [f"v{d}" if d == dim else f"d{d}" for d in range(x.dim())]
    row = [*table[:dim], f"i{dim}", *table[dim + 1 :]]
    sources = [row if s.dim() == x.dim() else [] for s in source]
    names, linear = [table, [f"i{dim}"], *sources], [[0, 2]] if source and sources[0] else ()
    return _rule(call, dim, names, sizes={}, whole=[], kind=kind, linear=linear)


@rule_for(aten.index_reduce.default)
def _index_reduce(call: Call) -> FactorRule:
    x, index, source = call.tensors
    dim = call.dim(1)
    table = ["v" if d == dim else f"d{d}" for d in range(x.dim())]
    rows = ["i" if d == dim else f"d{d}" for d in range(x.dim())]
    sizes = {**dict(zip(table, x.shape)), "i": index.numel()}
    # An index may write to any row, so the written dimension stays whole.
    return call.rule([table, ["i"], rows], [table], sizes, replicated="v i")
