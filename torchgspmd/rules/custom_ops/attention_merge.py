"""How results of attention for parts of the keys become one.

out = sum_i out_i exp(lse_i - lse), where lse = log sum_i exp(lse_i). Weights are float32 or wider.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def merge_parts(out: Tensor, lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merge the results for all parts of the keys, which are the first dimension."""
    top = lse.amax(0)
    top = torch.where(top == -math.inf, 0.0, top)
    weights = (lse - top).exp()
    total = weights.sum(0)
    merged = (out.to(lse.dtype) * weights.unsqueeze(-1)).sum(0)
    merged = merged / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return merged.to(dtype), top + total.log()


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge the results for two parts of the keys. Weights are float32 or wider."""
    lse = torch.logaddexp(first[1], second[1])
    finite = torch.where(lse == -math.inf, 0, lse)
    out = sum(o.to(x.dtype) * (x - finite).exp().unsqueeze(-1) for o, x in (first, second))
    return out.to(first[0].dtype), lse  # pyright: ignore[reportAttributeAccessIssue]


def lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype


def empty_results(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return tensors like attention's result and logsumexp."""
    return q.new_empty([*q.shape[:-1], v.shape[-1]]), q.new_empty(q.shape[:-1], dtype=lse_dtype(q))


def empty_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """Return tensors like the gradients of q, k and v."""
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
