"""Lower bounds for the estimated steps of runs, from a plan of their model for one device.

A device has at least its even share of the products, at the rate of the deepest sums that it may
have. It has its share of attention, and of the memory traffic of each layer outside of its experts.
It starts no fewer kernels than one device does, but for groups of experts. Tokens travel to their
experts and back beside a shared expert and gradients of weights alone. Other exchanges inside of a
layer are taken to cost nothing, and so are values that are computed again beside rings of products.
Stages, schedule, gradients and the optimizer are composed as they are in an estimate, which grows
with each of its layers' times.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import fx

from ...comm.collective import start, wait
from ...fx_passes.digest import module_path
from ...fx_passes.schedule.arithmetic import flops
from ..report.kernels import (
    DEPTH,
    RECIPES,
    ROWS,
    attends,
    base_of,
    is_transparent,
    least_bytes,
)
from .run_kernels import RunKernels, groups_of
from .run_layouts import MODEL, Axes
from .run_programs import Programs
from .run_steps import WEIGHT, Held, Planned, trained
from .run_times import KeptValue, LayerTimes
from .runs import DecoderRun

FEW = 256  # numbers of a token at most in values that may not grow with the tokens, such as angles


class Sums(NamedTuple):
    """Sums of products. depth: their length x size, bytes of a number. grows: with the tokens.
    is_beside: they may be computed while tokens travel to their experts.
    """

    depth: float
    size: float
    grows: bool
    is_grouped: bool
    is_beside: bool


@dataclass
class LayerWork:
    """Some layers' work for one row on one device: in the forward, then in the backward.

    products: operations, by their sums. attention, traffic: seconds, which grow with the rows;
    starts: those of kernels; host: those of its launches; grouped: of them for groups of experts.
    """

    products: tuple[Counter[Sums], Counter[Sums]] = field(
        default_factory=lambda: (Counter(), Counter())
    )
    attention: list[float] = field(default_factory=lambda: [0.0, 0.0])
    traffic: list[float] = field(default_factory=lambda: [0.0, 0.0])
    starts: list[float] = field(default_factory=lambda: [0.0, 0.0])
    host: list[float] = field(default_factory=lambda: [0.0, 0.0])
    grouped: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def without(self, other: LayerWork) -> LayerWork:
        """Return this work without that of other layers."""
        found = LayerWork()
        for way in range(2):
            found.products[way].update(self.products[way])
            found.products[way].subtract(other.products[way])
            for name in ("attention", "traffic", "starts", "host", "grouped"):
                mine, theirs = getattr(self, name)[way], getattr(other, name)[way]
                getattr(found, name)[way] = mine - theirs
        return found


class Reference(Planned):
    """The plans of a model's layers for one row on one device, and their work."""

    def __init__(self, run: DecoderRun, programs: Programs | None = None) -> None:
        alone = {"gpus": 1, "global_batch": 1, "micro_batch": 1, "fsdp": 0, "tensor": 1}
        alone |= {"pipeline": 1, "context": 1, "virtual_stages": 1, "expert": 1}
        super().__init__(replace(run, **alone), programs)
        kinds = list(self.config.kinds())
        first = kinds[0]
        one = self.work([first])
        self.kinds = {kind: self.work([first, kind]).without(one) for kind in kinds}
        self.rest = one.without(self.kinds[first])
        # Trained numbers: of the experts or not, in a layer of each kind and in none.
        self.numbers_of: dict[tuple[str, bool], int] = Counter()
        for kind in kinds:
            for prefix in ("layers.1.", "") if kind == first else ("layers.1.",):
                for name, number, _ in trained(self.plans[first, kind], prefix):
                    is_expert = "experts" in kind and name.split(".")[-1].startswith(
                        ("wide", "narrow")
                    )
                    self.numbers_of[kind if prefix else "", is_expert] += number

    def work(self, kinds: Sequence[str]) -> LayerWork:
        plan, found = self.plans[tuple(kinds)], LayerWork()
        times = RunKernels(plan.program_graph, plan.mesh, self.hardware, self.kernels)
        self.choices[tuple(kinds)] = [
            KeptValue(size, self.least_seconds(node, times, kinds), module_path(node))
            for node, size in times.saved().items()
            if self.grown(node)
        ]
        times.quantized.clear()
        for node in plan.program_graph.nodes:
            if node.op == "call_function" and node.target not in (start, wait):
                self.add(found, node, times)
        return found

    def least_seconds(self, node: fx.Node, times: RunKernels, kinds: Sequence[str]) -> float:
        """Return the seconds to compute a value again, without its start and its last wave."""
        if flops(node, times.mesh) and not is_transparent(node) and not attends(node):
            return times(node) / times.waves(node) - times.kernels.gap
        if is_routed(node, kinds):
            return 0.0
        return max(times(node) - times.kernels.gap, 0.0)

    def add(self, work: LayerWork, node: fx.Node, times: RunKernels) -> None:
        """Add a node's work; outside of layers that of products alone."""
        way, path = int(bool(node.meta.get("backward"))), module_path(node)
        count = 0 if is_transparent(node) else flops(node, times.mesh)
        is_inside, host = path.startswith("layers."), self.host_seconds(node, times)
        if host and not self.is_graphed(node, times):
            is_grouped = bool(count) and groups_of(node) > 1
            (work.grouped if is_grouped else work.host)[way] += host
        if count and attends(node):
            work.attention[way] += times.attention_seconds(node, count)
            work.starts[way] += times.kernels.gap
        elif count:
            sums = self.sums(node, times, count)
            work.products[way][sums] += count
            work.starts[way] += times.kernels.gap * (not sums.is_beside)
        elif host and is_inside and not is_shared(node):
            work.starts[way] += times.kernels.gap
            work.traffic[way] += self.traffic(times.regions.get(node, [node]), times)
        if count and not attends(node) and is_inside and not is_shared(node):
            for x in times.new_operands(node, times.quantized):
                moved = times.kernels.recipe.passes * self.grown(x) / 2
                work.traffic[way] += moved / times.bandwidth

    def sums(self, node: fx.Node, times: RunKernels, count: int) -> Sums:
        recipe = RECIPES["bf16"] if times.kernels.is_wide(node) else times.kernels.recipe
        size = recipe.itemsize
        depth = count / max(math.prod(node.meta["shape"]), 1) / 2 * size
        grows, is_backward = node in times.returned, bool(node.meta.get("backward"))
        is_routing = is_backward and module_path(node).endswith("feed.router")
        is_beside = is_shared(node) or is_routing or grows and is_backward
        return Sums(depth, size, grows, groups_of(node) > 1, is_beside)

    def traffic(self, region: Sequence[fx.Node], times: RunKernels) -> float:
        """Return the seconds of what a kernel reads and writes that grows with the tokens."""
        inside = set(region)
        read: dict[fx.Node, int] = {}
        for node in region:
            for x in node.all_input_nodes:
                if base_of(x) not in inside:
                    read[base_of(x)] = max(read.get(base_of(x), 0), self.grown(x))
        written = sum(self.grown(node) for node in region if not times.stays(node, inside))
        return (sum(read.values()) + written) / times.bandwidth

    def grown(self, node: fx.Node) -> int:
        """Return a value's bytes if it grows with the tokens for sure, else 0."""
        shape = node.meta.get("shape")
        if shape is None or math.prod(shape) < FEW * self.run.sequence:
            return 0
        return least_bytes(node)


def is_routed(node: fx.Node, kinds: Sequence[str]) -> bool:
    """Return whether an operation is one of a layer's experts: these differ with their devices."""
    parts = module_path(node).split(".")
    if parts[0] != "layers" or len(parts) < 3:
        return False
    return parts[2] == "feed" and "experts" in kinds[int(parts[1])]


def is_shared(node: fx.Node) -> bool:
    """Return whether an operation is one of an expert that all tokens have."""
    return "feed.shared" in module_path(node)


class Bound(Planned):
    """A lower bound for a run's plans, in their place: `composed(Bound(...))`."""

    def __init__(self, reference: Reference, run: DecoderRun) -> None:
        self.reference, self.run = reference, run
        self.config, self.hardware = run.config, run.hardware
        self.axes, self.kernels = Axes.of(run, run.config), reference.kernels
        self.layers = {kind: self.times(work) for kind, work in reference.kinds.items()}
        self.ends = self.times(reference.rest)
        share = run.micro_batch / run.context
        # With products in rings other values are kept: a bound has none then.
        known = {} if run.tensor > 1 else reference.choices
        self.choices = dict.fromkeys(reference.choices, [])
        self.choices |= {
            kinds: [replace(x, size=x.size * share, seconds=x.seconds * share) for x in values]
            for kinds, values in known.items()
        }

    def times(self, work: LayerWork) -> LayerTimes:
        run = self.run
        share = run.micro_batch / (run.tensor * run.context)
        # A ring of causal attention may compute no masked pair; a kernel computes whole tiles.
        attention = share / (1 + ROWS / run.sequence if run.context > 1 else 1)
        exchange = (
            2 * self.exchange_seconds() if any(x.is_grouped for x in work.products[0]) else 0.0
        )
        seconds, grouped, shared = [0.0, 0.0], 0.0, 0.0
        for way, products in enumerate(work.products):
            parts = {sums: share * n / self.rate(sums) for sums, n in products.items()}
            beside = sum(part for sums, part in parts.items() if sums.is_beside)
            rest = sum(part for sums, part in parts.items() if not sums.is_beside)
            rest += work.starts[way] + share * work.traffic[way] + attention * work.attention[way]
            seconds[way] = rest + max(beside, exchange)
            if way == 0:
                shared = beside
                grouped = sum(part for sums, part in parts.items() if sums.is_grouped)
        launches = [n / max(run.expert, 1) for n in work.grouped]
        host = [work.host[way] + launches[way] for way in range(2)]
        # A shared expert may be computed between grouped products, or before.
        experts = (0.0, 0.0) if shared else (grouped, launches[0])
        return LayerTimes(seconds[0], seconds[1], host[0], host[1], *experts)

    def exchange_seconds(self) -> float:
        """Return the seconds in which a microbatch's tokens travel to their experts, or back."""
        routed, n = self.routed(), self.axes.count(self.axes.owners)
        if routed is None:
            return 0.0
        run, c = self.run, self.config
        tokens = run.micro_batch * run.sequence / (run.tensor * run.context)
        sent = tokens * c.chosen * c.width * WEIGHT * (n - 1) / n
        return routed(sent, self.hardware, n) / self.kernels.links

    def rate(self, sums: Sums) -> float:
        """Return the operations per second of products that no layout is above."""
        run, speed, depth = self.run, self.hardware, sums.depth
        if sums.grows:
            depth *= run.micro_batch * (max(run.expert, 1) if sums.is_grouped else 1)
        return speed.deep * self.kernels.peak(speed, sums.size) / (1 + DEPTH / depth)

    def held(self) -> Iterator[Held]:
        stages, axes = self.run.pipeline, self.axes
        counts = self.config.kinds()
        for is_expert in (False, True):
            used = (*axes.owners, *axes.expert_shard) if is_expert else (*MODEL, *axes.shard)
            total = sum(
                number * (counts[kind] / stages if kind else 1.0 if stages == 1 else 0.5)
                for (kind, expert), number in self.reference.numbers_of.items()
                if expert == is_expert
            )
            if total:
                others = tuple(name for name in axes.sizes if name not in used)
                yield Held(others, total / axes.count(used))
