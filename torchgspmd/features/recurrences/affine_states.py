"""The operator of an affine recurrence: the state before each step.

    state[0] = first;  state[i + 1] = scale[i] * state[i] + shift[i]      or from behind
    state[0] = first;  state[i + 1] = scale[i] @ state[i] + shift[i]      scale[i]: matrices
    state[0] = first;  state[i + 1] = max(scale[i] + state[i], shift[i])  running maxima that decay

Minima and sums of exponentials (logaddexp) have such states, too, and matrices over them.

Along sharded steps each device begins with zeros, and multiplies its scales. These two of each
device are gathered, and give the state before its steps: two states a device, whatever the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.operators import custom_op
from ...rules.notation import Call, FactorRule, Split, factors
from ...rules.registry import rule_for
from ...rules.rewrites import DECLINED, Declined, rewrite


class Algebra(NamedTuple):
    """The product that changes a state and the sum that adds to it, with neutral elements."""

    times: Callable[[Tensor, Tensor], Tensor]
    plus: Callable[[Tensor, Tensor], Tensor]
    one: float
    zero: float


def _added(total: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the product of matrices over an algebra whose product is a sum."""
    return lambda x, y: total(x.unsqueeze(-1) + y.unsqueeze(-3), -2)


ALGEBRAS = {
    "elements": Algebra(torch.mul, torch.add, 1.0, 0.0),
    "matrices": Algebra(torch.matmul, torch.add, 1.0, 0.0),
    "maxima": Algebra(torch.add, torch.maximum, 0.0, -math.inf),
    "minima": Algebra(torch.add, torch.minimum, 0.0, math.inf),
    "logs": Algebra(torch.add, torch.logaddexp, 0.0, -math.inf),
    "matrices of maxima": Algebra(_added(torch.amax), torch.maximum, 0.0, -math.inf),
    "matrices of minima": Algebra(_added(torch.amin), torch.minimum, 0.0, math.inf),
    "matrices of logs": Algebra(_added(torch.logsumexp), torch.logaddexp, 0.0, -math.inf),
}


def identity(rows: int, columns: int, algebra: str, like: Tensor) -> Tensor:
    """Return a matrix with ones on its diagonal and zeros elsewhere. like: has its dtype."""
    *_, one, zero = ALGEBRAS[algebra]
    eye = torch.eye(rows, columns, dtype=like.dtype, device=like.device)
    return eye if zero == 0 else torch.full_like(eye, zero).masked_fill(eye > 0, one)


@custom_op("affine_states")
def affine_states(
    scale: Tensor, shift: Tensor, first: Tensor, reverse: bool, algebra: str
) -> Tensor:
    """Return the states before all steps, [steps, ...].

    scale, shift: [steps, ...]. first: the state before the first step, or the last one if
    `reverse`, [...]. algebra: one of ALGEBRAS. Of matrices, scale is [steps, ..., k, k], and states
    are [..., k, columns].
    """
    result, state = torch.empty_like(shift, memory_format=torch.contiguous_format), first
    for i in reversed(range(len(shift))) if reverse else range(len(shift)):
        result[i] = state
        state = _next(scale[i], shift[i], state, algebra)
    return result


def _next(scale: Tensor, shift: Tensor, state: Tensor, algebra: str) -> Tensor:
    if algebra == "elements":
        return torch.addcmul(shift, scale, state)
    times, plus, *_ = ALGEBRAS[algebra]
    return plus(shift, times(scale, state))


@affine_states.register_fake
def _(scale: Tensor, shift: Tensor, first: Tensor, reverse: bool, algebra: str) -> Tensor:
    return torch.empty_like(shift, memory_format=torch.contiguous_format)


AFFINE_STATES = affine_states._opoverload


@rule_for(AFFINE_STATES)
def _rule(call: Call) -> FactorRule:
    names = factors("d", call.tensors[2].dim())
    rows, matrix, fixed = ["n", *names], [*names], ["n"]
    if call.args[4].startswith("matrices"):
        matrix, fixed = [*names[:-1], "j"], ["n", *names[-2:-1], "j"]
    linear = [[1, 2]] if call.args[4] in ("elements", "matrices") else []
    return call.rule(
        [["n", *matrix], rows, names], [rows], replicated=fixed, split=Split(), linear=linear
    )


@rewrite("xla", AFFINE_STATES)
def _unrolled(scale: Tensor, shift: Tensor, first: Tensor, reverse: bool, algebra: str) -> Tensor:
    states, (times, plus, *_) = {}, ALGEBRAS[algebra]
    for i in reversed(range(len(shift))) if reverse else range(len(shift)):
        states[i], first = first, plus(shift[i], times(scale[i], first))
    return torch.stack([states[i] for i in range(len(shift))])


@rewrite("split", AFFINE_STATES)
def _by_blocks(
    scale: Tensor, shift: Tensor, first: Tensor, reverse: bool, algebra: str, *, shards: int = 1
) -> Tensor | Declined:
    """Compute a block for each shard, and the states before the blocks from their results."""
    steps = len(shift)
    if not 1 < shards < steps:
        return DECLINED
    times, plus, one, zero = ALGEBRAS[algebra]
    size = -(-steps // shards)
    like = first.expand(shards, *first.shape)
    same = torch.full_like(like, one)
    # Steps that are added change no state.
    pads = [0, 0] * first.dim() + [0, size * shards - steps]
    shift, padded = F.pad(shift, pads, value=zero), F.pad(scale, pads, value=one)
    if algebra.startswith("matrices"):
        eye = identity(scale.shape[-1], scale.shape[-1], algebra, scale)
        same = eye.expand(shards, *scale.shape[1:])
        place = torch.arange(size * shards, device=scale.device)
        padded = torch.where(place.reshape(-1, *[1] * first.dim()) < steps, padded, eye)
    scale, shift = (
        x.unflatten(0, (shards, size)).movedim(1, 0) for x in (padded, shift)
    )  # [size, shards, ...]
    states = affine_states(scale, shift, torch.full_like(like, zero), reverse, algebra)
    scales = affine_states(scale, torch.full_like(scale, zero), same, reverse, algebra)
    last = 0 if reverse else size - 1
    of_blocks = (
        times(scale[last], scales[last]),
        plus(times(scale[last], states[last]), shift[last]),
    )
    before = affine_states(*of_blocks, first, reverse, algebra)  # [shards, ...]
    result = plus(states, times(scales, before))
    return result.movedim(0, 1).flatten(0, 1).narrow(0, 0, steps)
