"""F.embedding_bag as a lookup and a reduction, which have sharding rules, also in the backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: Any = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Reduce the rows of weight [v, d] in each bag; return [b, d].

    input is [b, l] with bags of equal length, or [n] with the offsets [b] of bags. Gradients are
    dense.
    """
    if max_norm is not None or scale_grad_by_freq or mode not in ("sum", "mean", "max"):
        return NotImplemented
    if (
        input.dim() == 1
        and (offsets is None or mode == "max")
        or per_sample_weights is not None
        and mode != "sum"
    ):
        return NotImplemented
    rows = F.embedding(input, weight)  # [b, l, d] or [n, d]
    counts = (
        torch.ones_like(input, dtype=torch.bool)
        if padding_idx is None
        else input != padding_idx % weight.shape[0]
    )
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if mode == "max":
        best = rows.masked_fill(~counts.unsqueeze(-1), float("-inf")).max(1).values
        return best.masked_fill(~counts.any(1, keepdim=True), 0)
    rows = rows * counts.unsqueeze(-1)
    if input.dim() == 2:
        total, count = rows.sum(1), counts.sum(1)
    else:
        bags = offsets.shape[0] - include_last_offset
        bag = (
            torch.searchsorted(
                offsets[:bags],
                torch.arange(input.shape[0], device=input.device, dtype=offsets.dtype),
                right=True,
            )
            - 1
        )
        total = rows.new_zeros(bags, rows.shape[1]).index_add(0, bag, rows)
        count = counts.new_zeros(bags, dtype=torch.long).index_add(0, bag, counts.long())
    return total / count.clamp(min=1).unsqueeze(-1) if mode == "mean" else total
