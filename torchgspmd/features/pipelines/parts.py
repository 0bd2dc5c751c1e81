"""A pipeline's parts: marks in its flat graph, pieces of work and their messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...comm.kinds import Step
from ...comm.local_ops import Rows, add_rows, copy_rows, stack_rows
from ...compat.operators import custom_op
from ...fx_passes.loop_call import InnerProgram
from ...rules.custom_ops.loops import Loop
from .list_scheduler import Order
from .schedule import Piece, Steps


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
JOINT = "joint"


class StagePart(NamedTuple):
    """A round's work for one microbatch, and the names of the microbatch's values."""

    kind: str
    round: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.kind} {self.round}" if self.round else self.kind


@dataclass(eq=False)
class StageBody(InnerProgram):
    """A round's piece of work. graph: from the coordinates and `inputs` to `outputs`.

    joins: of a joint body, the parts for two microbatches, whose inputs and outputs follow each
    other.
    """

    kind: str
    round: int
    graph: fx.Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    joins: tuple[StagePart, ...] = ()

    @property
    def __name__(self) -> str:
        return " + ".join(part.name for part in self.parts)

    @property
    def parts(self) -> tuple[StagePart, ...]:
        return self.joins or (StagePart(self.kind, self.round, self.inputs, self.outputs),)

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


Work = tuple[StageBody, tuple[Piece, ...]]  # a body, and the piece that each of its parts is for


class Message(NamedTuple):
    """A piece's value, or one of the same shape where it arrives; device: the other end's."""

    link: StageLink
    device: int
    value: Tensor


LastUses = dict[str, tuple[str, int]]  # values -> the last reader's kind and stage


@dataclass(eq=False)
class StageProgram:
    """A pipeline with programs for its pieces.

    carries, rows, others: its arguments' names in the bodies. stacks, totals: the names of results
    that are stacked, and that are added up. kept_bytes: bytes that a stage keeps for a microbatch
    between its pieces. sizes: loss value sizes that only a run knows.
    """

    loop: Loop
    axis: str
    order: Order
    pieces: tuple[StageBody, ...]
    links: tuple[StageLink, ...]
    carries: tuple[str, ...]
    rows: tuple[str, ...]
    others: tuple[str, ...]
    stacks: tuple[str, ...]
    totals: tuple[str, ...]
    kept_bytes: int = 0
    sizes: tuple[LossSize, ...] = ()

    def body(self, kind: str, round_: int) -> StageBody | None:
        """Return the body for a kind in a round, if it has any work."""
        each = (body for body in self.pieces if (body.kind, body.round) == (kind, round_))
        return next(each, None)

    def bodies_of(self, kind: str, stage: int) -> list[StageBody]:
        """Return the bodies that a stage's piece runs, in order. The loss comes late."""
        places = self.order.places
        round_ = places.round(stage)
        kinds = [{"F": FORWARD, "B": BACKWARD, "W": WEIGHTS}[kind]]
        # The last stage has the loss: before its backward, or behind its forward if there is none.
        if stage == places.stages - 1:
            if kind == "B":
                kinds = [LOSS, BACKWARD]
            elif kind == "F" and self.body(BACKWARD, round_) is None:
                kinds = [FORWARD, LOSS]
        return [body for each in kinds if (body := self.body(each, round_)) is not None]

    def work_of(self, step: Sequence[Piece]) -> list[Work]:
        """Return the bodies that a step runs, in order, with the piece that each part is for."""
        each = [(body, piece) for piece in step for body in self.bodies_of(piece.kind, piece.stage)]
        pieces = {(body.kind, body.round): piece for body, piece in each}
        for body in self.pieces if len(step) > 1 else ():
            names = [part[:2] for part in body.joins]
            if names and {*names} <= {*pieces}:
                # The loss, which the backward takes.
                alone = [(x, (piece,)) for x, piece in each if (x.kind, x.round) not in names]
                return [*alone, (body, tuple(pieces[name] for name in names))]
        return [(body, (piece,)) for body, piece in each]

    def kind_of(self, body: StageBody) -> str:
        stage = (
            self.order.places.stages
            - 1
            - (self.order.rounds - 1 - body.round) * (self.order.devices)
        )
        return next(kind for kind in "FBW" if body in self.bodies_of(kind, stage))

    @property
    def last_device(self) -> int:
        """The device with the last stage, which has the loss."""
        return self.order.places.device(self.order.places.stages - 1)

    def steps_on(self, device: int) -> Steps:
        """Return a device's pieces, in order; those of one program together."""
        return self.order.steps([slot.piece for slot in self.order.schedule.rows[device]])

    def runs_of(self, body: StageBody) -> int:
        """Return how often the device with the loss runs a body."""
        works = (self.work_of(step) for step in self.steps_on(self.last_device))
        return sum(body is each for work in works for each, _ in work)

    @cached_property
    def last_uses(self) -> list[list[LastUses]]:
        """The last readers of each microbatch's values, by device."""
        return [self._last_uses_on(device) for device in range(self.order.devices)]

    def _last_uses_on(self, device: int) -> list[LastUses]:
        passed: list[list[tuple[str, int]]] = [[] for _ in range(self.loop.length)]
        for slot in self.order.schedule.rows[device]:
            passed[slot.piece.microbatch].append((slot.piece.kind, slot.piece.stage))
        known: dict[tuple[tuple[str, int], ...], LastUses] = {}
        for pieces in map(tuple, passed):
            if pieces not in known:
                uses = known[pieces] = {}
                for kind, stage in pieces:  # a later reader overwrites those before
                    for body in self.bodies_of(kind, stage):
                        uses.update(dict.fromkeys((*body.inputs, *body.outputs), (kind, stage)))
        return [known[tuple(pieces)] for pieces in passed]


class StageRun:
    def __init__(
        self,
        call: StageProgram,
        device: int,
        carries: Sequence[Tensor],
        rows: Sequence[Tensor],
        others: Sequence[object],
    ) -> None:
        self.call, self.device, self.places = call, device, call.order.places
        self.steps = call.steps_on(device)
        self.first = carries[0]
        self.rows = dict(zip(call.rows, rows))
        self.others = dict(zip(call.others, others))
        # Zeros for values that other stages have: the first receives none, the last has the loss.
        self.blank = dict(zip(call.carries, carries))
        self.values: list[dict[str, Any]] = [{} for _ in range(call.loop.length)]
        self.stacked: dict[str, Tensor] = {}
        self.added: dict[str, Rows] = {}
        self.last_uses = call.last_uses[device]

    def links(self, piece: Piece, direction: int) -> Iterator[tuple[StageLink, str, int]]:
        """Yield the links that a piece has to a stage (1) or from one (-1).

        Each comes with the value's name where it arrives, and with the other stage's device.
        """
        for link in self.call.links:
            other = piece.stage + direction * link.step
            if link.kind == piece.kind and 0 <= other < self.places.stages:
                sender, receiver = (piece.stage, other)[::direction]
                if link.round == self.places.round(sender):
                    carry = link.carries[self.places.round(receiver)]
                    yield link, carry, self.places.device(other)

    def received(self, piece: Piece) -> list[tuple[StageLink, str, int]]:
        """Return the values that a piece takes from other devices."""
        return [each for each in self.links(piece, -1) if each[-1] != self.device]

    def sent(self, piece: Piece) -> list[tuple[StageLink, str, int]]:
        """Return the values that a piece sends to other devices."""
        return [each for each in self.links(piece, 1) if each[-1] != self.device]

    def arrive(self, piece: Piece, carry: str, x: Tensor) -> None:
        self.values[piece.microbatch][carry] = x

    def inputs(self, body: StageBody, pieces: Sequence[Piece]) -> list[Any]:
        """Return a body's inputs. pieces: one for each of its parts."""
        return [
            self.value(piece.microbatch, name)
            for part, piece in zip(body.parts, pieces, strict=True)
            for name in part.inputs
        ]

    def value(self, microbatch: int, name: str) -> Any:
        if name in (own := self.values[microbatch]):
            return own[name]
        if name in self.rows:
            return self.rows[name][microbatch]
        return self.others[name] if name in self.others else self._blank(name)

    def _blank(self, name: str) -> Tensor:
        """Return zeros for a loss value, which another device computes."""
        if name not in self.blank:
            loss = self.call.body(LOSS, self.places.rounds - 1)
            assert loss is not None and name in loss.outputs, name
            meta = loss.graph.output_node().args[0][loss.outputs.index(name)].meta  # pyright: ignore
            shape = [*meta["shape"]]
            for size in self.call.sizes:
                if size.value == name:
                    shape[size.dim] = size.rows(self.others)
            self.blank[name] = self.first.new_zeros(shape, dtype=meta["dtype"])
        return self.blank[name]

    def take(self, body: StageBody, pieces: Sequence[Piece], values: Sequence[Any]) -> None:
        """Keep a body's outputs. pieces: one for each of its parts."""
        names = [
            (piece.microbatch, name)
            for part, piece in zip(body.parts, pieces, strict=True)
            for name in part.outputs
        ]
        for (microbatch, name), x in zip(names, values, strict=True):
            self.values[microbatch][name] = x
            if name in self.call.stacks:
                if name not in self.stacked:
                    self.stacked[name] = x.new_empty([self.call.loop.length, *x.shape])
                self.stacked[name][microbatch] = x
            if name in self.call.totals:
                if name in self.added:
                    add_rows(self.added[name], x)
                else:
                    self.added[name] = copy_rows(x)

    def finish(self, piece: Piece) -> None:
        """Pass the input to the device's next stage; free values that no later piece reads."""
        own = self.values[piece.microbatch]
        for link, carry, to in self.links(piece, 1):
            if to == self.device:
                own[carry] = self.value(piece.microbatch, link.sent)
        now = piece.kind, piece.stage
        for name in [n for n in own if self.last_uses[piece.microbatch].get(n, now) == now]:
            del own[name]

    def results(self) -> list[Tensor]:
        stacked = [
            self.stacked[name]
            if name in self.stacked
            else (blank := self._blank(name)).expand(self.call.loop.length, *blank.shape)
            for name in self.call.stacks
        ]
        added = {name: stack_rows(x) for name, x in self.added.items()}
        return [*stacked, *(added[n] if n in added else self._blank(n) for n in self.call.totals)]
