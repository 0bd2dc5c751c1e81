"""softmax and layer norm.

They stay fused while the normalized dimensions are whole. Otherwise they are decomposed into local
statistics and an all_reduce of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...compat.operators import aten
from ..notation import Call, Rule, make_rule
from ..registry import SPLITS, decomposition, rule_for
from .reduction import accumulation_dtype


@rule_for(
    aten._softmax.default,
    aten._log_softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    aten._safe_softmax.default,
    splits=True,
)
def _softmax(call: Call) -> Rule:
    x = call.results[0]
    dim = call.args[len(call.tensors)] % x.dim() if x.dim() else 0
    names = [(f"d{i}",) for i in range(x.dim())]
    return make_rule(
        [names] * len(call.tensors),
        [names],
        {f"d{i}": n for i, n in enumerate(x.shape)},
        whole=f"d{dim}",
        splits=True,
    )


def _split_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    e = (x.to(accumulation_dtype(x.dtype)) - x.amax(dim, True)).exp()
    return (e / e.sum(dim, True)).to(torch.float32 if half_to_float else x.dtype)


def _split_log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    shifted = x.to(accumulation_dtype(x.dtype)) - x.amax(dim, True)
    return (shifted - shifted.exp().sum(dim, True).log()).to(
        torch.float32 if half_to_float else x.dtype
    )


def _split_safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    dtype = dtype or x.dtype
    x = x.to(dtype)
    top = x.amax(dim, True)
    empty = top == float("-inf")  # rows without a finite number become 0
    e = (x.to(accumulation_dtype(dtype)) - torch.where(empty, 0.0, top)).exp()
    return torch.where(empty, 0.0, e / e.sum(dim, True)).to(dtype)


def _split_softmax_backward(grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    y = y.to(accumulation_dtype(y.dtype))
    gy = grad * y
    return (gy - y * gy.sum(dim, True)).to(dtype)


def _split_log_softmax_backward(grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    grad, y = (t.to(accumulation_dtype(t.dtype)) for t in (grad, y))
    return (grad - y.exp() * grad.sum(dim, True)).to(dtype)


SPLITS.update(
    {
        aten._softmax.default: _split_softmax,
        aten._safe_softmax.default: _split_safe_softmax,
        aten._log_softmax.default: _split_log_softmax,
        aten._softmax_backward_data.default: _split_softmax_backward,
        aten._log_softmax_backward_data.default: _split_log_softmax_backward,
    }
)


def _layer_norm_names(rank: int, count: int) -> tuple[list, list, list]:
    lead = [(f"l{i}",) for i in range(rank - count)]
    tail = [(f"n{i}",) for i in range(count)]
    return lead, tail, lead + [()] * count


@rule_for(aten.native_layer_norm.default, splits=True)
def _layer_norm(call: Call) -> Rule:
    x, count = call.tensors[0], len(call.args[1])
    lead, tail, statistics = _layer_norm_names(x.dim(), count)
    sizes = {name[0]: n for name, n in zip(lead + tail, x.shape)}
    return make_rule(
        [lead + tail] + [tail] * (len(call.tensors) - 1),
        [lead + tail, statistics, statistics],
        sizes,
        whole=" ".join(n[0] for n in tail),
        splits=True,
    )


def _split_layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.dim() - len(normalized_shape), x.dim()))
    full, count = x.to(accumulation_dtype(x.dtype)), math.prod(normalized_shape)
    mean = full.sum(dims, True) / count
    centered = full - mean
    rstd = ((centered * centered).sum(dims, True) / count + eps).rsqrt()
    out = centered * rstd
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).to(x.dtype), mean, rstd


SPLITS[aten.native_layer_norm.default] = _split_layer_norm


@rule_for(aten.native_layer_norm_backward.default, splits=True)
def _layer_norm_backward(call: Call) -> Rule:
    x, count = call.tensors[1], len(call.args[2])
    lead, tail, statistics = _layer_norm_names(x.dim(), count)
    sizes = {name[0]: n for name, n in zip(lead + tail, x.shape)}
    weights = [tail] * (len(call.tensors) - 4)
    results = [
        lead + tail
        if r.dim() == x.dim() and r.shape == x.shape and i == 0 and call.args[7][0]
        else tail
        for i, r in enumerate(call.results)
    ]
    return make_rule(
        [lead + tail, lead + tail, statistics, statistics, *weights],
        results,
        sizes,
        reduce=" ".join(n[0] for n in lead),
        whole=" ".join(n[0] for n in tail),
        splits=True,
    )


@decomposition(aten._weight_norm_interface_backward.default)
def _weight_norm_backward(
    grad: Tensor, v: Tensor, g: Tensor, norm: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    dims = [d for d in range(v.dim()) if d != dim % v.dim()]
    along = (grad * v).sum(dims, True)
    return (grad - v * along / norm.square()) * (g / norm), along / norm
