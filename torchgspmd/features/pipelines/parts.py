"""The parts of a pipeline: pieces of work, their messages, and how they send them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor, fx

from ...comm.kinds import Step
from ...comm.loop_call import InnerProgram

FORWARD, LOSS, BACKWARD, WEIGHTS = "forward", "loss", "backward", "weights"


@dataclass(eq=False)
class StageBody(InnerProgram):
    """A piece of work in a round. graph: from the coordinates and `inputs` to `outputs`."""

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
        """The compiled piece."""
        return self.compile(self.graph)


@dataclass(frozen=True)
class StageLink:
    """The messages of the stages of a round to their neighbors.

    kind: F, to the next stage, or B, to the one before. round: of who sends. leaf: which value of
    several. sent: its name. carries: the name that it has where it arrives, by the round there.
    message: the permute of one microbatch.
    """

    kind: str
    round: int
    leaf: int
    sent: str
    carries: tuple[str, ...]
    message: Step = field(compare=False)

    @property
    def step(self) -> int:
        """How many stages behind the sender it arrives."""
        return 1 if self.kind == "F" else -1


@dataclass(frozen=True)
class LossSize:
    """A size of a value of the loss that only a run knows: k ceil(n / devices) m, of a shard.

    times: k. factors: names of the sizes n and m among the others of the pipeline.
    """

    value: str
    dim: int
    times: int
    devices: int
    factors: tuple[str, ...]

    def rows(self, others: Mapping[str, Any]) -> int:
        """Return the number in a run."""
        first, *rest = (others[name] for name in self.factors)
        return self.times * -(-first // self.devices) * math.prod(rest)


class Transport(Protocol):
    """How the stages of a device send to those of others, and receive from them."""

    device: int

    def send(self, link: StageLink, to: int, x: Tensor) -> None:
        """Send a value to a device; it may arrive later."""
        ...

    def receive(self, link: StageLink, source: int, like: Tensor) -> Callable[[], Tensor]:
        """Begin to receive the next value of a link; return a function that returns it."""
        ...

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        ...
