"""Largest, smallest, sorted. Along a sharded dimension every device picks candidates of its block; those are gathered and picked
from again."""
from __future__ import annotations

from dataclasses import replace

import torch

from .notation import Call, Rule
from .reduction import reduction_rule
from .registry import BLOCKWISE, SPLITS, computed
from .scan import blocks_of, cut, place_of_block
from .view import keep_rule

aten = torch.ops.aten


@computed(aten.sort.default, aten.sort.stable)
def _sort(call: Call) -> Rule:
    return keep_rule(call, [call.argument(1, "dim", -1)])


@computed(aten.topk.default)
def _topk(call: Call) -> Rule:
    return replace(keep_rule(call, [call.argument(2, "dim", -1)]), splits=True)


@computed(aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim)
def _extreme(call: Call) -> Rule:
    dim = call.argument(1, "dim")
    return replace(reduction_rule(call, dim, None), splits=dim is not None)


def _places(x: torch.Tensor, parts: torch.Tensor, places: torch.Tensor, dim: int) -> torch.Tensor:
    """Places within blocks as places in x; 4 bytes each on their way, where that is enough."""
    dtype = torch.int32 if x.shape[dim] < 2 ** 31 else torch.int64
    return places.to(dtype) + place_of_block(parts.shape[dim], parts.shape[dim + 1], places.dim() - 1 - dim, x.device, dtype)


def _split_topk(x, k, dim=-1, largest=True, sorted=True, *, shards=1):
    dim %= max(x.dim(), 1)
    blocks = blocks_of(x.shape[dim] if x.dim() else 1, shards)
    if k == 0 or x.shape[dim] // blocks <= k:
        raise NotImplementedError
    parts = cut(x, dim, blocks)
    values, places = parts.topk(k, dim + 1, largest, sorted)
    shape = [*x.shape[:dim], blocks * k, *x.shape[dim + 1:]]
    values, at = values.reshape(shape).topk(k, dim, largest, sorted)
    return values, _places(x, parts, places, dim).reshape(shape).gather(dim, at).to(torch.int64)


def _blockwise(pick):
    def split(x, dim, keepdim=False, *, shards=1):
        dim %= max(x.dim(), 1)
        parts = cut(x, dim, blocks_of(x.shape[dim] if x.dim() else 1, shards))
        values, places = pick(parts, dim + 1)
        best, at = pick(values, dim, True)
        at = _places(x, parts, places.unsqueeze(dim + 1), dim).squeeze(dim + 1).gather(dim, at).to(torch.int64)
        return (best, at) if keepdim else (best.squeeze(dim), at.squeeze(dim))
    return split


def _only_places(split):
    return lambda x, dim=None, keepdim=False, *, shards=1: split(x, dim, keepdim, shards=shards)[1]


SPLITS.update({aten.topk.default: _split_topk, aten.max.dim: _blockwise(torch.max), aten.min.dim: _blockwise(torch.min),
               aten.argmax.default: _only_places(_blockwise(torch.max)), aten.argmin.default: _only_places(_blockwise(torch.min))})
BLOCKWISE.update([aten.topk.default, aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default])
