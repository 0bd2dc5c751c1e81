"""Which operations a ring computes, and how: the table RINGS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .kind import CollectiveKind, FusedKind
from .reduce_scatter import reduce_scatter
from .ring_attention import ring_attention, ring_attention_backward


class Ring(NamedTuple):
    """How an operation is computed in a ring.

    factor: of the queries, which the axes of the ring shard. queries: their place among the
    operands; keys and values follow. scatters: what becomes of the gradients of these. shards: the
    place of the number of shards for which tokens are in zigzag order; None if they are not.
    arguments: returns causal, the scale, and the options of a ring.
    """

    kind: FusedKind
    factor: str
    queries: int
    scatters: CollectiveKind | None
    shards: int | None
    arguments: Callable[[tuple[Any, ...]], tuple[bool, float, tuple[Any, ...]]]

    def operands(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the tensors of a call, but for those of the options."""
        return args[: self.queries + 3 + (2 if self.scatters else 0)]


def _after(at: int) -> Callable[[tuple[Any, ...]], tuple[bool, float, tuple[Any, ...]]]:
    """Return `arguments` of a call that has causal, the scale and perhaps options at this place."""

    def arguments(args: tuple[Any, ...]) -> tuple[bool, float, tuple[Any, ...]]:
        causal, scale, *rest = args[at:]
        mask, region = (rest[i] if len(rest) > i else None for i in range(2))
        place = tuple(region[4:] if region else ())
        return causal, scale, (mask, place, tuple(rest[2:]), ())

    return arguments


def _zigzag(scale: int) -> Callable[[tuple[Any, ...]], tuple[bool, float, tuple[Any, ...]]]:
    """Return `arguments` of a call in zigzag order, which has the scale at this place."""

    def arguments(args: tuple[Any, ...]) -> tuple[bool, float, tuple[Any, ...]]:
        return True, args[scale], (None, (), (), ())

    return arguments


def _flex(at: int) -> Callable[[tuple[Any, ...]], tuple[bool, float, tuple[Any, ...]]]:
    """Return `arguments` of a call that has buffers, and functions of positions, at this place."""

    def arguments(args: tuple[Any, ...]) -> tuple[bool, float, tuple[Any, ...]]:
        buffers, *texts, scale = args[at : at + 5]
        place = tuple(args[at + 5][4:] if len(args) > at + 5 else ())
        return False, scale, (None, place, (), (tuple(buffers), *texts))

    return arguments


_ours = torch.ops.torchgspmd
RINGS: dict[Any, Ring] = {
    _ours.attention.default: Ring(ring_attention, "s", 0, None, None, _after(3)),
    _ours.attention_backward.default: Ring(
        ring_attention_backward,
        "s",
        1,
        reduce_scatter,
        None,
        _after(6),
    ),
    _ours.flex_attention.default: Ring(ring_attention, "s", 0, None, None, _flex(3)),
    _ours.flex_attention_backward.default: Ring(
        ring_attention_backward, "s", 1, reduce_scatter, None, _flex(6)
    ),
    _ours.zigzag_attention.default: Ring(ring_attention, "s", 0, None, 4, _zigzag(3)),
    _ours.zigzag_attention_backward.default: Ring(
        ring_attention_backward, "s", 1, reduce_scatter, 7, _zigzag(6)
    ),
}
