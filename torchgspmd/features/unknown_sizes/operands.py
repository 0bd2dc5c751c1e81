"""Replacements for functions whose kernels take numbers, for sizes that only a run knows.

    torch.lerp(x[:n], y, 0.5)         operands with one shape
    F.one_hot(t, n)                   rows that are compared
    x[:n].chunk(2)                    two slices

    vmap(gather)(x [s, u0, m], i [s, u0])     gather(x, i) along the next dimension

Functions that move or resample rows are in capture.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...capture.traced_values import is_vectorizing
from ...rules.rewrites import DECLINED, rewrite
from .capture import arange_of, each_dim, is_unknown, padded, with_positions

_BY_SIZE = "use_mm_for_euclid_dist_if_necessary"


def _register_broadcast(target: Callable) -> None:
    """Expand the operands to one shape for a function whose kernel broadcasts by numbers."""

    @rewrite("value", target)
    def broadcast(*args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        # Compared as text: comparing the sizes would ask for their values.
        if not is_unknown(*tensors) or len({str(tuple(t.shape)) for t in tensors}) < 2:
            return DECLINED
        same = iter(torch.broadcast_tensors(*tensors))
        return target(*(next(same) if isinstance(a, Tensor) else a for a in args), **kwargs)


for _name in ("lerp", "addcmul", "addcdiv"):
    _register_broadcast(getattr(torch, _name))
    _register_broadcast(getattr(Tensor, _name))


@rewrite("value", F.cosine_similarity)
def _cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Any:
    if not is_unknown(x1, x2):
        return DECLINED
    one, two = (x / torch.linalg.vector_norm(x, dim=dim, keepdim=True).clamp(eps) for x in (x1, x2))
    return (one * two).sum(dim)


def _register_strided(target: Callable) -> None:
    """Give a strided convolution the rows that it reads, so that its gradient has as many."""

    @rewrite("value", target)
    def strided(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        kernel, first = weight.shape[2:], input.dim() - weight.dim() + 2
        steps, margins, gaps = (each_dim(v, len(kernel)) for v in (stride, padding, dilation))
        dims = [
            i for i, step in enumerate(steps) if step != 1 and is_unknown(input.shape[first + i])
        ]
        if not dims or not input.requires_grad or isinstance(padding, str):
            return DECLINED
        for i in dims:
            pad = [0, 0] * (len(kernel) - 1 - i) + [margins[i]] * 2
            input = padded(input, pad, "constant", None)
            span, size = gaps[i] * (kernel[i] - 1) + 1, input.shape[first + i]
            input = input.narrow(first + i, 0, (size - span) // steps[i] * steps[i] + span)
            margins[i] = 0
        more = dict(stride=steps, padding=margins, dilation=gaps, groups=groups)
        return target(input, weight, bias, **more)


for _convolution in (torch.conv1d, torch.conv2d, torch.conv3d):
    _register_strided(_convolution)


@rewrite("value", torch.eye)
def _eye(n: Any, m: Any = None, *, dtype: Any = None, device: Any = None, **rest: Any) -> Any:
    if not is_unknown(n, m) or any(rest.values()):
        return DECLINED
    rows, columns = (torch.arange(k, device=device) for k in (n, n if m is None else m))
    return (rows.unsqueeze(1) == columns).to(dtype or torch.get_default_dtype())


@rewrite("value", torch.baddbmm, Tensor.baddbmm)
def _baddbmm(
    input: Tensor,
    batch1: Tensor,
    batch2: Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    **rest: Any,
) -> Any:
    if not is_unknown(input, batch1, batch2) or out_dtype is not None or any(rest.values()):
        return DECLINED
    product = torch.bmm(batch1, batch2) * alpha
    # With beta = 0 PyTorch ignores the input, NaN included.
    return product if beta == 0 else input * beta + product


@rewrite("value", F.one_hot)
def _one_hot(tensor: Tensor, num_classes: Any = -1) -> Any:
    if not isinstance(num_classes, torch.SymInt):
        return DECLINED
    return (tensor.unsqueeze(-1) == arange_of(tensor, num_classes)).long()


@rewrite("value", torch.linspace)
def _linspace(
    start: Any, end: Any, steps: Any, *, dtype: Any = None, device: Any = None, **rest: Any
) -> Any:
    if not is_unknown(steps) or any(rest.values()):
        return DECLINED
    rows = torch.arange(steps, device=device).double()
    # A single step has no distance to divide.
    values = start + rows * ((end - start) / torch.sym_max(steps - 1, 1))
    return values.to(dtype or torch.get_default_dtype())


@rewrite("value", torch.cdist)
def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str = _BY_SIZE) -> Any:
    if not is_unknown(x1.shape[-2:], x2.shape[-2:]) or compute_mode != _BY_SIZE:
        return DECLINED
    return torch.cdist(x1, x2, p, "donot_use_mm_for_euclid_dist")


@rewrite("value", torch.trace, Tensor.trace)
def _trace(input: Tensor) -> Any:
    return input.diagonal().sum() if is_unknown(input) else DECLINED


@rewrite("value", torch.chunk, Tensor.chunk)
def _chunk(input: Tensor, chunks: int, dim: int = 0) -> Any:
    """Halve a dimension. For other chunks, the number of pieces would depend on its size."""
    if not is_unknown(input.shape[dim]) or chunks != 2:
        return DECLINED
    first = (input.shape[dim] + 1) // 2
    return input.narrow(dim, 0, first), input.narrow(dim, first, input.shape[dim] - first)


# Functions whose torch.vmap asks for sizes. One along a dimension becomes the same function along
# the next one, behind the positions; norms, losses and means are computed by sums.


def _vmapped(*targets: Callable) -> Callable:
    """Register a replacement under torch.vmap, where PyTorch's operator would ask for sizes."""

    def register(function: Callable) -> Callable:
        @wraps(function)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if not (is_vectorizing() and is_unknown(args, tuple(kwargs.values()))):
                return DECLINED
            return function(*args, **kwargs)

        return rewrite("vmap value", *targets)(replaced)

    return register


# ---------------------------------------------------------------------------- along a dimension


@_vmapped(torch.gather, Tensor.gather)
def _gather(input: Tensor, dim: int, index: Tensor) -> Any:
    dim %= input.dim()
    return with_positions(lambda n, x, i: torch.gather(x, dim + n, i), 0, input, index)


@_vmapped(torch.index_select, Tensor.index_select)
def _index_select(input: Tensor, dim: int, index: Tensor) -> Any:
    dim %= input.dim()
    return with_positions(lambda n, x, i: _selected(x, n, dim, i), 0, input, index)


@rewrite("vmap value", Tensor.__getitem__)
def _getitem(input: Tensor, index: object) -> Any:
    """Look up rows x[i], as index_select does: torch.vmap indexes the positions, too."""
    if not (isinstance(index, Tensor) and index.dtype in (torch.int32, torch.int64)):
        return DECLINED
    rows = _index_select(input, 0, index.reshape(-1))
    return DECLINED if rows is DECLINED else rows.view(*index.shape, *input.shape[1:])


def _selected(x: Tensor, front: int, dim: int, index: Tensor) -> Tensor:
    """Return rows of x [*positions, ..., r, ...] at index [*positions, k]."""
    rank, shape = x.dim(), list(x.shape)
    behind = rank - front - dim - 1
    # gather needs an index for each element, so it expands along the other dimensions.
    index = index.view(*index.shape[:front], *[1] * dim, index.shape[-1], *[1] * behind)
    shape[front + dim] = index.shape[front + dim]
    return torch.gather(x, front + dim, index.expand(shape))


@_vmapped(torch.scatter, Tensor.scatter)
def _scatter(input: Tensor, dim: int, index: Tensor, src: Any = 0.0) -> Any:
    dim %= input.dim()
    if not isinstance(src, Tensor):
        return with_positions(lambda n, x, i: x.scatter(dim + n, i, src), 0, input, index)
    return with_positions(lambda n, x, i, y: x.scatter(dim + n, i, y), 0, input, index, src)


@_vmapped(torch.scatter_add, Tensor.scatter_add)
def _scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Any:
    dim %= input.dim()
    return with_positions(lambda n, x, i, y: x.scatter_add(dim + n, i, y), 0, input, index, src)


@_vmapped(torch.cat, torch.concat, torch.concatenate)
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    dim %= tensors[0].dim()
    return with_positions(lambda n, *each: torch.cat(each, dim + n), 0, *tensors)


# ------------------------------------------------------------------------------------- by sums


@_vmapped(F.layer_norm)
def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[Any],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    dims = [*range(-len(normalized_shape), 0)]
    # PyTorch's kernel also computes half types in float32.
    x = input.float() if input.dtype in (torch.bfloat16, torch.float16) else input
    centered = x - x.mean(dims, keepdim=True)
    y = centered * torch.rsqrt(centered.square().mean(dims, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(input.dtype)


@_vmapped(F.cross_entropy)
def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    plain = weight is None and size_average is None and reduce is None
    plain &= input.dim() > 1 and not (label_smoothing or target.is_floating_point())
    if not plain:
        return DECLINED
    counted = target != ignore_index
    classes = arange_of(input, input.shape[1]).view(-1, *[1] * (input.dim() - 2))
    # Compared with all classes: an ignored target, such as -100, matches none.
    found = torch.where(target.unsqueeze(1) == classes, input, 0).sum(1)
    losses = torch.where(counted, input.logsumexp(1) - found, 0)
    if reduction == "none":
        return losses
    return losses.sum() / (counted.sum() if reduction == "mean" else 1)


@_vmapped(F.dropout)
def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if inplace or not 0 < p < 1 or not training:
        return DECLINED
    kept = torch.rand_like(input, dtype=torch.float32) >= p
    return torch.where(kept, input / (1 - p), 0)


@_vmapped(torch.mean, Tensor.mean)
def _mean(input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Compute a mean over all elements by a sum along each dimension: torch.vmap merges them."""
    if dim is not None:
        return DECLINED
    dims, x = [*range(input.dim())], input if dtype is None else input.to(dtype)
    return x.sum(dims) / torch.ones_like(x).sum(dims)  # counted: vmap takes no numbers from a run
