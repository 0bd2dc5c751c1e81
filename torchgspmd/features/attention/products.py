"""Attention by products, for calls that no PyTorch kernel takes, some score rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from ...rules.custom_ops.nd import einsum
from .call import AttentionCall, Gradients, Results, Upstream

# Score elements that are computed at a time.
SCORES = 1 << 24


def added_mask(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return a 4-d mask that is added to scores."""
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.dtype != torch.bool:
        return mask.to(q.dtype)
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -math.inf)


def in_rows(call: AttentionCall) -> Results:
    """Compute some score rows at a time."""
    out, lse = zip(*(attention_by_products(piece) for _, piece in _pieces(call)))
    return torch.cat(out, 2), torch.cat(lse, 2)


def backward_in_rows(call: AttentionCall, upstream: Upstream) -> Gradients:
    results = [
        gradients_by_products(piece, upstream.in_rows(rows)) for rows, piece in _pieces(call)
    ]
    q_grad, k_grad, v_grad = zip(*results)
    return torch.cat(q_grad, 2), cast(Tensor, sum(k_grad)), cast(Tensor, sum(v_grad))


def _pieces(call: AttentionCall) -> Iterator[tuple[slice, AttentionCall]]:
    """Yield calls for some queries each, with the causal mask as part of their mask."""
    (b, h, s), t = call.q.shape[:3], call.k.shape[2]
    # As many rows as keep all heads' scores within SCORES.
    step = max(1, SCORES // max(1, b * h * t))
    for row in range(0, s, step):
        rows, device = slice(row, row + step), call.k.device
        piece = call.in_block(rows, slice(None))
        if call.causal:
            query = torch.arange(row, min(s, row + step), device=device).unsqueeze(1)
            seen = torch.arange(t, device=device) <= query
            allowed = added_mask(piece.mask, call.k)
            cut = seen if allowed is None else torch.where(seen, allowed, -math.inf)
            piece = piece._replace(causal=False, mask=cut)
        yield rows, piece


def attention_by_products(call: AttentionCall) -> Results:
    """Compute `attention` by two einsums. Its statistics are float32 or wider."""
    q, k, v = call.q, call.k, call.v
    lead, heads = _letters(q, k)
    scores = _scores(call, _grouped(q, k, 3), lead)
    lse = scores.logsumexp(-1)
    # A row that sees no key has lse = -inf; -inf - -inf would be NaN.
    finite = lse if call.mask is None else torch.where(lse == -math.inf, 0, lse)
    weights = (scores - finite.unsqueeze(-1)).exp()
    out = einsum(f"{lead}st,{heads}te->{lead}se", weights.to(v.dtype), v)
    return out.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1])


def gradients_by_products(call: AttentionCall, upstream: Upstream) -> Gradients:
    """Compute `attention_backward` by einsums. The logsumexp gives the weights again."""
    k, v = call.k, call.v
    lead, heads = _letters(call.q, k)
    q, grad, out = (_grouped(x, k, 3) for x in (call.q, upstream.grad, upstream.out))
    lse = _grouped(upstream.lse, k, 2)
    scores = _scores(call, q, lead)
    if call.mask is not None:
        # Rows that see no key get the weights exp(scores - inf) = 0.
        lse = torch.where(lse == -math.inf, math.inf, lse)
    weights = (scores - lse.unsqueeze(-1)).exp()  # [b, h, s, t]
    grad_v = einsum(f"{lead}st,{lead}se->{heads}te", weights.to(grad.dtype), grad)
    grad_weights = einsum(f"{lead}se,{heads}te->{lead}st", grad, v).to(weights.dtype)
    # sum_t weights * grad_weights = sum_e grad * out, which needs no [s, t] (FlashAttention).
    mean = (grad * out).to(weights.dtype).sum(-1, True)  # [b, h, s, 1]
    grad_scores = (weights * (grad_weights - mean) * call.scale).to(q.dtype)
    return (
        einsum(f"{lead}st,{heads}td->{lead}sd", grad_scores, k).reshape(call.q.shape),
        einsum(f"{lead}st,{lead}sd->{heads}td", grad_scores, q),
        grad_v,
    )


def _letters(q: Tensor, k: Tensor) -> tuple[str, str]:
    """Return the letters for q's dimensions before its rows, and for those of k."""
    heads = "abchijkl"[: k.dim() - 2]
    return heads + ("g" if q.shape[-3] != k.shape[-3] else ""), heads


def _grouped(x: Tensor, k: Tensor, dims: int) -> Tensor:
    """Split query heads into key heads and groups. dims: the dimensions from the heads on."""
    heads = x.shape[-dims]
    if heads == k.shape[-3]:
        return x
    at = x.dim() - dims
    return x.reshape(*x.shape[:at], k.shape[-3], heads // k.shape[-3], *x.shape[at + 1 :])


def _scores(call: AttentionCall, q: Tensor, lead: str) -> Tensor:
    """Return masked scores, with head groups as a dimension of their own.

    q: with such a dimension. lead: the letters of q's dimensions before its rows.
    """
    k, mask = call.k, call.mask
    heads = _letters(call.q, k)[1]
    scores = einsum(f"{lead}sd,{heads}td->{lead}st", q, k)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * call.scale
    if call.causal:
        s, t = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
        scores = torch.where(t <= s.unsqueeze(1), scores, float("-inf"))
    if mask is None:
        return scores
    if scores.dim() > k.dim() and mask.dim() > 2:  # a dimension for groups in the mask
        mask = _grouped(mask, k, 3) if mask.shape[-3] > 1 else mask.unsqueeze(-3)
    if mask.dtype == torch.bool:
        return torch.where(mask, scores, float("-inf"))
    return scores + mask
