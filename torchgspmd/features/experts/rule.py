"""Rules of the products of groups of rows with one matrix each, as experts compute them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...compat.operators import aten
from ...errors import ShardingError
from ...rules.custom_ops.nd import einsum
from ...rules.local_builder import LocalBuilder
from ...rules.notation import LocalForm, Split
from ...rules.registry import rule
from ...rules.rewrites import rewrite
from .op import block_ends, groups_of_block, put_blocks, sorted_groups, take_blocks, within

ours = torch.ops.torchgspmd


def _emit_groups(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
    """Multiply the device's rows. The ends of the groups count from its first row."""
    x, other, ends = args
    shifted = local.call(aten.sub.Tensor, ends, local.start("t"))
    ends = local.call(aten.clamp.default, shifted, 0, local.size("t"))
    return local.call(local.node.target, x, other, ends)


def _emit_blocks(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
    """Compute the device's blocks."""
    count = [local.size("d")] if local.node.target is take_blocks._opoverload else []
    groups = [0] if len(args) == len(local.rule.operands) + 1 else []
    return local.call(local.node.target, *args, *groups, local.start("d"), *count)


_GROUPS = {
    "contraction": True,
    "chosen": "e",
    "replicated": "e",
    "linear": [[0], [1]],
    "split": Split(blocks="e"),
    "local": LocalForm(_emit_groups, when="t"),
}
rule(ours.grouped_mm.default, "t k, e k n, 1 -> t n", reduce="k", **_GROUPS)
rule(ours.grouped_outer.default, "t k, t n, 1 -> e k n", reduce="t", **_GROUPS)

_BLOCKS = {"replicated": "t p", "local": LocalForm(_emit_blocks, when="d", positional=False)}
_PRODUCT = {"contraction": True, "chosen": "d p", "linear": [[0], [1]]}
rule(ours.block_mm.default, "d t k, d p k n, 1 -> d t n", reduce="k", **_PRODUCT, **_BLOCKS)
rule(ours.block_outer.default, "d t k, d t n, 1 -> d p k n", **_PRODUCT, **_BLOCKS)
# All devices check all counts: if there is no room on one, all of them raise.
rule(within._opoverload, "g d p -> g d p", replicated="g d p")
rule(ours.take_blocks.default, "t ..., 1 -> d t ...", linear=[[0]], **_BLOCKS)
rule(ours.put_blocks.default, "d t ..., 1 -> t ...", reduce="d", linear=[[0]], **_BLOCKS)


class Cut(NamedTuple):
    """Rows in blocks of groups: what take_blocks and put_blocks name besides the rows."""

    ends: fx.Node
    blocks: int
    groups: int  # 0: the rows are sorted

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What a call has behind the rows."""
        return (*self[:2], *((self.groups,) if self.groups else ()))


def taken_blocks_of(node: fx.Node) -> tuple[fx.Node, Cut] | None:
    """Return (x, how it is cut) of a call of take_blocks, else None."""
    return _cut_of(node) if node.target is take_blocks._opoverload else None


def put_blocks_of(node: fx.Node) -> tuple[fx.Node, Cut] | None:
    """Return (blocks, how they are cut) of a call of put_blocks, else None."""
    return _cut_of(node) if node.target is put_blocks._opoverload else None


def _cut_of(node: fx.Node) -> tuple[fx.Node, Cut]:
    args: Any = (*node.args, 0)
    rows, ends, blocks, groups = args[:4]
    return rows, Cut(ends, blocks, groups)


@rewrite("split", ours.grouped_mm.default)
def mm_by_blocks(x: Tensor, w: Tensor, ends: Tensor, *, shards: int = 1, groups: int = 0) -> Tensor:
    """Compute each block of groups by itself, as if each had all rows."""
    width = groups_of_block(len(w), shards)
    padded = aten.constant_pad_nd(w, [0, 0, 0, 0, 0, shards * width - len(w)])
    blocks = padded.reshape(shards, width, *w.shape[1:])
    ys = ours.block_mm(ours.take_blocks(x, ends, shards, groups), blocks, ends, shards, groups)
    return ours.put_blocks(ys, ends, shards, groups)


@rewrite("split", ours.grouped_outer.default)
def outer_by_blocks(
    x: Tensor, y: Tensor, ends: Tensor, *, shards: int = 1, groups: int = 0
) -> Tensor:
    """Compute the products of each block of groups by itself."""
    xs, ys = (ours.take_blocks(t, ends, shards, groups) for t in (x, y))
    blocks = ours.block_outer(xs, ys, ends, shards, groups)
    return blocks.flatten(0, 1)[: groups or len(ends)]


@rewrite("xla", ours.grouped_mm.default)
def _masked_groups(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Multiply all rows by all matrices, and take those of each row's group."""
    products = einsum("tk,ekn->etn", x, w)
    return torch.where(_in_group(len(x), ends), products, 0).sum(0)


@rewrite("xla", ours.grouped_outer.default)
def _masked_outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of each group, and zeros in place of all others."""
    return einsum("etk,tn->ekn", torch.where(_in_group(len(x), ends), x, 0), y)


def _in_group(rows: int, ends: Tensor) -> Tensor:
    """Return [e, t, 1]: whether each of the rows is in each group."""
    start = aten.constant_pad_nd(ends[:-1], [1, 0])
    row = torch.arange(rows, device=ends.device)
    return ((row >= start.unsqueeze(1)) & (row < ends.unsqueeze(1))).unsqueeze(2)


@rewrite("xla", ours.block_mm.default)
def _masked_blocks(
    xs: Tensor, ws: Tensor, ends: Tensor, blocks: int, groups: int = 0, first: int = 0
) -> Tensor:
    """Multiply the rows of each block by all its matrices, and take those of each row's group."""
    products = einsum("dtk,dpkn->dptn", xs, ws)
    return torch.where(
        _in_block(xs, sorted_groups(ends, groups)[1], blocks, first), products, 0
    ).sum(1)


@rewrite("xla", ours.block_outer.default)
def _masked_block_outer(
    xs: Tensor, ys: Tensor, ends: Tensor, blocks: int, groups: int = 0, first: int = 0
) -> Tensor:
    """Multiply the rows of each group of a block, and zeros in place of all others."""
    rows = torch.where(
        _in_block(xs, sorted_groups(ends, groups)[1], blocks, first), xs.unsqueeze(1), 0
    )
    return einsum("dptk,dtn->dpkn", rows, ys)


def _in_block(xs: Tensor, ends: Tensor, blocks: int, first: int) -> Tensor:
    """Return [d, p, t, 1]: whether each of the rows of a block is in each of its groups."""
    last = block_ends(ends, blocks, first, len(xs))[1].unsqueeze(2)  # [d, p, 1]
    start = aten.constant_pad_nd(last[:, :-1], [0, 0, 1, 0])
    row = torch.arange(xs.shape[1], device=xs.device)
    return ((row >= start) & (row < last)).unsqueeze(3)


@rewrite("xla", within._opoverload)
def _within(counts: Tensor, room: int, where: str | None) -> Tensor:
    raise ShardingError(
        "dispatch has a capacity, and a program of XLA cannot raise an error",
        where=where,
        fix='overflow="count", and a look at what was dropped',
    )


@rewrite("decompose", "transformers::grouped_mm_fallback")
def _transformers_groups(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return ours.grouped_mm(x, w, ends)


@rewrite("decompose", "transformers::grouped_mm_fallback_backward")
def _transformers_backward(
    x: Tensor, w: Tensor, ends: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    return ours.grouped_mm(grad, w.mT, ends), ours.grouped_outer(x, grad, ends)
