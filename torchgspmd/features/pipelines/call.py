"""StageCall: a pipeline in the local program, the target of a node.

%pipe = stages_1x8([%c, %g], [%xs, %targets], [%w])     first carries, stacked rows, others
%dx   = %pipe[0]                                        stacked results, then totals

Its bodies are pieces of work for one microbatch: forward, loss, backward, weights. A device does
its stage's pieces in schedule order. While it computes one, it receives the next one's input, and
it waits for nothing else. So a step takes as long as the schedule says. The last reader of a
piece's value frees it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from ...comm.process_groups import ProcessGroups
from ...fx_passes.loop_call import BodyCall, BodyReader, RunBody, copy_of
from ...fx_passes.units import size_text
from ...layout.mesh import Mesh
from .list_scheduler import Order, curve
from .merge_halves import beside
from .parts import LossSize, Message, StageBody, StageLink, StagePart, StageProgram, StageRun
from .schedule import Piece

TAG = "stages"  # in saved plans
_LINK = "kind", "round", "leaf", "sent", "carries"


@dataclass(eq=False)
class StageCall(StageProgram, BodyCall):
    """A node's target. transport: on the rank that runs it."""

    transport: StageTransport | None = None
    sends = True

    @property
    def __name__(self) -> str:
        return f"stages_{self.loop}"

    def copy(self) -> StageCall:
        """Return a copy with its own graphs, down to the loops in them."""
        pieces = [replace(body, graph=copy_of(body.graph)) for body in self.pieces]
        return replace(self, pieces=tuple(pieces), transport=None)

    @property
    def bodies(self) -> Sequence[StageBody]:
        return self.pieces

    @property
    def most_kept(self) -> int:
        return max(self.order.schedule.kept)

    def simulate(self, mesh: Mesh, arguments: Sequence[Sequence], run_body: RunBody) -> list[Any]:
        return _Simulation(self, mesh, arguments, run_body).run()

    def connect(self, groups: ProcessGroups) -> None:
        self.transport = StageTransport(groups, self.axis, self.order, self.links)

    def iteration_bytes(self, own_bytes: Callable[[fx.Graph], int]) -> int:
        """Return the bytes for one piece, and for everything that stages keep over microbatches."""
        return self.kept_bytes * self.most_kept + max(own_bytes(b.graph) for b in self.bodies)

    def summary(self) -> Iterator[str]:
        """Yield lines about a pipeline that has a backward.

        The second line has other points on the curve, as if all pieces took equally long. Joint
        bodies have a line each.
        """
        order, kept = self.order, self.most_kept
        if order.name == "forward":
            return
        yield (
            f"pipeline over {self.axis}: {order}, {order.schedule.idle:.0%} of the time idle, "
            f"activations of {kept} x {size_text(self.kept_bytes)}"
        )
        limits = [n for n, _ in curve(order.devices, order.microbatches, rounds=order.rounds)]
        shares = [f"{order.zero_bubble(limit).schedule.idle:.0%}" for limit in limits]
        kept = f"{limits[0]} to {limits[-1]}"
        yield f"  zero_bubble with activations of {kept}: {', '.join(shares)} idle"
        for body in self.pieces:
            if body.joins:
                hidden = [bool(products) for _, products in beside(body.graph)]
                share = f"{sum(hidden)} of {len(hidden)} messages"
                yield f"  {body.__name__}: {share} travel beside products of the other half"

    def picture(self) -> str | None:
        return None if self.order.name == "forward" else self.order.schedule.svg()

    def encode(self, graph: Callable[[fx.Graph], Any], value: Callable[[Any], Any]) -> list[Any]:
        pieces = [
            [b.kind, b.round, graph(b.graph), b.inputs, b.outputs, [[*part] for part in b.joins]]
            for b in self.pieces
        ]
        links = [[*map(x.__dict__.get, _LINK), value(x.message)] for x in self.links]
        names = [self.carries, self.rows, self.others, self.stacks, self.totals]
        order = str(self.order)
        ends = names, self.kept_bytes, [[*vars(size).values()] for size in self.sizes]
        return [TAG, str(self.loop), self.axis, order, pieces, links, *ends]

    @classmethod
    def decode(cls, parts: list[Any], read: BodyReader) -> StageCall:
        _, loop, axis, order, pieces, links, names, kept_bytes, sizes = parts
        schedule = Order.parse(order)
        if str(schedule) != order or not read.has_axis(axis):
            raise ValueError(order)
        bodies = (
            StageBody(
                kind,
                read.natural(n),
                read.graph(rows),
                tuple(inputs),
                tuple(outputs),
                tuple(StagePart(of, read.natural(r), tuple(a), tuple(b)) for of, r, a, b in joins),
            )
            for kind, n, rows, inputs, outputs, joins in pieces
        )
        carries, rows, others, stacks, totals = map(tuple, names)
        return cls(
            loop=read.loop(loop),
            axis=axis,
            order=schedule,
            pieces=tuple(bodies),
            links=tuple(
                StageLink(a, b, c, sent, tuple(to), read.value(message))
                for a, b, c, sent, to, message in links
            ),
            carries=carries,
            rows=rows,
            others=others,
            stacks=stacks,
            totals=totals,
            kept_bytes=read.natural(kept_bytes),
            sizes=tuple(
                LossSize(value, read.natural(d), read.natural(n), read.natural(m), tuple(factors))
                for value, d, n, m, factors in sizes
            ),
        )

    @property
    def checked(self) -> Sequence[Any]:
        return (self, *self.pieces, *self.links, *self.sizes)

    def __call__(
        self, carries: Sequence[Tensor], rows: Sequence[Tensor], others: Sequence[object]
    ) -> list[Tensor]:
        assert (transport := self.transport) is not None, "a rank has a transport"
        run = StageRun(self, transport.device, carries, rows, others)

        def begin(step: Sequence[Piece]) -> Callable[[], list[tuple[Piece, str, Tensor]]]:
            received = [(piece, *each) for piece in step for each in run.received(piece)]
            wait = transport.receive([Message(link, d, run.blank[c]) for _, link, c, d in received])
            return lambda: [(piece, c, x) for (piece, _, c, _), x in zip(received, wait())]

        # The next step's input travels while this step runs.
        arriving = begin(run.steps[0])
        for step, following in zip(run.steps, [*run.steps[1:], ()]):
            arrived, arriving = arriving, begin(following)
            for piece, carry, x in arrived():
                run.arrive(piece, carry, x)
            for body, pieces in self.work_of(step):
                run.take(body, pieces, body.run(*run.inputs(body, pieces)))
            transport.send(
                [
                    Message(link, to, run.value(piece.microbatch, link.sent))
                    for piece in step
                    for link, _, to in run.sent(piece)
                ]
            )
            for piece in step:
                run.finish(piece)
        transport.finish()
        return run.results()


class _Simulation:
    """A pipeline's devices in one process, and the messages between them.

    All stages whose next piece has one kind do it at once. arguments: carries, rows and others for
    each device. run_body: runs a graph on all devices.
    """

    def __init__(
        self, call: StageCall, mesh: Mesh, arguments: Sequence[Sequence], run_body: RunBody
    ) -> None:
        self.call, self.run_body, self.devices = call, run_body, range(mesh.size)
        axes = (call.axis,)
        places = [mesh.index(axes, mesh.coordinates(device)) for device in self.devices]
        self.runs = [StageRun(call, place, *args) for place, args in zip(places, arguments)]
        groups = {device: group for group in mesh.groups(axes) for device in group}
        self.at = [dict(enumerate(groups[device])) for device in self.devices]
        self.messages: dict[tuple[int, int, StageLink], deque[Tensor]] = {}  # to, from, link
        self.done = [0] * mesh.size

    def run(self) -> list[list[Tensor]]:
        places = self.call.order.places
        while left := {d: step for d in self.devices if (step := self._next(d))}:
            ready = {d: step for d, step in left.items() if self._has_arrived(d, step)}
            assert ready, "a stage waits for a piece that comes later"
            kinds = {
                d: tuple((p.kind, places.round(p.stage)) for p in step) for d, step in ready.items()
            }
            first = next(iter(kinds.values()))
            self._do({d: step for d, step in ready.items() if kinds[d] == first})
        return [run.results() for run in self.runs]

    def _next(self, device: int) -> Sequence[Piece]:
        steps, done = self.runs[device].steps, self.done[device]
        return steps[done] if done < len(steps) else ()

    def _has_arrived(self, device: int, step: Sequence[Piece]) -> bool:
        received = [each for piece in step for each in self.runs[device].received(piece)]
        return all(self.messages.get((device, self.at[device][d], x)) for x, _, d in received)

    def _do(self, steps: dict[int, Sequence[Piece]]) -> None:
        each = [(device, piece) for device, step in steps.items() for piece in step]
        for device, piece in each:
            for link, carry, source in self.runs[device].received(piece):
                message = self.messages[device, self.at[device][source], link].popleft()
                self.runs[device].arrive(piece, carry, message)
        works = {d: dict(self.call.work_of(step)) for d, step in steps.items()}
        for body in max(works.values(), key=len):
            active = [d for d in steps if body in works[d]]
            inputs = {d: self.runs[d].inputs(body, works[d][body]) for d in active}
            columns = [
                [
                    inputs[d][i] if d in inputs else _poison(inputs[active[0]][i])
                    for d in self.devices
                ]
                for i in range(len(body.inputs))
            ]
            # The forward's microbatch, and the backward's.
            at = {d: tuple(p.microbatch for p in works[d][body])[:2] for d in active}
            results = self.run_body(body.graph, columns, at)
            for device in active:
                self.runs[device].take(body, works[device][body], results[device])
        for device, piece in each:
            run = self.runs[device]
            for link, _, to in run.sent(piece):
                value = run.value(piece.microbatch, link.sent)
                key = self.at[device][to], device, link
                self.messages.setdefault(key, deque()).append(value)
            run.finish(piece)
        for device in steps:
            self.done[device] += 1


def _poison(like: object) -> Any:
    """Return a value for a device without work: nobody may read it."""
    if isinstance(like, (tuple, list)):
        return type(like)(map(_poison, like))
    if isinstance(like, Tensor) and like.is_floating_point():
        return torch.full_like(like, math.nan)
    return like


class StageTransport:
    """Sends between a rank's stages and those of other ranks along the axis."""

    def __init__(
        self, groups: ProcessGroups, axis: str, order: Order, links: Sequence[StageLink]
    ) -> None:
        self.device = groups.coordinates[axis]
        self.groups = groups.between_stages(axis, _keys(order, links))
        (ranks,) = (group for group in groups.mesh.groups((axis,)) if groups.rank in group)
        self.processes = [groups.processes[rank] for rank in ranks]
        self.in_flight: deque[tuple[Any, Sequence[Message]]] = deque()

    def send(self, messages: Sequence[Message]) -> None:
        messages = [m._replace(value=m.value.contiguous()) for m in messages]
        for work in self._begin(dist.isend, messages):
            # The values have to live until their sends are complete.
            self.in_flight.append((work, messages))
        while self.in_flight and self.in_flight[0][0].is_completed():
            self.in_flight.popleft()

    def receive(self, messages: Sequence[Message]) -> Callable[[], list[Tensor]]:
        """Begin to receive a piece's values; return a function that returns them.

        It begins before the piece before has sent, and a received value may depend on the sent one.
        So the two use different groups, where a group's messages wait for each other.
        """
        empty = [torch.empty_like(m.value, memory_format=torch.contiguous_format) for m in messages]
        works = self._begin(dist.irecv, [m._replace(value=x) for m, x in zip(messages, empty)])

        def arrived() -> list[Tensor]:
            for work in works:
                work.wait()
            return empty

        return arrived

    def _begin(self, op: Callable, messages: Sequence[Message]) -> list[Any]:
        """Begin messages: in NCCL, those of a group are one kernel in the group's communicator."""
        batches: dict[Key, list[dist.P2POp]] = {}
        for link, other, x in messages:
            ends = (self.device, other) if op is dist.isend else (other, self.device)
            key = key_of(link, *ends)
            # Messages with one tag arrive in order. A pipeline has fewer than 64 rounds.
            tag = (link.leaf * 64 + link.round) * 2 + (link.kind == "F")
            one = dist.P2POp(op, x, self.processes[other], self.groups[key], tag)
            batches.setdefault(key, []).append(one)
        return [work for batch in batches.values() for work in dist.batch_isend_irecv(batch)]

    def finish(self) -> None:
        while self.in_flight:
            self.in_flight.popleft()[0].wait()


Key = tuple[str, int, int, int]


def key_of(link: StageLink, sender: int, receiver: int) -> Key:
    """Return a message's group: by its kind, round and step, and the sender's parity.

    So a device that receives from one neighbor and sends to the other has a group for each.
    """
    return link.kind, link.round, receiver - sender, sender % 2


def _keys(order: Order, links: Sequence[StageLink]) -> list[Key]:
    places = order.places
    keys: dict[Key, None] = {}
    for link in links:
        for stage in range(places.stages):
            other = stage + link.step
            if places.round(stage) == link.round and 0 <= other < places.stages:
                sender, receiver = places.device(stage), places.device(other)
                keys |= {key_of(link, sender, receiver): None} if sender != receiver else {}
    return [*keys]
