"""Attention of all queries of a block to its keys, by PyTorch's kernels or by products.

Kernels have 4 dimensions and as many heads of queries as of keys. So leading dimensions become one,
and the groups of queries that share a head of keys are called one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ...compat.operators import aten
from ...rules.custom_ops.nd import einsum

LSE_ROWS = 32  # the GPU kernel needs a multiple of this many rows in its logsumexp
BIAS_COLUMNS = 16  # and a multiple of this many columns in the memory of a mask
SCORES = 1 << 24  # elements of the scores that are computed at a time without a kernel


# ------------------------------------------------------------------------------- groups of queries


def kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute one block. Heads of queries share one of keys in groups, which are not expanded."""
    run = _run_of(q, k, v)
    if q.dim() == 4 and q.shape[-3] == k.shape[-3]:
        out, lse = run(q, k, v, mask, causal, scale)
    else:
        pieces = [
            run(q, k, v, mask, causal, scale) for q, k, v, mask in _groups([q], k, v, mask, causal)
        ]
        out, lse = (_joined([piece[i] for piece in pieces], q, k, causal, mask) for i in range(2))
    if mask is not None:  # Kernels have other values for queries that see nothing.
        seen = mask.any(-1) if mask.dtype == torch.bool else (mask != -math.inf).any(-1)
        lse = torch.where(seen, lse, -math.inf)
    return out, lse


def backward_kernel(
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
    """Compute the gradients of one block. out, lse: of the queries for all keys."""
    run = _backward_run_of(q, k, v)
    if q.dim() == 4 and q.shape[-3] == k.shape[-3]:
        return run(grad, q, k, v, mask, out, lse, causal, scale)
    rows = [grad, q, out, lse.unsqueeze(-1)]
    pieces = [
        run(g, x, k, v, mask, o, lse.squeeze(-1), causal, scale)
        for g, x, o, lse, k, v, mask in _groups(rows, k, v, mask, causal)
    ]
    q_grad = _joined([piece[0] for piece in pieces], q, k, causal, mask)
    k_grad, v_grad = (cast(Tensor, sum(piece[i] for piece in pieces)) for i in (1, 2))
    return q_grad, k_grad.view(k.shape), v_grad.view(v.shape)


def _folds(causal: bool, mask: Tensor | None) -> bool:
    """Return whether the queries of a group may be rows of one head: nothing tells them apart."""
    return not causal and mask is None


def _groups(
    rows: Sequence[Tensor], k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
) -> list[tuple[Any, ...]]:
    """Return calls of a kernel, each with as many heads of queries as of keys, in 4 dimensions."""
    lead, heads = rows[0].shape[:-3], k.shape[-3]
    rows = [x.reshape(-1, heads, x.shape[-3] // heads, *x.shape[-2:]) for x in rows]
    k, v = (x.reshape(-1, *x.shape[-3:]) for x in (k, v))
    if _folds(causal, mask):
        return [(*(x.flatten(2, 3) for x in rows), k, v, None)]
    count = rows[0].shape[2]
    if mask is not None:
        mask = mask[(None,) * (len(lead) + 3 - mask.dim())]
        if mask.shape[:-3].numel() > 1:
            mask = mask.expand(*lead, *mask.shape[-3:])
        mask = mask.reshape(-1, *mask.shape[-3:])
        mask = mask.unflatten(1, (heads, count) if mask.shape[1] > 1 else (1, 1))
    return [
        (
            *(x[:, :, g] for x in rows),
            k,
            v,
            None if mask is None else mask[:, :, g if mask.shape[2] > 1 else 0],
        )
        for g in range(count)
    ]


def _joined(
    pieces: Sequence[Tensor], q: Tensor, k: Tensor, causal: bool, mask: Tensor | None
) -> Tensor:
    """Return results of `_groups` in the shape of the queries."""
    folded = _folds(causal, mask)
    joined = pieces[0] if folded else torch.stack(list(pieces), 2)  # [b, h, g s, ...]
    tail = pieces[0].shape[3:]
    return joined.reshape(*q.shape[:-1], *tail)


# ------------------------------------------------------------------- kernels of 4 dimensions each


def _run_of(q: Tensor, k: Tensor, v: Tensor) -> Any:
    if q.device.type == "cpu" and v.shape[-1] == q.shape[-1]:
        return _on_cpu
    return _on_gpu if _has_gpu_kernel(q, v) else _in_rows


def _backward_run_of(q: Tensor, k: Tensor, v: Tensor) -> Any:
    if q.device.type == "cpu" and v.shape[-1] == q.shape[-1]:
        return _backward_on_cpu
    return _backward_on_gpu if _has_gpu_kernel(q, v) else _backward_in_rows


def _on_cpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(
        *_contiguous_rows(q, k, v), 0.0, causal, attn_mask=_added(mask, q), scale=scale
    )


def _backward_on_cpu(
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
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *_contiguous_rows(grad, q, k, v, out),
        lse,
        0.0,
        causal,
        attn_mask=_added(mask, q),
        scale=scale,
    )


def _on_gpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        *_contiguous_rows(q, k, v), _aligned(mask, q, k), True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]


def _backward_on_gpu(
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
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % LSE_ROWS), value=float("inf"))
    # Seed and offset of the dropout, which is off.
    seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
    return aten._scaled_dot_product_efficient_attention_backward(
        *_contiguous_rows(grad, q, k, v),
        _aligned(mask, q, k),
        *_contiguous_rows(out),
        padded,
        seed,
        offset,
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )[:3]


def _has_gpu_kernel(q: Tensor, v: Tensor) -> bool:
    """Return whether PyTorch's memory-efficient kernel applies: rows are multiples of 16 bytes."""
    return (
        q.device.type == "cuda"
        and q.dtype != torch.float64
        and all(t.shape[-1] * t.itemsize % 16 == 0 for t in (q, v))
    )


def _contiguous_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors with contiguous rows, which kernels need and do not check."""
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in tensors)


def _added(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return a mask in 4 dimensions that is added to scores."""
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.dtype != torch.bool:
        return mask.to(q.dtype)
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -math.inf)


def _aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return a mask whose rows begin at multiples of BIAS_COLUMNS, of all heads and queries."""
    added = _added(mask, q)
    if added is None:
        return None
    shape = (*q.shape[:3], k.shape[2])
    added = added.expand(*added.shape[:3], shape[3])
    padded = torch.nn.functional.pad(added, (0, -shape[3] % BIAS_COLUMNS))
    return padded[..., : shape[3]].expand(shape)


# ------------------------------------------------------------------------------ without a kernel


def _in_rows(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute some rows of scores at a time."""
    results = [
        attention_by_products(q, k, v, False, scale, mask)
        for q, k, v, mask in _pieces([q], k, v, mask, causal)
    ]
    out, lse = zip(*results)
    return torch.cat(out, 2), torch.cat(lse, 2)


def _backward_in_rows(
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
            allowed = None if cut is None else cast(Tensor, _added(cut, k))
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
