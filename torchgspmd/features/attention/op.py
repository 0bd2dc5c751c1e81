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
from collections.abc import Sequence
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
    """Compute a call's gradients by kernels; with dropout by tiles."""
    s, t, offset = _extent(call)
    if call.seed is not None:
        return Tiles(call, Dropout(call.seed, call.dropout)).backward(upstream)
    blocks = visible_blocks(s, t, offset, call.causal)
    # A query that sees nothing has the weights exp(scores - inf) = 0.
    if call.mask is not None:
        lse = torch.where(upstream.lse == -math.inf, math.inf, upstream.lse)
        upstream = upstream._replace(lse=lse)
    results = [
        backward_kernel(_block(call, block, s), upstream.in_rows(slice(block.row, s)))
        for block in blocks
    ]
    sizes = (call.q.shape[-2], call.k.shape[-2])
    # One block is all of the call, so nothing is added up.
    if len(blocks) == 1 and (blocks[0][:3], (s, t)) == ((0, 0, t), sizes):
        return results[0]
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
    some = call.in_block(slice(block.row, s), slice(block.start, block.stop))
    return some._replace(causal=block.causal, region=None)


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
