"""Attention by products: what PyTorch's kernels do not compute, some rows of scores at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ...rules.custom_ops.nd import einsum

SCORES = 1 << 24  # elements of the scores that are computed at a time


def added_mask(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return a mask in 4 dimensions that is added to scores."""
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.dtype != torch.bool:
        return mask.to(q.dtype)
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -math.inf)


def in_rows(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute some rows of scores at a time."""
    results = [
        attention_by_products(q, k, v, False, scale, mask)
        for q, k, v, mask in _pieces([q], k, v, mask, causal)
    ]
    out, lse = zip(*results)
    return torch.cat(out, 2), torch.cat(lse, 2)


def backward_in_rows(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    results = [
        attention_backward_by_products(g, x, k, v, o, lse.squeeze(-1), False, scale, mask)
        for g, x, o, lse, k, v, mask in _pieces(
            [grad, q, out, lse.unsqueeze(-1)], k, v, mask, causal
        )
    ]
    q_grad, k_grad, v_grad = zip(*results)
    return torch.cat(q_grad, 2), cast(Tensor, sum(k_grad)), cast(Tensor, sum(v_grad))


def _pieces(
    rows: Sequence[Tensor], k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
) -> list[tuple[Any, ...]]:
    """Return calls for some queries each, with a causal mask as a part of the mask."""
    (b, h, s), t = rows[0].shape[:3], k.shape[2]
    step = max(1, SCORES // max(1, b * h * t))
    result: list[tuple[Any, ...]] = []
    for row in range(0, s, step):
        some = slice(row, row + step)
        cut = mask if mask is None or mask.shape[-2] == 1 else mask[..., some, :]
        if causal:
            query = torch.arange(row, min(s, row + step), device=k.device).unsqueeze(1)
            seen = torch.arange(t, device=k.device) <= query
            allowed = None if cut is None else cast(Tensor, added_mask(cut, k))
            cut = seen if allowed is None else torch.where(seen, allowed, -math.inf)
        result.append((*(x[:, :, some] for x in rows), k, v, cut))
    return result


def attention_by_products(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `attention` by two einsums. Its statistics are float32 or wider."""
    lead, heads = _letters(q, k)
    scores = _scores(q, k, causal, scale, mask)
    lse = scores.logsumexp(-1)
    finite = lse if mask is None else torch.where(lse == -math.inf, 0, lse)
    weights = (scores - finite.unsqueeze(-1)).exp()
    out = einsum(f"{lead}st,{heads}te->{lead}se", weights.to(v.dtype), v)
    return out.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1])


def attention_backward_by_products(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `attention_backward` by einsums. The logsumexp gives the weights again."""
    lead, heads = _letters(q, k)
    shape = q.shape
    q, grad, out, lse = (_grouped(x, k, d) for x, d in ((q, 3), (grad, 3), (out, 3), (lse, 2)))
    scores = _scores(q, k, causal, scale, mask, lead)
    if mask is not None:
        lse = torch.where(lse == -math.inf, math.inf, lse)
    weights = (scores - lse.unsqueeze(-1)).exp()  # [b, h, s, t]
    grad_v = einsum(f"{lead}st,{lead}se->{heads}te", weights.to(grad.dtype), grad)
    grad_weights = einsum(f"{lead}se,{heads}te->{lead}st", grad, v).to(weights.dtype)
    mean = (grad * out).to(weights.dtype).sum(-1, True)  # [b, h, s, 1]
    grad_scores = (weights * (grad_weights - mean) * scale).to(q.dtype)
    return (
        einsum(f"{lead}st,{heads}td->{lead}sd", grad_scores, k).reshape(shape),
        einsum(f"{lead}st,{lead}sd->{heads}td", grad_scores, q),
        grad_v,
    )


def _letters(q: Tensor, k: Tensor) -> tuple[str, str]:
    """Return the letters of the dimensions of q before its rows, and of those of k."""
    heads = "abchijkl"[: k.dim() - 2]
    return heads + ("g" if q.shape[-3] != k.shape[-3] else ""), heads


def _grouped(x: Tensor, k: Tensor, dims: int) -> Tensor:
    """Take heads of queries apart into heads of keys and groups. dims: from the heads on."""
    heads = x.shape[-dims]
    if heads == k.shape[-3]:
        return x
    at = x.dim() - dims
    return x.reshape(*x.shape[:at], k.shape[-3], heads // k.shape[-3], *x.shape[at + 1 :])


def _scores(
    q: Tensor, k: Tensor, causal: bool, scale: float, mask: Tensor | None, lead: str = ""
) -> Tensor:
    """Return masked scores, with groups of heads as a dimension of their own."""
    letters, heads = _letters(q, k)
    q = _grouped(q, k, 3) if not lead else q
    lead = lead or letters
    scores = einsum(f"{lead}sd,{heads}td->{lead}st", q, k)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if causal:
        s, t = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
        scores = torch.where(t <= s.unsqueeze(1), scores, float("-inf"))
    if mask is None:
        return scores
    if scores.dim() > k.dim() and mask.dim() > 2:  # a dimension for groups in the mask
        mask = _grouped(mask, k, 3) if mask.shape[-3] > 1 else mask.unsqueeze(-3)
    if mask.dtype == torch.bool:
        return torch.where(mask, scores, float("-inf"))
    return scores + mask
