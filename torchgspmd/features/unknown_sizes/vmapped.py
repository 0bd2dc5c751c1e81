"""Replacements for functions whose torch.vmap asks for sizes, where only a run knows these.

    vmap(gather)(x [s, u0, m], i [s, u0])     gather(x, i) along the next dimension

A function along a dimension becomes, under torch.vmap, the same function along the next one. Norms,
losses and means are computed by sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...capture.traced_values import is_vectorizing
from ...rules.rewrites import DECLINED, rewrite
from .capture import arange_of, is_unknown
from .positions import with_positions


def _asks(*values: Any) -> bool:
    """Return whether torch.vmap on PyTorch's operator would ask for a run's size."""
    return is_vectorizing() and is_unknown(*values)


# ---------------------------------------------------------------------------- along a dimension


@rewrite("vmap", torch.gather, Tensor.gather)
@rewrite("value", torch.gather, Tensor.gather)
def _gather(input: Tensor, dim: int, index: Tensor) -> Any:
    if not _asks(input, index):
        return DECLINED
    dim %= input.dim()
    return with_positions(lambda n, x, i: torch.gather(x, dim + n, i), 0, input, index)


@rewrite("vmap", torch.index_select, Tensor.index_select)
@rewrite("value", torch.index_select, Tensor.index_select)
def _index_select(input: Tensor, dim: int, index: Tensor) -> Any:
    if not _asks(input, index):
        return DECLINED
    dim %= input.dim()
    return with_positions(lambda n, x, i: _selected(x, n, dim, i), 0, input, index)


@rewrite("vmap", Tensor.__getitem__)
@rewrite("value", Tensor.__getitem__)
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


@rewrite("vmap", torch.scatter, Tensor.scatter)
@rewrite("value", torch.scatter, Tensor.scatter)
def _scatter(input: Tensor, dim: int, index: Tensor, src: Any = 0.0) -> Any:
    if not _asks(input, index):
        return DECLINED
    dim %= input.dim()
    if not isinstance(src, Tensor):
        return with_positions(lambda n, x, i: x.scatter(dim + n, i, src), 0, input, index)
    return with_positions(lambda n, x, i, y: x.scatter(dim + n, i, y), 0, input, index, src)


@rewrite("vmap", torch.scatter_add, Tensor.scatter_add)
@rewrite("value", torch.scatter_add, Tensor.scatter_add)
def _scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Any:
    if not _asks(input, index):
        return DECLINED
    dim %= input.dim()
    return with_positions(lambda n, x, i, y: x.scatter_add(dim + n, i, y), 0, input, index, src)


@rewrite("vmap", torch.cat, torch.concat, torch.concatenate)
@rewrite("value", torch.cat, torch.concat, torch.concatenate)
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    if not _asks(*tensors):
        return DECLINED
    dim %= tensors[0].dim()
    return with_positions(lambda n, *each: torch.cat(each, dim + n), 0, *tensors)


# ------------------------------------------------------------------------------------- by sums


@rewrite("vmap", F.layer_norm)
@rewrite("value", F.layer_norm)
def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[Any],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """Compute F.layer_norm by means: torch.vmap on PyTorch's operator asks for sizes."""
    if not (is_vectorizing() and is_unknown(input)):
        return DECLINED
    dims = [*range(-len(normalized_shape), 0)]
    # PyTorch's kernel also computes half types in float32.
    x = input.float() if input.dtype in (torch.bfloat16, torch.float16) else input
    centered = x - x.mean(dims, keepdim=True)
    y = centered * torch.rsqrt(centered.square().mean(dims, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(input.dtype)


@rewrite("vmap", F.cross_entropy)
@rewrite("value", F.cross_entropy)
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
    """Compute F.cross_entropy by sums: torch.vmap on PyTorch's operator asks for sizes."""
    plain = weight is None and size_average is None and reduce is None
    plain &= input.dim() > 1 and not (label_smoothing or target.is_floating_point())
    if not (plain and is_vectorizing() and is_unknown(input, target)):
        return DECLINED
    counted = target != ignore_index
    classes = arange_of(input, input.shape[1]).view(-1, *[1] * (input.dim() - 2))
    # Compared with all classes: an ignored target, such as -100, matches none.
    found = torch.where(target.unsqueeze(1) == classes, input, 0).sum(1)
    losses = torch.where(counted, input.logsumexp(1) - found, 0)
    if reduction == "none":
        return losses
    return losses.sum() / (counted.sum() if reduction == "mean" else 1)


@rewrite("vmap", F.dropout)
@rewrite("value", F.dropout)
def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Compute F.dropout by a mask: torch.vmap on PyTorch's operator asks for sizes."""
    if not (is_vectorizing() and is_unknown(input)) or inplace or not 0 < p < 1 or not training:
        return DECLINED
    kept = torch.rand_like(input, dtype=torch.float32) >= p
    return torch.where(kept, input / (1 - p), 0)


@rewrite("vmap", torch.mean, Tensor.mean)
@rewrite("value", torch.mean, Tensor.mean)
def _mean(input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Compute a mean over all elements by a sum along each dimension: torch.vmap merges them."""
    if dim is not None or not (is_vectorizing() and is_unknown(input)):
        return DECLINED
    dims, x = [*range(input.dim())], input if dtype is None else input.to(dtype)
    return x.sum(dims) / torch.ones_like(x).sum(dims)  # counted: vmap takes no numbers from a run
