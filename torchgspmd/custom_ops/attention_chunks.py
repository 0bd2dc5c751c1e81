"""Causal attention by chunks of queries in an order that gives all shards the same work.

    shard       0     1     2     3            chunk 7 sees all keys, chunk 0 almost none
    chunks     0 7   2 5   4 3   6 1

Of 2 n chunks, shard i has number 2 i and, in the place of number 2 i + 1, the one that is as far
from the end: 2 n - 1 - 2 i. So shards i and n - 1 - i exchange one. Source: the zigzag order of
Ring Flash Attention; Striped Attention (arXiv 2311.09431) has another one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .attention import attention_backward_in_blocks, attention_in_blocks, lse_dtype, merge


class Merged:
    """The results for the parts of the keys so far, in float32 or wider."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        shape, self.dtype = q.shape[:-1], q.dtype
        self.out = q.new_zeros(*shape, v.shape[-1], dtype=lse_dtype(q))
        self.lse = q.new_full(shape, -math.inf, dtype=lse_dtype(q))

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge the results of some queries for further keys."""
        before = self.out[..., rows, :], self.lse[..., rows]
        self.out[..., rows, :], self.lse[..., rows] = merge(before, (out, lse))

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the result in the dtype of the queries, and the logsumexp."""
        return self.out.to(self.dtype), self.lse


def chunks_of(shard: int, shards: int) -> tuple[int, int]:
    """Return the numbers of the chunks of a shard."""
    return 2 * shard, 2 * shards - 1 - 2 * shard


@torch.library.custom_op("torchgspmd::attention_chunks", mutates_args=())
def attention_chunks(
    q: Tensor, k: Tensor, v: Tensor, scale: float, shards: int, first: int
) -> tuple[Tensor, Tensor]:
    """Return causal `attention` of chunks of queries [shard, ..., chunk, s, d] to all keys.

    shards: how many there are in all. first: the number of the first one of q.
    """
    keys, rows = k.shape[-2], q.shape[-2]
    results = [
        attention_in_blocks(x[..., c, :, :], k, v, True, scale, None, [place * rows, 0, keys, keys])
        for i, x in enumerate(q)
        for c, place in enumerate(chunks_of(first + i, shards))
    ]
    out, lse = (torch.stack(x).unflatten(0, (-1, 2)) for x in zip(*results))
    return out.movedim(1, -3).contiguous(), lse.movedim(1, -2).contiguous()


@attention_chunks.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty([*q.shape[:-1], v.shape[-1]]), q.new_empty(q.shape[:-1], dtype=lse_dtype(q))


@torch.library.custom_op("torchgspmd::attention_chunks_backward", mutates_args=())
def attention_chunks_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    shards: int,
    first: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of `attention_chunks`."""
    keys, rows = k.shape[-2], q.shape[-2]
    q_grad = torch.empty_like(q, memory_format=torch.contiguous_format)
    k_grad, v_grad = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    for i in range(len(q)):
        for c, place in enumerate(chunks_of(first + i, shards)):
            g, x, o = (t[i, ..., c, :, :] for t in (grad, q, out))
            region = [place * rows, 0, keys, keys]
            q_grad[i, ..., c, :, :], *others = attention_backward_in_blocks(
                g, x, k, v, o, lse[i, ..., c, :], True, scale, None, region
            )
            k_grad += others[0]
            v_grad += others[1]
    return q_grad, k_grad, v_grad


@attention_chunks_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
