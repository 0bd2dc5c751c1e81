"""Replacements for functions whose kernels take numbers, for sizes that only a run knows.

    torch.lerp(x[:n], y, 0.5)         operands with one shape
    F.one_hot(t, n)                   rows that are compared
    x[:n].chunk(2)                    two slices

Functions that move or resample rows are in capture.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...rules.rewrites import DECLINED, rewrite
from .capture import arange_of, is_unknown

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
