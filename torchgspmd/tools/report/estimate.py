"""Estimate: a step's time, from the one-device program and the hardware's speed.

The program runs on two streams, in its own order. An operation takes the time for its products or
for its memory traffic, whichever is longer (roofline). A collective takes the time for its bytes on
the slowest link that its group crosses, and a latency for each doubling of the group. It begins at
its start, when the one before it has ended; a wait holds the device until it has arrived. A loop's
events are one iteration's, each as long as all iterations together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from ...comm.collective import start, wait
from ...comm.hardware import Hardware
from ...comm.kinds import FusedKind, Step
from ...features.pipelines.call import StageCall
from ...features.pipelines.schedule import Times
from ...fx_passes.digest import module_path
from ...fx_passes.loop_call import LoopCall
from ...fx_passes.schedule.arithmetic import graph_flops, op_seconds, step_seconds
from ...fx_passes.schedule.liveness import Ledger, bytes_of, inputs_bytes
from ...fx_passes.units import time_text
from ...layout.mesh import Mesh
from .kernels import Kernels, KernelTimes, exchange_seconds

COMPUTE, COMMUNICATION, EXPOSED = "compute", "communication", "exposed"


@dataclass(frozen=True)
class Event:
    """An interval in a step: an operation, a collective, or a wait for one.

    name: the node's. stream: COMPUTE, COMMUNICATION, or EXPOSED. begin, seconds: within the step.
    alive: bytes on the device meanwhile. steps: a collective's messages. runs: how often it happens
    in this time, in a loop. module: the path of the module whose forward computes it.
    """

    name: str
    stream: str
    begin: float
    seconds: float
    alive: int
    source: str | None
    backward: bool
    steps: tuple[Step, ...] = ()
    runs: int = 1
    module: str = ""

    @property
    def sent(self) -> float:
        """Return the bytes that are sent."""
        return self.runs * sum(step.sent for step in self.steps)


@dataclass(frozen=True)
class Estimate:
    """The time of one run, on one device in a mesh.

    Args:
        hardware: The device and its links.
        mesh: The devices.
        events: In the order in which the device comes to them.
        flops: Product operations on one device.
        model_flops: Product operations in the whole model, without repeated work.

    Example:
        >>> x, w = torch.ones(4, 8), torch.ones(8, 16)
        >>> specs = ("data model", "model _")
        >>> result = plan(torch.matmul, x, w, mesh=Mesh(data=2, model=4), in_specs=specs)
        >>> [event.stream for event in result.estimate("h100").events]
        ['compute', 'communication', 'exposed']
    """

    hardware: Hardware
    mesh: Mesh
    events: tuple[Event, ...]
    flops: int
    model_flops: int

    @cached_property
    def seconds(self) -> float:
        """Return a step's seconds."""
        end = max((e.begin + e.seconds for e in self.events), default=0.0)
        # Measured: a step costs more than its operations.
        return end + self.hardware.step

    def busy(self, stream: str) -> float:
        """Return the seconds that a stream is busy.

        Args:
            stream: "compute", "communication", or "exposed": the device waits for communication.

        Returns:
            Seconds.

        Example:
            >>> x, w = torch.ones(4, 8), torch.ones(8, 16)
            >>> specs = ("data model", "model _")
            >>> result = plan(torch.matmul, x, w, mesh=Mesh(data=2, model=4), in_specs=specs)
            >>> times = result.estimate("h100")
            >>> times.busy("exposed") <= times.busy("communication")
            True
        """
        return sum(e.seconds for e in self.events if e.stream == stream)

    def beside(self, event: Event) -> tuple[Event, ...]:
        """Return the operations that the device computes while a collective is sent.

        Args:
            event: One of `events`, on the stream "communication".

        Returns:
            Events on the stream "compute"; none, if nothing hides the collective.

        Example:
            >>> x, w = torch.ones(4, 8), torch.ones(8, 16)
            >>> specs = ("data model", "model _")
            >>> result = plan(torch.matmul, x, w, mesh=Mesh(data=2, model=4), in_specs=specs)
            >>> times = result.estimate("h100")
            >>> times.beside(times.events[1])
            ()
        """
        end = event.begin + event.seconds
        return tuple(
            e
            for e in self.events
            if e.stream == COMPUTE and e.begin < end and e.begin + e.seconds > event.begin
        )

    @property
    def mfu(self) -> float:
        """Return the model's operations, as a share of all devices' peak in that time."""
        return self._share(self.model_flops / self.mesh.size)

    @property
    def hfu(self) -> float:
        """Return the device's operations, repeated ones too, as a share of its peak."""
        return self._share(self.flops)

    def _share(self, count: float) -> float:
        return count / (self.seconds * self.hardware.peak) if self.seconds else 0.0

    def __str__(self) -> str:
        compute, exposed = self.busy(COMPUTE), self.busy(EXPOSED)
        hidden = max(self.busy(COMMUNICATION) - exposed, 0.0)
        return (
            f"{self.hardware.name}: step {time_text(self.seconds)}, of it compute "
            f"{time_text(compute)} and exposed communication {time_text(exposed)} "
            f"(hidden {time_text(hidden)}); MFU {self.mfu:.1%}, HFU {self.hfu:.1%}"
        )


def estimate(
    program: fx.Graph,
    model: fx.Graph,
    mesh: Mesh,
    hardware: Hardware,
    kernels: Kernels | None = None,
) -> Estimate:
    """Estimate a scheduled one-device program's time.

    model: the captured graph, at global shapes. kernels: those of a framework; None for an
    operation at a time.
    """
    events = tuple(_Streams(program, mesh, hardware, kernels).run())
    return Estimate(hardware, mesh, events, graph_flops(program, mesh), graph_flops(model, mesh))


def _times(call: StageCall, seconds: Mapping[str, float]) -> Times:
    """Return how long a stage's pieces take. seconds: for each body. Rounds are taken to be alike.

    A pair without a body of its own computes its pieces one after the other.
    """
    rounds, kinds = call.order.rounds, dict.fromkeys("FBW", 0.0)
    for body in call.bodies:
        if not body.joins:
            kinds[call.kind_of(body)] += seconds[body.__name__] / rounds
    saved = sum(
        sum(seconds[part.name] for part in body.joins) - seconds[body.__name__]
        for body in call.bodies
        if body.joins
    )
    times = Times(*kinds.values())
    return replace(times, joint=times.whole - saved / rounds)


class _Streams:
    """The clock for the two streams while a program runs."""

    def __init__(
        self, program: fx.Graph, mesh: Mesh, hardware: Hardware, kernels: Kernels | None
    ) -> None:
        self.program, self.mesh, self.hardware, self.kernels = program, mesh, hardware, kernels
        self.ledger = Ledger(program)
        self.times = None if kernels is None else KernelTimes(program, mesh, hardware, kernels)
        self.now = self.free = 0.0  # the device's time; the time at which the links are free
        self.arrival: dict[fx.Node, float] = {}

    def inner(self, body: fx.Graph) -> _Streams:
        return _Streams(body, self.mesh, self.hardware, self.kernels)

    def run(self) -> Iterator[Event]:
        for node in self.program.nodes:
            alive = self.ledger.emit(node)
            if self.times is not None and self.times.is_later(node):
                continue
            if node.target is start:
                steps = tuple(user.meta["step"] for user in node.users)
                yield self.send(node, steps, alive)
                # Where nothing is sent beside computing (a CPU), the device waits at once.
                if not self.hardware.beside:
                    yield from self.hold(node, node, alive)
            elif node.target is wait:
                yield from self.hold(node, node.args[0], alive)
            elif isinstance(node.target, LoopCall):
                yield from self.loop(node, node.target, alive)
            elif isinstance(node.target, StageCall):
                yield from self.stages(node, node.target, alive)
            elif isinstance(node.target, FusedKind):
                yield self.ring(node, alive)
            elif node.op == "call_function" and (seconds := self.seconds(node)):
                yield self.event(node, COMPUTE, self.now, seconds, alive)
                self.now += seconds

    def event(
        self,
        node: fx.Node,
        stream: str,
        begin: float,
        seconds: float,
        alive: int,
        steps: tuple[Step, ...] = (),
    ) -> Event:
        return Event(
            name=node.name,
            stream=stream,
            begin=begin,
            seconds=seconds,
            alive=alive,
            source=node.meta.get("source"),
            backward=bool(node.meta.get("backward")),
            steps=steps,
            module=module_path(node),
        )

    def seconds(self, node: fx.Node) -> float:
        """Return an operation's seconds."""
        return (
            op_seconds(node, self.mesh, self.hardware) if self.times is None else self.times(node)
        )

    def transfer(self, steps: Sequence[Step]) -> float:
        """Return the seconds for collectives that are sent as one."""
        if self.kernels is None:
            return step_seconds(steps, self.mesh, self.hardware)
        return exchange_seconds(steps, self.mesh, self.hardware, self.kernels)

    def send(self, node: fx.Node, steps: tuple[Step, ...], alive: int) -> Event:
        """Return the event for a collective that starts now."""
        # The links carry one collective at a time.
        begin, seconds = max(self.now, self.free), self.transfer(steps)
        self.free = self.arrival[node] = begin + seconds
        return self.event(node, COMMUNICATION, begin, seconds, alive, steps)

    def hold(self, node: fx.Node, collective: fx.Node, alive: int) -> Iterator[Event]:
        """Yield the time that the device waits for a collective, if it does."""
        late = self.arrival[collective] - self.now
        if late > 0:
            yield self.event(node, EXPOSED, self.now, late, alive)
            self.now += late

    def repeated(self, count: int, begin: float, alive: int) -> Iterator[Event]:
        """Yield the events in a body that runs `count` times. alive: bytes outside of it."""
        # A body's inputs are alive outside, where they are counted already.
        outside = inputs_bytes(self.program)
        for event in self.run():
            yield replace(
                event,
                begin=begin + event.begin * count,
                seconds=event.seconds * count,
                alive=alive + event.alive - outside,
                runs=event.runs * count,
            )

    def loop(self, node: fx.Node, call: LoopCall, alive: int) -> Iterator[Event]:
        """Yield a loop's events: an iteration's, and the rows and sums that it writes."""
        one, count, begin = self.inner(call.graph), call.loop.length, self.now
        before = alive - self.ledger.iterations[node]
        if call.held:  # what the first iteration needs has nothing to travel beside
            steps = [x.meta["step"] for x in call.body_results.held]
            late = self.event(node, EXPOSED, self.now, self.transfer(steps), alive)
            yield late
            self.now = begin = self.now + late.seconds
        yield from one.repeated(count, begin, before)
        self.now += one.now * count
        self.free = max(self.free, begin + one.free * count)
        written = [*call.body_results.stacks, *call.body_results.totals]
        if written:
            moved = sum(2 * bytes_of(value) for value in written)
            each = len(written) * self.hardware.launch + moved / self.hardware.memory_bandwidth
            yield replace(self.event(node, COMPUTE, self.now, each * count, alive), runs=count)
            self.now += each * count

    def stages(self, node: fx.Node, call: StageCall, alive: int) -> Iterator[Event]:
        """Yield the events in a pipeline's pieces, and how long a stage waits for others.

        Messages between stages are taken to arrive while they compute. The last stage has the loss.
        """
        start, count, before = self.now, call.loop.length, alive - self.ledger.iterations[node]
        # The most activations that the schedule keeps at once.
        kept, seconds = before + call.kept_bytes * call.most_kept, dict[str, float]()
        for body in call.bodies:
            one, begin, runs = self.inner(body.graph), self.now, call.runs_of(body)
            yield from one.repeated(runs, begin, kept)
            self.now = begin + one.now * runs
            seconds[body.__name__] = one.now
        schedule, device = call.order.timed(_times(call, seconds)), call.last_device
        # A stage waits whenever it does not compute one of its own pieces.
        idle = schedule.end - sum(slot.end - slot.begin for slot in schedule.rows[device])
        yield self.event(node, EXPOSED, self.now, idle, alive)
        # Messages are on the links while stages compute: they take no time of the device.
        for link in call.links:
            busy = self.transfer([link.message]) * count
            sent = self.event(node, COMMUNICATION, start, busy, alive, (link.message,))
            yield replace(sent, name=link.sent, backward=link.kind == "B", runs=count)
        self.now += idle

    def ring(self, node: fx.Node, alive: int) -> Event:
        """Return the event for products in a ring: each hides a chunk's transfer."""
        step = node.meta["step"]
        n = self.mesh.count(step.axes)
        products = self.seconds(node)
        transfer = self.transfer([step]) / (n - 1)
        is_hidden = self.kernels is None or self.kernels.rings
        chunk = max(products / n, transfer) if is_hidden else products / n + transfer
        # n chunks and n - 1 transfers: nothing is sent beside the last product.
        seconds = (n - 1) * chunk + products / n
        self.now, begin = self.now + seconds, self.now
        return self.event(node, COMPUTE, begin, seconds, alive, (step,))
