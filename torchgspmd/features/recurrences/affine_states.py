"""The operator of an affine recurrence: the state before each step.

    state[0] = first;  state[i + 1] = scale[i] * state[i] + shift[i]      or from behind

Along sharded steps each device begins with zeros, and multiplies its scales. These two of each
device are gathered, and give the state before its steps: two states a device, whatever the length.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.operators import custom_op
from ...rules.notation import Call, FactorRule, Split, factors
from ...rules.registry import rule_for
from ...rules.rewrites import DECLINED, Declined, rewrite


@custom_op("affine_states")
def affine_states(scale: Tensor, shift: Tensor, first: Tensor, reverse: bool) -> Tensor:
    """Return the states before all steps, [steps, ...].

    scale, shift: [steps, ...]. first: the state before the first step, or the last one if
    `reverse`, [...].
    """
    result, state = torch.empty_like(shift, memory_format=torch.contiguous_format), first
    for i in reversed(range(len(shift))) if reverse else range(len(shift)):
        result[i] = state
        state = torch.addcmul(shift[i], scale[i], state)
    return result


@affine_states.register_fake
def _(scale: Tensor, shift: Tensor, first: Tensor, reverse: bool) -> Tensor:
    return torch.empty_like(shift, memory_format=torch.contiguous_format)


AFFINE_STATES = affine_states._opoverload


@rule_for(AFFINE_STATES)
def _rule(call: Call) -> FactorRule:
    names = factors("d", call.tensors[2].dim())
    rows = ["n", *names]
    return call.rule([rows, rows, names], [rows], replicated="n", split=Split(), linear=[[1, 2]])


@rewrite("xla", AFFINE_STATES)
def _unrolled(scale: Tensor, shift: Tensor, first: Tensor, reverse: bool) -> Tensor:
    states = {}
    for i in reversed(range(len(shift))) if reverse else range(len(shift)):
        states[i], first = first, shift[i] + scale[i] * first
    return torch.stack([states[i] for i in range(len(shift))])


@rewrite("split", AFFINE_STATES)
def _by_blocks(
    scale: Tensor, shift: Tensor, first: Tensor, reverse: bool, *, shards: int = 1
) -> Tensor | Declined:
    """Compute a block for each shard, and the states before the blocks from their results."""
    steps = len(shift)
    if not 1 < shards < steps:
        return DECLINED
    size = -(-steps // shards)
    pads = [0, 0] * first.dim() + [0, size * shards - steps]
    # Steps that are added change no state.
    scale, shift = (
        F.pad(x, pads, value=fill).unflatten(0, (shards, size)).movedim(1, 0)
        for x, fill in ((scale, 1.0), (shift, 0.0))
    )  # [size, shards, ...]
    like = first.expand(shards, *first.shape)
    states = affine_states(scale, shift, torch.zeros_like(like), reverse)
    scales = affine_states(scale, torch.zeros_like(shift), torch.ones_like(like), reverse)
    last = 0 if reverse else size - 1
    of_blocks = scale[last] * scales[last], scale[last] * states[last] + shift[last]
    before = affine_states(*of_blocks, first, reverse)  # [shards, ...]
    result = states + scales * before
    return result.movedim(0, 1).flatten(0, 1).narrow(0, 0, steps)
