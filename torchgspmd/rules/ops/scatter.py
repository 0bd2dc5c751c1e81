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
from ..notation import IDENTITY, Call, Dims, Rule, make_rule
from ..registry import rule_for
from .lookup import aligned_factors

KINDS = {
    "sum": "sum",
    "prod": "prod",
    "amax": "max",
    "amin": "min",
    "add": "sum",
    "multiply": "prod",
}


def index_or_spare_row(local: LocalBuilder, index: fx.Node, factor: str) -> fx.Node:
    """Return indices into the device's shard. Those outside of it point behind its end."""
    size = local.size(factor)
    shifted = local.call(aten.sub.Tensor, index, local.index(factor) * size)
    inside = local.call(
        aten.logical_and.default,
        local.call(aten.ge.Scalar, shifted, 0),
        local.call(aten.lt.Scalar, shifted, size),
    )
    spare = local.call(
        aten.scalar_tensor.default, size, dtype=torch.int64, device=local.results[0].device
    )
    return local.call(aten.where.self, inside, shifted, spare)


def with_spare_row(local: LocalBuilder, x: fx.Node, dim: int) -> fx.Node:
    """Return x with one more row at the end of a dimension."""
    return local.call(
        aten.constant_pad_nd.default, x, [0, 0] * (len(local.results[0].shape) - 1 - dim) + [0, 1]
    )


def only_on_first_shard(local: LocalBuilder, x: fx.Node, factors: list[str], kind: str) -> fx.Node:
    """Return x on the device with the first shard of all factors, else the neutral value."""
    if kind in ("max", "min"):
        return x
    first = True
    for factor in factors:
        if local.assignment.get(factor):
            is_first = local.call(
                aten.scalar_tensor.default,
                local.index(factor) == 0,
                dtype=torch.bool,
                device=local.results[0].device,
            )
            first = (
                is_first if first is True else local.call(aten.logical_and.default, first, is_first)
            )
    neutral = local.call(
        aten.scalar_tensor.default,
        IDENTITY[kind],
        dtype=local.results[0].dtype,
        device=local.results[0].device,
    )
    return x if first is True else local.call(aten.where.self, first, x, neutral)


def _emit(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
    """Write into the shard and its spare row, then cut the spare row off."""
    x, dim, index, *rest = args
    dim %= len(local.results[0].shape)
    row_factor, index_factor = f"v{dim}", f"i{dim}"
    place = next(
        (i for i, factors in enumerate(local.rule.operands[1]) if factors == (index_factor,)), 0
    )
    masked, whole = (
        local.masked(index, place, index_factor, -1),
        not local.assignment.get(row_factor),
    )
    x = only_on_first_shard(local, x, [index_factor], local.rule.reduce.get(index_factor, "sum"))
    if whole and masked is index:  # all rows are here
        return [local.call(local.node.target, x, dim, index, *rest, **kwargs)]
    result = local.call(
        local.node.target,
        with_spare_row(local, x, dim),
        dim,
        index_or_spare_row(local, masked, row_factor),
        *rest,
        **kwargs,
    )
    return [local.call(aten.slice.Tensor, result, dim, 0, local.size(row_factor))]


def _rule(
    call: Call,
    dim: int,
    names: Sequence[Dims],
    sizes: dict[str, int],
    whole: str,
    kind: str | None,
    linear: Sequence[Sequence[int]] = (),
) -> Rule:
    special = f"v{dim} i{dim}" if kind else f"v{dim}"
    return make_rule(
        names,
        [names[0]],
        sizes,
        special=special,
        reduce={f"i{dim}": kind} if kind else {},
        emit=_emit,
        linear=linear,
        whole=whole if kind else f"{whole} i{dim}",
        positions=frozenset({1}),
    )


@rule_for(
    aten.scatter.value,
    aten.scatter.src,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
)
def _scatter(call: Call) -> Rule | None:
    x, index, *source = call.tensors
    if not x.dim() or not index.numel() or not x.numel():
        return None
    dim = call.args[1] % x.dim()
    names, sizes, whole = aligned_factors(dim, x, index, *source)
    kind, linear = None, ()
    if call.target is aten.scatter_add.default:
        kind, linear = "sum", [[0, 2]]
    elif call.target is aten.scatter_reduce.two and call.argument(5, "include_self", True):
        kind = KINDS.get(call.args[4])
    elif call.target is aten.scatter.src:
        linear = [[0, 2]]
    return _rule(
        call, dim, names, sizes, whole, kind if f"i{dim}" not in whole.split() else None, linear
    )


@rule_for(
    aten.index_add.default,
    aten.index_copy.default,
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
)
def _index_write(call: Call) -> Rule | None:
    x, index, *source = call.tensors
    if not x.dim() or not index.dim() or not index.numel() or not x.numel():
        return None
    dim = call.args[1] % x.dim()
    table = [(f"v{d}" if d == dim else f"d{d}",) for d in range(x.dim())]
    sizes = {name[0]: n for name, n in zip(table, x.shape)} | {f"i{dim}": index.shape[0]}
    sources = [
        [*table[:dim], (f"i{dim}",), *table[dim + 1 :]] if s.dim() == x.dim() else []
        for s in source
    ]
    return _rule(
        call,
        dim,
        [table, [(f"i{dim}",)], *sources],
        sizes,
        "",
        "sum" if call.target is aten.index_add.default else None,
        [[0, 2]] if source and sources[0] else (),
    )
