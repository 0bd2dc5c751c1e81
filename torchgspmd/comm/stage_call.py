"""StageCall: a pipeline in the program of one device, the target of a node.

%pipe = stages_1x8([%c, %g], [%xs, %targets], [%w])     first carries, stacked rows, others
%dx   = %pipe[0]                                        stacked results, then totals

Its bodies are pieces of work for one microbatch: forward, loss, backward, weights. A device does
the pieces of its stage in the order of the schedule. While it computes one it receives what the
next one needs, and it waits for nothing else, so a step takes as long as the schedule says. What
a piece leaves for later ones is freed by the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor, fx

from ..rules.custom_ops.loops import Loop
from .kinds import Step
from .local_ops import Rows, add_rows, copy_rows, stack_rows
from .loop_call import Body, BodyCall, copy_of
from .stage_order import Order
from .stage_schedule import Piece

FORWARD, LOSS, BACKWARD, WEIGHTS = "forward", "loss", "backward", "weights"


@dataclass(eq=False)
class StageBody(Body):
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
class Link:
    """What the stages of a round send to their neighbors.

    kind: F, to the next stage, or B, to the one before. round: of who sends. leaf: which value of
    several. sent: its name. carries: the name that it has where it arrives, by the round there.
    message: the permute of one microbatch.
    """

    kind: str
    round: int
    leaf: int
    sent: str
    carries: tuple[str, ...]
    message: Step

    @property
    def step(self) -> int:
        """How many stages behind the sender it arrives."""
        return 1 if self.kind == "F" else -1


class Transport(Protocol):
    """How the stages of a device send to those of others, and receive from them."""

    device: int

    def send(self, link: Link, to: int, x: Tensor) -> None:
        """Send a value to a device; it may arrive later."""
        ...

    def receive(self, link: Link, source: int, like: Tensor) -> Callable[[], Tensor]:
        """Begin to receive the next value of a link; return what waits for it and returns it."""
        ...

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        ...


@dataclass(eq=False)
class StageCall(BodyCall):
    """A pipeline with the programs of its pieces.

    carries, rows, others: names of its arguments in the bodies. stacks, totals: names of results
    that are stacked, and of those that are added up. kept_bytes: what a stage keeps of a microbatch
    between its pieces. transport: of the rank that runs it.
    """

    loop: Loop
    axis: str
    order: Order
    pieces: tuple[StageBody, ...]
    links: tuple[Link, ...]
    carries: tuple[str, ...]
    rows: tuple[str, ...]
    others: tuple[str, ...]
    stacks: tuple[str, ...]
    totals: tuple[str, ...]
    kept_bytes: int = 0
    transport: Transport | None = None

    @property
    def __name__(self) -> str:
        return f"stages_{self.loop}"

    def copy(self) -> StageCall:
        """Return a copy with graphs of its own, down to the loops in them."""
        pieces = [replace(body, graph=copy_of(body.graph)) for body in self.pieces]
        return replace(self, pieces=tuple(pieces), transport=None)

    @property
    def bodies(self) -> Sequence[StageBody]:
        """The bodies: forward, loss, backward, weights, as far as there are any."""
        return self.pieces

    @property
    def most_kept(self) -> int:
        """The most activations that a device keeps at once."""
        return max(self.order.schedule.kept)

    def body(self, kind: str, round_: int) -> StageBody | None:
        """Return the body of a kind in a round, if there is work of it."""
        each = (body for body in self.pieces if (body.kind, body.round) == (kind, round_))
        return next(each, None)

    def bodies_of(self, kind: str, stage: int) -> list[StageBody]:
        """Return the bodies that a piece of a stage runs, in order. The loss comes late."""
        places = self.order.places
        round_ = places.round(stage)
        kinds = [{"F": FORWARD, "B": BACKWARD, "W": WEIGHTS}[kind]]
        if stage == places.stages - 1:
            if kind == "B":
                kinds = [LOSS, BACKWARD]
            elif kind == "F" and self.body(BACKWARD, round_) is None:
                kinds = [FORWARD, LOSS]
        return [body for each in kinds if (body := self.body(each, round_)) is not None]

    def kind_of(self, body: StageBody) -> str:
        """Return the kind of the pieces that have a body."""
        stage = (
            self.order.places.stages
            - 1
            - (self.order.rounds - 1 - body.round) * (self.order.devices)
        )
        return next(kind for kind in "FBW" if body in self.bodies_of(kind, stage))

    def __call__(
        self, carries: Sequence[Tensor], rows: Sequence[Tensor], others: Sequence[Any]
    ) -> list[Tensor]:
        """Run the pieces of this rank's device."""
        assert (transport := self.transport) is not None, "a rank has a transport"
        run = StageRun(self, transport.device, carries, rows, others)

        def begin(piece: Piece | None) -> list[tuple[str, Callable[[], Tensor]]]:
            received = [] if piece is None else run.received(piece)
            return [(c, transport.receive(link, d, run.blank[c])) for link, c, d in received]

        arriving = begin(run.pieces[0])
        for piece, following in zip(run.pieces, [*run.pieces[1:], None]):
            arrived, arriving = arriving, begin(following)
            for carry, wait in arrived:
                run.arrive(piece, carry, wait())
            for body in self.bodies_of(piece.kind, piece.stage):
                run.take(piece, body, body.run(*run.inputs(piece, body)))
            for link, _, to in run.sent(piece):
                transport.send(link, to, run.value(piece.microbatch, link.sent))
            run.finish(piece)
        transport.finish()
        return run.results()


class StageRun:
    """What one device has while it does the pieces of its stages."""

    def __init__(
        self,
        call: StageCall,
        device: int,
        carries: Sequence[Tensor],
        rows: Sequence[Tensor],
        others: Sequence[Any],
    ) -> None:
        self.call, self.device, self.places = call, device, call.order.places
        self.pieces = [slot.piece for slot in call.order.schedule.rows[device]]
        self.first = carries[0]
        self.rows = dict(zip(call.rows, rows))
        self.others = dict(zip(call.others, others))
        # values that other stages have: the first one receives nothing, the last one has the loss
        self.blank = dict(zip(call.carries, carries))
        self.values: list[dict[str, Any]] = [{} for _ in range(call.loop.length)]
        self.stacked: dict[str, Tensor] = {}
        self.added: dict[str, Rows] = {}
        self.last_use: dict[str, tuple[str, int]] = {}  # the kind and the stage of a piece
        order = [(kind, stage) for kind in "FBW" for stage in self._own_stages()]
        for kind, stage in order:
            for body in call.bodies_of(kind, stage):
                self.last_use |= dict.fromkeys((*body.inputs, *body.outputs), (kind, stage))

    def _own_stages(self) -> list[int]:
        return [self.places.stage(self.device, r) for r in range(self.places.rounds)]

    def links(self, piece: Piece, direction: int) -> Iterator[tuple[Link, str, int]]:
        """Yield the links that a piece has to a stage (1) or from one (-1).

        With the name that the value has where it arrives, and the device of the other stage.
        """
        for link in self.call.links:
            other = piece.stage + direction * link.step
            if link.kind == piece.kind and 0 <= other < self.places.stages:
                sender, receiver = (piece.stage, other)[::direction]
                if link.round == self.places.round(sender):
                    carry = link.carries[self.places.round(receiver)]
                    yield link, carry, self.places.device(other)

    def received(self, piece: Piece) -> list[tuple[Link, str, int]]:
        """Return what a piece takes from other devices."""
        return [each for each in self.links(piece, -1) if each[-1] != self.device]

    def sent(self, piece: Piece) -> list[tuple[Link, str, int]]:
        """Return what a piece sends to other devices."""
        return [each for each in self.links(piece, 1) if each[-1] != self.device]

    def arrive(self, piece: Piece, carry: str, x: Tensor) -> None:
        """Take what another device has sent for a piece."""
        self.values[piece.microbatch][carry] = x

    def inputs(self, piece: Piece, body: StageBody) -> list[Any]:
        """Return the inputs of a body."""
        return [self.value(piece.microbatch, name) for name in body.inputs]

    def value(self, microbatch: int, name: str) -> Any:
        """Return a value of a microbatch."""
        if name in (own := self.values[microbatch]):
            return own[name]
        if name in self.rows:
            return self.rows[name][microbatch]
        return self.others[name] if name in self.others else self._blank(name)

    def _blank(self, name: str) -> Tensor:
        """Return zeros in place of a value of the loss, which another device computes."""
        if name not in self.blank:
            loss = self.call.body(LOSS, self.places.rounds - 1)
            assert loss is not None and name in loss.outputs, name
            meta = loss.graph.output_node().args[0][loss.outputs.index(name)].meta  # pyright: ignore
            self.blank[name] = self.first.new_zeros(meta["shape"], dtype=meta["dtype"])
        return self.blank[name]

    def take(self, piece: Piece, body: StageBody, values: Sequence[Any]) -> None:
        """Take the results of a body."""
        own = self.values[piece.microbatch]
        for name, x in zip(body.outputs, values):
            own[name] = x
            if name in self.call.stacks:
                if name not in self.stacked:
                    self.stacked[name] = x.new_empty([self.call.loop.length, *x.shape])
                self.stacked[name][piece.microbatch] = x
            if name in self.call.totals:
                if name in self.added:
                    add_rows(self.added[name], x)
                else:
                    self.added[name] = copy_rows(x)

    def finish(self, piece: Piece) -> None:
        """Pass what the next stage of this device takes; free what no later piece reads."""
        own = self.values[piece.microbatch]
        for link, carry, to in self.links(piece, 1):
            if to == self.device:
                own[carry] = own[link.sent]
        now = piece.kind, piece.stage
        for name in [n for n in own if self.last_use.get(n, now) == now]:
            del own[name]

    def results(self) -> list[Tensor]:
        """Return the results of the pipeline."""
        stacked = [self.stacked[name] for name in self.call.stacks]
        added = {name: stack_rows(x) for name, x in self.added.items()}
        return [*stacked, *(added[n] if n in added else self._blank(n) for n in self.call.totals)]
