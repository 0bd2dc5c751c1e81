"""Attention: batch, heads, queries and keys may all be sharded.

    b (h g) s d, b h t d, b h t e -> b (h g) s e, b (h g) s

A device with some queries computes by their positions, with all keys. A causal mask leaves later
queries more to do, unless tokens are in zigzag order (op.py). A device with some keys computes
a part for all queries. Sums merge the parts, weighted by their logsumexp, so keys need no gather.
The part is then a dimension `p`. Gradients are sums over queries, or over keys, and their terms
need nothing but the merged result.

Attention with position functions (flex_attention) computes queries by their global positions, with
all keys and replicated buffers:

    b (h g) s d, b h t d, b h t e, buffers -> b (h g) s e, b (h g) s
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.operators import aten
from ...rules.local_builder import LocalBuilder
from ...rules.notation import (
    Balance,
    Call,
    DimNames,
    FactorRule,
    Instead,
    LocalForm,
    Split,
    factors,
)
from ...rules.registry import rule_for
from ...rules.rewrites import rewrite
from . import op as _op  # noqa: F401
from .call import AttentionCall, of_backward, of_parts
from .expressions import learned_buffers, shard_dims
from .flex_op import BACKWARDS
from .lending import LSE_ITEMSIZE
from .tiles import merge_parts
from .token_orders import TokenOrder, in_order

ours = torch.ops.torchgspmd


class Names:
    """Factors for the tensors of one call. keys: the factors along the keys."""

    def __init__(self, q: Sequence[int], k: Sequence[int], keys: Sequence[str] = ("t",)) -> None:
        lead = ["b"] if len(q) == 4 else factors("b", len(q) - 3)
        heads, groups = k[-3], q[-3] // k[-3]
        self.sizes = {"h": heads, "g": groups}
        self.before = [*lead, "h", "g"]  # the queries
        self.rows: list[Any] = [*lead, ("h", "g") if groups > 1 else "h", "s"]
        self.q: DimNames = [*self.rows, "d"]
        self.k: DimNames = [*lead, "h", keys if len(keys) > 1 else keys[0], "d"]
        self.v: DimNames = [*self.k[:-1], "e"]
        self.out: DimNames = [*self.rows, "e"]

    def mask(self, mask: Tensor) -> DimNames:
        """Return a mask's factors; a dimension with size 1 has none."""
        names = [*self.rows, self.k[-2]][-mask.dim() :] if mask.dim() else []
        return [name if size > 1 else "" for name, size in zip(names, mask.shape)]

    def others(self, call: AttentionCall) -> list[DimNames]:
        """Return the factors for the operands behind q, k and v."""
        masks = [] if call.mask is None else [self.mask(call.mask)]
        return masks if call.seed is None else [*masks, []]

    def local(self, emit: Any, along: str, call: AttentionCall) -> LocalForm:
        """Return a call's local form by positions; dropout also needs the positions of heads."""
        if call.seed is None:
            return LocalForm(emit, when=along)
        return LocalForm(emit, when=[*along.split(), *self.before], positional=along)


def _rule(
    call: Call,
    names: Names,
    others: Sequence[DimNames] = (),
    whole: Sequence[str] = (),
    is_gradient: bool = False,
    terms: Sequence[DimNames] = (),
    price: float = 1.0,
    **keywords: Any,
) -> FactorRule:
    """Return the rule for (q, k, v, *others), or (gradient, q, k, v, result, logsumexp, *others).

    whole: factors of the others that no axis may shard. terms: the factors of their gradients.
    """
    q, k, _ = call.tensors[is_gradient : 3 + is_gradient]
    inputs, rows = [names.q, names.k, names.v], [names.out, names.rows]
    keywords |= {"contraction": True, "instead": instead(q, k, price)}
    if is_gradient:
        operands, replicated = [names.out, *inputs, *rows, *others], ["d", "e", *whole]
        reduce = ["s", "t", "g", *(names.before if terms else ())]
        results = [*inputs, *terms]
        keywords |= {"reduce": reduce, "replicated": replicated}
        return call.rule(operands, results, names.sizes, **keywords)
    replicated = ["t", "d", "e", *whole]
    return call.rule([*inputs, *others], rows, names.sizes, replicated=replicated, **keywords)


@rule_for(ours.attention.default)
def _attention(call: Call) -> FactorRule:
    names, operands = _names_of(call, 0), AttentionCall(*call.args)
    local = names.local(_emit_queries, "s t", operands)
    options = {"split": _split_of(call), "balance": _balance(call, 3), "local": local}
    return _rule(call, names, names.others(operands), **options)


def _names_of(call: Call, q: int) -> Names:
    """Return the factors of a call. q: the index of the queries among its tensors."""
    return Names(call.tensors[q].shape, call.tensors[q + 1].shape)


def _split_of(call: Call) -> Split | None:
    """Split a forward by keys, if merging results sends less than gathering keys."""
    q, k, v = call.tensors[:3]
    # The result and its logsumexp: e + 1 numbers a query.
    merged = q[..., 0].numel() * (v.shape[-1] + 1) * max(LSE_ITEMSIZE, q.itemsize)
    return Split(merges="t") if 2 * merged < k.nbytes + v.nbytes else None


def _balance(call: Call, operands: int) -> Balance | None:
    """Describe how causal self-attention is balanced.

    operands: their number without a mask. causal and the scale follow them.
    """
    q, k, v = call.tensors[:3] if operands == 3 else call.tensors[1:4]
    if q.shape[-2] != k.shape[-2] or len(call.tensors) > operands or not call.args[operands]:
        return None
    # A multiplication and an addition for each score and channel.
    products = 2 * q[..., 0].numel() * k.shape[-2]
    widths = q.shape[-1] + v.shape[-1] if operands == 3 else 3 * q.shape[-1] + 2 * v.shape[-1]
    target = (ours.zigzag_attention if operands == 3 else ours.zigzag_attention_backward).default

    def zigzag(args: tuple[object, ...], order: TokenOrder, _: object) -> tuple[object, Any]:
        rows = q.shape[-2]
        return target, (*args[:operands], args[operands + 1], order.shards, [0, 0, rows, rows])

    # A causal mask leaves half the scores.
    return Balance(("s", "t"), products * widths / 2, zigzag)


def instead(q: Tensor, k: Tensor, price: float = 1.0) -> Instead:
    """Allow sharding heads in place of queries, though queries and results move, too.

    price: of keys under a mask, relative to a gather.
    """
    moved = 1 + q[..., 0, 0].numel() * q.shape[-2] / k[..., 0].numel()
    return Instead("s", "h", moved / max(price, 1e-6), stays=price < 1)


@rule_for(ours.attention_backward.default)
def _attention_backward(call: Call) -> FactorRule:
    names, operands = _names_of(call, 1), of_backward(*call.args)[0]
    options = {"balance": _balance(call, 6), "local": names.local(_emit_backward, "s t", operands)}
    return _rule(call, names, names.others(operands), is_gradient=True, **options)


@rule_for(ours.zigzag_attention.default)
def _zigzag_attention(call: Call) -> FactorRule:
    return _rule(call, _names_of(call, 0), local=LocalForm(_emit_zigzag, when="s t"))


@rule_for(ours.zigzag_attention_backward.default)
def _zigzag_attention_backward(call: Call) -> FactorRule:
    local = LocalForm(_emit_zigzag, when="s t")
    return _rule(call, _names_of(call, 1), is_gradient=True, local=local)


def _emit_zigzag(local: LocalBuilder, args: tuple, kwargs: dict) -> list[fx.Node]:
    """Compute the device's queries and keys, in zigzag order."""
    *inputs, region = args
    region = [local.start("s"), local.start("t"), *region[2:]]
    return results_of(local, local.target, *inputs, region)


@rule_for(ours.attention_parts.default)
def _attention_parts(call: Call) -> FactorRule:
    q, k, *_ = call.tensors
    operands, count = of_parts(*call.args)
    names = Names(q.shape, k.shape, ("p", "t"))
    return call.rule(
        [names.q, names.k, names.v, *names.others(operands)],
        [["p", *names.out], ["p", *names.rows]],
        {**names.sizes, "p": count, "t": k.shape[-2] // count},
        replicated="t d e",
        contraction=True,
        local=names.local(_emit_parts, "p s", operands),
    )


def _emit_queries(local: LocalBuilder, args: tuple, kwargs: dict) -> list[fx.Node]:
    call = AttentionCall(*args)
    options = call._replace(region=_region(local, 0, bool(call.modifiers), all_keys=True)).options
    return results_of(local, local.target, *args[:3], *options)


def place_of(local: LocalBuilder, q: int) -> list[object]:
    """Return the region's part for the dimensions before the queries.

    q: the index of the queries among the operands.
    """
    sizes = (local.global_shape(q), local.global_shape(q + 1))
    # The heads of keys, then the groups: heads of queries for each of them.
    whole = [*sizes[1][:-2], sizes[0][-3] // sizes[1][-3]]
    return [*map(local.start, Names(*sizes).before), *whole]


def results_of(local: LocalBuilder, op: object, *args: object) -> list[fx.Node]:
    result = local.call(op, *args)
    return [local.call(operator.getitem, result, i) for i in range(len(local.results))]


def _emit_backward(local: LocalBuilder, args: tuple, kwargs: dict) -> list[fx.Node]:
    """Compute the device's queries and keys; gradients are terms to add up."""
    call, _ = of_backward(*args)
    options = call._replace(region=_region(local, 1, bool(call.modifiers))).options
    return results_of(local, local.target, *args[:6], *options)


def _emit_parts(local: LocalBuilder, args: tuple, kwargs: dict) -> list[fx.Node]:
    call, _ = of_parts(*args)
    query, key, *sizes = args[6]
    rows = local.rule.sizes.get("t", 1)
    region = [query + local.start("s"), key + local.start("p") * rows, *sizes]
    region += place_of(local, 0) if call.modifiers else []
    args = (*args[:5], call.mask, region, local.size("p"), *call.modifiers)
    return results_of(local, local.target, *args)


@rewrite("split", ours.attention.default)
def _split_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
    region: Sequence[int] | None = None,
    *modifiers: object,
    shards: int,
) -> object:
    """Compute key ranges apart, and merge their results."""
    keys = k.shape[-2]
    missing = -keys % shards
    # The region has the number of keys without padding, so padding is never seen.
    if missing:
        k, v = (aten.constant_pad_nd(x, [0, 0, 0, missing]) for x in (k, v))
        if mask is not None and mask.shape[-1] > 1:
            mask = aten.constant_pad_nd(mask, [0, missing])
    region = [0, 0, q.shape[-2], keys]
    out, lse = ours.attention_parts(q, k, v, causal, scale, mask, region, shards, *modifiers)
    return merge_parts(out, lse, q.dtype)


# ------------------------------------------------------------------------------ flex_attention


def _buffers(call: Call, names: Names, q: int) -> tuple[list[DimNames], list[str]]:
    """Return the factors for each buffer, and a list of those that no axis may shard.

    q: the index of the queries. A buffer that scores alone read, at the positions of queries, is
    sharded like them.
    """
    at, buffers = 3 + 3 * q, call.tensors[3 + 3 * q :]
    shared = shard_dims(*call.args[at + 1 : at + 4])
    places: dict[str, Any] = dict(zip("bhq", names.rows)) if len(names.rows) == 3 else {}
    sizes = dict(zip("bhq", call.tensors[q].shape))
    found: list[DimNames] = []
    for i, x in enumerate(buffers):
        own = factors(f"u{i}_", x.dim())
        for d, name in enumerate(own):
            place = shared.get((i, d), "")
            found_place = place in places and sizes[place] == x.shape[d]
            own[d] = places[place] if found_place else name
        found.append(own)
    whole = [n for dims in found for n in dims if isinstance(n, str) and n.startswith("u")]
    return found, whole


@rule_for(ours.flex_attention.default)
def _flex_attention(call: Call) -> FactorRule:
    names = _names_of(call, 0)
    dims, whole = _buffers(call, names, 0)
    options = {"price": _price(call.args, 0), "local": _flex_form(names, 0)}
    return _rule(call, names, dims, whole, balance=_masked_balance(call, 0), **options)


@rule_for(*(op._opoverload for op in BACKWARDS))
def _flex_attention_backward(call: Call) -> FactorRule:
    names = _names_of(call, 1)
    dims, whole = _buffers(call, names, 1)
    options = {
        "is_gradient": True,
        "terms": [dims[i] for i in learned_buffers(call.args[9])],
        "price": _price(call.args, 1),
        "balance": _masked_balance(call, 1),
        "local": _flex_form(names, 1),
    }
    return _rule(call, names, dims, whole, **options)


def _masked_balance(call: Call, q: int) -> Balance | None:
    """Describe how self-attention under a mask is balanced. q: the index of the queries."""
    at, rows = 3 + 3 * q, [x.shape[-2] for x in call.tensors[q : q + 2]]
    # A buffer that is sharded like the queries would have to be in another order, too.
    by_queries = "q" in shard_dims(*call.args[at + 1 : at + 4]).values()
    if rows[0] != rows[1] or not call.args[at + 1] or by_queries:
        return None

    def ordered(args: tuple[Any, ...], order: TokenOrder, starts: object) -> tuple[object, Any]:
        functions = in_order(args[at : at + 4], order, starts)
        return call.target, (*args[:at], *functions, *args[at + 4 :])

    return Balance(("s", "t"), 0.0, ordered)


def _flex_form(names: Names, q: int) -> LocalForm:
    """Compute the device's queries; of gradients, terms. q: the index of the queries."""

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> list[fx.Node]:
        # The region is the last argument, which a program before it is sharded lacks.
        options = _price(args, q), _region(local, q)
        return results_of(local, local.target, *args[: 8 + 3 * q], *options)

    return LocalForm(emit, when=["s", "t", *names.before], positional="s t")


def _price(args: tuple, q: int) -> float:
    """Return the price of keys under a mask (mask_shares.py). q: the index of the queries."""
    at = 8 + 3 * q
    return args[at] if len(args) > at else 1.0


def _region(
    local: LocalBuilder, q: int, has_place: bool = True, all_keys: bool = False
) -> list[object]:
    """Return a device's region. q: the index of the queries among the operands."""
    first = [local.start("s"), 0 if all_keys else local.start("t")]
    sizes = [local.global_shape(i)[-2] for i in (q, q + 1)]
    return [*first, *sizes, *(place_of(local, q) if has_place else [])]
