"""Reductions over dimensions. Means and variances divide by the global count."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...compat.operators import aten
from ..notation import Call, Rule, make_rule
from ..registry import decomposition, rule_for
from .pointwise import is_linear_cast


def reduction_rule(call: Call, dims: Sequence[int] | int | None, kind: str | None) -> Rule:
    """Return the rule of a reduction over `dims`; None or empty: all dimensions.

    kind: the reduction of terms; None: the dimensions must be whole.
    """
    x = call.tensors[0]
    dims = [dims] if isinstance(dims, int) else dims
    reduced = set(range(x.dim())) if not dims else {d % x.dim() for d in dims} if x.dim() else set()
    names = [(f"d{i}",) for i in range(x.dim())]
    remaining = [n for i, n in enumerate(names) if i not in reduced]
    keepdim = [() if i in reduced else n for i, n in enumerate(names)]
    sizes = {f"d{i}": size for i, size in enumerate(x.shape)}
    factors = [f"d{i}" for i in sorted(reduced)]
    results = [remaining if r.dim() == len(remaining) else keepdim for r in call.results]
    return make_rule(
        [names],
        results,
        sizes,
        reduce={f: kind for f in factors} if kind else {},
        whole="" if kind else " ".join(factors),
        linear=[[0]] if kind == "sum" and is_linear_cast(call) else (),
    )


for _op, _kind in (
    (aten.sum.dim_IntList, "sum"),
    (aten.amax.default, "max"),
    (aten.amin.default, "min"),
    (aten.prod.dim_int, "prod"),
):
    rule_for(_op)(lambda call, kind=_kind: reduction_rule(call, call.argument(1, "dim"), kind))
for _op, _kind in (
    (aten.sum.default, "sum"),
    (aten.max.default, "max"),
    (aten.min.default, "min"),
    (aten.prod.default, "prod"),
    (aten.median.default, None),
    (aten.nanmedian.default, None),
):
    rule_for(_op)(lambda call, kind=_kind: reduction_rule(call, None, kind))
for _op in (aten.median.dim, aten.nanmedian.dim):
    rule_for(_op)(lambda call: reduction_rule(call, call.argument(1, "dim"), None))
rule_for(aten.mode.default)(lambda call: reduction_rule(call, call.argument(1, "dim", -1), None))
rule_for(aten.kthvalue.default)(
    lambda call: reduction_rule(call, call.argument(2, "dim", -1), None)
)


def _count(x: Tensor, dims: Sequence[int] | int | None) -> int:
    dims = [dims] if isinstance(dims, int) else dims
    return math.prod(x.shape[d] for d in dims) if dims and x.dim() else x.numel()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that PyTorch's kernels accumulate in.

    Long sums overflow float16, and lose digits in bfloat16.
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@decomposition(aten.mean.dim)
def _mean_dim(
    x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dtype = dtype or x.dtype
    total = x.sum(
        dim if dim else list(range(x.dim())),
        keepdim,
        dtype=None if accumulation_dtype(dtype) == x.dtype else accumulation_dtype(dtype),
    )
    return (total / _count(x, dim)).to(dtype)


@decomposition(aten.mean.default)
def _mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return _mean_dim(x, None, dtype=dtype)


@decomposition(aten.any.dim, aten.any.dims, aten.any.default)
def _any(x: Tensor, dim: Sequence[int] | int | None = None, keepdim: bool = False) -> Tensor:
    if not x.numel():
        return x.ne(0).sum(dim, keepdim).ne(0)
    ones = x.ne(0).to(torch.uint8)
    return (ones.amax() if dim is None else ones.amax(dim, keepdim)).ne(0)


@decomposition(aten.all.dim, aten.all.dims, aten.all.default)
def _all(x: Tensor, dim: Sequence[int] | int | None = None, keepdim: bool = False) -> Tensor:
    if not x.numel():
        return x.eq(0).sum(dim, keepdim).eq(0)
    ones = x.ne(0).to(torch.uint8)
    return (ones.amin() if dim is None else ones.amin(dim, keepdim)).ne(0)


@decomposition(aten.var_mean.correction)
def _var_mean(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = 1,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    dims, dtype, x = (
        list(range(x.dim())) if dim is None else dim,
        x.dtype,
        x.to(accumulation_dtype(x.dtype)),
    )
    mean = x.sum(dims, True) / _count(x, dims)
    var = (x - mean).square().sum(dims, keepdim) / max(
        0, _count(x, dims) - (1 if correction is None else correction)
    )
    return var.to(var.dtype if dtype.is_complex else dtype), (
        mean if keepdim else x.sum(dims) / _count(x, dims)
    ).to(dtype)


@decomposition(aten.var.correction)
def _var(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = 1,
    keepdim: bool = False,
) -> Tensor:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


@decomposition(aten.std.correction)
def _std(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = 1,
    keepdim: bool = False,
) -> Tensor:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0].sqrt()


@decomposition(aten.std_mean.correction)
def _std_mean(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = 1,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    var, mean = _var_mean(x, dim, correction=correction, keepdim=keepdim)
    return var.sqrt(), mean


@decomposition(aten.aminmax.default)
def _aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    if dim is None or not x.dim():
        dims = list(range(x.dim()))
        return x.amin(dims, keepdim), x.amax(dims, keepdim)
    return x.amin(dim, keepdim), x.amax(dim, keepdim)


@decomposition(aten.logsumexp.default)
def _logsumexp(x: Tensor, dim: Sequence[int] | int, keepdim: bool = False) -> Tensor:
    if not x.is_floating_point() and not x.is_complex():
        x = x.to(torch.get_default_dtype())
    top = (x.real if x.is_complex() else x).amax(dim, True)
    top = torch.where(top.abs() == math.inf, torch.zeros_like(top), top)
    total = ((x.to(accumulation_dtype(x.dtype)) - top).exp().sum(dim, True).log() + top).to(x.dtype)
    dims = [dim] if isinstance(dim, int) else dim
    return total if keepdim else total.squeeze(tuple(dims) if dims else tuple(range(x.dim())))
