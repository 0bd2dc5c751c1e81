"""Launches and saved values of a graph's operations, and a dispatcher of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from ...comm.collective import start, wait
from ...comm.hardware import Hardware
from ...comm.kinds import all_to_all
from ...fx_passes.digest import module_path
from ...fx_passes.schedule.arithmetic import flops
from ...fx_passes.schedule.liveness import bytes_of
from ..report.kernels import Kernels, KernelTimes, attends, base_of, is_transparent
from .runs import DecoderRun

# GPT-OSS in Megatron: experts.py (_apply_bias) adds the second product's bias expert by expert, in
# float32: b p, t + b p, cat, and a cast, with six kernels behind them. rope_utils.py has no fused
# kernel for positions that YaRN scales. Bytes of a number, forward and backward; kernels.
BIAS, BIAS_KERNELS, ROTARY = (28, 40), (3, 6), (24, 24)


@dataclass(frozen=True)
class Routed:
    """A dispatcher that sends a token once to each host of its experts, then to each device there.

    chosen: experts of a token. experts: all of them. in_order: a token's experts are neighbours, as
    a balanced gate for benchmarks chooses them; else they are random. repeats: a token is sent once
    for each of its experts. Source: DeepEP; Megatron's MoEAlltoAllTokenDispatcher repeats.
    """

    chosen: int
    experts: int
    in_order: bool = False
    repeats: bool = False

    def reached(self, parts: int) -> float:
        """Return how many of so many parts of the experts a token is sent to, the own one too."""
        if self.repeats:
            return self.chosen
        if self.in_order:
            return min(parts, 1 + (self.chosen - 1) * parts / self.experts)
        return parts * (1 - (1 - 1 / parts) ** self.chosen)

    def __call__(self, sent: float, hardware: Hardware, devices: int) -> float:
        """Return the seconds of an exchange without its start; sent: all choices' bytes."""
        token = sent * devices / (devices - 1) / self.chosen
        inside, *across = hardware.links
        found = token * self.reached(devices) * (1 - 1 / devices) / inside.bandwidth
        hosts = math.ceil(devices / inside.devices)
        if hosts > 1 and across:
            crossing = token * self.reached(hosts) * (1 - 1 / hosts)
            found = max(found, crossing / across[0].bandwidth)
        return found


class RunKernels(KernelTimes):
    """The launches of a graph's operations, and the values that its forward keeps."""

    def launches(self, node: fx.Node) -> int:
        """Return how many kernels an operation is: a grouped product is one for each group."""
        if node in self.regions:
            return int(node is self.regions[node][0])
        if is_transparent(node) or node.target in (start, wait):
            return 0
        groups = groups_of(node) if flops(node, self.mesh) else 1
        return groups * (1 + self.passes(node))

    def passes(self, node: fx.Node) -> int:
        """Return the kernels that quantize a product's operands; others are quantized already."""
        if attends(node) or not flops(node, self.mesh):
            return 0
        return self.kernels.recipe.kernels * len(self.new_operands(node, self.counted))

    @cached_property
    def counted(self) -> set[fx.Node]:
        return set()

    @cached_property
    def dispatched(self) -> set[fx.Node]:
        """Operations of experts' modules from their tokens' dispatch on.

        Megatron's graphs of "moe_router" and "moe_preprocess" end before it (moe_layer.py).
        """
        ways: dict[tuple[str, bool], list[fx.Node]] = {}
        for x in self.graph.nodes:
            ways.setdefault((module_path(x), bool(x.meta.get("backward"))), []).append(x)
        found: set[fx.Node] = set()
        for (_, is_backward), way in ways.items():
            sent = [i for i, x in enumerate(way) if x.target is wait]
            sent = [i for i in sent if way[i].meta["step"].target is all_to_all]
            if sent and any(groups_of(x) > 1 for x in way):
                found.update(way[: sent[-1]] if is_backward else way[sent[0] :])
        return found

    def saved(self) -> dict[fx.Node, float]:
        """Return the bytes of each value that the forward keeps for the backward.

        A product needs its operands as they were quantized; a fused kernel computes again from what
        its forward read.
        """
        needs: dict[fx.Node, float] = {}
        for node in self.graph.nodes:
            if node.op != "call_function" or not node.meta.get("backward"):
                continue
            is_product = (
                not is_transparent(node)
                and node.target not in (start, wait)
                and bool(flops(node, self.mesh))
            )
            narrow = is_product and not attends(node) and not self.kernels.is_wide(node)
            share = min(self.kernels.recipe.itemsize / 2, 1) if narrow else 1.0
            for x in map(base_of, node.all_input_nodes):
                is_stored = is_product or x not in self.regions or _is_read(x, self.regions[x])
                for each in [x] if is_stored else self.read_by(x):
                    if each.op == "call_function" and not each.meta.get("backward"):
                        if each.target not in (start, wait):
                            needs[each] = max(needs.get(each, 0.0), share * bytes_of(each))
        return needs

    def read_by(self, node: fx.Node) -> set[fx.Node]:
        """Return the values that an operation's kernel reads."""
        region = self.regions[node]
        return {base_of(x) for each in region for x in each.all_input_nodes} - set(region)


def _is_read(node: fx.Node, region: list[fx.Node]) -> bool:
    """Return True if the forward reads a value, or a view of it, in another kernel."""
    return any(
        _is_read(user, region)
        if is_transparent(user)
        else user.op == "call_function" and not user.meta.get("backward") and user not in region
        for user in node.users
    )


def groups_of(node: fx.Node) -> int:
    """Return how many matrices a grouped product on this device has; 1 for other products."""
    if not any(word in str(node.target) for word in ("block_mm", "grouped_mm", "outer")):
        return 1
    shapes = [node, *node.all_input_nodes]
    sizes = [math.prod(x.meta["shape"][:-2]) for x in shapes if len(x.meta.get("shape", ())) > 2]
    return max(sizes, default=1)


def between_products(graph: fx.Graph) -> set[str]:
    """Return a forward's operations from a layer's first grouped product to its last."""
    forward = [x for x in graph.nodes if x.op == "call_function" and not x.meta.get("backward")]
    ends: dict[str, list[int]] = {}
    for i, node in enumerate(forward):
        if groups_of(node) > 1:
            ends.setdefault(module_path(node), []).append(i)
    return {x.name for found in ends.values() for x in forward[found[0] : found[-1] + 1]}


def unfused(run: DecoderRun, hardware: Hardware, kernels: Kernels, host: float) -> Iterator[float]:
    """Yield LayerTimes of what Megatron does not fuse in a layer whose experts have biases."""
    c = run.config
    if not c.biases or run.is_automodel:
        return
    tokens = run.micro_batch * run.sequence / run.context / run.tensor
    rows, turned = tokens * c.chosen * c.width, tokens * (c.heads + c.key_heads) * c.head
    bandwidth, local = kernels.memory * hardware.memory_bandwidth, c.experts / run.expert
    yield from ((rows * b + turned * r) / bandwidth for b, r in zip(BIAS, ROTARY))
    yield from (host * count * local for count in BIAS_KERNELS)
    yield from (rows * BIAS[0] / bandwidth, host * BIAS_KERNELS[0] * local)
