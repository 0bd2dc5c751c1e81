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
    arguments: returns the mask, causal, and the scale.
    """

    kind: FusedKind
    factor: str
    queries: int
    scatters: CollectiveKind | None
    shards: int | None
    arguments: Callable[[tuple[Any, ...]], tuple[Any, bool, float]]

    def operands(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the tensors of a call, but for the mask."""
        return args[: self.queries + 3 + (2 if self.scatters else 0)]


def _after(causal: int) -> Callable[[tuple[Any, ...]], tuple[Any, bool, float]]:
    """Return `arguments` of a call that has causal, the scale and perhaps a mask at this place."""

    def arguments(args: tuple[Any, ...]) -> tuple[Any, bool, float]:
        return args[causal + 2] if len(args) > causal + 2 else None, args[causal], args[causal + 1]

    return arguments


def _zigzag(scale: int) -> Callable[[tuple[Any, ...]], tuple[Any, bool, float]]:
    """Return `arguments` of a call in zigzag order, which has the scale at this place."""

    def arguments(args: tuple[Any, ...]) -> tuple[Any, bool, float]:
        return None, True, args[scale]

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
    _ours.zigzag_attention.default: Ring(ring_attention, "s", 0, None, 4, _zigzag(3)),
    _ours.zigzag_attention_backward.default: Ring(
        ring_attention_backward, "s", 1, reduce_scatter, 7, _zigzag(6)
    ),
}
