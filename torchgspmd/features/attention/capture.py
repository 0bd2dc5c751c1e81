"""PyTorch's attention as operations that keep their dimensions.

    F.scaled_dot_product_attention(q, k, v)     attention(q, k, v, False, 0.1)
    nn.MultiheadAttention                       with batch, position and head as dimensions

PyTorch flattens [position, batch] and [batch, head], which would lose the batch's layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...capture.eager_kernels import has_no_elements
from ...capture.rewrites.loop_trace import is_unrolling
from ...capture.rewrites.products import autocast
from ...capture.traced_values import is_transforming, needs_gradient
from ...rules.custom_ops.nd import einsum
from ...rules.custom_ops.random import draw_seed
from ...rules.rewrites import DECLINED, apply_first, rewrite
from .flex_op import biased_attention
from .op import attention
from .written import unrepeated


@rewrite("vmap product", F.scaled_dot_product_attention)
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> object:
    """Run F.scaled_dot_product_attention as one node, or as einsums and a softmax.

    A mask that needs a gradient is a bias of flex_attention. Dropout takes einsums with it, under
    torch.vmap, and for backends that take only graphs.
    """
    # PyTorch broadcasts other leading dimensions, or reports them.
    if query.dim() < 3 or (query.shape[:-2] != key.shape[:-2] and not enable_gqa):
        return DECLINED
    if query.shape[-1] != key.shape[-1]:  # an error of PyTorch's own
        return DECLINED
    fused = query.is_floating_point() and query.shape[:-3] == key.shape[:-3]
    fused &= not (dropout_p and (is_transforming() or is_unrolling()))
    fused &= not has_no_elements(query, key, value)  # kernels divide by sizes
    biased = False
    if attn_mask is not None:
        _check_mask(attn_mask, query.shape[-2], key.shape[-2])
        takes_bias = fused and not (is_transforming() or is_unrolling() or dropout_p)
        fused &= not (needs_gradient(attn_mask) or is_causal or attn_mask.dim() > query.dim())
        biased = takes_bias and not fused and attn_mask.is_floating_point()
    if fused or biased:
        key, value = unrepeated(key, value)
    query, key, value = autocast(query, key, value)
    if scale is None and isinstance(query.shape[-1], torch.SymInt):
        query, scale = query / torch.sym_sqrt(query.shape[-1]), 1.0  # nodes have plain numbers
    # Rows of no numbers have the product 0, whatever the scale.
    scale = 1 / math.sqrt(query.shape[-1] or 1) if scale is None else scale
    if biased and attn_mask is not None:
        bias = attn_mask.to(query.dtype)
        if (out := biased_attention(query, key, value, bias, is_causal, scale)) is not None:
            return out
    if fused:
        # The operator's mask has at least two dimensions.
        mask = None if attn_mask is None else attn_mask[(None,) * (2 - attn_mask.dim())]
        options = () if mask is None else (mask,)
        if dropout_p:
            options = (mask, None, draw_seed(), dropout_p)
        return attention(query, key, value, is_causal, scale, *options)[0]
    if query.shape[-3] != key.shape[-3]:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    lead = "abcdefgh"[: query.dim() - 2]
    scores = einsum(f"{lead}sx,{lead}tx->{lead}st", query, key) * scale
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    if attn_mask is not None:
        empty = None
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
            empty = ~attn_mask.any(-1, keepdim=True)  # a row without keys is 0, not NaN
        else:
            scores = scores + attn_mask
        weights = scores.softmax(-1)
        weights = weights if empty is None else weights.masked_fill(empty, 0)
    else:
        weights = scores.softmax(-1)
    left = apply_first("vmap", F.dropout, weights, dropout_p)
    weights = F.dropout(weights, dropout_p) if left is DECLINED else left
    weights = weights.to(value.dtype)
    return einsum(f"{lead}st,{lead}tx->{lead}sx", weights, value)


def _check_mask(mask: Tensor, queries: object, keys: object) -> None:
    """Raise PyTorch's error for a mask that has other numbers of queries or keys.

    A mask of a fixed size does not fit rows whose number only a run knows. One whose size only a
    run knows may fit: its size may be that of the longest sequence.
    """
    for size, rows in zip(reversed(mask.shape), (keys, queries)):
        if isinstance(size, int) and size not in (1, rows if isinstance(rows, int) else 1):
            raise RuntimeError(
                f"The expanded size of the tensor ({rows}) must match the existing size ({size})"
            )


# ------------------------------------------------------------------------ nn.MultiheadAttention

# Letters: n batch, l and s positions of queries and of keys, h heads, d width of a head, i and o
# width of inputs and results.


@rewrite("body", F.multi_head_attention_forward)
def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: object,
    bias_v: object,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: object = None,
    static_v: object = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> object:
    """Run F.multi_head_attention_forward on query [l, n, i], key and value [s, n, i].

    The inputs may lack n.
    """
    inputs, width = (query, key, value), embed_dim_to_check
    if (
        add_zero_attn
        or any(t is not None for t in (bias_k, bias_v, static_k, static_v))
        or not _is_supported(inputs, width, num_heads)
    ):
        return DECLINED  # rare, or a mistake that PyTorch will explain
    if is_causal and attn_mask is None:
        return DECLINED
    weights: Sequence[Tensor | None] = (q_proj_weight, k_proj_weight, v_proj_weight)
    if not use_separate_proj_weight:
        assert in_proj_weight is not None
        weights = in_proj_weight.view(3, width, -1).unbind(0)
    biases = (
        (None, None, None)
        if in_proj_bias is None
        else in_proj_bias.view(3, num_heads, 1, -1).unbind(0)
    )
    q, k, v = (
        _project(x if x.dim() == 3 else x.unsqueeze(1), w, b, num_heads)
        for x, w, b in zip(inputs, weights, biases)
    )
    # With is_causal, attn_mask is promised to be the causal mask, so it need not be read.
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if causal else _mask(attn_mask, key_padding_mask, q)
    dropout = dropout_p if training else 0.0
    if need_weights:
        out, seen = _with_weights(q, k, v, mask, dropout)
    else:
        out, seen = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal), None
    y = torch.einsum(
        "nhld,ohd->lno", out, out_proj_weight.view(out_proj_weight.shape[0], num_heads, -1)
    )
    y = y if out_proj_bias is None else y + out_proj_bias.to(y.dtype)
    seen = seen if seen is None or not average_attn_weights else seen.mean(1)  # [n, l, s]
    if query.dim() == 2:
        return y.squeeze(1), None if seen is None else seen.squeeze(0)
    return y, seen


def _is_supported(inputs: tuple[Tensor, ...], width: int, heads: int) -> bool:
    """Return whether the shapes are regular; PyTorch reports mistakes."""
    query, key, value = inputs
    return (
        query.dim() in (2, 3)
        and key.dim() == value.dim() == query.dim()
        and query.shape[-1] == width
        and width % heads == 0
        and key.shape[:-1] == value.shape[:-1]
        and (query.dim() == 2 or key.shape[1] == query.shape[1])
        and not any(t.is_nested for t in inputs)
    )


def _project(x: Tensor, weight: Any, bias: Tensor | None, heads: int) -> Tensor:
    """Project x [l, n, i] to heads [n, h, l, d]."""
    y = torch.einsum("lni,hdi->nhld", x, weight.view(heads, -1, weight.shape[-1]))
    return y if bias is None else y + bias.to(y.dtype)


def _mask(mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
    """Return the mask to add to the scores [n, h, l, s]: -inf where a boolean mask is True."""
    n, h = q.shape[:2]
    # Here True hides a key; in scaled_dot_product_attention it shows one.
    masks = [] if mask is None else [mask if mask.dim() == 2 else mask.view(n, h, *mask.shape[1:])]
    if padding is not None:
        masks.append(padding[..., None, None, :])  # [n, 1, 1, s], or [1, 1, s]
    masks = [
        torch.zeros_like(p, dtype=q.dtype).masked_fill(p, -math.inf) if p.dtype is torch.bool else p
        for p in masks
    ]
    return sum(masks[1:], masks[0]) if masks else None


def _with_weights(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    # Where it returns weights, PyTorch scales q instead of the scores.
    scores = torch.einsum("nhld,nhsd->nhls", q * math.sqrt(1 / q.shape[-1]), k)
    weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
    return torch.einsum("nhls,nhsd->nhld", weights.to(v.dtype), v), weights
