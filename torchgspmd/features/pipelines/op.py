"""Pipeline stages whose backward runs between forwards: marks in a flat graph.

    %c   = carry(%zeros, 1x8)          f32[4, 2, 16]    sent by the stage before
    %y   = ...                                          forward: 4 stages, each on its microbatch
    %h   = stage_head(%y)                               the loss begins here, on the last stage
    %g   = carry(%zeros, 1x8)                           sent back by the next stage
    %dx  = ...                                          backward, from %g and the loss
    %s   = stage_send(%y, 1, [0, 0], stage, 1f1b); next(%s, %s, %c, 1x8)
    %t   = stage_send(%dx, -1, [0, 0], stage, 1f1b); next(%t, %t, %g, 1x8)

It is a loop over microbatches whose carries go to the next stage, not to the next iteration. Once
the local program exists, outline_stages.py cuts the body into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...compat.operators import custom_op


@custom_op("stage_send")
def stage_send(x: Tensor, shift: int, place: list[int], axis: str, schedule: str) -> Tensor:
    """Return x [devices, ...]: each stage has sent it to the one that is `shift` behind.

    place: the stages' round, and the value's number among several. schedule: the order of pieces,
    as text (order.py).
    """
    return x.clone()


@custom_op("stage_head")
def stage_head(x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
    """Return x. Values computed from it, and from no gradient, are work for the last stage alone.

    sizes: the arguments' sizes that only a run knows, in the local program.
    """
    return x.clone()


@stage_send.register_fake
def _(x: Tensor, shift: int, place: list[int], axis: str, schedule: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@stage_head.register_fake
def _(x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


SEND, HEAD = (op._opoverload for op in (stage_send, stage_head))
