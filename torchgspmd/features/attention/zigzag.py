"""Causal attention with tokens in an order that gives all shards the same work.

    shard       0     1     2     3            chunk 7 sees all keys, chunk 0 almost none
    chunks     0 7   2 5   4 3   6 1

There are 2 n chunks. Shard i has chunk 2 i. In place of chunk 2 i + 1 it has the one that is as far
from the end: 2 n - 1 - 2 i. So shards i and n - 1 - i exchange one chunk, and the order is its own
inverse. Source: the zigzag order of Ring Flash Attention. Striped Attention (arXiv 2311.09431) has
another order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...compat.operators import custom_op
from .call import AttentionCall, Gradients, Results, Upstream
from .op import computed, gradients
from .tiles import empty_gradients, empty_results, lse_dtype, merge


class Merged:
    """The merged results for the keys so far, in float32 or wider."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        shape, self.dtype = q.shape[:-1], q.dtype
        self.out = q.new_zeros(*shape, v.shape[-1], dtype=lse_dtype(q))
        self.lse = q.new_full(shape, -math.inf, dtype=lse_dtype(q))

    def add(self, rows: slice, results: Results) -> None:
        """Merge some queries' results for further keys."""
        before = self.out[..., rows, :], self.lse[..., rows]
        self.out[..., rows, :], self.lse[..., rows] = merge(before, results)

    def result(self) -> Results:
        """Return the result in the queries' dtype, and the logsumexp."""
        return self.out.to(self.dtype), self.lse


def zigzag(x: Tensor, dim: int, shards: int, outer: int = 1) -> Tensor:
    """Put the rows along a dimension into zigzag order, or back into their own.

    outer: the number of sequences along the dimension.
    """
    sizes = (outer, shards, 2, -1) if outer > 1 else (shards, 2, -1)
    # The dimension of shards.
    chunks, at = x.unflatten(dim, sizes), dim + len(sizes) - 3
    even, odd = (chunks.select(at + 1, i) for i in range(2))
    return torch.stack([even, odd.flip(at)], at + 1).flatten(dim, at + 2)


def runs_of_rows(first: int, rows: int, shards: int, total: int) -> Iterator[tuple[slice, int]]:
    """Yield a device's runs of adjacent rows, with the position of their first token.

    first: the index of the device's first row over all shards. Rows behind the last are padding.
    """
    chunk, row, end = total // (2 * shards), first, min(first + rows, total)
    while row < end:
        place, ahead = divmod(row, chunk)
        stop = min(end, (place + 1) * chunk)
        # The chunk at place 2 i + 1 is 2 n - (2 i + 1).
        number = 2 * shards - place if place % 2 else place
        yield slice(row - first, stop - first), number * chunk + ahead
        row = stop


@custom_op("zigzag_attention")
def zigzag_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, shards: int, region: Sequence[int]
) -> Results:
    """Return causal `attention` between queries and all keys, with tokens in zigzag order.

    region: the first query's row and the first key's, and how many queries and keys there are.
    """
    total = region[2]
    # All keys are here: in their own order, a run of queries sees one range.
    k, v = (zigzag(x, x.dim() - 2, shards) for x in (k, v))
    out = q.new_zeros([*q.shape[:-1], v.shape[-1]])
    lse = q.new_full(q.shape[:-1], -math.inf, dtype=lse_dtype(q))
    for rows, place in runs_of_rows(region[0], q.shape[-2], shards, total):
        here = [place, 0, total, total]
        call = AttentionCall(q[..., rows, :], k, v, True, scale, region=here)
        out[..., rows, :], lse[..., rows] = computed(call)
    return out, lse


zigzag_attention.register_fake(empty_results)


@custom_op("zigzag_attention_backward")
def zigzag_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    shards: int,
    region: Sequence[int],
) -> Gradients:
    """Return terms of `zigzag_attention`'s gradients for q, k and v, from some keys."""
    total, keys = region[2], k.shape[-2]
    whole = keys == total
    if whole:
        k, v = (zigzag(x, x.dim() - 2, shards) for x in (k, v))
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    columns = [(slice(0, keys), 0)] if whole else [*runs_of_rows(region[1], keys, shards, total)]
    for rows, place in runs_of_rows(region[0], q.shape[-2], shards, total):
        upstream = Upstream(grad, out, lse).in_rows(rows)
        for some, start in columns:
            here = [place, start, total, total]
            call = AttentionCall(q, k, v, True, scale, region=here).in_block(rows, some)
            terms = gradients(call, upstream)
            for total_grad, part, term in zip(grads, (rows, some, some), terms):
                total_grad[..., part, :] += term
    if whole:
        # The order is its own inverse.
        grads[1:] = (zigzag(x, x.dim() - 2, shards) for x in grads[1:])
    return grads[0], grads[1], grads[2]


zigzag_attention_backward.register_fake(empty_gradients)
