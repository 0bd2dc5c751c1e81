"""Attention: batch, heads, queries and keys may all be sharded.

    b (h g) s d, b h t d, b h t e -> b (h g) s e, b (h g) s

A device that has some of the queries computes by their positions, with all keys. A causal mask
would leave later queries more to do. So of 2 n chunks of queries, devices i and n - 1 - i exchange
one: then all have the same work. A device that has some of the keys computes a
part for all queries: parts are merged by sums, weighted by their logsumexp, in the place of the
keys' being gathered. Then the part is a dimension `p` of its own. Gradients are sums over queries,
or over keys, of terms that need nothing but the merged result.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....compat.operators import aten
from ....custom_ops import attention_chunks as _chunks  # noqa: F401 (registers operations)
from ....custom_ops.attention import merge_parts
from ...local_builder import LocalBuilder
from ...notation import Call, DimNames, FactorRule, Instead, LocalForm, Split, factors
from ...registry import rule_for
from ...rewrites import rewrite

ours = torch.ops.torchgspmd
LSE_ITEMSIZE = 4  # bytes of an element of a result that is merged
# From so many queries on, arithmetic that others wait for outweighs the exchange of queries: an
# element of them is sent 3 times, and multiplied 7 times for each query before it.
BALANCED_QUERIES = 2048


class _Names:
    """The factors of the tensors of one call. keys: of the dimension of the keys."""

    def __init__(self, q: Tensor, k: Tensor, keys: Sequence[str] = ("t",)) -> None:
        lead = ["b"] if q.dim() == 4 else factors("b", q.dim() - 3)
        heads, groups = k.shape[-3], q.shape[-3] // k.shape[-3]
        self.sizes = {"h": heads, "g": groups}
        self.rows: list[Any] = [*lead, ("h", "g") if groups > 1 else "h", "s"]
        self.q: DimNames = [*self.rows, "d"]
        self.k: DimNames = [*lead, "h", keys if len(keys) > 1 else keys[0], "d"]
        self.v: DimNames = [*self.k[:-1], "e"]
        self.out: DimNames = [*self.rows, "e"]

    def mask(self, mask: Tensor) -> DimNames:
        """Return the factors of a mask, whose dimensions of size 1 have none."""
        names = [*self.rows, self.k[-2]][-mask.dim() :] if mask.dim() else []
        return [name if size > 1 else "" for name, size in zip(names, mask.shape)]


@rule_for(ours.attention.default)
def _attention(call: Call) -> FactorRule:
    q, k, _, *mask = call.tensors
    names = _Names(q, k)
    return call.rule(
        [names.q, names.k, names.v, *map(names.mask, mask)],
        [names.out, names.rows],
        names.sizes,
        replicated="t d e",
        contraction=True,
        split=_split_of(call, call.args[3], mask or None),
        instead=_instead(q, k),
        local=LocalForm(_emit_queries, when="s t"),
    )


def _split_of(call: Call, causal: bool, mask: Any) -> Split | None:
    """Return by which factor a forward is split: by keys if merging results sends less than keys.

    Else, queries of a causal mask are balanced.
    """
    q, k, v = call.tensors[:3]
    merged = q[..., 0].numel() * (v.shape[-1] + 1) * max(LSE_ITEMSIZE, q.itemsize)
    if 2 * merged < k.nbytes + v.nbytes:
        return Split(merges="t")
    return _balanced(q, k, causal, mask)


def _balanced(q: Tensor, k: Tensor, causal: bool, mask: Any) -> Split | None:
    """Return by which factor causal attention of a long sequence to itself is split."""
    balances = causal and mask is None and q.shape[-2] == k.shape[-2] >= BALANCED_QUERIES
    return Split(balances="s") if balances else None


def _instead(q: Tensor, k: Tensor) -> Instead:
    """Return that heads may be sharded in place of queries: queries and results move, too."""
    return Instead("s", "h", 1 + q[..., 0, 0].numel() * q.shape[-2] / k[..., 0].numel())


@rule_for(ours.attention_backward.default)
def _attention_backward(call: Call) -> FactorRule:
    _, q, k, _, _, _, *mask = call.tensors
    names = _Names(q, k)
    return call.rule(
        [names.out, names.q, names.k, names.v, names.out, names.rows, *map(names.mask, mask)],
        [names.q, names.k, names.v],
        names.sizes,
        reduce="s t g",
        replicated="d e",
        contraction=True,
        split=_balanced(q, k, call.args[6], mask or None),
        instead=_instead(q, k),
        local=LocalForm(_emit_backward, when="s t"),
    )


def _chunk_names(call: Call, q: int) -> tuple[_Names, DimNames]:
    """Return the factors of a call by chunks, as if of one shard, and those of its queries."""
    names = _Names(call.tensors[q][0, ..., 0, :, :], call.tensors[q + 1])
    return names, ["n", *names.rows[:-1], "c", "s"]


@rule_for(ours.attention_chunks.default)
def _attention_chunks(call: Call) -> FactorRule:
    names, rows = _chunk_names(call, 0)
    return call.rule(
        [[*rows, "d"], names.k, names.v],
        [[*rows, "e"], rows],
        names.sizes,
        replicated="c s t d e",
        contraction=True,
        local=LocalForm(_emit_chunks, when="n"),
    )


@rule_for(ours.attention_chunks_backward.default)
def _attention_chunks_backward(call: Call) -> FactorRule:
    names, rows = _chunk_names(call, 1)
    return call.rule(
        [[*rows, "e"], [*rows, "d"], names.k, names.v, [*rows, "e"], rows],
        [[*rows, "d"], names.k, names.v],
        names.sizes,
        reduce="n g",
        replicated="c s t d e",
        contraction=True,
        local=LocalForm(_emit_chunks, when="n"),
    )


def _emit_chunks(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
    """Compute the device's chunks of the queries."""
    *inputs, first = args
    return _results(local, local.node.target, *inputs, first + local.start("n"))


@rule_for(ours.attention_parts.default)
def _attention_parts(call: Call) -> FactorRule:
    q, k, _, *mask = call.tensors
    names, count = _Names(q, k, ("p", "t")), call.args[-1]
    return call.rule(
        [names.q, names.k, names.v, *map(names.mask, mask)],
        [["p", *names.out], ["p", *names.rows]],
        {**names.sizes, "p": count, "t": k.shape[-2] // count},
        replicated="t d e",
        contraction=True,
        local=LocalForm(_emit_parts, when="p s"),
    )


def _emit_queries(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
    """Compute the device's queries, with all keys."""
    mask = args[5] if len(args) > 5 else None
    region = [local.start("s"), 0, local.global_shape(0)[-2], local.global_shape(1)[-2]]
    return _results(local, local.node.target, *args[:5], mask, region)


def _results(local: LocalBuilder, op: Any, *args: Any) -> list[Any]:
    result = local.call(op, *args)
    return [local.call(operator.getitem, result, i) for i in range(len(local.results))]


def _emit_backward(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
    """Compute the device's queries and keys; gradients are terms of sums."""
    mask = args[8] if len(args) > 8 else None
    region = [
        local.start("s"),
        local.start("t"),
        local.global_shape(1)[-2],
        local.global_shape(2)[-2],
    ]
    return _results(local, local.node.target, *args[:8], mask, region)


def _emit_parts(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
    """Compute the device's parts of the keys."""
    *inputs, region, _ = args
    rows = local.rule.sizes.get("t", 1)
    region = [region[0] + local.start("s"), region[1] + local.start("p") * rows, *region[2:]]
    return _results(local, local.node.target, *inputs, region, local.size("p"))


@rewrite("split", ours.attention.default)
def _split_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
    *,
    shards: int,
) -> Any:
    """Compute parts of the keys, and merge them; or chunks of queries, if they are as many."""
    keys = k.shape[-2]
    if q.shape[-2] == keys:
        return _balanced_forward(q, k, v, scale, shards)
    missing = -keys % shards
    if missing:
        k, v = (aten.constant_pad_nd(x, [0, 0, 0, missing]) for x in (k, v))
        if mask is not None and mask.shape[-1] > 1:
            mask = aten.constant_pad_nd(mask, [0, missing])
    out, lse = ours.attention_parts(q, k, v, causal, scale, mask, [0, 0, q.shape[-2], keys], shards)
    return merge_parts(out, lse, q.dtype)


def _zigzag(x: Tensor, shards: int, dim: int) -> Tensor:
    """Return the chunks of `attention_chunks`: shards are a new first dimension.

    dim: of the queries, from the end; the chunks of a shard are one before it.
    """
    chunks = x.unflatten(dim, (shards, 2, -1)).movedim(dim - 2, 0)
    return torch.stack([chunks.select(dim - 1, 0), chunks.select(dim - 1, 1).flip(0)], dim - 1)


def _unzigzag(chunks: Tensor, dim: int) -> Tensor:
    """Undo `_zigzag`."""
    chunks = torch.stack([chunks.select(dim - 1, 0), chunks.select(dim - 1, 1).flip(0)], dim - 1)
    return chunks.movedim(0, dim - 2).flatten(dim - 2, dim)


def _balanced_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, shards: int
) -> tuple[Tensor, Tensor]:
    """Compute the queries in an order that gives all devices the same work."""
    out, lse = ours.attention_chunks(_zigzag(q, shards, -2), k, v, scale, shards, 0)
    return _unzigzag(out, -2), _unzigzag(lse, -1)


@rewrite("split", ours.attention_backward.default)
def _balanced_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    *,
    shards: int,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, out, lse = (
        _zigzag(x, shards, d) for x, d in ((grad, -2), (q, -2), (out, -2), (lse, -1))
    )
    q_grad, k_grad, v_grad = ours.attention_chunks_backward(
        grad, q, k, v, out, lse, scale, shards, 0
    )
    return _unzigzag(q_grad, -2), k_grad, v_grad
