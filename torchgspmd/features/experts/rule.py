"""Rules for products between row groups and one matrix each, as experts compute them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ...capture.rewrites.products import matmul
from ...compat.operators import aten
from ...compat.private_apis import _grouped_mm
from ...errors import ShardingError
from ...rules.custom_ops.nd import einsum
from ...rules.local_builder import LocalBuilder
from ...rules.notation import Call, DimNames, FactorRule, LocalForm, Split, factors
from ...rules.registry import host_reads, rule, rule_for
from ...rules.rewrites import DECLINED, rewrite
from .op import (
    KERNEL_BYTES,
    block_ends,
    grouped_mm,
    grouped_outer,
    groups_of_block,
    leading_dims,
    put_blocks,
    sorted_groups,
    take_blocks,
    within,
)

ours = torch.ops.torchgspmd


@host_reads(
    *(ours.grouped_mm.default, ours.grouped_outer.default),
    *(ours.block_mm.default, ours.block_outer.default),
)
def _reads_ends(node: fx.Node) -> str | None:
    """Return why the host reads where groups end; None if PyTorch's kernel for GPUs does."""
    types = [(x.meta.get("dtype"), x.meta.get("shape")) for x in node.args[:2]]
    if any(dtype != torch.bfloat16 or not shape for dtype, shape in types):
        return "the host reads where groups end, since they are not in bfloat16"
    if any(shape[-1] * torch.bfloat16.itemsize % KERNEL_BYTES for _, shape in types):
        return f"the host reads where groups end: a row is no multiple of {KERNEL_BYTES} bytes"
    return None


def _emit_groups(local: LocalBuilder, args: tuple, kwargs: dict) -> object:
    """Multiply the device's rows. Group ends count from its first row."""
    x, other, ends = args
    shifted = local.call(aten.sub.Tensor, ends, local.start("t"))
    ends = local.call(aten.clamp.default, shifted, 0, local.size("t"))
    return local.call(local.target, x, other, ends)


def _emit_blocks(local: LocalBuilder, args: tuple, kwargs: dict) -> object:
    # The block range goes behind `groups`, which a call may leave out.
    count = [local.size("d")] if local.target is take_blocks._opoverload else []
    groups = [0] if len(args) == len(local.rule.operands) + 1 else []
    return local.call(local.target, *args, *groups, local.start("d"), *count)


_GROUPS = {
    "contraction": True,
    "chosen": "e",
    "replicated": "e",
    "linear": [[0], [1]],
    "split": Split(blocks="e"),
    "local": LocalForm(_emit_groups, when="t"),
}
rule(ours.grouped_mm.default, "... t k, ... e k n, ... 1 -> ... t n", reduce="k", **_GROUPS)
rule(ours.grouped_outer.default, "... t k, ... t n, ... 1 -> ... e k n", reduce="t", **_GROUPS)

_BLOCKS = {"replicated": "t p", "local": LocalForm(_emit_blocks, when="d", positional=False)}
_PRODUCT = {"contraction": True, "chosen": "d p", "linear": [[0], [1]]}
_PRODUCT |= _BLOCKS
_MM, _OUTER = (
    "... d t k, ... d p k n, ... 1 -> ... d t n",
    "... d t k, ... d t n, ... 1 -> ... d p k n",
)
rule(ours.block_mm.default, _MM, reduce="k", **_PRODUCT)
rule(ours.block_outer.default, _OUTER, **_PRODUCT)
# All devices check all counts: if there is no room on one, all of them raise.
rule(within._opoverload, "... g d p -> ... g d p", replicated="g d p")


@rule_for(ours.take_blocks.default)
def _take(call: Call) -> FactorRule:
    rows, ends, blocks = _dims_of_blocks(call, call.tensors[0], 0)
    return call.rule([rows, ends], [blocks], linear=[[0]], **_BLOCKS)


@rule_for(ours.put_blocks.default)
def _put(call: Call) -> FactorRule:
    rows, ends, blocks = _dims_of_blocks(call, call.tensors[0], 1)
    return call.rule([blocks, ends], [rows], reduce="d", linear=[[0]], **_BLOCKS)


def _dims_of_blocks(call: Call, tensor: Tensor, blocks: int) -> tuple[DimNames, ...]:
    """Return the factors for rows, for their ends and for their blocks.

    tensor: the first operand. blocks: the number of its block dimensions.
    """
    lead = factors("l", leading_dims(call.tensors[1]))
    row = factors("d", tensor.dim() - len(lead) - 1 - blocks)
    return [*lead, "t", *row], [*lead, ()], [*lead, "d", "t", *row]


class BlockCut(NamedTuple):
    """Rows cut into blocks of groups: take_blocks' and put_blocks' operands besides the rows."""

    ends: fx.Node
    blocks: int
    groups: int  # 0: the rows are sorted

    @property
    def lead(self) -> int:
        return leading_dims(self.ends.meta["val"])

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (*self[:2], *((self.groups,) if self.groups else ()))


def taken_blocks_of(node: fx.Node) -> tuple[fx.Node, BlockCut] | None:
    """Return (x, the cut) for a call to take_blocks, else None."""
    return _cut_of(node) if node.target is take_blocks._opoverload else None


def put_blocks_of(node: fx.Node) -> tuple[fx.Node, BlockCut] | None:
    """Return (blocks, their cut) for a call to put_blocks, else None."""
    return _cut_of(node) if node.target is put_blocks._opoverload else None


def _cut_of(node: fx.Node) -> tuple[fx.Node, BlockCut]:
    args: Any = (*node.args, 0)
    rows, ends, blocks, groups = args[:4]
    return rows, BlockCut(ends, blocks, groups)


@rewrite("split", ours.grouped_mm.default)
def mm_by_blocks(x: Tensor, w: Tensor, ends: Tensor, *, shards: int = 1, groups: int = 0) -> Tensor:
    """Compute each block of groups by itself, as if each had all rows."""
    width = groups_of_block(w.shape[-3], shards)
    # Empty groups fill the last block, so that all blocks have the same shape.
    padded = aten.constant_pad_nd(w, [0, 0, 0, 0, 0, shards * width - w.shape[-3]])
    blocks = padded.unflatten(-3, (shards, width))
    ys = ours.block_mm(ours.take_blocks(x, ends, shards, groups), blocks, ends, shards, groups)
    return ours.put_blocks(ys, ends, shards, groups)


@rewrite("split", ours.grouped_outer.default)
def outer_by_blocks(
    x: Tensor, y: Tensor, ends: Tensor, *, shards: int = 1, groups: int = 0
) -> Tensor:
    xs, ys = (ours.take_blocks(t, ends, shards, groups) for t in (x, y))
    blocks = ours.block_outer(xs, ys, ends, shards, groups)
    # Without the empty groups that fill the last block.
    return blocks.flatten(-4, -3).narrow(-3, 0, groups or ends.shape[-1])


@rewrite("xla", ours.grouped_mm.default)
def _masked_groups(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Multiply all rows by all matrices, and take those of each row's group."""
    # XLA needs fixed shapes, so a mask chooses the groups.
    lead = _letters(ends)
    products = einsum(f"{lead}tk,{lead}ekn->{lead}etn", x, w)
    return torch.where(_in_group(x.shape[-2], ends), products, 0).sum(-3)


@rewrite("xla", ours.grouped_outer.default)
def _masked_outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group's rows, and zeros in place of all others."""
    lead = _letters(ends)
    rows = torch.where(_in_group(x.shape[-2], ends), x.unsqueeze(-3), 0)
    return einsum(f"{lead}etk,{lead}tn->{lead}ekn", rows, y)


def _letters(ends: Tensor) -> str:
    """Return letters for leading dimensions, such as stages."""
    return "abc"[: leading_dims(ends)]


def _in_group(rows: int, ends: Tensor) -> Tensor:
    """Return [e, t, 1]: whether each row is in each group."""
    start = aten.constant_pad_nd(ends[..., :-1], [1, 0])
    row = torch.arange(rows, device=ends.device)
    return ((row >= start.unsqueeze(-1)) & (row < ends.unsqueeze(-1))).unsqueeze(-1)


@rewrite("xla", ours.block_mm.default)
def _masked_blocks(
    xs: Tensor, ws: Tensor, ends: Tensor, blocks: int, groups: int = 0, first: int = 0
) -> Tensor:
    """Multiply each block's rows by all its matrices, and take those for each row's group."""
    lead = _letters(ends)
    products = einsum(f"{lead}dtk,{lead}dpkn->{lead}dptn", xs, ws)
    inside = _in_block(xs, sorted_groups(ends, groups)[1], blocks, first)
    return torch.where(inside, products, 0).sum(-3)


@rewrite("xla", ours.block_outer.default)
def _masked_block_outer(
    xs: Tensor, ys: Tensor, ends: Tensor, blocks: int, groups: int = 0, first: int = 0
) -> Tensor:
    """Multiply each group's rows in a block, and zeros in place of all others."""
    lead = _letters(ends)
    inside = _in_block(xs, sorted_groups(ends, groups)[1], blocks, first)
    rows = torch.where(inside, xs.unsqueeze(-3), 0)
    return einsum(f"{lead}dptk,{lead}dtn->{lead}dpkn", rows, ys)


def _in_block(xs: Tensor, ends: Tensor, blocks: int, first: int) -> Tensor:
    """Return [d, p, t, 1]: whether each row of a block is in each of its groups."""
    last = block_ends(ends, blocks, first, xs.shape[-3])[1].unsqueeze(-1)  # [d, p, 1]
    start = aten.constant_pad_nd(last[..., :-1, :], [0, 0, 1, 0])
    row = torch.arange(xs.shape[-2], device=xs.device)
    return ((row >= start) & (row < last)).unsqueeze(-1)


@rewrite("xla", within._opoverload)
def _within(counts: Tensor, room: int, where: str | None) -> Tensor:
    raise ShardingError(
        "dispatch has a capacity, and a program of XLA cannot raise an error",
        where=where,
        fix='use overflow="count", and look at what was dropped',
    )


@rewrite("decompose", "transformers::grouped_mm_fallback")
def _transformers_groups(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return ours.grouped_mm(x, w, ends)


@rewrite("decompose", "transformers::grouped_mm_fallback_backward")
def _transformers_backward(
    x: Tensor, w: Tensor, ends: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    return ours.grouped_mm(grad, w.mT, ends), ours.grouped_outer(x, grad, ends)


@rewrite("vmap product", _grouped_mm, getattr(F, "grouped_mm", _grouped_mm))
def _groups(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Run grouped_mm for all types. PyTorch's own takes only bfloat16 in aligned rows."""
    if bias is not None or mat_a.dtype != mat_b.dtype:
        return DECLINED
    if offs is None:
        out = matmul(mat_a, mat_b)
    elif mat_a.dim() == mat_b.dim() == 2:
        out = grouped_outer(mat_a.t(), mat_b, offs)
    elif mat_a.dim() == 2:
        out = grouped_mm(mat_a, mat_b, offs)
    else:
        # The groups are columns of mat_b: transposed, they are rows.
        out = grouped_mm(mat_b.t(), mat_a.mT, offs).t()
    return out if out is DECLINED or out_dtype is None else out.to(out_dtype)
