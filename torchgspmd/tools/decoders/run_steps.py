"""Estimated steps of measured runs: a few layers are planned, the others follow.

One microbatch of a pipeline stage is planned on the meta device, with one layer and with two, and
with one more of each kind: the differences are a layer's. Its forward and backward are the pieces
of the pipeline's schedule; gradients and weights are exchanged once a step.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch

from torch import fx

from ...comm.kinds import all_gather, reduce_scatter
from ...compiler.plan import Plan
from ...fx_passes.digest import module_path
from ...layout.mesh import Mesh
from ..report.estimate import COMMUNICATION, estimate
from ..report.kernels import Kernels
from .run_kernels import Routed, RunKernels, between_products, groups_of, unfused
from .run_layouts import Axes
from .run_programs import Programs
from .run_times import KeptValue, LayerTimes
from .runs import DecoderRun

# Megatron's linear layers are TransformerEngine's, except for the router and the head.
WIDE = ("*router", "head", "")
GRAPHED = ("b200", "b300")
GRADIENT, WEIGHT, STATES = 2, 2, 12  # bytes; float32 weights and Adam's two moments
# Seconds of the host for a kernel of eager PyTorch: 3.4 to 3.6 ms for the 112 of a layer's forward
# and backward, docs/benchmarks.md, "One rank of eight on an H200".
HOST = 3.5e-3 / 112
ROOM = 0.95  # of a device's memory; the rest is the context's and the allocator's


class Planned:
    """The plans of a run's layers."""

    def __init__(self, run: DecoderRun, programs: Programs | None = None) -> None:
        run.check()
        self.programs = Programs() if programs is None else programs
        self.run, self.config, self.hardware = run, run.config, run.hardware
        self.axes = Axes.of(run, self.config)
        self.kernels = Kernels(
            run.precision.lower(),
            WIDE,
            # The sums of sharded weights' gradients would not fit whole.
            accumulates=run.fsdp <= 1 and not run.has_adapters,
            # Automodel's recipes of adapters compile sharded models alone, and force transformers'
            # modules on one device (examples/llm_benchmark, force_hf and enable_compile).
            is_fused=not run.has_adapters or run.tensor > 1,
            rings=run.precision != "NVFP4",
            routed=self.routed(),
        )
        self.plans: dict[tuple[str, ...], Plan] = {}
        self.choices: dict[tuple[str, ...], list[KeptValue]] = {}
        self.known: dict[tuple[str, ...], dict[str, LayerTimes]] = {}
        kinds = list(self.config.kinds())
        first = kinds[0]
        deep = {kind: self.program(first, kind) for kind in kinds}
        plain = {kind: self.last_layer(layers) for kind, layers in deep.items()}
        more = LayerTimes(*unfused(run, self.hardware, self.kernels, HOST))
        self.layers = {kind: found + more for kind, found in plain.items()}
        alike = deep[first]
        self.ends = self.numbers(alike) + plain[first].times(-len(alike))

    def program(self, first: str, kind: str) -> tuple[str, ...]:
        """Return the layers of a program whose last one is planned as those in a deep model.

        A single layer may be planned in another way than with a second one; a third one decides.
        """
        for kinds in ((first,), (first, kind)):
            self.numbers(kinds)
        alone, second = (_first_layer(self.plans[kinds]) for kinds in ((first,), (first, kind)))
        return (first, kind) if alone == second else (first, kind, kind)

    def last_layer(self, kinds: tuple[str, ...]) -> LayerTimes:
        """Return the times of a program's last layer, by the modules of its operations.

        Two programs may be planned in other ways: their difference is no layer.
        """
        products = self.numbers(kinds).products - self.numbers(kinds[:-1]).products
        return replace(self.parts(kinds)[f"layers.{len(kinds) - 1}"], products=products)

    def on(self, run: DecoderRun) -> Planned:
        """Return these plans for a run with other stages and microbatches, planned alike."""
        found = copy.copy(self)
        found.run, found.axes = run, Axes.of(run, self.config)
        return found

    def routed(self) -> Routed | None:
        """Return the dispatcher. Automodel's gate for benchmarks chooses neighbouring experts."""
        if not self.axes.owners:
            return None
        in_order, c = self.run.is_automodel, self.config
        return Routed(c.chosen, c.experts, in_order, c.repeats and not in_order)

    def held(self) -> Iterator[Held]:
        """Yield a device's part of each trained weight; a stage has its share of the layers.

        The first stage has the embedding, the last the head: half of both counts.
        """
        stages, kinds = self.run.pipeline, self.config.kinds()
        ends = 1.0 if stages == 1 else 0.5
        for kind, count in kinds.items():
            plan = self.plans[next(iter(kinds)), kind]
            for prefix, times in (("layers.1.", count / stages), ("", ends)):
                if prefix or kind == next(iter(kinds)):
                    for _, number, used in trained(plan, prefix):
                        others = tuple(name for name in self.axes.sizes if name not in used)
                        yield Held(others, times * number / self.axes.count(used))

    def frozen(self) -> float:
        """Return the bytes of weights that are not trained; with adapters, all but these."""
        if not self.run.has_adapters:
            return 0.0
        c = self.config
        layer = c.width * (c.head * 2 * (c.heads + c.key_heads) + 3 * c.hidden)
        total = WEIGHT * (c.layers * layer + 2 * c.width * c.words)
        return total / (self.run.tensor * self.run.pipeline * max(self.run.fsdp, 1))

    def numbers(self, kinds: Sequence[str]) -> LayerTimes:
        """Return the times of a program with these layers."""
        parts = self.parts(tuple(kinds))
        return sum(parts.values(), LayerTimes())

    def parts(self, kinds: tuple[str, ...]) -> dict[str, LayerTimes]:
        """Return the times of each layer of a program, by the modules of its operations.

        What is in no layer stands under no name.
        """
        if kinds not in self.known:
            self.known[kinds] = self._parts(kinds)
        return self.known[kinds]

    def _parts(self, kinds: tuple[str, ...]) -> dict[str, LayerTimes]:
        plan = self.plans[kinds] = self.programs.plan(self.run, kinds, self.axes)
        graph, mesh = plan.program_graph, plan.mesh
        found = estimate(graph, plan.captured.graph, mesh, self.hardware, self.kernels)
        times = RunKernels(graph, mesh, self.hardware, self.kernels)
        between = between_products(graph)
        layers = {node.name: _layer_of(module_path(node)) for node in graph.nodes}
        sums = {layer: [0.0] * 8 for layer in {*layers.values(), ""}}
        for event in found.events:
            part = sums[layers[event.name]]
            part[7] += event.sent
            if event.stream != COMMUNICATION:
                part[event.backward] += event.seconds
                part[4] += event.seconds * (event.name in between)
        for node in graph.nodes:
            if node.op == "call_function" and not self.is_graphed(node, times):
                host, part = self.host_seconds(node, times), sums[layers[node.name]]
                part[2 + bool(node.meta.get("backward"))] += host
                part[5] += host * (node.name in between)
        self.choices[kinds] = []
        for node, size in times.saved().items():
            sums[layers[node.name]][6] += size
            self.choices[kinds].append(KeptValue(size, times(node), module_path(node)))
        parts = {layer: LayerTimes(*part) for layer, part in sums.items()}
        products = LayerTimes(products=found.model_flops / mesh.size)
        return {**parts, "": parts[""] + products}

    def host_seconds(self, node: fx.Node, times: RunKernels) -> float:
        """Return the host's seconds for an operation.

        Each expert's weight is a parameter in Megatron: autograd and a hook pass on its gradient
        (distributed_data_parallel.py, _make_backward_post_hook; Automodel stacks the experts).
        """
        launches, groups = times.launches(node), groups_of(node)
        hooks = groups if launches and groups > 1 and node in times.returned else 0
        return HOST * (launches + (0 if self.run.is_automodel else hooks))

    def is_graphed(self, node: fx.Node, times: RunKernels) -> bool:
        """Return whether a CUDA graph starts an operation, on Blackwell alone; a TPU runs one."""
        if self.hardware.name.startswith("tpu"):
            return True
        if not self.hardware.name.endswith(GRAPHED):
            return False
        if groups_of(node) > 1 or node in times.dispatched:
            return False
        return any(fnmatch(module_path(node), glob) for glob in self.config.graphs)

    def saved(self) -> list[KeptValue]:
        """Return the values that a stage keeps of a microbatch, and the seconds for them."""
        stages, kinds = self.run.pipeline, self.config.kinds()
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
class RunStep:
    """An estimated step. parts: its seconds by cause. sent: bytes by a device. products: operations
    of the model in a device's share.
    """

    seconds: float
    memory: float
    planning: float
    parts: Mapping[str, float]
    sent: float = 0.0
    products: float = 0.0


def step(run: DecoderRun) -> RunStep:
    """Estimate a run's step.

    Raises:
        ShardingError: There is no such model, or its layout cannot be planned.
    """
    begin = time.process_time()
    found = composed(Planned(run))
    return replace(found, planning=time.process_time() - begin)


def composed(planned: Planned) -> RunStep:
    """Return the step of planned layers in their stages."""
    run, layers = planned.run, LayerTimes()
    for kind, count in planned.config.kinds().items():
        layers += planned.layers[kind].times(count)
    layers, memory = within_memory(planned, layers)
    slowest = slowest_stage(planned, layers)
    exchange, update = once(planned, slowest)
    parts = {
        "microbatches": run.microbatches * slowest.seconds,
        "messages": message_seconds(planned),
        "idle": idle_seconds(run, (layers + planned.ends).times(1 / run.pipeline)),
        "exchange": exchange,
        "update": update,
    }
    one = (layers + planned.ends).times(run.microbatches / run.pipeline)
    # Gradients are reduced, and new weights gathered.
    once_sent = sum(
        held.count * (GRADIENT + WEIGHT) * (1 - 1 / planned.axes.count(held.axes))
        for held in planned.held()
    )
    return RunStep(sum(parts.values()), memory, 0.0, parts, one.sent + once_sent, one.products)


def within_memory(planned: Planned, layers: LayerTimes) -> tuple[LayerTimes, float]:
    """Return the layers, with what does not fit computed again or moved to the host, and bytes.

    The values that cost least for their bytes go first. What is moved travels beside the forward,
    and comes back beside the backward.
    """
    run, speed = planned.run, planned.hardware
    states, values = states_bytes(planned), planned.saved()
    if not values:
        return layers, states
    flight = in_flight(run)
    memory = states + flight * sum(each.size for each in values)
    if run.is_automodel and memory > ROOM * speed.memory:
        # PyTorch's checkpoint: a layer keeps its input.
        tokens = run.micro_batch * run.sequence / run.context / run.tensor
        kept = planned.config.layers / run.pipeline * tokens * planned.config.width * 2
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
    stages = run.pipeline
    computed = replace(layers, backward=layers.backward + again * stages)
    offloaded = replace(
        layers,
        forward=max(layers.forward, moved / speed.host_bandwidth * stages),
        backward=max(layers.backward, moved / speed.host_bandwidth * stages),
    )
    return min(computed, offloaded, key=lambda numbers: numbers.seconds), memory


def slowest_stage(planned: Planned, layers: LayerTimes) -> LayerTimes:
    """Return the numbers of the stage that takes longest for a microbatch."""
    run, count = planned.run, planned.config.layers + planned.config.predictions
    layers, ends = layers.launched(), planned.ends.launched()
    chunks = run.pipeline * run.virtual_stages
    layer = layers.times(1 / count)
    if run.pipeline == 1:
        return layers + ends
    if count % chunks == 0:  # the last stage has the head, too
        return layer.times(count / run.pipeline) + ends
    # The embedding and the head take a layer's place each.
    places = math.ceil((count + 2) / run.pipeline)
    last = layer.times(places - 1) + ends
    return max(layer.times(places), last, key=lambda numbers: numbers.seconds)


def idle_seconds(run: DecoderRun, stage: LayerTimes) -> float:
    """Return how long a stage waits for others: for the first microbatch's way and the last's back.

    Source: 1F1B, interleaved if virtual, arXiv 2104.04473, section 2.2.
    """
    return (run.pipeline - 1) * stage.seconds / run.virtual_stages


def message_seconds(planned: Planned) -> float:
    """Return how long a stage waits for its neighbours' messages.

    Interleaved stages compute another piece meanwhile; others wait, in both directions.
    """
    run, speed = planned.run, planned.hardware
    if run.pipeline == 1 or run.virtual_stages > 1:
        return 0.0
    mesh = Mesh(stage=run.pipeline, rank=run.gpus // run.pipeline)
    tokens = run.micro_batch * run.sequence / run.context / run.tensor
    sent = tokens * planned.config.width * WEIGHT
    one = speed.transfer_seconds(mesh, ("stage",), "permute", False, sent / planned.kernels.links)
    return 2 * run.microbatches * one


def once(planned: Planned, stage: LayerTimes) -> tuple[float, float]:
    """Return the seconds of what comes once a step: exposed exchanges, and the update.

    Gradients are reduced beside the last microbatch's backward, new weights gathered beside the
    first one's forward; the last bucket of each, a layer's, has nothing to hide behind.
    """
    run, speed, mesh = planned.run, planned.hardware, planned.axes.mesh
    reduced = gathered = update = 0.0
    for held in planned.held():
        n = planned.axes.count(held.axes)
        sent = held.count * (n - 1) / n
        for kind, itemsize in ((reduce_scatter, GRADIENT), (all_gather, WEIGHT)):
            size, seconds = sent * itemsize / planned.kernels.links, 0.0
            if n > 1:
                seconds = speed.transfer_seconds(mesh, held.axes, kind.name, True, size)
            if kind is all_gather:
                gathered += seconds
            else:
                reduced += seconds
        # Gradients are cleared, and their norm read; states are read and written.
        moved = held.count * 2 * GRADIENT + held.count / n * (GRADIENT + 2 * STATES + WEIGHT)
        update += moved / speed.memory_bandwidth
    deep = max(planned.config.layers / run.pipeline, 1.0)
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


def in_flight(run: DecoderRun) -> float:
    """Return for how many microbatches the first stage keeps values at once.

    Source: Megatron-LM's schedules.py, the warmup of both schedules.
    """
    stages, rounds = run.pipeline, run.virtual_stages
    warmup = stages - 1 if rounds == 1 else 2 * (stages - 1) + (rounds - 1) * stages
    return min(warmup + 1, run.microbatches * rounds) / rounds


def _layer_of(module: str) -> str:
    """Return the layer that has a module; no name for one outside of the layers."""
    words = module.split(".")
    return ".".join(words[:2]) if words[0] == "layers" and len(words) > 1 else ""


def _first_layer(plan: Plan) -> Counter[str]:
    """Count the first layer's operations, by their names."""
    nodes = [node for node in plan.program_graph.nodes if node.op == "call_function"]
    return Counter(str(node.target) for node in nodes if module_path(node).startswith("layers.0."))


def trained(plan: Plan, prefix: str) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Yield name, numbers and axes of trained weights with this prefix; without it, of no layer."""
    changed = {output.input for output in plan.captured.outputs if output.kind == "gradient"}
    for i, (held, spec) in enumerate(zip(plan.captured.inputs, plan.in_specs)):
        if i in changed and held.name.startswith(prefix or ("words", "norm", "head")):
            used = {axis for axes in spec.dims for axis in axes or ()}
            yield held.name, math.prod(held.shape), tuple(used)
