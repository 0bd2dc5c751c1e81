"""A pipeline's parts: marks in its flat graph, pieces of work and their messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...comm.kinds import Step
from ...comm.loop_call import InnerProgram
from ...compat.operators import custom_op


@custom_op("stage_send")
def stage_send(x: Tensor, shift: int, place: list[int], axis: str, schedule: str) -> Tensor:
    """Return x [devices, ...]: each stage has sent it to the one that is `shift` behind.

    place: the stages' round, and the value's number among several. schedule: the order of pieces,
    as text (Order).
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


FORWARD, LOSS, BACKWARD, WEIGHTS = "forward", "loss", "backward", "weights"


@dataclass(eq=False)
class StageBody(InnerProgram):
    """A round's piece of work. graph: from the coordinates and `inputs` to `outputs`."""

    kind: str
    round: int
    graph: fx.Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def __name__(self) -> str:
        return f"{self.kind} {self.round}" if self.round else self.kind

    @cached_property
    def run(self) -> Callable[..., Any]:
        return self.compile(self.graph)


@dataclass(frozen=True)
class StageLink:
    """The messages that a round's stages send to their neighbors.

    kind: F, to the next stage, or B, to the one before. round: the senders'. leaf: the value's
    number among several. sent: its name. carries: its name where it arrives, by the round there.
    message: one microbatch's permute.
    """

    kind: str
    round: int
    leaf: int
    sent: str
    carries: tuple[str, ...]
    message: Step = field(compare=False)

    @property
    def step(self) -> int:
        """The distance in stages, from sender to receiver."""
        return 1 if self.kind == "F" else -1


@dataclass(frozen=True)
class LossSize:
    """A loss value's size that only a run knows: k ceil(n / devices) m, in one shard.

    times: k. factors: the names of the sizes n and m among the pipeline's others.
    """

    value: str
    dim: int
    times: int
    devices: int
    factors: tuple[str, ...]

    def rows(self, others: Mapping[str, Any]) -> int:
        # The first factor is sharded, with its last shard padded.
        first, *rest = (others[name] for name in self.factors)
        return self.times * -(-first // self.devices) * math.prod(rest)


class Message(NamedTuple):
    """A piece's value, or one of the same shape where it arrives; device: the other end's."""

    link: StageLink
    device: int
    value: Tensor
