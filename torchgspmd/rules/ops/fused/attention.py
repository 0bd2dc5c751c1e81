"""Attention: batch, heads, queries and keys may all be sharded.

    b (h g) s d, b h t d, b h t e -> b (h g) s e, b (h g) s

A device that has some of the queries computes by their positions, with all keys. A causal mask
leaves later queries more to do, unless tokens are in zigzag order (custom_ops/attention_zigzag.py).
A device that has some of the keys computes a part for all queries: parts are merged by sums,
weighted by their logsumexp, in the place of the keys' being gathered. Then the part is a dimension
`p` of its own. Gradients are sums over queries, or over keys, of terms that need nothing but the
merged result.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....compat.operators import aten
from ....custom_ops import attention_zigzag as _zigzag  # noqa: F401 (registers operations)
from ....custom_ops.attention import merge_parts
from ...local_builder import LocalBuilder
from ...notation import Balance, Call, DimNames, FactorRule, Instead, LocalForm, Split, factors
from ...registry import rule_for
from ...rewrites import rewrite

ours = torch.ops.torchgspmd
LSE_ITEMSIZE = 4  # bytes of an element of a result that is merged


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
        split=_split_of(call),
        instead=_instead(q, k),
        balance=_balance(call, 3),
        local=LocalForm(_emit_queries, when="s t"),
    )


def _split_of(call: Call) -> Split | None:
    """Return that a forward is split by keys, if merging results sends less than keys."""
    q, k, v = call.tensors[:3]
    merged = q[..., 0].numel() * (v.shape[-1] + 1) * max(LSE_ITEMSIZE, q.itemsize)
    return Split(merges="t") if 2 * merged < k.nbytes + v.nbytes else None


def _balance(call: Call, operands: int) -> Balance | None:
    """Return how causal attention of a sequence to itself is balanced.

    operands: how many there are without a mask. causal and the scale follow.
    """
    q, k, v = call.tensors[:3] if operands == 3 else call.tensors[1:4]
    if q.shape[-2] != k.shape[-2] or len(call.tensors) > operands or not call.args[operands]:
        return None
    products = 2 * q[..., 0].numel() * k.shape[-2]
    widths = q.shape[-1] + v.shape[-1] if operands == 3 else 3 * q.shape[-1] + 2 * v.shape[-1]
    target = (ours.zigzag_attention if operands == 3 else ours.zigzag_attention_backward).default

    def zigzag(args: tuple[Any, ...], shards: int) -> tuple[Any, tuple[Any, ...]]:
        rows = q.shape[-2]
        return target, (*args[:operands], args[operands + 1], shards, [0, 0, rows, rows])

    return Balance(("s", "t"), products * widths / 2, zigzag)


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
        instead=_instead(q, k),
        balance=_balance(call, 6),
        local=LocalForm(_emit_backward, when="s t"),
    )


@rule_for(ours.zigzag_attention.default)
def _zigzag_attention(call: Call) -> FactorRule:
    q, k, _ = call.tensors
    names = _Names(q, k)
    return call.rule(
        [names.q, names.k, names.v],
        [names.out, names.rows],
        names.sizes,
        replicated="t d e",
        contraction=True,
        instead=_instead(q, k),
        local=LocalForm(_emit_zigzag, when="s t"),
    )


@rule_for(ours.zigzag_attention_backward.default)
def _zigzag_attention_backward(call: Call) -> FactorRule:
    _, q, k, *_ = call.tensors
    names = _Names(q, k)
    return call.rule(
        [names.out, names.q, names.k, names.v, names.out, names.rows],
        [names.q, names.k, names.v],
        names.sizes,
        reduce="s t g",
        replicated="d e",
        contraction=True,
        instead=_instead(q, k),
        local=LocalForm(_emit_zigzag, when="s t"),
    )


def _emit_zigzag(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
    """Compute the device's queries and keys, in zigzag order."""
    *inputs, region = args
    region = [local.start("s"), local.start("t"), *region[2:]]
    return _results(local, local.node.target, *inputs, region)


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
    """Compute parts of the keys, and merge them."""
    keys = k.shape[-2]
    missing = -keys % shards
    if missing:
        k, v = (aten.constant_pad_nd(x, [0, 0, 0, missing]) for x in (k, v))
        if mask is not None and mask.shape[-1] > 1:
            mask = aten.constant_pad_nd(mask, [0, missing])
    out, lse = ours.attention_parts(q, k, v, causal, scale, mask, [0, 0, q.shape[-2], keys], shards)
    return merge_parts(out, lse, q.dtype)
