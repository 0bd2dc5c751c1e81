"""Attention within one block, by PyTorch's kernels or by products.

    CPU         FLASH_CPU; PRODUCTS where values have another width than keys
    CUDA        CUDNN on Hopper and later for half precision: twice as fast as the next two
                FLASH for half precision without a mask
                EFFICIENT for masks and float32
                PRODUCTS for the rest

Kernels have 4 dimensions, so leading dimensions become one. CUDNN and FLASH compute head groups in
one call, without a mask. With a mask, cuDNN's gradient for GQA is wrong (torch 2.11 on an H200).
Otherwise the groups that share a head of keys are called one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ...compat.operators import aten
from .call import AttentionCall, Gradients, Results, Upstream
from .tiles import added_mask, backward_in_rows, in_rows

LSE_ROWS = 32  # the GPU kernel needs a multiple of this many rows in its logsumexp
BIAS_COLUMNS = 16  # and a multiple of this many columns in the memory of a mask
FLASH_WIDTH, CUDNN_WIDTH = 256, 128  # of a head
AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities


# ------------------------------------------------------------------------------- groups of queries


def kernel(call: AttentionCall) -> Results:
    """Compute one block. Groups of query heads share a key head, which is not expanded."""
    chosen, q, mask = _kernel_of(call), call.q, call.mask
    if q.dim() == 4 and q.shape[-3] == call.k.shape[-3]:
        out, lse = chosen.forward(call)
    elif chosen.has_groups and mask is None:
        out, lse = chosen.forward(_of_4_dims(call))
        out, lse = out.reshape(*q.shape[:-1], -1), lse.reshape(q.shape[:-1])
    else:
        pieces = [chosen.forward(group) for group in _groups(call)]
        out, lse = (_joined([piece[i] for piece in pieces], call) for i in range(2))
    if mask is not None:  # Kernels have other values for queries that see nothing.
        lse = torch.where(_seen(mask), lse, -math.inf)
    return out, lse


def backward_kernel(call: AttentionCall, upstream: Upstream) -> Gradients:
    chosen, q, k, v = _kernel_of(call), call.q, call.k, call.v
    if q.dim() == 4 and q.shape[-3] == k.shape[-3]:
        return chosen.backward(call, upstream)
    if chosen.has_groups and call.mask is None:
        grad, out = (_flat(x) for x in (upstream.grad, upstream.out))
        flat = Upstream(grad, out, upstream.lse.flatten(0, -3))
        grads = chosen.backward(_of_4_dims(call), flat)
        q_grad, k_grad, v_grad = (g.reshape(x.shape) for g, x in zip(grads, (q, k, v)))
        return q_grad, k_grad, v_grad
    rows = [_of_heads(x, k) for x in (upstream.grad, upstream.out, upstream.lse.unsqueeze(-1))]
    pieces = [
        chosen.backward(group, Upstream(grad, out, lse.squeeze(-1)))
        for group, (grad, out, lse) in zip(_groups(call), zip(*(_split(x, call) for x in rows)))
    ]
    q_grad = _joined([piece[0] for piece in pieces], call)
    # Groups share keys and values, so these gradients are sums over the groups.
    k_grad, v_grad = (cast(Tensor, sum(piece[i] for piece in pieces)) for i in (1, 2))
    return q_grad, k_grad.view(k.shape), v_grad.view(v.shape)


def _seen(mask: Tensor) -> Tensor:
    """Mark the queries that see a key."""
    return mask.any(-1) if mask.dtype == torch.bool else (mask != -math.inf).any(-1)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-3:])


def _of_4_dims(call: AttentionCall) -> AttentionCall:
    return call._replace(q=_flat(call.q), k=_flat(call.k), v=_flat(call.v))


def _folds(call: AttentionCall) -> bool:
    """Return whether the queries of a group may be rows of one head: nothing tells them apart."""
    return not call.causal and call.mask is None


def _of_heads(x: Tensor, k: Tensor) -> Tensor:
    """Return query rows as [b, heads of keys, groups, s, ...]."""
    heads = k.shape[-3]
    return x.reshape(-1, heads, x.shape[-3] // heads, *x.shape[-2:])


def _split(rows: Tensor, call: AttentionCall) -> list[Tensor]:
    """Split query rows as `_groups` splits the call."""
    return [rows.flatten(2, 3)] if _folds(call) else [*rows.unbind(2)]


def _groups(call: AttentionCall) -> list[AttentionCall]:
    """Return kernel calls in 4 dimensions, each with as many query heads as key heads."""
    lead, heads, mask = call.q.shape[:-3], call.k.shape[-3], call.mask
    rows = _of_heads(call.q, call.k)
    call, queries = call._replace(k=_flat(call.k), v=_flat(call.v)), _split(rows, call)
    if mask is None:
        return [call._replace(q=q) for q in queries]
    mask = mask[(None,) * (len(lead) + 3 - mask.dim())]
    # Leading dimensions become one, so the mask cannot broadcast along some.
    if mask.shape[:-3].numel() > 1:
        mask = mask.expand(*lead, *mask.shape[-3:])
    mask = mask.reshape(-1, *mask.shape[-3:])
    mask = mask.unflatten(1, (heads, rows.shape[2]) if mask.shape[1] > 1 else (1, 1))
    return [
        call._replace(q=q, mask=mask[:, :, g if mask.shape[2] > 1 else 0])
        for g, q in enumerate(queries)
    ]


def _joined(pieces: Sequence[Tensor], call: AttentionCall) -> Tensor:
    """Join results from `_groups` into the queries' shape."""
    joined = pieces[0] if _folds(call) else torch.stack(list(pieces), 2)  # [b, h, g s, ...]
    tail = pieces[0].shape[3:]
    return joined.reshape(*call.q.shape[:-1], *tail)


# ------------------------------------------------------------------- kernels of 4 dimensions each


def _on_cpu(call: AttentionCall) -> Results:
    return aten._scaled_dot_product_flash_attention_for_cpu(
        *_contiguous_rows(call.q, call.k, call.v),
        0.0,
        call.causal,
        attn_mask=added_mask(call.mask, call.q),
        scale=call.scale,
    )


def _backward_on_cpu(call: AttentionCall, up: Upstream) -> Gradients:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *_contiguous_rows(up.grad, call.q, call.k, call.v, up.out),
        up.lse,
        0.0,
        call.causal,
        attn_mask=added_mask(call.mask, call.q),
        scale=call.scale,
    )


def _on_gpu(call: AttentionCall) -> Results:
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        *_contiguous_rows(call.q, call.k, call.v),
        _aligned(call),
        True,
        0.0,
        call.causal,
        scale=call.scale,
    )
    # The kernel pads the rows of its logsumexp to LSE_ROWS.
    return out, lse[..., : call.q.shape[2]]


def _backward_on_gpu(call: AttentionCall, up: Upstream) -> Gradients:
    # exp(score - inf) is 0, so padded rows add nothing to a gradient.
    padded = torch.nn.functional.pad(up.lse, (0, -up.lse.shape[-1] % LSE_ROWS), value=float("inf"))
    # A result in the memory [b, s, h, e], as the memory-efficient kernel writes it. Its half-
    # precision backward reads it so, whatever the strides are.
    return aten._scaled_dot_product_efficient_attention_backward(
        *_contiguous_rows(up.grad, call.q, call.k, call.v),
        _aligned(call),
        up.out.transpose(1, 2).contiguous().transpose(1, 2),
        padded,
        *_no_dropout(call.q),
        0.0,
        [True, True, True, False],
        call.causal,
        scale=call.scale,
    )[:3]


def _by_flash(call: AttentionCall) -> Results:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        *_contiguous_rows(call.q, call.k, call.v), 0.0, call.causal, scale=call.scale
    )
    return out, lse


def _backward_by_flash(call: AttentionCall, up: Upstream) -> Gradients:
    return aten._scaled_dot_product_flash_attention_backward(
        *_contiguous_rows(up.grad, call.q, call.k, call.v, up.out),
        up.lse.contiguous(),
        *(None, None, call.q.shape[2], call.k.shape[2]),
        0.0,
        call.causal,
        *_no_dropout(call.q),
        scale=call.scale,
    )


def _by_cudnn(call: AttentionCall) -> Results:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        *_contiguous_rows(call.q, call.k, call.v),
        _aligned(call),
        True,
        0.0,
        call.causal,
        False,
        scale=call.scale,
    )
    if call.mask is not None:  # a query that sees nothing has NaN; other NaN stay
        out = torch.where(_seen(call.mask).unsqueeze(-1), out, 0)
    return out, lse.squeeze(-1)


def _backward_by_cudnn(call: AttentionCall, up: Upstream) -> Gradients:
    return aten._scaled_dot_product_cudnn_attention_backward(
        *_contiguous_rows(up.grad, call.q, call.k, call.v, up.out),
        up.lse.unsqueeze(-1).contiguous(),
        *_no_dropout(call.q),
        _aligned(call),
        *(None, None, call.q.shape[2], call.k.shape[2]),
        0.0,
        call.causal,
        scale=call.scale,
    )


def _no_dropout(q: Tensor) -> Iterator[Tensor]:
    return (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))


def _contiguous_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Make rows contiguous, which kernels need and do not check."""
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in tensors)


def _aligned(call: AttentionCall) -> Tensor | None:
    """Return a mask for all heads and queries, whose rows begin at multiples of BIAS_COLUMNS."""
    added = added_mask(call.mask, call.q)
    if added is None:
        return None
    shape = (*call.q.shape[:3], call.k.shape[2])
    added = added.expand(*added.shape[:3], shape[3])
    padded = torch.nn.functional.pad(added, (0, -shape[3] % BIAS_COLUMNS))
    return padded[..., : shape[3]].expand(shape)


# ------------------------------------------------------------------------------- choice of a kernel


class Kernel(NamedTuple):
    """Two functions that compute a block. has_groups: queries may have more heads than keys."""

    forward: Callable[[AttentionCall], Results]
    backward: Callable[[AttentionCall, Upstream], Gradients]
    has_groups: bool = False


FLASH_CPU = Kernel(_on_cpu, _backward_on_cpu)
CUDNN = Kernel(_by_cudnn, _backward_by_cudnn, has_groups=True)
FLASH = Kernel(_by_flash, _backward_by_flash, has_groups=True)
EFFICIENT = Kernel(_on_gpu, _backward_on_gpu)
PRODUCTS = Kernel(in_rows, backward_in_rows)


def _kernel_of(call: AttentionCall) -> Kernel:
    q, v = call.q, call.v
    if q.device.type == "cpu" and v.shape[-1] == q.shape[-1]:
        return FLASH_CPU
    if q.device.type != "cuda":
        return PRODUCTS
    capability = torch.cuda.get_device_capability(q.device)
    if capability >= AMPERE and _is_for_flash(call):
        if capability >= HOPPER and _is_for_cudnn(call):
            return CUDNN
        if call.mask is None:
            return FLASH
    return EFFICIENT if _is_for_efficient(call) else PRODUCTS


def _is_for_flash(call: AttentionCall) -> bool:
    """Return whether FlashAttention applies. Its causal mask needs a square."""
    q, width = call.q, call.q.shape[-1]
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and width == call.v.shape[-1] <= FLASH_WIDTH
        and width % 8 == 0
        and (not call.causal or q.shape[-2] == call.k.shape[-2])
    )


def _is_for_cudnn(call: AttentionCall) -> bool:
    """Return whether cuDNN may replace FlashAttention. Its summation order varies."""
    return (
        call.q.shape[-1] <= CUDNN_WIDTH
        and min(call.q.shape[-2], call.k.shape[-2]) > 1
        and not torch.are_deterministic_algorithms_enabled()
    )


def _is_for_efficient(call: AttentionCall) -> bool:
    """Return whether the memory-efficient kernel applies: rows are multiples of 16 bytes."""
    rows = (call.q, call.v)
    return call.q.dtype != torch.float64 and all(t.shape[-1] * t.itemsize % 16 == 0 for t in rows)
