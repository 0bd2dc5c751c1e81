"""Attention of all queries of a block to its keys, by PyTorch's kernels or by products.

    CPU         FLASH_CPU; PRODUCTS where the width of values is another
    CUDA        CUDNN on Hopper and later for half precision: twice as fast as the next two
                FLASH for half precision without a mask
                EFFICIENT for masks and float32
                PRODUCTS for the rest

Kernels have 4 dimensions, so leading dimensions become one. CUDNN and FLASH compute groups of heads
without a mask in one call: with one, cuDNN's gradient of GQA is wrong (torch 2.11 on an H200). Else
the groups that share a head of keys are called one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ...compat.operators import aten
from .products import added_mask, backward_in_rows, in_rows

LSE_ROWS = 32  # the GPU kernel needs a multiple of this many rows in its logsumexp
BIAS_COLUMNS = 16  # and a multiple of this many columns in the memory of a mask
FLASH_WIDTH, CUDNN_WIDTH = 256, 128  # of a head
AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities


# ------------------------------------------------------------------------------- groups of queries


def kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute one block. Heads of queries share one of keys in groups, which are not expanded."""
    chosen = _kernel_of(q, k, v, mask, causal)
    if q.dim() == 4 and q.shape[-3] == k.shape[-3]:
        out, lse = chosen.forward(q, k, v, mask, causal, scale)
    elif chosen.has_groups and mask is None:
        out, lse = chosen.forward(*_of_4_dims(q, k, v), None, causal, scale)
        out, lse = out.reshape(*q.shape[:-1], -1), lse.reshape(q.shape[:-1])
    else:
        pieces = [
            chosen.forward(q, k, v, mask, causal, scale)
            for q, k, v, mask in _groups([q], k, v, mask, causal)
        ]
        out, lse = (_joined([piece[i] for piece in pieces], q, k, causal, mask) for i in range(2))
    if mask is not None:  # Kernels have other values for queries that see nothing.
        lse = torch.where(_seen(mask), lse, -math.inf)
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
    chosen = _kernel_of(q, k, v, mask, causal)
    if q.dim() == 4 and q.shape[-3] == k.shape[-3]:
        return chosen.backward(grad, q, k, v, mask, out, lse, causal, scale)
    if chosen.has_groups and mask is None:
        flat = _of_4_dims(grad, q, k, v, out)
        grads = chosen.backward(*flat[:4], None, flat[4], lse.flatten(0, -3), causal, scale)
        q_grad, k_grad, v_grad = (g.reshape(x.shape) for g, x in zip(grads, (q, k, v)))
        return q_grad, k_grad, v_grad
    rows = [grad, q, out, lse.unsqueeze(-1)]
    pieces = [
        chosen.backward(g, x, k, v, mask, o, lse.squeeze(-1), causal, scale)
        for g, x, o, lse, k, v, mask in _groups(rows, k, v, mask, causal)
    ]
    q_grad = _joined([piece[0] for piece in pieces], q, k, causal, mask)
    k_grad, v_grad = (cast(Tensor, sum(piece[i] for piece in pieces)) for i in (1, 2))
    return q_grad, k_grad.view(k.shape), v_grad.view(v.shape)


def _seen(mask: Tensor) -> Tensor:
    """Return which queries see a key."""
    return mask.any(-1) if mask.dtype == torch.bool else (mask != -math.inf).any(-1)


def _of_4_dims(*tensors: Tensor) -> list[Tensor]:
    return [t.reshape(-1, *t.shape[-3:]) for t in tensors]


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


def _on_cpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(
        *_contiguous_rows(q, k, v), 0.0, causal, attn_mask=added_mask(mask, q), scale=scale
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
        attn_mask=added_mask(mask, q),
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
    return aten._scaled_dot_product_efficient_attention_backward(
        *_contiguous_rows(grad, q, k, v),
        _aligned(mask, q, k),
        _heads_inside(out),
        padded,
        *_no_dropout(q),
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )[:3]


def _by_flash(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        *_contiguous_rows(q, k, v), 0.0, causal, scale=scale
    )
    return out, lse


def _backward_by_flash(
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
    return aten._scaled_dot_product_flash_attention_backward(
        *_contiguous_rows(grad, q, k, v, out),
        lse.contiguous(),
        *(None, None, q.shape[2], k.shape[2]),
        0.0,
        causal,
        *_no_dropout(q),
        scale=scale,
    )


def _by_cudnn(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        *_contiguous_rows(q, k, v), _aligned(mask, q, k), True, 0.0, causal, False, scale=scale
    )
    if mask is not None:  # a query that sees nothing has NaN; other NaN stay
        out = torch.where(_seen(mask).unsqueeze(-1), out, 0)
    return out, lse.squeeze(-1)


def _backward_by_cudnn(
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
    return aten._scaled_dot_product_cudnn_attention_backward(
        *_contiguous_rows(grad, q, k, v, out),
        lse.unsqueeze(-1).contiguous(),
        *_no_dropout(q),
        _aligned(mask, q, k),
        *(None, None, q.shape[2], k.shape[2]),
        0.0,
        causal,
        scale=scale,
    )


def _no_dropout(q: Tensor) -> Iterator[Tensor]:
    """Return the seed and the offset of a dropout that is off."""
    return (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))


def _contiguous_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors with contiguous rows, which kernels need and do not check."""
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in tensors)


def _heads_inside(out: Tensor) -> Tensor:
    """Return a result in the memory [b, s, h, e], as the memory-efficient kernel writes it.

    Its backward for half precision reads it so, whatever the strides are.
    """
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return a mask whose rows begin at multiples of BIAS_COLUMNS, of all heads and queries."""
    added = added_mask(mask, q)
    if added is None:
        return None
    shape = (*q.shape[:3], k.shape[2])
    added = added.expand(*added.shape[:3], shape[3])
    padded = torch.nn.functional.pad(added, (0, -shape[3] % BIAS_COLUMNS))
    return padded[..., : shape[3]].expand(shape)


# ------------------------------------------------------------------------------- choice of a kernel


class Kernel(NamedTuple):
    """Two functions that compute a block. has_groups: queries may have more heads than keys."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    has_groups: bool = False


FLASH_CPU = Kernel(_on_cpu, _backward_on_cpu)
CUDNN = Kernel(_by_cudnn, _backward_by_cudnn, has_groups=True)
FLASH = Kernel(_by_flash, _backward_by_flash, has_groups=True)
EFFICIENT = Kernel(_on_gpu, _backward_on_gpu)
PRODUCTS = Kernel(in_rows, backward_in_rows)


def _kernel_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Kernel:
    """Return the fastest kernel that computes a block."""
    if q.device.type == "cpu" and v.shape[-1] == q.shape[-1]:
        return FLASH_CPU
    if q.device.type != "cuda":
        return PRODUCTS
    capability = torch.cuda.get_device_capability(q.device)
    if capability >= AMPERE and _is_for_flash(q, k, v, causal):
        if capability >= HOPPER and _is_for_cudnn(q, k):
            return CUDNN
        if mask is None:
            return FLASH
    return EFFICIENT if _is_for_efficient(q, v) else PRODUCTS


def _is_for_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Return whether FlashAttention applies. It has the diagonal of a square alone."""
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] == v.shape[-1] <= FLASH_WIDTH
        and q.shape[-1] % 8 == 0
        and (not causal or q.shape[-2] == k.shape[-2])
    )


def _is_for_cudnn(q: Tensor, k: Tensor) -> bool:
    """Return whether cuDNN has what FlashAttention has. It adds in an order that varies."""
    return (
        q.shape[-1] <= CUDNN_WIDTH
        and min(q.shape[-2], k.shape[-2]) > 1
        and not torch.are_deterministic_algorithms_enabled()
    )


def _is_for_efficient(q: Tensor, v: Tensor) -> bool:
    """Return whether the memory-efficient kernel applies: rows are multiples of 16 bytes."""
    return q.dtype != torch.float64 and all(t.shape[-1] * t.itemsize % 16 == 0 for t in (q, v))
