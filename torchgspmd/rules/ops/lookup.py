"""Operations that look up by index: embedding, gather, index_select, class losses.

A table may be sharded along the indexed dimension. Then each device reads the rows that it has, and
puts 0 elsewhere. The sum over devices is the result (GSPMD's partitioned gather; Megatron's
vocabulary-parallel embedding). An index outside of the whole table is left as it is, so that the
kernel refuses it on every device, as it does on one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.operators import aten
from ..custom_ops import nd  # noqa: F401
from ..local_builder import LocalBuilder
from ..notation import Call, FactorRule, LocalForm, factors
from ..registry import ordered, rule_for
from ..rewrites import DECLINED, Declined, rewrite


def in_shard(local: LocalBuilder, factor: str, index: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return (index into the device's shard of a factor, whether it falls into the shard)."""
    shifted = local.call(aten.sub.Tensor, index, local.start(factor))
    inside = local.call(
        aten.logical_and.default,
        local.call(aten.ge.Scalar, shifted, 0),
        local.call(aten.lt.Scalar, shifted, local.size(factor)),
    )
    return shifted, inside


def shard_index(
    local: LocalBuilder,
    factor: str,
    index: fx.Node,
    asked: fx.Node | None = None,
    checked: bool = True,
) -> tuple[fx.Node, fx.Node]:
    """Return (index into the device's shard, clamped; whether it falls into the shard).

    checked: whether an index outside of the whole table stays outside of the shard, as `asked`.
    """
    shifted, inside = in_shard(local, factor, index)
    # Clamped: devices without the row read another one, which zero_outside drops.
    place = local.call(aten.clamp.default, shifted, 0, local.size(factor) - 1)
    return outside_kept(local, factor, index, place, asked) if checked else place, inside


def outside_kept(
    local: LocalBuilder,
    factor: str,
    index: fx.Node,
    place: fx.Node,
    asked: fx.Node | None = None,
    least: int = 0,
) -> fx.Node:
    """Return `place`, but the index that was asked for where it is outside of the whole table.

    It is a few operations on indices, beside rows of values and a message. asked: the index before
    negative ones became positive. least: the lowest index that is no mistake.
    """
    rows = local.known_size(factor)
    if rows is None:
        return place
    known = local.call(aten.clamp.default, index, least, rows - 1)
    is_known = local.call(aten.eq.Tensor, known, index)
    result = local.call(aten.where.self, is_known, place, index if asked is None else asked)
    local.limit(result, rows)
    return result


def zero_outside(
    local: LocalBuilder, inside: fx.Node | None, values: fx.Node, trailing: int = 0
) -> fx.Node:
    """Return the values where `inside` is true, else 0.

    trailing: how many more dimensions the values have.
    """
    for _ in range(trailing):
        inside = local.call(aten.unsqueeze.default, inside, -1)
    return local.call(aten.where.self, inside, values, local.scalar(0))


@rule_for(aten.embedding.default)
def _embedding(call: Call) -> FactorRule:
    names = factors("i", call.tensors[1].dim())

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> fx.Node:
        place, inside = shard_index(local, "v", args[1])
        return zero_outside(local, inside, local.call(aten.embedding.default, args[0], place), 1)

    return call.rule(
        [["v", "e"], names],
        [[*names, "e"]],
        reduce="v",
        linear=[[0]],
        local=LocalForm(emit, when="v", fill={1: 0.0}),
    )


@rule_for(aten.embedding_dense_backward.default)
def _embedding_backward(call: Call) -> FactorRule:
    index, (rows, padding_index, by_frequency) = call.tensors[1], call.args[2:5]
    names = factors("i", index.dim())

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> fx.Node:
        """Add only the gradients whose row the shard has."""
        # The forward has checked the indices.
        place, inside = shard_index(local, "v", args[1], checked=False)
        if padding_index >= 0:
            is_row = local.call(aten.ne.Scalar, args[1], padding_index)
            inside = local.call(aten.logical_and.default, inside, is_row)
        grad = zero_outside(local, inside, args[0], 1)
        # -1: the padding row's number is a global one, and its gradients are 0 by now.
        options = (place, local.size("v"), -1, by_frequency)
        return local.call(aten.embedding_dense_backward.default, grad, *options)

    return call.rule(
        [[*names, "e"], names],
        [["v", "e"]],
        dict(zip(names, index.shape)) | {"v": rows},
        reduce=names,
        replicated=[*names, "v"] if by_frequency else "",  # frequencies count all indices
        linear=[[0]],
        local=LocalForm(emit, when="v", fill={1: 0.0}),
    )


def aligned_factors(
    dim: int, table: Tensor, index: Tensor, *sources: Tensor
) -> tuple[list[list[str]], dict[str, int], list[str]]:
    """Return the factors of table, index and sources in gather and scatter, sizes, whole ones.

    Dimensions with equal sizes correspond. Others are whole.
    """
    names: list[list[str]] = [[] for _ in (table, index, *sources)]
    sizes: dict[str, int] = {}
    whole: list[str] = []
    for d in range(table.dim()):
        row = [f"v{d}" if d == dim else f"d{d}", f"i{d}" if d == dim else f"d{d}"]
        # gather may leave rows out: then shards of table and index have other rows.
        if d != dim and table.shape[d] != index.shape[d]:
            row = [f"x{d}", f"y{d}"]
            whole += row
        for k, source in enumerate(sources):
            same = source.shape[d] == index.shape[d]
            row.append(row[1] if same else f"s{k}_{d}")
            whole += [] if same else [row[1], row[-1]]
        for tensor_names, name, tensor in zip(names, row, (table, index, *sources)):
            tensor_names.append(name)
            sizes[name] = tensor.shape[d]
    return names, sizes, whole


@rule_for(aten.gather.default)
def _gather(call: Call) -> FactorRule | Declined:
    x, index = call.tensors
    if not x.dim() or index.dim() != x.dim():
        return DECLINED
    dim = call.dim(1)
    (x_names, i_names), sizes, whole = aligned_factors(dim, x, index)

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> fx.Node:
        place, inside = shard_index(local, f"v{dim}", args[2])
        values = local.call(aten.gather.default, args[0], args[1], place)
        return zero_outside(local, inside, values)

    return call.rule(
        [x_names, i_names],
        [i_names],
        sizes,
        reduce=f"v{dim}",
        replicated=whole,
        linear=[[0]],
        local=LocalForm(emit, when=f"v{dim}", fill={1: 0.0}),
    )


@rule_for(aten.index_select.default)
def _index_select(call: Call) -> FactorRule | Declined:
    x, index = call.tensors
    if not x.dim() or not index.dim():
        return DECLINED
    dim, names = call.dim(1), factors("d", x.dim())

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> fx.Node:
        place, inside = shard_index(local, names[dim], args[2])
        rows = local.call(aten.index_select.default, args[0], args[1], place)
        return zero_outside(local, inside, rows, x.dim() - 1 - dim)

    return call.rule(
        [names, ["i"]],
        [[*names[:dim], "i", *names[dim + 1 :]]],
        reduce=names[dim],
        linear=[[0]],
        local=LocalForm(emit, when=names[dim], fill={1: 0.0}),
    )


# With steps between the indices it reads others. Without steps in the weight it leaves out results.
for _op in (aten._embedding_bag.default, aten._embedding_bag_forward_only.default):
    ordered(_op)


@rule_for(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def _embedding_bag(call: Call) -> FactorRule:
    """Return a rule in which only the table's columns may be sharded."""
    tensors, count = (*call.tensors, *call.results), len(call.tensors)
    dims = [
        [f"w{i}_{d}" if (t.dim(), d) != (2, 1) else "e" for d in range(t.dim())]
        for i, t in enumerate(tensors)
    ]
    whole = [name for row in dims for name in row if name != "e"]
    return call.rule(dims[:count], dims[count:], {"e": call.tensors[0].shape[1]}, replicated=whole)


# --------------------------------------------------------------------------------------- losses


@rule_for(torch.ops.torchgspmd.ctc_losses.default)
def _ctc(call: Call) -> FactorRule:
    """Return a rule in which the batch may be sharded, unless its targets are concatenated."""
    # Concatenated targets belong to rows by their lengths, which no layout knows.
    batched = call.tensors[1].dim() == 2
    return call.rule(
        [["t", "n", "c"], ["n", "s"] if batched else ["s"], ["n"], ["n"]],
        [["n"], ["t", "n", "c"]],
        replicated="t c s" if batched else "t c s n",
        local=LocalForm(fill=dict.fromkeys(range(4), 0.0)),
    )


@rewrite("decompose", aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    # The ignored index may be out of range, such as -100: it reads class 0 with weight 0.
    dim = 1 if x.dim() == 4 else x.dim() - 1  # [n, c, h, w], [n, c] or [c]
    safe = torch.where(target != ignore_index, target, 0)
    # Without classes every target is ignored.
    read = x if x.shape[dim] else x.new_zeros([1 if d == dim else n for d, n in enumerate(x.shape)])
    target_losses = -read.gather(dim, safe.unsqueeze(dim)).squeeze(dim)
    class_weight = (target != ignore_index).to(x.dtype)
    if weight is not None:
        class_weight = class_weight * weight[safe]
    losses = torch.where(target != ignore_index, target_losses, 0.0) * (
        class_weight if weight is not None else 1
    )
    total = class_weight.sum()
    if reduction == 0:
        return losses, x.new_zeros(())
    return losses.sum() / total if reduction == 1 else losses.sum(), total


@rewrite("decompose", aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _nll_loss_backward(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total: Tensor,
) -> Tensor:
    dim = 1 if x.dim() == 4 else x.dim() - 1
    grad = grad / total if reduction == 1 else grad
    safe = torch.where(target != ignore_index, target, 0).unsqueeze(dim)
    grad = grad.unsqueeze(dim) if grad.dim() else grad
    scale = torch.where(target != ignore_index, -1.0, 0.0).to(x.dtype)
    if weight is not None:
        scale = scale * weight[safe.squeeze(dim)]
    return torch.full_like(x, 0.0).scatter(dim, safe, grad * scale.unsqueeze(dim))


_CHOOSING = (aten.index.Tensor, aten.embedding.default, aten.index_select.default, aten.select.int)


def _as_bytes(op: Callable[..., Tensor], table: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Choose rows of float8 as integers of one byte.

    A device that lacks a row adds zeros in its place, and float8 has no addition.
    """
    if not (table.is_floating_point() and table.itemsize == 1):
        return DECLINED
    return op(table.view(torch.uint8), *args, **kwargs).view(table.dtype)


for _op in _CHOOSING:
    rewrite("decompose", _op)(partial(_as_bytes, _op))


_Rows = Callable[[tuple[Any, ...]], Iterator[tuple[Any, int]]]


def _along_dim(args: tuple[Any, ...]) -> Iterator[tuple[Any, int]]:
    shape = args[0].meta["val"].shape
    # A tensor without dimensions is read as one row.
    yield args[2], (shape[args[1]] if shape else 1)


def _of_each_dim(args: tuple[Any, ...]) -> Iterator[tuple[Any, int]]:
    yield from zip(args[1], args[0].meta["val"].shape)


# By name without overload: all overloads have their index in one place.
_READERS: dict[str, _Rows] = {
    "embedding": lambda args: iter([(args[1], args[0].meta["val"].shape[0])]),
    "embedding_dense_backward": lambda args: iter([(args[1], args[2])]),
    "nll_loss_forward": lambda args: iter([(args[1], args[0].meta["val"].shape[-1])]),
    "nll_loss2d_forward": lambda args: iter([(args[1], args[0].meta["val"].shape[1])]),
    "index": _of_each_dim,
    "index_put": _of_each_dim,
    **dict.fromkeys(
        ("gather", "index_select", "scatter", "scatter_add", "scatter_reduce", "index_add"),
        _along_dim,
    ),
}


def rows_read(node: fx.Node) -> Iterator[tuple[Any, int]]:
    """Yield (indices, rows) for a node's operands that look rows up."""
    name = getattr(node.target, "__name__", "").split(".")[0]
    if name in _READERS:
        yield from _READERS[name](node.args)
