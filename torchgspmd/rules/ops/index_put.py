"""Advanced indexing: x[:, i, j] as aten.index, x[:, i, j] = values as aten.index_put.

Factors: v an indexed dimension, b one that the indices have, d any other one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from ...compat.operators import aten
from ..local_builder import LocalBuilder
from ..notation import IDENTITY, Call, FactorRule, LocalForm, factors
from ..registry import rule_for
from ..rewrites import DECLINED, Declined, rewrite
from .lookup import aligned_factors, in_shard, outside_kept, shard_index, zero_outside
from .pointwise import broadcast_dims, named

# Operations that write by index: scatter, index_add, index_copy, index_fill.
#
# If the indexed dimension is sharded, a device writes the rows that it has. All others go to a
# spare row behind its shard, which is cut off. If writing is a reduction (add, max), the values may
# be sharded. Then each device writes its own into a neutral value, the first one into the operand.
# The reduction stays pending (GSPMD's partitioned scatter).


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


def _emit_scatter(local: LocalBuilder, args: tuple, kwargs: dict) -> fx.Node:
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


def _written_rule(
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
        local=LocalForm(_emit_scatter, when=[row, written] if kind else row, fill={1: 0.0}),
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
    return _written_rule(call, dim, names, sizes=sizes, whole=whole, kind=kind, linear=linear)


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
    return _written_rule(call, dim, names, sizes={}, whole=[], kind=kind, linear=linear)


@rule_for(aten.index_reduce.default)
def _index_reduce(call: Call) -> FactorRule:
    x, index, source = call.tensors
    dim = call.dim(1)
    table = ["v" if d == dim else f"d{d}" for d in range(x.dim())]
    rows = ["i" if d == dim else f"d{d}" for d in range(x.dim())]
    sizes = {**dict(zip(table, x.shape)), "i": index.numel()}
    # An index may write to any row, so the written dimension stays whole.
    return call.rule([table, ["i"], rows], [table], sizes, replicated="v i")


@rule_for(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(call: Call) -> FactorRule | Declined:
    if (names := indexing_factors(call)) is None:
        return DECLINED
    x, indices, result, sizes = names
    values, accumulate = call.tensors[-1], call.argument(3, "accumulate", False)
    lead = len(result) - values.dim()
    if lead < 0:
        return DECLINED
    value = [name if n == sizes[name] else "" for name, n in zip(result[lead:], values.shape)]
    written = [name for name in sizes if name[0] == "b"]
    rows = [name for name in sizes if name[0] == "v"]
    last = len(call.tensors) - 1
    return call.rule(
        [x, *indices, value],
        [x],
        sizes,
        reduce=written if accumulate else "",
        # Without accumulation the last write to an element wins, so one device needs all writes.
        replicated="" if accumulate else written,
        linear=[[0, last]],
        local=LocalForm(
            _emit_index_put, when=rows + written, fill=dict.fromkeys(range(1, last), 0.0)
        ),
    )


def _emit_index_put(local: LocalBuilder, args: tuple, kwargs: dict) -> fx.Node:
    """Write into the shard and its spare rows, then cut the spare rows off."""
    x, indices, values, *accumulate = args
    local_indices, operand = [], 0
    # The results of all shards are added: x counts once.
    x = only_on_first_shard(local, x, [f for f in local.rule.sizes if f[0] == "b"], "sum")
    for d, index in enumerate(indices):
        if index is not None:
            operand += 1
            asked, index = index, nonnegative(local, index, local.rule.sizes.get(f"v{d}", 1))
            given = index
            for i, names in enumerate(local.rule.operands[operand]):
                # Padding goes to the spare row: -1 is outside every shard.
                index = local.masked(index, i, names[0], -1) if names else index
            place, least = index_or_spare_row(local, index, f"v{d}"), 0 if index is given else -1
            index = outside_kept(local, f"v{d}", index, place, asked, least)
            x = with_spare_row(local, x, d)
        local_indices.append(index)
    result = local.call(local.target, x, local_indices, values, *accumulate, **kwargs)
    for d, index in enumerate(indices):
        if index is not None:
            result = local.call(aten.slice.Tensor, result, d, 0, local.size(f"v{d}"))
    return result


def nonnegative(local: LocalBuilder, index: fx.Node, size: int) -> fx.Node:
    """Return indices that count from the start, where negative ones count from the end."""
    return local.call(
        aten.where.self,
        local.call(aten.lt.Scalar, index, 0),
        local.call(aten.add.Scalar, index, size),
        index,
    )


def indexing_factors(
    call: Call,
) -> tuple[list[str], list[list[str]], list[str], dict[str, int]] | None:
    """Return the factors for x, for each index and for x[indices], and sizes; None for masks."""
    x, arguments = call.tensors[0], call.args[1]
    tensors = [i for i in arguments if i is not None]
    if not tensors or any(i.dtype in (torch.bool, torch.uint8) for i in tensors) or not x.numel():
        return None
    shape = torch.broadcast_shapes(*(i.shape for i in tensors))
    places = [d for d, i in enumerate(arguments) if i is not None]
    names = [f"v{d}" if d in places else f"d{d}" for d in range(x.dim())]
    index_names = factors("b", len(shape))
    sizes = dict(zip(names, x.shape)) | dict(zip(index_names, shape))
    indices = [list(broadcast_dims(i.shape, shape, index_names)) for i in tensors]
    rest = [name for d, name in enumerate(names) if d not in places]
    at = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    return names, indices, [*rest[:at], *index_names, *rest[at:]], sizes


@rule_for(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(call: Call) -> FactorRule | Declined:
    if (names := indexing_factors(call)) is None:
        return DECLINED
    x, indices, result, sizes = names
    rows = [name for name in sizes if name[0] == "v"]
    fill = dict.fromkeys(range(1, len(call.tensors)), 0.0)
    return call.rule(
        [x, *indices],
        [result],
        sizes,
        reduce=rows,
        linear=[[0]],
        local=LocalForm(_emit_index, when=rows, fill=fill),
    )


def _emit_index(local: LocalBuilder, args: tuple, kwargs: dict) -> fx.Node:
    """Read the rows that the shard has; 0 for all others."""
    x, indices = args
    local_indices, all_inside = [], None
    for d, index in enumerate(indices):
        if index is not None and local.sharded(f"v{d}"):
            positive = nonnegative(local, index, local.rule.sizes[f"v{d}"])
            index, inside = shard_index(local, f"v{d}", positive, index)
            if all_inside is not None:
                inside = local.call(aten.logical_and.default, all_inside, inside)
            all_inside = inside
        local_indices.append(index)
    assert all_inside is not None
    rank, places = len(local.rule.operands[0]), [d for d, i in enumerate(indices) if i is not None]
    # PyTorch puts the indices' dimensions first if indexed dimensions are not adjacent.
    adjacent = places[-1] - places[0] == len(places) - 1
    trailing = rank - 1 - places[-1] if adjacent else rank - len(places)
    rows = local.call(local.target, x, local_indices)
    return zero_outside(local, all_inside, rows, trailing)


@rewrite("decompose", aten.index_put.default, aten._unsafe_index_put.default)
def _masked_write(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor | Declined:
    """Write one value wherever a mask says: `x[mask] = 0` is a choice for each element."""
    masks = [(d, i) for d, i in enumerate(indices) if i is not None]
    if len(masks) != 1 or masks[0][1].dtype not in (torch.bool, torch.uint8):
        return DECLINED
    (first, mask) = masks[0]
    # A selection has one dimension for the mask's. The rest counts from the last dimension.
    rest = x.dim() - first - mask.dim()
    if values.dim() > rest:
        if values.shape[values.dim() - 1 - rest] != 1:  # a value for each selected element
            return DECLINED
        place = values.dim() - 1 - rest
        shape = [*values.shape[:place], *[1] * mask.dim(), *values.shape[place + 1 :]]
        values = values.reshape(shape)
    chosen = mask.bool().reshape([*mask.shape, *[1] * rest])
    return torch.where(chosen, x + values if accumulate else values, x)


@rewrite("decompose", aten._unsafe_masked_index.default)
def _masked_index(x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], fill: float) -> Tensor:
    # An index that is masked out may be out of range.
    return aten._unsafe_index.Tensor(x, _clamp(x, indices)).masked_fill(~mask, fill)


@rewrite("decompose", aten._unsafe_masked_index_put_accumulate.default)
def _masked_index_put(
    x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], values: Tensor
) -> Tensor:
    return aten._unsafe_index_put.default(x, _clamp(x, indices), values.masked_fill(~mask, 0), True)


def _clamp(x: Tensor, indices: Sequence[Tensor | None]) -> list:
    return [
        None if index is None else index.clamp(-size, size - 1)
        for index, size in zip(indices, x.shape)
    ]


@rewrite("decompose", aten.diagonal.default, aten.diagonal_copy.default)
def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    index, order = _diagonal_index(x.shape, offset, dim1, dim2, x.device)
    # One element of each row: rows stay where they are.
    if x.dim() == 2 and len(index[0]) == x.shape[order[0]]:
        return x.permute(order).gather(1, index[1].unsqueeze(1)).squeeze(1)
    return aten.index.Tensor(x.permute(order), [None] * (x.dim() - 2) + index)


@rewrite("decompose", aten.diagonal_backward.default)
def _diagonal_backward(
    grad: Tensor, shape: Sequence[int], offset: int, dim1: int, dim2: int
) -> Tensor:
    index, order = _diagonal_index(shape, offset, dim1, dim2, grad.device)
    zeros = grad.new_zeros([shape[d] for d in order])
    if len(shape) == 2 and len(index[0]) == zeros.shape[0]:
        result = zeros.scatter(1, index[1].unsqueeze(1), grad.unsqueeze(1))
        return result.permute([order.index(d) for d in range(2)])
    result = aten.index_put.default(zeros, [None] * (len(shape) - 2) + index, grad, True)
    return result.permute([order.index(d) for d in range(len(shape))])


@rewrite("decompose", aten.diagonal_scatter.default)
def _diagonal_scatter(
    x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Tensor:
    index, order = _diagonal_index(x.shape, offset, dim1, dim2, x.device)
    result = aten.index_put.default(
        x.permute(order), [None] * (x.dim() - 2) + index, source.to(x.dtype)
    )
    return result.permute([order.index(d) for d in range(x.dim())])


def _diagonal_index(
    shape: Sequence[int], offset: int, dim1: int, dim2: int, device: torch.device
) -> tuple[list, list[int]]:
    """Return a diagonal's [rows, columns], and the dimensions with these two last."""
    dim1, dim2 = dim1 % len(shape), dim2 % len(shape)
    rows, columns = max(-offset, 0), max(offset, 0)
    count = max(0, min(shape[dim1] - rows, shape[dim2] - columns))
    place = torch.arange(count, device=device)
    return [place + rows, place + columns], [
        d for d in range(len(shape)) if d not in (dim1, dim2)
    ] + [dim1, dim2]


@rewrite("decompose", aten.trace.default)
def _trace(x: Tensor) -> Tensor:
    return _diagonal(x).sum(dtype=None if x.is_floating_point() or x.is_complex() else torch.int64)


@rewrite("decompose", aten.take.default)
def _take(x: Tensor, index: Tensor) -> Tensor:
    place = torch.where(index < 0, index + x.numel(), index)
    return aten.index.Tensor(x.reshape(-1), [place])  # x[place] reads a single place on torch 2.15


@rewrite("decompose", aten.put.default)
def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    flat = aten.index_put.default(
        x.reshape(-1), [index.reshape(-1)], source.reshape(-1), accumulate
    )
    return flat.reshape(x.shape)


@rewrite("decompose", aten.masked_scatter.default)
def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Put the source's n-th element where the mask has its n-th True."""
    x, mask = torch.broadcast_tensors(x, mask)
    place = mask.reshape(-1).cumsum(0) - 1
    values = source.reshape(-1)[place.clamp(0, source.numel() - 1)].reshape(x.shape)
    return torch.where(mask, values, x)


@rewrite("decompose", aten.masked_scatter_backward.default)
def _masked_scatter_backward(grad: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    count = math.prod(sizes)
    flat = mask.expand(grad.shape).reshape(-1)
    place = torch.where(flat, flat.cumsum(0) - 1, count)  # masked elements go past the end
    return grad.new_zeros(count + 1).scatter_add(0, place, grad.reshape(-1))[:count].reshape(sizes)
