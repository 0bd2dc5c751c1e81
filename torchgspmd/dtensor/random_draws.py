"""Random numbers on DTensors: one device's numbers, from which every rank takes its shard.

    model.to_empty(device="cpu"); model.reset_parameters()    # after parallelize on a meta model
    p.add_(torch.randn_like(p), alpha=0.01)
    F.dropout(y, 0.1)                                         # y: a sharded result

torch's DTensor draws the same numbers in every shard on CPUs. On GPUs its numbers depend on the
mesh. Here each rank draws the whole tensor's numbers. Ranks compare their generators' states first.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from ..comm.rank_mismatch import agree
from ..compat.operators import aten
from ..compat.private_apis import OpOverload
from ..errors import user_line
from .ours import as_before, groups_of_ours, our_dtensors
from .replicated_fallback import distribute_like, run_replicated, store_full

_FILLED = tuple(
    getattr(packet, overload)
    for packet in (
        aten.normal_,
        aten.uniform_,
        aten.exponential_,
        aten.cauchy_,
        aten.log_normal_,
        aten.geometric_,
        aten.random_,
        aten.bernoulli_,
    )
    for overload in packet.overloads()
    if overload not in ("out", "Tensor")
)  # in place, independent of the old values
_LIKE = tuple(
    getattr(packet, overload)
    for packet in (aten.rand_like, aten.randn_like, aten.randint_like)
    for overload in packet.overloads()
    if "out" not in overload
)
_OTHERS = (
    aten.native_dropout.default,
    aten.bernoulli.default,
    aten.bernoulli_.Tensor,
    aten.multinomial.default,
    aten.poisson.default,
    aten.binomial.default,
    aten.normal.Tensor_Tensor,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.rrelu_with_noise.default,
)
DRAWING = (*_FILLED, *_LIKE, *_OTHERS)


def draw(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Draw a whole tensor's numbers and return or store this rank's shard."""
    one = our_dtensors(args, kwargs)[0]
    # No numbers, so no generator to compare.
    if one.device.type == "meta":
        return as_before(op, args, kwargs)
    groups = groups_of_ours(one)
    # The line too: ranks may be about to draw different tensors in equal states.
    line = [("the line that draws", user_line() or "")]
    state = _state_hash(kwargs.get("generator"), one.device)
    agree(groups, "the random numbers of a DTensor", line, state)
    # Their numbers depend on the values of their operands.
    if op in _OTHERS:
        return run_replicated(op, args, kwargs, one)
    # Strides too: torch fills in memory order, and one device has these strides.
    whole = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)
    values = op(whole, *args[1:], **kwargs)
    if op in _LIKE:
        return distribute_like(one, values)
    store_full(one, values)
    return one


def _state_hash(generator: torch.Generator | None, device: torch.device) -> int:
    """Hash a generator's state; None: the device's default generator."""
    if generator is not None:
        state: Tensor = generator.get_state()
    else:
        state = (
            torch.get_rng_state()
            if device.type == "cpu"
            else torch.get_device_module(device).get_rng_state(device)
        )
    return zlib.crc32(state.cpu().numpy().tobytes())
