"""Attention between some queries and some keys, with the logsumexp that merges such parts.

    out, lse = attention(q, k, v, causal, scale, mask, region, seed, dropout)

    q [..., h g, s, d]   k [..., h, t, d]   v [..., h, t, e]   mask [..., h g, s, t], or 1 for each
    out [..., h g, s, e]   lse [..., h g, s]                   call.py has all operands by name

Results for several key ranges merge by weights: out = sum_i out_i exp(lse_i - lse), where
lse = log sum_i exp(lse_i). Given the merged out and lse, the gradients are sums over the ranges.
PyTorch's kernels compute blocks that a causal mask leaves whole or cuts along their diagonal. Fully
masked blocks are skipped. Source: FlashAttention-2 (arXiv 2307.08691) and Flash-Decoding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ...compat.operators import custom_op
from .call import (
    OPTIONS,
    AttentionCall,
    Gradients,
    Results,
    Upstream,
    backward_schema,
    forward_schema,
    of_backward,
    of_parts,
)
from .kernels import backward_kernel, kernel
from .tiles import Dropout, Tiles, empty_gradients, empty_results, lse_dtype, merge


class Block(NamedTuple):
    """Keys [start, stop) that queries from `row` on see: all, or those up to the diagonal."""

    row: int
    start: int
    stop: int
    causal: bool


def visible_blocks(s: int, t: int, offset: int, causal: bool) -> list[Block]:
    """Return the blocks to compute for s queries and t keys. Query i sees keys up to i + offset."""
    if not causal:
        return [Block(0, 0, t, False)] if s > 0 and t > 0 else []
    # Queries before `row` see no key.
    row = max(0, -offset)
    shift = offset + row
    # All rows see the keys left of the diagonal; the square on it is cut.
    blocks = [Block(row, 0, min(shift, t), False), Block(row, shift, min(t, shift + s - row), True)]
    return [block for block in blocks if block.row < s and block.start < block.stop]


def computed(call: AttentionCall) -> Results:
    """Compute attention by kernels; with dropout by tiles."""
    s, t, offset = _extent(call)
    if call.seed is not None:
        return Tiles(call, Dropout(call.seed, call.dropout)).forward()
    results = [
        kernel(_block(call, block, s)) for block in visible_blocks(s, t, offset, call.causal)
    ]
    q, v = call.q, call.v
    # No query sees a key.
    if not results:
        return q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_full(
            q.shape[:-1], -math.inf, dtype=lse_dtype(q)
        )
    # There are at most two blocks: the keys that all queries see, and the diagonal.
    out, lse = results[0] if len(results) == 1 else merge(*results)
    # The blocks leave out queries without keys and padding: these get 0 and -inf.
    before = max(0, -offset) if call.causal else 0
    around = (before, q.shape[-2] - s)
    if any(around):
        out = torch.nn.functional.pad(out, (0, 0, *around))
        lse = torch.nn.functional.pad(lse, around, value=-math.inf)
    return out, lse


def gradients(call: AttentionCall, upstream: Upstream) -> Gradients:
    s, t, offset = _extent(call)
    if call.seed is not None:
        return Tiles(call, Dropout(call.seed, call.dropout)).backward(upstream)
    blocks = visible_blocks(s, t, offset, call.causal)
    # A query that sees nothing has the weights exp(scores - inf) = 0.
    if call.mask is not None:
        lse = torch.where(upstream.lse == -math.inf, math.inf, upstream.lse)
        upstream = upstream._replace(lse=lse)
    if len(blocks) == 1 and _is_whole(call, blocks[0], s):
        return backward_kernel(_block(call, blocks[0], s), upstream)
    results = [
        backward_kernel(_block(call, block, s), upstream.in_rows(slice(block.row, s)))
        for block in blocks
    ]
    totals = [
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (call.q, call.k, call.v)
    ]
    for block, (q_grad, k_grad, v_grad) in zip(blocks, results):
        totals[0][..., block.row : s, :] += q_grad
        totals[1][..., block.start : block.stop, :] += k_grad
        totals[2][..., block.start : block.stop, :] += v_grad
    return cast(Gradients, tuple(totals))


def _extent(call: AttentionCall) -> tuple[int, int, int]:
    """Return how many queries and keys are no padding, and how far queries are ahead."""
    s, t = call.q.shape[-2], call.k.shape[-2]
    if call.region is None:
        return s, t, 0
    first_query, first_key, queries, keys = call.region[:4]
    return min(s, queries - first_query), min(t, keys - first_key), first_query - first_key


def _block(call: AttentionCall, block: Block, s: int) -> AttentionCall:
    if _is_whole(call, block, s):
        return call if call.region is None else call._replace(causal=block.causal, region=None)
    some = call.in_block(slice(block.row, s), slice(block.start, block.stop))
    return some._replace(causal=block.causal, region=None)


def _is_whole(call: AttentionCall, block: Block, s: int) -> bool:
    """Return whether a block is all of the call: nothing is cut, or added up."""
    sizes = call.q.shape[-2], call.k.shape[-2]
    return (block.row, block.start, s, block.stop) == (0, 0, *sizes)


# ----------------------------------------------------------------------------------- the operators


def attention_in_blocks(*args: Any) -> Results:
    """Compute `attention` past PyTorch's operator registry."""
    return computed(AttentionCall(*args))


def attention_backward_in_blocks(*args: object) -> Gradients:
    """Compute `attention_backward` past PyTorch's operator registry."""
    return gradients(*of_backward(*args))


@custom_op("attention", schema=forward_schema(f"bool causal, float scale, {OPTIONS}"))
def attention(*args: object) -> Results:
    """Return softmax(q k^T * scale + mask) v, and the scores' logsumexp.

    A query that sees no key has a result of 0 and a logsumexp of -inf.
    """
    out, lse = attention_in_blocks(*args)
    return out.contiguous(), lse.contiguous()


@custom_op(
    "attention_parts",
    schema=forward_schema(
        "bool causal, float scale, Tensor? mask, SymInt[] region, SymInt count, "
        "Tensor? seed=None, float dropout=0.0"
    ),
)
def attention_parts(*args: object) -> Results:
    """Return `attention` for each of `count` key ranges, in a new first dimension."""
    call, count = of_parts(*args)
    query, key, *rest = cast("Sequence[int]", call.region)
    # No remainder: the keys are padded to a multiple of count (rule.py).
    rows = call.k.shape[-2] // count
    results: list[Results] = []
    for start in range(0, call.k.shape[-2], rows):
        part = call.in_block(slice(None), slice(start, start + rows))
        results.append(computed(part._replace(region=[query, key + start, *rest])))
    out, lse = zip(*results)
    return torch.stack(out), torch.stack(lse)


@attention_parts.register_fake
def _(*args: object) -> Results:
    call, count = of_parts(*args)
    shape = [count, *call.q.shape[:-1]]
    out = call.q.new_empty([*shape, call.v.shape[-1]])
    return out, call.q.new_empty(shape, dtype=lse_dtype(call.q))


attention.register_fake(empty_results)


@custom_op("attention_backward", schema=backward_schema(f"bool causal, float scale, {OPTIONS}"))
def attention_backward(*args: object) -> Gradients:
    """Return the gradients for q, k and v."""
    q_grad, k_grad, v_grad = (g.contiguous() for g in attention_backward_in_blocks(*args))
    return q_grad, k_grad, v_grad


attention_backward.register_fake(empty_gradients)


def _attention_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    call = AttentionCall(*inputs)
    ctx.causal, ctx.scale, ctx.dropout = call.causal, call.scale, call.dropout
    ctx.save_for_backward(call.q, call.k, call.v, *output, call.mask, call.seed)
    ctx.mark_non_differentiable(output[1])


def _attention_backward(ctx: Any, grad: Tensor, _: Any) -> tuple:
    *tensors, mask, seed = ctx.saved_tensors
    options = () if mask is None else (mask,)
    if seed is not None:
        options = (mask, None, seed, ctx.dropout)
    # No region: autograd runs before the program is sharded.
    grads = attention_backward(grad, *tensors, ctx.causal, ctx.scale, *options)
    return (*grads, *(None,) * 6)


attention.register_autograd(_attention_backward, setup_context=_attention_context)


@attention.register_vmap
def _attention_of_batch(info: Any, in_dims: tuple, *args: Any) -> tuple[Results, tuple[int, int]]:
    """Compute all calls under torch.vmap at once, as one more leading dimension."""
    call, dims = AttentionCall(*args), AttentionCall(*in_dims)
    q, k, v = (
        x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip((call.q, call.k, call.v), in_dims)
    )
    mask, dim = call.mask, cast("int | None", dims.mask)
    if mask is not None and dim is not None:
        mask = mask.movedim(dim, 0)
        # The batch stays first; broadcast dimensions go behind it.
        mask = mask[(slice(None), *(None,) * (q.dim() - mask.dim()))]
    return attention(*call._replace(q=q, k=k, v=v, mask=mask)), (0, 0)


# Causal attention with tokens in an order that gives all shards the same work.
#
#     shard       0     1     2     3            chunk 7 sees all keys, chunk 0 almost none
#     chunks     0 7   2 5   4 3   6 1
#
# There are 2 n chunks. Shard i has chunk 2 i. In place of chunk 2 i + 1 it has the one that is as
# far from the end: 2 n - 1 - 2 i. So shards i and n - 1 - i exchange one chunk, and the order is
# its own inverse. Source: the zigzag order of Ring Flash Attention.


class Merged:
    """The merged results for the keys so far, in float32 or wider."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        shape, self.dtype = q.shape[:-1], q.dtype
        self.out = q.new_zeros(*shape, v.shape[-1], dtype=lse_dtype(q))
        self.lse = q.new_full(shape, -math.inf, dtype=lse_dtype(q))

    def add(self, rows: slice, results: Results) -> None:
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


@custom_op(
    "zigzag_attention_backward",
    schema=backward_schema("float scale, SymInt shards, SymInt[] region"),
)
def zigzag_attention_backward(*args: Any) -> Gradients:
    """Return terms of `zigzag_attention`'s gradients for q, k and v, from some keys."""
    grad, q, k, v, out, lse, scale, shards, region = args
    upstream = Upstream(grad, out, lse)
    total, keys = region[2], k.shape[-2]
    whole = keys == total
    if whole:
        k, v = (zigzag(x, x.dim() - 2, shards) for x in (k, v))
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    columns = [(slice(0, keys), 0)] if whole else [*runs_of_rows(region[1], keys, shards, total)]
    for rows, place in runs_of_rows(region[0], q.shape[-2], shards, total):
        for some, start in columns:
            here = [place, start, total, total]
            call = AttentionCall(q, k, v, True, scale, region=here).in_block(rows, some)
            terms = gradients(call, upstream.in_rows(rows))
            for total_grad, part, term in zip(grads, (rows, some, some), terms):
                total_grad[..., part, :] += term
    if whole:
        # The order is its own inverse.
        grads[1:] = (zigzag(x, x.dim() - 2, shards) for x in grads[1:])
    return grads[0], grads[1], grads[2]


zigzag_attention_backward.register_fake(empty_gradients)
