"""Attention with functions of positions: batch, heads and queries may be sharded.

    b (h g) s d, b h t d, b h t e, buffers -> b (h g) s e, b (h g) s

A device computes its queries, by their positions in all, with all keys and whole buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...custom_ops import flex_attention as _flex  # noqa: F401
from ...local_builder import LocalBuilder
from ...notation import Call, DimNames, FactorRule, LocalForm, factors
from ...registry import rule_for
from .attention import Names, instead, place_of, results_of

ours = torch.ops.torchgspmd


def _buffers(buffers: Sequence[Tensor]) -> tuple[list[DimNames], list[str]]:
    """Return the factors of each buffer, and all of these, which every device needs whole."""
    names = [factors(f"u{i}_", x.dim()) for i, x in enumerate(buffers)]
    return [*names], [name for dims in names for name in dims]


@rule_for(ours.flex_attention.default)
def _flex_attention(call: Call) -> FactorRule:
    q, k, _, *buffers = call.tensors
    names, (dims, whole) = Names(q.shape, k.shape), _buffers(buffers)
    return call.rule(
        [names.q, names.k, names.v, *dims],
        [names.out, names.rows],
        names.sizes,
        replicated=["t", "d", "e", *whole],
        contraction=True,
        instead=instead(q, k),
        local=LocalForm(_emit, when=["s", "t", *names.before], positional="s t"),
    )


@rule_for(ours.flex_attention_backward.default)
def _flex_attention_backward(call: Call) -> FactorRule:
    _, q, k, _, _, _, *buffers = call.tensors
    names, (dims, whole) = Names(q.shape, k.shape), _buffers(buffers)
    return call.rule(
        [names.out, names.q, names.k, names.v, names.out, names.rows, *dims],
        [names.q, names.k, names.v],
        names.sizes,
        reduce="s t g",
        replicated=["d", "e", *whole],
        contraction=True,
        instead=instead(q, k),
        local=LocalForm(_emit_backward, when=["s", "t", *names.before], positional="s t"),
    )


def _emit(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
    """Compute the device's queries, with all keys."""
    return results_of(local, local.node.target, *args[:8], _region(local, 0))


def _emit_backward(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
    """Compute the device's queries and keys; gradients are terms of sums."""
    return results_of(local, local.node.target, *args[:11], _region(local, 1))


def _region(local: LocalBuilder, q: int) -> list[Any]:
    """Return the region of a device. q: the place of the queries among the operands."""
    sizes = [local.global_shape(i)[-2] for i in (q, q + 1)]
    return [local.start("s"), local.start("t"), *sizes, *place_of(local, q)]
