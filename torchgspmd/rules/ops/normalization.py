"""softmax and layer norm.

They stay fused while the normalized dimensions are whole. Otherwise they become local statistics
and an all_reduce.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...compat.operators import aten
from ..notation import Call, FactorRule, Ints, Split, factors
from ..registry import ordered, packed, rule_for
from ..rewrites import rewrite
from .pointwise import named
from .reduction import accumulation_dtype


@rule_for(
    *named("_softmax _log_softmax _safe_softmax"),
    *named("_softmax_backward_data _log_softmax_backward_data"),
)
def _softmax(call: Call) -> FactorRule:
    count, rank = len(call.tensors), call.results[0].dim()
    names, dim = factors("d", rank), call.args[count] % max(rank, 1)
    return call.rule([names] * count, [names], replicated=names[dim : dim + 1], split=Split())


@rewrite("split", aten._softmax.default)
def _split_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    # Less the maximum, so that exp does not overflow: one more reduction over devices.
    e = (x.to(accumulation_dtype(x.dtype)) - x.amax(dim, True)).exp()
    return (e / e.sum(dim, True)).to(torch.float32 if half_to_float else x.dtype)


@rewrite("split", aten._log_softmax.default)
def _split_log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    shifted = x.to(accumulation_dtype(x.dtype)) - x.amax(dim, True)
    return (shifted - shifted.exp().sum(dim, True).log()).to(
        torch.float32 if half_to_float else x.dtype
    )


@rewrite("split", aten._safe_softmax.default)
def _split_safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    dtype = dtype or x.dtype
    x = x.to(dtype)
    top = x.amax(dim, True)
    empty = top == float("-inf")  # rows without a finite number become 0
    e = (x.to(accumulation_dtype(dtype)) - torch.where(empty, 0.0, top)).exp()
    return torch.where(empty, 0.0, e / e.sum(dim, True)).to(dtype)


@rewrite("split", aten._softmax_backward_data.default)
def _split_softmax_backward(grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    y = y.to(accumulation_dtype(y.dtype))
    gy = grad * y
    return (gy - y * gy.sum(dim, True)).to(dtype)


@rewrite("split", aten._log_softmax_backward_data.default)
def _split_log_softmax_backward(grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    grad, y = (t.to(accumulation_dtype(t.dtype)) for t in (grad, y))
    return (grad - y.exp() * grad.sum(dim, True)).to(dtype)


def _layer_norm_factors(rank: int, count: int) -> tuple[list[str], list[str], list[str]]:
    """Return the leading factors, the `count` normalized ones, and the statistics' factors."""
    lead = factors("l", rank - count)
    return lead, factors("n", count), lead + [""] * count


@rule_for(aten.native_layer_norm.default)
def _layer_norm(call: Call) -> FactorRule:
    lead, tail, statistics = _layer_norm_factors(call.tensors[0].dim(), len(call.args[1]))
    return call.rule(
        [lead + tail] + [tail] * (len(call.tensors) - 1),
        [lead + tail, statistics, statistics],
        replicated=tail,
        split=Split(),
    )


packed(aten.native_layer_norm.default)
# The CPU's kernel reads the statistics as if they were contiguous.
ordered(aten.native_layer_norm_backward.default, "mean rstd")


@rewrite("split", aten.native_layer_norm.default)
def _split_layer_norm(
    x: Tensor, normalized_shape: Ints, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.dim() - len(normalized_shape), x.dim()))
    full, count = x.to(accumulation_dtype(x.dtype)), math.prod(normalized_shape)
    # By the global count: shards may be uneven.
    mean = full.sum(dims, True) / count
    # Centered first: E[x^2] - E[x]^2 would lose digits.
    centered = full - mean
    rstd = ((centered * centered).sum(dims, True) / count + eps).rsqrt()
    out = centered * rstd
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).to(x.dtype), mean, rstd


@rule_for(aten.native_layer_norm_backward.default)
def _layer_norm_backward(call: Call) -> FactorRule:
    """Return the gradient's rule. PyTorch's decomposition splits it."""
    lead, tail, statistics = _layer_norm_factors(call.tensors[1].dim(), len(call.args[2]))
    x, weights = call.tensors[1], [tail] * (len(call.tensors) - 4)
    results = [
        lead + tail if i == 0 and r.shape == x.shape and call.args[7][0] else tail
        for i, r in enumerate(call.results)
    ]
    return call.rule(
        [lead + tail, lead + tail, statistics, statistics, *weights],
        results,
        # Gradients of weight and bias are sums over the leading rows.
        reduce=lead,
        replicated=tail,
        split=Split(),
    )


@rewrite("decompose", aten._weight_norm_interface_backward.default)
def _weight_norm_backward(
    grad: Tensor, v: Tensor, g: Tensor, norm: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    dims = [d for d in range(v.dim()) if d != dim % v.dim()]
    along = (grad * v).sum(dims, True)
    return (grad - v * along / norm.square()) * (g / norm), along / norm
