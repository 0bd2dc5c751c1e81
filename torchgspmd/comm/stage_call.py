"""StageCall: a pipeline in the program of one device, the target of a node.

%pipe = stages_1x8([%c, %g], [%xs, %targets], [%w])     first carries, stacked rows, others
%dx   = %pipe[0]                                        stacked results, then totals

Its bodies are pieces of work for one microbatch: forward, loss, backward, weights. A device does
the pieces of its stage in the order of the schedule. It receives what a neighbor has sent when a
piece needs it, and waits for nothing else, so a step takes as long as the schedule says. What a
piece leaves for later ones is freed by the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from ..custom_ops.loops import Loop
from .loop_call import BodyCall, copy_of
from .stage_schedule import Order, Piece

FORWARD, LOSS, BACKWARD, WEIGHTS = "forward", "loss", "backward", "weights"


@dataclass(eq=False)
class StageBody:
    """A piece of work. graph: from the coordinates and the `inputs` to the `outputs`, by name."""

    name: str
    graph: fx.Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def __name__(self) -> str:
        return self.name

    @cached_property
    def run(self) -> Callable[..., Any]:
        """The compiled piece."""
        return fx.GraphModule(torch.nn.Module(), self.graph).forward


@dataclass(frozen=True)
class Link:
    """What a stage has `sent` is the `carry` of the one that is `shift` behind it."""

    carry: str
    sent: str
    shift: int

    @property
    def kind(self) -> str:
        """The pieces that send it, and those that take it."""
        return "F" if self.shift > 0 else "B"


class Transport(Protocol):
    """How a stage sends to its neighbors, and receives from them."""

    stage: int

    def send(self, link: int, shift: int, x: Tensor) -> None:
        """Send a value of a link to the next stage; it may arrive later."""
        ...

    def receive(self, link: int, shift: int, like: Tensor) -> Tensor:
        """Return the next value of a link, from the stage before."""
        ...

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        ...


@dataclass(eq=False)
class StageCall(BodyCall):
    """A pipeline with the programs of its pieces.

    rows, others: names of the stacked rows, and of values of outside, in the bodies. stacks,
    totals: names of results that are stacked, and of those that are added up. kept_bytes: what a
    stage keeps of a microbatch between its pieces. transport: of the rank that runs it.
    """

    loop: Loop
    axis: str
    order: Order
    pieces: tuple[StageBody, ...]
    links: tuple[Link, ...]
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
        """The most activations that a stage keeps at once."""
        return max(self.order.schedule.kept)

    def body(self, name: str) -> StageBody | None:
        """Return the body of a name, if there is work of its kind."""
        return next((body for body in self.bodies if body.name == name), None)

    def bodies_of(self, kind: str, stage: int) -> list[StageBody]:
        """Return the bodies that a piece of a stage runs, in order. The loss comes late."""
        names = [{"F": FORWARD, "B": BACKWARD, "W": WEIGHTS}[kind]]
        if stage == self.order.stages - 1:
            if kind == "B":
                names = [LOSS, BACKWARD]
            elif kind == "F" and self.body(BACKWARD) is None:
                names = [FORWARD, LOSS]
        return [body for name in names if (body := self.body(name)) is not None]

    def kind_of(self, body: StageBody) -> str:
        """Return the kind of the pieces that have a body."""
        last = self.order.stages - 1
        return next(kind for kind in "FBW" if body in self.bodies_of(kind, last))

    def __call__(
        self, carries: Sequence[Tensor], rows: Sequence[Tensor], others: Sequence[Any]
    ) -> list[Tensor]:
        """Run the pieces of this rank's stage."""
        assert (transport := self.transport) is not None, "a rank has a transport"
        run = StageRun(self, transport.stage, carries, rows, others)
        for piece in run.pieces:
            for i, link in run.links(piece, -1):
                run.arrive(piece, link, transport.receive(i, link.shift, carries[i]))
            for body in self.bodies_of(piece.kind, piece.stage):
                run.take(piece, body, body.run(*run.inputs(piece, body)))
            for i, link in run.links(piece, 1):
                transport.send(i, link.shift, run.value(piece.microbatch, link.sent))
            run.free(piece)
        transport.finish()
        return run.results()


class StageRun:
    """What one stage has while it does its pieces."""

    def __init__(
        self,
        call: StageCall,
        stage: int,
        carries: Sequence[Tensor],
        rows: Sequence[Tensor],
        others: Sequence[Any],
    ) -> None:
        self.call, self.stage = call, stage
        self.pieces = [slot.piece for slot in call.order.schedule.rows[stage]]
        self.first = carries[0]
        self.rows = dict(zip(call.rows, rows))
        self.others = dict(zip(call.others, others))
        # values that other stages have: the first one receives nothing, the last one has the loss
        self.blank = {link.carry: x for link, x in zip(call.links, carries)}
        self.values: list[dict[str, Any]] = [{} for _ in range(call.loop.length)]
        self.stacked: dict[str, Tensor] = {}
        self.added: dict[str, Tensor] = {}
        self.last_use: dict[str, str] = {}  # the kind of piece
        for kind in "FBW":
            for body in call.bodies_of(kind, stage):
                self.last_use |= dict.fromkeys((*body.inputs, *body.outputs), kind)

    def links(self, piece: Piece, direction: int) -> Iterator[tuple[int, Link]]:
        """Yield the links that a piece sends along, or with direction -1 receives along."""
        for i, link in enumerate(self.call.links):
            other = self.stage + direction * link.shift
            if link.kind == piece.kind and 0 <= other < self.call.order.stages:
                yield i, link

    def arrive(self, piece: Piece, link: Link, x: Tensor) -> None:
        """Take what another stage has sent for a piece."""
        self.values[piece.microbatch][link.carry] = x

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
        """Return zeros in place of a value of the loss, of which another stage has the real one."""
        if name not in self.blank:
            loss = self.call.body(LOSS)
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
                self.added[name] = self.added[name].add_(x) if name in self.added else x.clone()

    def free(self, piece: Piece) -> None:
        """Free what no later piece reads."""
        own = self.values[piece.microbatch]
        kinds = "FBW"[: "FBW".index(piece.kind) + 1]
        for name in [n for n in own if self.last_use.get(n, "F") in kinds]:
            del own[name]

    def results(self) -> list[Tensor]:
        """Return the results of the pipeline."""
        stacked = [self.stacked[name] for name in self.call.stacks]
        added = self.added
        return [*stacked, *(added[n] if n in added else self._blank(n) for n in self.call.totals)]
