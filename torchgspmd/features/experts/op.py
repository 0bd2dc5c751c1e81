"""Products between row groups and one matrix each, as experts compute them.

    grouped_mm(x, w, ends)          rows ends[i-1]:ends[i] in x [t, k] times w[i], w [e, k, n]
    grouped_outer(x, y, ends)       each group's sum of outer products: [e, k, n]

torch._grouped_mm and F.grouped_mm become these in a capture. They take every type, without an
alignment, and rows behind the last group are 0. Experts on several devices are one block of groups
each:

    take_blocks(x, ends, 2)         [2, t, k]: block b begins with the first row of its groups
    block_mm(xs, ws, ends, 2)       [2, t, n]: each block times its own matrices
    put_blocks(ys, ends, 2)         [t, n]: all blocks' rows, each back at its place

A block has room for all rows, since all may choose its experts; a device multiplies only its own.
Unsorted rows come with each row's group in place of the ends, and with the number of groups:

    take_blocks(x, index, 2, 8)     block b begins with its groups' rows, sorted

All tensors may have leading dimensions, such as pipeline stages. Each position there has its own
rows, matrices and ends: x [s, t, k], w [s, e, k, n], ends [s, e]. torch.vmap adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...compat.operators import aten, custom_op
from ...compat.private_apis import _grouped_mm
from ...errors import ShardingError

# Without a kernel the host reads where groups end, and calls a product for each.
READS_ENDS = (torch.Tag.cudagraph_unsafe,)
# PyTorch's kernel needs rows whose bytes are a multiple of this.
KERNEL_BYTES = 16


def leading_dims(ends: Tensor) -> int:
    """Return the number of dimensions before the rows."""
    return ends.dim() - 1


def _each(function: Callable[..., Tensor], tensors: Sequence[Tensor], *options: object) -> Tensor:
    """Return the results for each position in the tensors' first leading dimension."""
    return torch.stack([function(*row, *options) for row in zip(*tensors, strict=True)])


@custom_op("grouped_mm", tags=READS_ENDS)
def grouped_mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Return [t, n]: each row of x [t, k] times its group's matrix, in w [e, k, n].

    ends: the row behind each group. Rows behind the last group are 0.
    """
    return _each(grouped_mm, (x, w, ends)) if leading_dims(ends) else _mm(x, w, ends)


def _mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    if _has_kernel(x, w):
        out = _grouped_mm(x, w, offs=ends.to(torch.int32))
        # The kernel writes no rows behind the last group.
        rows = torch.arange(len(x), device=x.device).unsqueeze(1)
        return torch.where(rows < ends[-1], out, 0)
    out, start = x.new_empty(x.shape[0], w.shape[2]), 0
    for matrix, end in zip(w, ends.tolist()):
        if end > start:
            torch.mm(x[start:end], matrix, out=out[start:end])
            start = end
    out[start:].zero_()
    return out


@custom_op("grouped_outer", tags=READS_ENDS)
def grouped_outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Return [e, k, n]: for each group x [t, k], transposed, times y [t, n]."""
    return _each(grouped_outer, (x, y, ends)) if leading_dims(ends) else _outer(x, y, ends)


def _outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    if _has_kernel(x.t(), y):
        return _grouped_mm(x.t(), y, offs=ends.to(torch.int32))
    out, start = x.new_empty(ends.shape[0], x.shape[1], y.shape[1]), 0
    for matrix, end in zip(out, ends.tolist()):
        if end > start:
            torch.mm(x[start:end].t(), y[start:end], out=matrix)
            start = end
        else:
            matrix.zero_()
    return out


def _has_kernel(a: Tensor, b: Tensor) -> bool:
    return (
        a.is_cuda
        and a.dtype == torch.bfloat16
        and all(
            sorted(t.stride()[-2:])[0] == 1
            and max(t.stride()[-2:]) * t.itemsize % KERNEL_BYTES == 0
            for t in (a, b)
        )
    )


@grouped_mm.register_fake
def _(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    if x.shape[-1] != w.shape[-2] or ends.shape != w.shape[:-2]:
        raise RuntimeError(
            f"shapes {list(x.shape)}, {list(w.shape)} and {list(ends.shape)} of groups differ"
        )
    return x.new_empty(*x.shape[:-1], w.shape[-1])


@grouped_outer.register_fake
def _(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(*ends.shape, x.shape[-1], y.shape[-1])


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.blocks = inputs[3:]


def _mm_backward(ctx: Any, grad: Tensor) -> tuple:
    x, w, ends = ctx.saved_tensors
    mm, outer = (block_mm, block_outer) if ctx.blocks else (grouped_mm, grouped_outer)
    return (
        mm(grad, w.mT, ends, *ctx.blocks) if ctx.needs_input_grad[0] else None,
        outer(x, grad, ends, *ctx.blocks) if ctx.needs_input_grad[1] else None,
        *[None] * (1 + len(ctx.blocks)),
    )


def _outer_backward(ctx: Any, grad: Tensor) -> tuple:
    x, y, ends = ctx.saved_tensors
    return (
        grouped_mm(y, grad.mT, ends) if ctx.needs_input_grad[0] else None,
        grouped_mm(x, grad, ends) if ctx.needs_input_grad[1] else None,
        None,
    )


grouped_mm.register_autograd(_mm_backward, setup_context=_save)
grouped_outer.register_autograd(_outer_backward, setup_context=_save)


# ----------------------------------------------------------------------------- blocks of groups


def groups_of_block(groups: int, blocks: int) -> int:
    """Return the number of groups in a block; the last ones may have fewer, or none."""
    return -(-groups // blocks)


def sorted_groups(ends: Tensor, groups: int) -> tuple[Tensor | None, Tensor]:
    """Return (the row order that sorts by group, or None, the ends after sorting).

    groups: 0 if the rows are sorted. Otherwise `ends` has each row's group, one of so many.
    """
    if not groups:
        return None, ends
    index = ends.remainder(groups)  # negative groups count from the end
    counts = index.new_zeros(*index.shape[:-1], groups)
    counts = counts.scatter_add(-1, index, torch.ones_like(index))
    return index.argsort(dim=-1, stable=True), counts.cumsum(-1)


def block_ends(ends: Tensor, blocks: int, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return (first row [count], ends [count, p] from there) for `count` blocks from `first` on."""
    width = groups_of_block(ends.shape[-1], blocks)
    padding = width * max(blocks, first + count) - ends.shape[-1]  # a device may have empty blocks
    behind = ends[..., -1:].expand(*ends.shape[:-1], padding)
    # Where groups begin and end; each `width` of them is a block.
    borders = torch.cat([torch.zeros_like(ends[..., :1]), ends, behind], -1)
    start = borders[..., :-1:width].narrow(-1, first, count)
    last = borders[..., 1:].unflatten(-1, (-1, width)).narrow(-2, first, count)
    return start, last - start.unsqueeze(-1)


@custom_op("take_blocks")
def take_blocks(
    x: Tensor, ends: Tensor, blocks: int, groups: int = 0, first: int = 0, count: int | None = None
) -> Tensor:
    """Return [count, t, ...]: x [t, ...], turned so that each block begins at row 0.

    The groups are cut into `blocks`; those from `first` on are taken.
    """
    if leading_dims(ends):
        return _each(take_blocks, (x, ends), blocks, groups, first, count)
    order, ends = sorted_groups(ends, groups)
    start, _ = block_ends(ends, blocks, first, blocks if count is None else count)
    # Every block has all t rows, turned: its size may not depend on values.
    rows = torch.arange(len(x), device=x.device)
    rows = (rows + start.unsqueeze(1)) % max(len(x), 1)
    rows = rows if order is None else order.gather(0, rows.flatten()).view_as(rows)
    return x.index_select(0, rows.flatten()).unflatten(0, rows.shape)


@custom_op("put_blocks")
def put_blocks(ys: Tensor, ends: Tensor, blocks: int, groups: int = 0, first: int = 0) -> Tensor:
    """Return [t, ...]: each block's rows in ys [count, t, ...], where take_blocks read them.

    Rows that no block has are 0.
    """
    if leading_dims(ends):
        return _each(put_blocks, (ys, ends), blocks, groups, first)
    order, ends = sorted_groups(ends, groups)
    start, last = block_ends(ends, blocks, first, len(ys))
    out = ys.new_zeros(ys.shape[1:])
    for y, begin, size in zip(ys, start, last[:, -1]):
        if ys.is_cpu:
            out[begin : begin + size] = y[:size]
            continue
        rows = torch.arange(len(out), device=out.device) - begin
        # A mask, not a slice: a block's size is a value on the device.
        inside = ((rows >= 0) & (rows < size)).reshape([-1] + [1] * (out.dim() - 1))
        out = torch.where(inside, y[rows.clamp(0)], out)
    return out if order is None else torch.empty_like(out).index_copy_(0, order, out)


@custom_op("block_mm", tags=READS_ENDS)
def block_mm(
    xs: Tensor, ws: Tensor, ends: Tensor, blocks: int, groups: int = 0, first: int = 0
) -> Tensor:
    """Return [d, t, n]: grouped_mm for each block in xs [d, t, k] and ws [d, p, k, n]."""
    if leading_dims(ends):
        return _each(block_mm, (xs, ws, ends), blocks, groups, first)
    last = block_ends(sorted_groups(ends, groups)[1], blocks, first, len(xs))[1]
    return _stacked([_mm(*block) for block in zip(xs, ws, last)])


@custom_op("block_outer", tags=READS_ENDS)
def block_outer(
    xs: Tensor, ys: Tensor, ends: Tensor, blocks: int, groups: int = 0, first: int = 0
) -> Tensor:
    """Return [d, p, k, n]: grouped_outer for each block in xs [d, t, k] and ys [d, t, n]."""
    if leading_dims(ends):
        return _each(block_outer, (xs, ys, ends), blocks, groups, first)
    last = block_ends(sorted_groups(ends, groups)[1], blocks, first, len(xs))[1]
    return _stacked([_outer(*block) for block in zip(xs, ys, last)])


def _stacked(blocks: list[Tensor]) -> Tensor:
    """Stack blocks; a device's only one is not copied."""
    return blocks[0].unsqueeze(0) if len(blocks) == 1 else torch.stack(blocks)


@take_blocks.register_fake
def _(
    x: Tensor, ends: Tensor, blocks: int, groups: int = 0, first: int = 0, count: int | None = None
) -> Tensor:
    lead = leading_dims(ends)
    return x.new_empty([*x.shape[:lead], blocks if count is None else count, *x.shape[lead:]])


@put_blocks.register_fake
def _(ys: Tensor, ends: Tensor, blocks: int, groups: int = 0, first: int = 0) -> Tensor:
    lead = leading_dims(ends)
    return ys.new_empty([*ys.shape[:lead], *ys.shape[lead + 1 :]])


@block_mm.register_fake
def _(xs: Tensor, ws: Tensor, ends: Tensor, blocks: int, groups: int = 0, first: int = 0) -> Tensor:
    return xs.new_empty(*xs.shape[:-1], ws.shape[-1])


block_mm.register_autograd(_mm_backward, setup_context=_save)


@block_outer.register_fake
def _(xs: Tensor, ys: Tensor, ends: Tensor, blocks: int, groups: int = 0, first: int = 0) -> Tensor:
    width = groups_of_block(groups or ends.shape[-1], blocks)
    return xs.new_empty(*xs.shape[:-2], width, xs.shape[-1], ys.shape[-1])


@custom_op("within")
def within(counts: Tensor, room: int, where: str | None) -> Tensor:
    """Copy counts, or raise ShardingError if one is larger than the room.

    On a GPU the host reads nothing: the device asserts it.
    """
    if counts.is_cuda:
        aten._assert_async.msg((counts <= room).all(), f"no room for more than {room} rows")
    elif counts.numel() and (largest := int(counts.max())) > room:
        raise ShardingError(
            f"{largest} rows go from one shard of the tokens to one of the experts, which has room "
            f"for {room}",
            where=where,
            why="dispatch has a capacity, and drops nothing in silence",
            fix='give a larger capacity, or overflow="count", which drops rows and counts them',
        )
    return counts.clone()


@within.register_fake
def _(counts: Tensor, room: int, where: str | None) -> Tensor:
    return torch.empty_like(counts)


def _first(x: object, dim: int | None, size: int) -> object:
    """Return a vmapped call's argument, where a tensor has `size` positions in front."""
    if not isinstance(x, Tensor):
        return x
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _vmap(op: Any) -> Callable[..., tuple[Tensor, int]]:
    def batched(info: Any, dims: tuple, *args: Any) -> tuple[Tensor, int]:
        return op(*(_first(x, dim, info.batch_size) for x, dim in zip(args, dims))), 0

    return batched


for _op in (grouped_mm, grouped_outer, take_blocks, put_blocks, block_mm, block_outer, within):
    _op.register_vmap(_vmap(_op))
