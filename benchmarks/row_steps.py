"""Estimated steps of measured runs: a few layers are planned, the others follow.

One microbatch of a pipeline stage is planned on the meta device, with one layer and with two, and
with one more of each kind: the differences are a layer's. Its forward and backward are the pieces
of the pipeline's schedule; gradients and weights are exchanged once a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch

import torch
from measured_rows import Row
from row_kernels import Routed, RowKernels, groups_of
from row_models import Axes, marked
from torch import fx

import torchgspmd as gspmd
from torchgspmd import Hardware
from torchgspmd.features.pipelines.list_scheduler import Order
from torchgspmd.features.pipelines.schedule import Times
from torchgspmd.fx_passes.digest import module_path
from torchgspmd.tools.decoders import config
from torchgspmd.tools.report.estimate import COMMUNICATION, estimate
from torchgspmd.tools.report.kernels import Kernels

# Megatron's linear layers are TransformerEngine's, except for the router and the head.
WIDE = ("*router", "head", "")
GRAPHED = ("200", "300")
PRESETS = {"B300": "b300", "GB300": "gb300", "B200": "b200", "GB200": "gb200", "H100": "h100"}
GRADIENT, WEIGHT, STATES = 2, 2, 12  # bytes; float32 weights and Adam's two moments
# Seconds of the host for a kernel of eager PyTorch: 3.4 to 3.6 ms for the 112 of a layer's forward
# and backward, docs/benchmarks.md, "One rank of eight on an H200".
HOST = 3.5e-3 / 112
ROOM = 0.95  # of a device's memory; the rest is the context's and the allocator's


@dataclass(frozen=True)
class Numbers:
    """Some layers' seconds of the device and of the host, and bytes for the backward."""

    forward: float = 0.0
    backward: float = 0.0
    host_forward: float = 0.0
    host_backward: float = 0.0
    saved: float = 0.0

    def __add__(self, other: Numbers) -> Numbers:
        return Numbers(*(a + b for a, b in zip(self.values, other.values)))

    def times(self, count: float) -> Numbers:
        return Numbers(*(a * count for a in self.values))

    @property
    def values(self) -> tuple[float, ...]:
        return self.forward, self.backward, self.host_forward, self.host_backward, self.saved

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    def launched(self) -> Numbers:
        """Return them where the host is no faster than it is."""
        return replace(
            self,
            forward=max(self.forward, self.host_forward),
            backward=max(self.backward, self.host_backward),
        )


def hardware_of(row: Row) -> Hardware:
    """Return a run's hardware; a run takes as many devices of each domain as divide its number."""
    if row.system.upper() not in PRESETS:
        name = row.system.lower()
    else:
        name = PRESETS[row.system.upper()]
    found = Hardware.of(name)
    first, *rest = found.links
    joined = max(n for n in range(1, int(min(first.devices, row.gpus)) + 1) if row.gpus % n == 0)
    return replace(found, links=(replace(first, devices=joined), *rest)) if rest else found


@dataclass(frozen=True)
class Choice:
    """A value that is kept for the backward, or computed again. size: bytes."""

    size: float
    seconds: float
    module: str

    def times(self, count: float) -> Choice:
        return replace(self, size=self.size * count, seconds=self.seconds * count)


class Planned:
    """The plans of a run's layers."""

    def __init__(self, row: Row) -> None:
        self.row, self.config, self.hardware = row, config(row.model), hardware_of(row)
        if "automodel" in row.source.lower():  # its models are those of transformers
            self.config = replace(self.config, predictions=0)
        self.axes = Axes.of(row, self.config)
        self.kernels = Kernels(
            row.precision.lower(),
            WIDE,
            # The sums of sharded weights' gradients would not fit whole.
            accumulates=row.fsdp <= 1 and not row.has_adapters,
            rings=row.precision != "NVFP4",
            routed=self.routed(),
        )
        self.plans: dict[tuple[str, ...], gspmd.Plan] = {}
        self.choices: dict[tuple[str, ...], list[Choice]] = {}
        kinds = list(self.config.kinds())
        first = kinds[0]
        one = self.numbers([first])
        self.layers = {kind: self.numbers([first, kind]) + one.times(-1) for kind in kinds}
        self.ends = one + self.layers[first].times(-1)

    def routed(self) -> Routed | None:
        """Return the dispatcher. Automodel's gate for benchmarks chooses neighbouring experts."""
        if not self.axes.owners:
            return None
        in_order = "automodel" in self.row.source.lower()
        return Routed(self.config.chosen, self.config.experts, in_order)

    def plan(self, kinds: Sequence[str]) -> gspmd.Plan:
        """Plan a microbatch on the devices of a stage."""
        row, axes = self.row, self.axes
        batch = row.micro_batch * row.replicas
        head = self.config.latent.places if self.config.latent else self.config.head
        with torch.device("meta"):
            model = marked(row, self.config, kinds, axes)
            tokens = torch.empty(batch, row.sequence, dtype=torch.long)
            angles = torch.empty(row.sequence, head // 2)
        return gspmd.plan(
            model,
            tokens,
            tokens,
            angles,
            mesh=axes.mesh,
            in_specs=(axes.tokens, axes.tokens, "_ _"),
            grad=True,
            hardware=self.hardware,
            advanced={"regather": "always", "rng": "native"},
        )

    def held(self) -> Iterator[Held]:
        """Yield a device's part of each trained weight; a stage has its share of the layers.

        The first stage has the embedding, the last the head: half of both counts.
        """
        stages, kinds = self.row.pipeline, self.config.kinds()
        ends = 1.0 if stages == 1 else 0.5
        for kind, count in kinds.items():
            plan = self.plans[next(iter(kinds)), kind]
            for prefix, times in (("layers.1.", count / stages), ("", ends)):
                if prefix or kind == next(iter(kinds)):
                    yield from _held(plan, prefix, times)

    def frozen(self) -> float:
        """Return the bytes of weights that are not trained; with adapters, all but these."""
        if not self.row.has_adapters:
            return 0.0
        c = self.config
        layer = c.width * (c.head * 2 * (c.heads + c.key_heads) + 3 * c.hidden)
        total = WEIGHT * (c.layers * layer + 2 * c.width * c.words)
        return total / (self.row.tensor * self.row.pipeline * max(self.row.fsdp, 1))

    def numbers(self, kinds: Sequence[str]) -> Numbers:
        plan = self.plans[tuple(kinds)] = self.plan(kinds)
        found = estimate(
            plan.program_graph, plan.captured.graph, plan.mesh, self.hardware, self.kernels
        )
        times = RowKernels(plan.program_graph, plan.mesh, self.hardware, self.kernels)
        sums = [0.0] * 4
        for event in found.events:
            if event.stream != COMMUNICATION:
                sums[event.backward] += event.seconds
        for node in plan.program_graph.nodes:
            if node.op == "call_function" and not self.is_graphed(node):
                sums[2 + bool(node.meta.get("backward"))] += HOST * times.launches(node)
        self.choices[tuple(kinds)] = [
            Choice(size, times(node), module_path(node)) for node, size in times.saved().items()
        ]
        saved = sum(each.size for each in self.choices[tuple(kinds)])
        return Numbers(sums[0], sums[1], sums[2], sums[3], saved)

    def is_graphed(self, node: fx.Node) -> bool:
        """Return whether a CUDA graph starts an operation, on Blackwell alone."""
        if self.row.system[-3:] not in GRAPHED or groups_of(node) > 1:
            return False
        return any(fnmatch(module_path(node), glob) for glob in self.config.graphs)

    def saved(self) -> list[Choice]:
        """Return the values that a stage keeps of a microbatch, and the seconds for them."""
        stages, kinds = self.row.pipeline, self.config.kinds()
        first, found = next(iter(kinds)), []
        for kind, count in kinds.items():
            for each in self.choices[first, kind]:
                share = count if each.module.startswith("layers.1") else 0
                if kind == first and not each.module.startswith("layers"):
                    share = 1
                if share:
                    found.append(each.times(share / stages))
        return found


@dataclass(frozen=True)
class Held:
    """Weights on a device that the same devices have copies of.

    axes: along which they are replicated; states are divided over these. count: numbers.
    """

    axes: tuple[str, ...]
    count: float


@dataclass(frozen=True)
class Step:
    """An estimated step. parts: its seconds by cause."""

    seconds: float
    memory: float
    planning: float
    parts: Mapping[str, float]


def step(row: Row) -> Step:
    """Estimate a run's step.

    Raises:
        BadRow: There is no such model, or its layout cannot be planned.
    """
    begin = time.process_time()
    row.check()
    planned = Planned(row)
    layers = Numbers()
    for kind, count in planned.config.kinds().items():
        layers += planned.layers[kind].times(count)
    layers, memory = within_memory(planned, layers)
    slowest = slowest_stage(planned, layers)
    exchange, update = once(planned, slowest)
    parts = {
        "microbatches": row.microbatches * slowest.seconds,
        "messages": message_seconds(planned),
        "idle": idle_seconds(row, (layers + planned.ends).times(1 / row.pipeline)),
        "exchange": exchange,
        "update": update,
    }
    return Step(sum(parts.values()), memory, time.process_time() - begin, parts)


def within_memory(planned: Planned, layers: Numbers) -> tuple[Numbers, float]:
    """Return the layers, with what does not fit computed again or moved to the host, and bytes.

    The values that cost least for their bytes go first. What is moved travels beside the forward,
    and comes back beside the backward.
    """
    row, speed = planned.row, planned.hardware
    states, flight = states_bytes(planned), in_flight(row)
    values = planned.saved()
    memory = states + flight * sum(each.size for each in values)
    if "automodel" in row.source.lower() and memory > ROOM * speed.memory:
        # PyTorch's checkpoint: a layer keeps its input.
        tokens = row.micro_batch * row.sequence / row.context / row.tensor
        kept = planned.config.layers / row.pipeline * tokens * planned.config.width * 2
        again = replace(
            layers,
            backward=layers.backward + layers.forward,
            host_backward=layers.host_backward + layers.host_forward,
        )
        return again, states + flight * kept + planned.ends.saved
    again = moved = 0.0
    for each in sorted(values, key=lambda each: each.seconds / max(each.size, 1)):
        if memory <= ROOM * speed.memory:
            break
        again, moved, memory = again + each.seconds, moved + each.size, memory - flight * each.size
    stages = row.pipeline
    computed = replace(layers, backward=layers.backward + again * stages)
    offloaded = replace(
        layers,
        forward=max(layers.forward, moved / speed.host_bandwidth * stages),
        backward=max(layers.backward, moved / speed.host_bandwidth * stages),
    )
    return min(computed, offloaded, key=lambda numbers: numbers.seconds), memory


def slowest_stage(planned: Planned, layers: Numbers) -> Numbers:
    """Return the numbers of the stage that takes longest for a microbatch."""
    row, count = planned.row, planned.config.layers + planned.config.predictions
    layers, ends = layers.launched(), planned.ends.launched()
    chunks = row.pipeline * row.virtual_stages
    layer = layers.times(1 / count)
    if row.pipeline == 1:
        return layers + ends
    if count % chunks == 0:  # the last stage has the head, too
        return layer.times(count / row.pipeline) + ends
    # The embedding and the head take a layer's place each.
    places = math.ceil((count + 2) / row.pipeline)
    last = layer.times(places - 1) + ends
    return max(layer.times(places), last, key=lambda numbers: numbers.seconds)


def idle_seconds(row: Row, stage: Numbers) -> float:
    """Return how long a stage waits for others in its schedule: 1F1B, interleaved if virtual."""
    if row.pipeline == 1:
        return 0.0
    # The wait is that of the first microbatches and the last; those between add none.
    few = min(row.microbatches, 4 * row.pipeline)
    order = Order("1f1b", row.pipeline, few, rounds=row.virtual_stages)
    piece = stage.times(1 / row.virtual_stages)
    times = Times(piece.forward, piece.backward, 0.0)
    return order.timed(times).end - few * row.virtual_stages * times.whole


def message_seconds(planned: Planned) -> float:
    """Return how long a stage waits for its neighbours' messages.

    Interleaved stages compute another piece meanwhile; others wait, in both directions.
    """
    row, speed = planned.row, planned.hardware
    if row.pipeline == 1 or row.virtual_stages > 1:
        return 0.0
    mesh = gspmd.Mesh(stage=row.pipeline, rank=row.gpus // row.pipeline)
    tokens = row.micro_batch * row.sequence / row.context / row.tensor
    sent = tokens * planned.config.width * WEIGHT
    one = speed.transfer_seconds(mesh, ("stage",), "permute", False, sent / planned.kernels.links)
    return 2 * row.microbatches * one


def once(planned: Planned, stage: Numbers) -> tuple[float, float]:
    """Return the seconds of what comes once a step: exposed exchanges, and the update.

    Gradients are reduced beside the last microbatch's backward, new weights gathered beside the
    first one's forward; the last bucket of each, a layer's, has nothing to hide behind.
    """
    row, speed, mesh = planned.row, planned.hardware, planned.axes.mesh
    reduced = gathered = update = 0.0
    for held in planned.held():
        n = planned.axes.count(held.axes)
        sent = held.count * (n - 1) / n
        for kind, itemsize in (("reduce_scatter", GRADIENT), ("all_gather", WEIGHT)):
            seconds = (
                speed.transfer_seconds(
                    mesh, held.axes, kind, True, sent * itemsize / planned.kernels.links
                )
                if n > 1
                else 0.0
            )
            if kind == "all_gather":
                gathered += seconds
            else:
                reduced += seconds
        # Gradients are cleared, and their norm read; states are read and written.
        moved = held.count * 2 * GRADIENT + held.count / n * (GRADIENT + 2 * STATES + WEIGHT)
        update += moved / speed.memory_bandwidth
    deep = max(planned.config.layers / row.pipeline, 1.0)
    exchange = max(reduced - stage.backward, reduced / deep)
    return exchange + max(gathered - stage.forward, gathered / deep), update


def states_bytes(planned: Planned) -> float:
    """Return the bytes of weights, gradients and the optimizer's states on a device."""
    return (
        sum(
            held.count * (WEIGHT + GRADIENT + STATES / planned.axes.count(held.axes))
            for held in planned.held()
        )
        + planned.frozen()
    )


def in_flight(row: Row) -> float:
    """Return for how many microbatches the first stage keeps values at once."""
    few, rounds = min(row.microbatches, 4 * row.pipeline), row.virtual_stages
    order = Order("1f1b", row.pipeline, few, rounds=rounds)
    return max(order.schedule.kept) / rounds if row.pipeline > 1 else 1.0


def _held(plan: gspmd.Plan, prefix: str, times: float) -> Iterator[Held]:
    """Yield a device's shares of trained weights with this prefix; without it, of no layer."""
    trained = {output.input for output in plan.captured.outputs if output.kind == "gradient"}
    for i, (held, spec) in enumerate(zip(plan.captured.inputs, plan.in_specs)):
        if i not in trained or not held.name.startswith(prefix or ("words", "norm", "head")):
            continue
        used = {axis for axes in spec.dims for axis in axes or ()}
        replicated = tuple(name for name in plan.mesh.names if name not in used)
        share = plan.mesh.count(tuple(used))
        yield Held(replicated, times * math.prod(held.shape) / share)
