"""Operations that look up by index: embedding, gather, index_select, nll_loss.

A table may be sharded along the indexed dimension. Then each device reads the rows that it has, and
puts 0 elsewhere. The sum over devices is the result (GSPMD's partitioned gather; Megatron's
vocabulary-parallel embedding).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from ...compat.operators import aten
from ..local_builder import LocalBuilder
from ..notation import Call, Rule, make_rule
from ..registry import decomposition, rule_for


def _factors(prefix: str, shape: Sequence[int], start: int = 0) -> list[tuple[str, ...]]:
    return [(f"{prefix}{i + start}",) for i in range(len(shape))]


def _sizes(*pairs: tuple[Sequence[tuple[str, ...]], Sequence[int]]) -> dict[str, int]:
    return {name[0]: n for names, shape in pairs for name, n in zip(names, shape) if name}


def shard_index(local: LocalBuilder, factor: str, index: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return (index into the device's shard, clamped; whether it falls into the shard)."""
    size, start = local.size(factor), local.index(factor) * local.size(factor)
    shifted = local.call(aten.sub.Tensor, index, start)
    inside = local.call(
        aten.logical_and.default,
        local.call(aten.ge.Scalar, shifted, 0),
        local.call(aten.lt.Scalar, shifted, size),
    )
    return local.call(aten.clamp.default, shifted, 0, size - 1), inside


def zero_outside(
    local: LocalBuilder, inside: fx.Node, values: fx.Node, trailing: int = 0
) -> fx.Node:
    """Return the values where `inside` is true, else 0.

    trailing: how many more dimensions the values have.
    """
    for _ in range(trailing):
        inside = local.call(aten.unsqueeze.default, inside, -1)
    zero = local.call(
        aten.scalar_tensor.default, 0, dtype=local.results[0].dtype, device=local.results[0].device
    )
    return local.call(aten.where.self, inside, values, zero)


@rule_for(aten.embedding.default)
def _embedding(call: Call) -> Rule:
    table, index = call.tensors
    names = _factors("i", index.shape)
    return make_rule(
        [[("v",), ("e",)], names],
        [[*names, ("e",)]],
        {"v": table.shape[0], "e": table.shape[1]} | _sizes((names, index.shape)),
        special="v",
        reduce="v",
        emit=_emit_embedding,
        linear=[[0]],
        positions=frozenset({1}),
    )


def _emit_embedding(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
    table, index = args[:2]
    place, inside = shard_index(local, "v", index)
    return [zero_outside(local, inside, local.call(aten.embedding.default, table, place), 1)]


@rule_for(aten.embedding_dense_backward.default)
def _embedding_backward(call: Call) -> Rule:
    grad, index = call.tensors
    names = _factors("i", index.shape)
    sizes = _sizes((names, index.shape)) | {"v": call.args[2], "e": grad.shape[-1]}
    factors = " ".join(n[0] for n in names)
    return make_rule(
        [[*names, ("e",)], names],
        [[("v",), ("e",)]],
        sizes,
        special="v",
        reduce=factors,
        whole=f"{factors} v" if call.args[4] else "",  # frequencies count all indices
        emit=_emit_embedding_backward,
        linear=[[0]],
        positions=frozenset({1}),
    )


def _emit_embedding_backward(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
    """Add only the gradients whose row the shard has."""
    grad, index, _, padding_index, by_frequency = args
    place, inside = shard_index(local, "v", index)
    if padding_index >= 0:
        inside = local.call(
            aten.logical_and.default, inside, local.call(aten.ne.Scalar, index, padding_index)
        )
    unsqueezed = local.call(aten.unsqueeze.default, inside, -1)
    zero = local.call(
        aten.scalar_tensor.default, 0, dtype=local.results[0].dtype, device=local.results[0].device
    )
    grad = local.call(aten.where.self, unsqueezed, grad, zero)
    return [
        local.call(
            aten.embedding_dense_backward.default, grad, place, local.size("v"), -1, by_frequency
        )
    ]


def aligned_factors(
    dim: int, table: Tensor, index: Tensor, *sources: Tensor
) -> tuple[list[list], dict[str, int], str]:
    """Return the factors of table, index and sources in gather and scatter, sizes, whole factors.

    Dimensions of equal size correspond. Others are whole.
    """
    names: list[list] = [[] for _ in (table, index, *sources)]
    sizes: dict[str, int] = {}
    whole = []
    for d in range(table.dim()):
        row = [f"v{d}" if d == dim else f"d{d}", f"i{d}" if d == dim else f"d{d}"]
        if d != dim and table.shape[d] != index.shape[d]:
            row = [f"x{d}", f"y{d}"]
            whole += row
        for k, source in enumerate(sources):
            same = source.shape[d] == index.shape[d]
            row.append(row[1] if same else f"s{k}_{d}")
            whole += [] if same else [row[1], row[-1]]
        for tensor_names, name, tensor in zip(names, row, (table, index, *sources)):
            tensor_names.append((name,))
            sizes[name] = tensor.shape[d]
    return names, sizes, " ".join(whole)


@rule_for(aten.gather.default)
def _gather(call: Call) -> Rule | None:
    x, index = call.tensors
    if not x.dim() or index.dim() != x.dim():
        return None
    dim = call.args[1] % x.dim()
    (x_names, i_names), sizes, whole = aligned_factors(dim, x, index)
    return make_rule(
        [x_names, i_names],
        [i_names],
        sizes,
        special=f"v{dim}",
        reduce=f"v{dim}",
        whole=whole,
        emit=_emit_gather,
        linear=[[0]],
        positions=frozenset({1}),
    )


def _emit_gather(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
    x, dim, index = args[:3]
    rank = len(local.results[0].shape)
    place, inside = shard_index(local, f"v{dim % rank}", index)
    return [zero_outside(local, inside, local.call(aten.gather.default, x, dim, place))]


@rule_for(aten.index_select.default)
def _index_select(call: Call) -> Rule | None:
    x, index = call.tensors
    if not x.dim() or not index.dim():
        return None
    dim = call.args[1] % x.dim()
    names = _factors("d", x.shape)
    out = [*names[:dim], ("i",), *names[dim + 1 :]]
    sizes = _sizes((names, x.shape)) | {"i": index.shape[0]}
    return make_rule(
        [names, [("i",)]],
        [out],
        sizes,
        special=f"d{dim}",
        reduce=f"d{dim}",
        emit=_emit_index_select,
        linear=[[0]],
        positions=frozenset({1}),
    )


def _emit_index_select(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
    x, dim, index = args[:3]
    rank = len(local.results[0].shape)
    place, inside = shard_index(local, f"d{dim % rank}", index)
    return [
        zero_outside(
            local,
            inside,
            local.call(aten.index_select.default, x, dim, place),
            rank - 1 - dim % rank,
        )
    ]


@decomposition(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    dim = 1 if x.dim() == 4 else x.dim() - 1  # [n, c, h, w], [n, c] or [c]
    safe = torch.where(target != ignore_index, target, 0)
    target_losses = -x.gather(dim, safe.unsqueeze(dim)).squeeze(dim)
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


@decomposition(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
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
