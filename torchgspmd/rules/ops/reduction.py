"""Reductions over dimensions, softmax and layer norm.

Means and variances divide by the global count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...compat.operators import aten
from ...compat.private_apis import OpOverload
from ..local_builder import LocalBuilder
from ..notation import Call, FactorRule, Ints, LocalForm, Split, factors
from ..registry import ordered, packed, rule_for
from ..rewrites import DECLINED, Declined, rewrite
from .pointwise import is_linear_cast, named


def reduction_rule(
    call: Call, dims: Sequence[int] | int | None, kind: str | None, **keywords: Any
) -> FactorRule:
    """Return the rule for a reduction over `dims`; None or empty: all dimensions.

    kind: how terms are reduced; None: the dimensions must be whole.
    """
    rank = call.tensors[0].dim()
    dims = [dims] if isinstance(dims, int) else dims
    reduced = set(range(rank)) if not dims else {d % rank for d in dims} if rank else set()
    names = factors("d", rank)
    remaining = [name for d, name in enumerate(names) if d not in reduced]
    keepdim = [name if name in remaining else "" for name in names]
    summed = [names[d] for d in sorted(reduced)]
    return call.rule(
        [names],
        [remaining if r.dim() == len(remaining) else keepdim for r in call.results],
        reduce=dict.fromkeys(summed, kind) if kind else {},
        replicated="" if kind else summed,
        linear=[[0]] if kind == "sum" and is_linear_cast(call) else (),
        **keywords,
    )


def _reductions(
    kind: str | None, *ops: OpOverload, at: int | None = 1, default: object = None
) -> None:
    """Register reductions. at: which argument is `dim`; None: they reduce all dimensions."""
    rule_for(*ops)(
        lambda call: reduction_rule(
            call, None if at is None else call.argument(at, "dim", default), kind
        )
    )


_reductions("sum", aten.sum.dim_IntList)
_reductions("max", aten.amax.default)
_reductions("min", aten.amin.default)
_reductions("prod", aten.prod.dim_int)
_reductions("sum", aten.sum.default, at=None)
_reductions("max", aten.max.default, at=None)
_reductions("min", aten.min.default, at=None)
_reductions("prod", aten.prod.default, at=None)
# Medians of shards do not give the median, so the dimensions are whole.
_reductions(None, aten.median.default, aten.nanmedian.default, at=None)
_reductions(None, aten.median.dim, aten.nanmedian.dim)
_reductions(None, aten.mode.default, default=-1)
_reductions(None, aten.kthvalue.default, at=2, default=-1)


@rule_for(aten.histc.default)
def _histogram(call: Call) -> FactorRule | Declined:
    """Return the rule for a histogram with fixed borders: every device counts its own values.

    Padding gets a value outside the borders.
    """
    low, high = call.argument(2, "min", 0), call.argument(3, "max", 0)
    # Equal borders mean the data's minimum and maximum.
    if low == high:
        return DECLINED
    names, bins = factors("d", call.tensors[0].dim()), call.results[0].shape[0]

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
        x = args[0]
        for d, name in enumerate(names):
            x = local.masked(x, d, name, low - 1)
        return local.call(aten.histc.default, x, bins, low, high)

    return call.rule(
        [names],
        [["b"]],
        {"b": bins},
        replicated="b",
        reduce=names,
        local=LocalForm(emit, when=names),
    )


@rewrite("body", torch.bincount, Tensor.bincount)
def _bincount(
    input: Tensor, weights: Tensor | None = None, minlength: int = 0
) -> Tensor | Declined:
    """Count by sums of rows, once the largest number is known: every device adds its own."""
    is_index = input.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    if input.dim() != 1 or not input.numel() or not is_index:
        return DECLINED
    size: Any = torch.sym_max(input.max().item() + 1, minlength)
    if weights is None:
        added = torch.ones_like(input, dtype=torch.int64)
    else:
        added = weights.detach() if weights.dtype == torch.float32 else weights.detach().double()
    return added.new_zeros(size).index_add(0, input.to(torch.int64), added)


def _count(x: Tensor, dims: Sequence[int] | int | None) -> int:
    dims = [dims] if isinstance(dims, int) else dims
    return math.prod(x.shape[d] for d in dims) if dims and x.dim() else x.numel()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that PyTorch's kernels accumulate in.

    Long sums overflow float16, and lose digits in bfloat16.
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@rewrite("decompose", aten.mean.dim)
def _mean_dim(
    x: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dtype = dtype or x.dtype
    total = x.sum(
        dim if dim else list(range(x.dim())),
        keepdim,
        dtype=None if accumulation_dtype(dtype) == x.dtype else accumulation_dtype(dtype),
    )
    return (total / _count(x, dim)).to(dtype)


@rewrite("decompose", aten.any.dim, aten.any.dims, aten.any.default)
def _any(x: Tensor, dim: list[int] | int | None = None, keepdim: bool = False) -> Tensor:
    if not x.numel():
        # amax refuses an empty dimension; any of nothing is False.
        return x.ne(0).sum(dim, keepdim).ne(0)
    ones = x.ne(0).to(torch.uint8)
    return (ones.amax() if dim is None else ones.amax(dim, keepdim)).ne(0)


@rewrite("decompose", aten.all.dim, aten.all.dims, aten.all.default)
def _all(x: Tensor, dim: list[int] | int | None = None, keepdim: bool = False) -> Tensor:
    if not x.numel():
        # amin refuses an empty dimension; all of nothing is True.
        return x.eq(0).sum(dim, keepdim).eq(0)
    ones = x.ne(0).to(torch.uint8)
    return (ones.amin() if dim is None else ones.amin(dim, keepdim)).ne(0)


@rewrite("decompose", aten.var_mean.correction)
def _var_mean(
    x: Tensor, dim: list[int] | None = None, *, correction: float | None = 1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims, dtype = list(range(x.dim())) if dim is None else dim, x.dtype
    x, count = x.to(accumulation_dtype(dtype)), _count(x, dims)
    mean = x.sum(dims, True) / count
    # The global count: a mean of local means would weigh uneven shards alike.
    freedom = max(0, count - (1 if correction is None else correction))
    if isinstance(count, int) and not count:  # of no elements it is NaN, with any correction
        freedom = 0
    # Centered first: E[x^2] - E[x]^2 would lose digits.
    var = (x - mean).square().sum(dims, keepdim) / freedom
    if not keepdim:
        mean = x.sum(dims) / count
    return var.to(var.dtype if dtype.is_complex else dtype), mean.to(dtype)


for _op, _formula in {
    aten.mean.default: lambda x, **options: _mean_dim(x, None, **options),
    aten.var.correction: lambda x, dim=None, **options: _var_mean(x, dim, **options)[0],
    aten.std.correction: lambda x, dim=None, **options: _var_mean(x, dim, **options)[0].sqrt(),
}.items():
    rewrite("decompose", _op)(_formula)


@rewrite("decompose", aten.std_mean.correction)
def _std_mean(x: Tensor, dim: list[int] | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    var, mean = _var_mean(x, dim, **options)
    return var.sqrt(), mean


@rewrite("decompose", aten.aminmax.default)
def _aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    if dim is None or not x.dim():
        dims = list(range(x.dim()))
        return x.amin(dims, keepdim), x.amax(dims, keepdim)
    return x.amin(dim, keepdim), x.amax(dim, keepdim)


@rewrite("decompose", aten.logsumexp.default)
def _logsumexp(x: Tensor, dim: list[int] | int, keepdim: bool = False) -> Tensor:
    if not x.is_floating_point() and not x.is_complex():
        x = x.to(torch.get_default_dtype())
    top = (x.real if x.is_complex() else x).amax(dim, True)
    # inf - inf would be NaN.
    top = torch.where(top.abs() == math.inf, torch.zeros_like(top), top)
    total = ((x.to(accumulation_dtype(x.dtype)) - top).exp().sum(dim, True).log() + top).to(x.dtype)
    dims = [dim] if isinstance(dim, int) else dim
    return total if keepdim else total.squeeze(tuple(dims) if dims else tuple(range(x.dim())))


# Softmax and layer norm.


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
