"""Attention of a part of the queries to a part of the keys, with the logsumexp that merges parts.

    out, lse = attention(q, k, v, causal, scale, mask, region, seed, dropout)

    q [..., h g, s, d]   k [..., h, t, d]   v [..., h, t, e]   mask [..., h g, s, t], or 1 for each
    out [..., h g, s, e]   lse [..., h g, s]

Results for several parts of the keys merge by weights: out = sum_i out_i exp(lse_i - lse), where
lse = log sum_i exp(lse_i). Given the merged out and lse, the gradients of parts are sums. PyTorch's
kernels compute blocks that a causal mask leaves whole or cuts along their diagonal; blocks that it
leaves nothing of are not computed. Source: FlashAttention-2 (arXiv 2307.08691) and Flash-Decoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .kernels import backward_kernel, kernel
from .tiles import Dropout, Tiles, empty_gradients, empty_results, lse_dtype, merge


class Block(NamedTuple):
    """Keys [start, stop) that queries from `row` on see: all, or those up to the diagonal."""

    row: int
    start: int
    stop: int
    causal: bool


def visible_blocks(s: int, t: int, offset: int, causal: bool) -> list[Block]:
    """Return the blocks of s queries and t keys to compute. Query i sees keys up to i + offset."""
    if not causal:
        return [Block(0, 0, t, False)] if s > 0 and t > 0 else []
    row = max(0, -offset)
    shift = offset + row
    blocks = [Block(row, 0, min(shift, t), False), Block(row, shift, min(t, shift + s - row), True)]
    return [block for block in blocks if block.row < s and block.start < block.stop]


@torch.library.custom_op("torchgspmd::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
    region: Sequence[int] | None = None,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return softmax(q k^T * scale + mask) v, and the logsumexp of the scores.

    mask: True for what is seen, or added to the scores. region: the positions of the first query
    and the first key, and the numbers of queries and keys in all. Those behind the last are
    padding. With dropout also that of the first and the number in all of each dimension before the
    queries, where heads are two: heads of keys, and groups (`attention_tiles.Place`). seed: the
    weights that dropout leaves out follow from it and from positions. A query that sees no key has
    a result of 0 and a logsumexp of -inf.
    """
    out, lse = attention_in_blocks(q, k, v, causal, scale, mask, region, seed, dropout)
    return out.contiguous(), lse.contiguous()


def attention_in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
    region: Sequence[int] | None = None,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute `attention` by kernels, past PyTorch's registry of operators."""
    s, t, offset = _extent(q, k, region)
    if seed is not None:
        change = Dropout(seed, dropout)
        return Tiles(q, k, v, causal, scale, mask, region, change).forward()
    results = [
        kernel(*_block(block, s, q, k, v, mask=mask), block.causal, scale)
        for block in visible_blocks(s, t, offset, causal)
    ]
    if not results:
        return q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_full(
            q.shape[:-1], -math.inf, dtype=lse_dtype(q)
        )
    out, lse = results[0] if len(results) == 1 else merge(*results)
    before = max(0, -offset) if causal else 0
    around = (before, q.shape[-2] - s)
    if any(around):
        out = torch.nn.functional.pad(out, (0, 0, *around))
        lse = torch.nn.functional.pad(lse, around, value=-math.inf)
    return out, lse


@torch.library.custom_op("torchgspmd::attention_parts", mutates_args=())
def attention_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | None,
    region: Sequence[int],
    count: int,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return `attention` for each of `count` parts of the keys, in a new first dimension."""
    rows = k.shape[-2] // count
    results: list[tuple[Tensor, Tensor]] = []
    for start in range(0, k.shape[-2], rows):
        part = slice(start, start + rows)
        some = mask if mask is None or mask.shape[-1] == 1 else mask[..., part]
        here = [region[0], region[1] + start, *region[2:]]
        pair = k[..., part, :], v[..., part, :]
        results.append(attention_in_blocks(q, *pair, causal, scale, some, here, seed, dropout))
    out, lse = zip(*results)
    return torch.stack(out), torch.stack(lse)


@attention_parts.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    shape = [options[4], *q.shape[:-1]]
    return q.new_empty([*shape, v.shape[-1]]), q.new_empty(shape, dtype=lse_dtype(q))


def _extent(q: Tensor, k: Tensor, region: Sequence[int] | None) -> tuple[int, int, int]:
    """Return the numbers of queries and keys without padding, and by how much queries are ahead."""
    s, t = q.shape[-2], k.shape[-2]
    if region is None:
        return s, t, 0
    first_query, first_key, queries, keys = region[:4]
    return min(s, queries - first_query), min(t, keys - first_key), first_query - first_key


def _block(
    block: Block, s: int, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    rows, keys = slice(block.row, s), slice(block.start, block.stop)
    if mask is not None:
        mask = mask[..., rows if mask.shape[-2] > 1 else slice(None), :]
        mask = mask[..., keys if mask.shape[-1] > 1 else slice(None)]
    return q[..., rows, :], k[..., keys, :], v[..., keys, :], mask


attention.register_fake(empty_results)


@torch.library.custom_op("torchgspmd::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
    region: Sequence[int] | None = None,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. out, lse: for all keys, not for a part of them."""
    grads = attention_backward_in_blocks(
        grad, q, k, v, out, lse, causal, scale, mask, region, seed, dropout
    )
    q_grad, k_grad, v_grad = (g.contiguous() for g in grads)
    return q_grad, k_grad, v_grad


def attention_backward_in_blocks(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
    region: Sequence[int] | None = None,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `attention_backward` by kernels, past PyTorch's registry of operators."""
    s, t, offset = _extent(q, k, region)
    if seed is not None:
        change = Dropout(seed, dropout)
        tiles = Tiles(q, k, v, causal, scale, mask, region, change)
        return tiles.backward(grad, out, lse)
    blocks = visible_blocks(s, t, offset, causal)
    # A query that sees nothing has the weights exp(scores - inf) = 0.
    if mask is not None:
        lse = torch.where(lse == -math.inf, math.inf, lse)
    results = [
        backward_kernel(
            grad[..., block.row : s, :],
            *_block(block, s, q, k, v, mask=mask),
            out[..., block.row : s, :],
            lse[..., block.row : s],
            block.causal,
            scale,
        )
        for block in blocks
    ]
    if len(blocks) == 1 and (blocks[0][:3], s, t) == ((0, 0, t), *_sizes(q, k)):
        return results[0]
    totals = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for block, (q_grad, k_grad, v_grad) in zip(blocks, results):
        totals[0][..., block.row : s, :] += q_grad
        totals[1][..., block.start : block.stop, :] += k_grad
        totals[2][..., block.start : block.stop, :] += v_grad
    return totals  # pyright: ignore[reportReturnType]


def _sizes(q: Tensor, k: Tensor) -> tuple[int, int]:
    return q.shape[-2], k.shape[-2]


attention_backward.register_fake(empty_gradients)


def _attention_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.causal, ctx.scale, mask, _, seed, ctx.dropout = (*inputs[3:], *(None,) * 4)[:6]
    ctx.save_for_backward(*inputs[:3], *output, mask, seed)
    ctx.mark_non_differentiable(output[1])


def _attention_backward(ctx: Any, grad: Tensor, _: Any) -> tuple:
    *tensors, mask, seed = ctx.saved_tensors
    options = () if mask is None else (mask,)
    if seed is not None:
        options = (mask, None, seed, ctx.dropout)
    grads = attention_backward(grad, *tensors, ctx.causal, ctx.scale, *options)
    return (*grads, *(None,) * 6)


attention.register_autograd(_attention_backward, setup_context=_attention_context)


@attention.register_vmap
def _attention_of_batch(
    info: Any,
    in_dims: tuple,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
    region: Sequence[int] | None = None,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """Compute all calls of torch.vmap at once, as one more leading dimension."""
    q, k, v = (
        x.expand(info.batch_size, *x.shape) if d is None else x.movedim(d, 0)
        for x, d in zip((q, k, v), in_dims)
    )
    mask_dim = (*in_dims, None, None, None)[5]
    if mask is not None and mask_dim is not None:
        mask = mask.movedim(mask_dim, 0)
        mask = mask[(slice(None), *(None,) * (q.dim() - mask.dim()))]
    return attention(q, k, v, causal, scale, mask, region, seed, dropout), (0, 0)
