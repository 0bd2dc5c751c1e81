"""Kernels: how a framework with fused and quantized operations runs a program, and its seconds.

Elementwise operations and sums of rows of a module that lie between two products are one kernel,
which reads and writes what passes its border. Attention computes the pairs that a causal mask
leaves, and an exponential for each: two limits that FlashAttention-3 (arXiv 2407.08608) names.

Sources: TransformerEngine's documentation for the recipes and their passes; DeepEP's README for the
share of links. BabelStream's share of an H100's memory is quoted from memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from operator import getitem

import torch
from torch import fx

from ...comm.collective import start, wait
from ...comm.hardware import Hardware
from ...comm.kinds import FusedKind, Step, all_to_all
from ...compat.private_apis import OpOverload
from ...fx_passes.digest import module_path
from ...fx_passes.schedule.arithmetic import flops, is_view, step_seconds
from ...fx_passes.schedule.liveness import bytes_of
from ...layout.mesh import Mesh

aten = torch.ops.aten
TILE = 128 * 256  # numbers of a result that a multiprocessor computes at once
# DeepGEMM's README, FP8 on an H800, sums of 1,536, 2,048, 7,168 and 16,384: 990, 1,025, 1,304 and
# 1,358 of 1,979 TFLOP/s. With Hardware.deep this number gives 985, 1,069, 1,307 and 1,376.
DEPTH = 700
ROWS = 128  # queries and keys of a tile of attention
# Besides pointwise operations: what a compiler fuses with them.
FUSED = {
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.amax.default,
    aten._softmax.default,
    aten._log_softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    aten.gather.default,
    aten.index_select.default,
    aten.cat.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.full.default,
    aten.scalar_tensor.default,
    aten.arange.start_step,
}


@dataclass(frozen=True)
class Recipe:
    """A numeric format of products. itemsize: bytes of a number.

    passes: bytes that a number's quantization takes the time of, at the share of the bandwidth that
    kernels reach. rate: of products, as a share of plain ones of the same bytes. kernels: of a
    quantization.
    """

    itemsize: float
    passes: float
    rate: float = 1.0
    kernels: int = 1


# TransformerEngine's docs, examples/gemm_profiling: a layer's products with quantization and
# without. 2,483 M numbers take 2.34, 1.82 and 2.69 ms on a B300, which are 6.9, 5.4 and 8.0 bytes;
# FP8 on an H200 takes 3.5 ms, 6.2 bytes. MXFP8's products take 5 % longer than FP8's.
# TransformerEngine 2.12, quantizer.cpp and current_scaling.cu: FP8 with a tensor's current scale
# clears a maximum, finds it, computes the scale and casts.
RECIPES = {
    "bf16": Recipe(2, 0),
    "fp8": Recipe(1, 6.5, kernels=4),
    "mxfp8": Recipe(1, 5.4, 0.95),
    "nvfp4": Recipe(0.5, 8.0),
}


# The seconds of an exchange of tokens without its start: all choices' bytes over so many devices.
Dispatcher = Callable[[float, Hardware, int], float]


@dataclass(frozen=True)
class Kernels:
    """A framework's kernels.

    products: a name in RECIPES. wide: globs of the modules whose products stay in bfloat16. gap:
    seconds between two kernels, from memory of NVIDIA's page on CUDA graphs. accumulates: the
    program is one of several microbatches; sums over devices that are only returned come once a
    step. is_fused: whether elementwise operations are fused. rings: whether products hide transfers
    of their operands and results. routed: a dispatcher; None for the plan's exchanges. links: the
    share of a bandwidth that messages reach (DeepEP on SM100: 726 and 740 of 900 GB/s). memory: the
    share that kernels reach (BabelStream on an H100, from memory: 3.07 of 3.35 TB/s).
    """

    products: str = "bf16"
    wide: Sequence[str] = ()
    gap: float = 1e-6
    accumulates: bool = False
    is_fused: bool = True
    links: float = 0.8
    rings: bool = True
    routed: Dispatcher | None = None
    memory: float = 0.92

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.products]

    def peak(self, speed: Hardware, itemsize: float) -> float:
        """Return the products' operations per second for operands of so many bytes, at most.

        The same page: NVFP4's products are 1.9 times as fast as MXFP8's, on a B300 too.
        """
        plain = min(speed.rate(itemsize), 2 * speed.rate(max(itemsize, 1)))
        return plain * (self.recipe.rate if itemsize == self.recipe.itemsize else 1.0)

    def is_wide(self, node: fx.Node) -> bool:
        return any(fnmatch(module_path(node), glob) for glob in self.wide)


def exchange_seconds(
    steps: Sequence[Step], mesh: Mesh, hardware: Hardware, kernels: Kernels
) -> float:
    """Return the seconds of collectives that are sent as one, by a framework's kernels."""
    first, sent = steps[0], sum(step.sent for step in steps)
    if kernels.routed is None or first.target is not all_to_all:
        return step_seconds(steps, mesh, hardware) / kernels.links
    start = hardware.transfer_seconds(mesh, first.axes, all_to_all.name, False, 0.0)
    moved = kernels.routed(sent, hardware, mesh.count(first.axes))
    return start + moved / kernels.links


@dataclass
class KernelTimes:
    """The seconds of a graph's operations."""

    graph: fx.Graph
    mesh: Mesh
    hardware: Hardware
    kernels: Kernels

    @property
    def bandwidth(self) -> float:
        return self.kernels.memory * self.hardware.memory_bandwidth

    def __call__(self, node: fx.Node) -> float:
        """Return an operation's seconds; a region's are those of its first one."""
        if node in self.regions:
            first = self.regions[node][0]
            return self.region_seconds(self.regions[node]) if node is first else 0.0
        if is_transparent(node) or node.target is wait:
            return 0.0
        count = flops(node, self.mesh)
        if count and attends(node):
            return self.kernels.gap + self.attention_seconds(node, count)
        moved = self.moved(node)
        if not count:
            work = moved / self.bandwidth
            return self.kernels.gap + work if moved else 0.0
        return self.kernels.gap + self.product_seconds(node, count, moved)

    # ------------------------------------------------------------------------------ regions

    @cached_property
    def regions(self) -> Mapping[fx.Node, list[fx.Node]]:
        """Map each fused operation to those of its kernel, in their order."""
        level: dict[fx.Node, int] = {}
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in self.graph.nodes:
            inputs = node.all_input_nodes
            # Between operations of one level lies no product: they can run in one kernel.
            level[node] = max((level[x] + (not self._joins(x)) for x in inputs), default=0)
            if node.op != "call_function" or not _is_fused(node):
                continue
            region = [node]
            for each in map(base_of, inputs):
                other = found.get(each)
                if not self.kernels.is_fused or other is None or other is region:
                    continue
                # A framework's kernels are those of a module.
                if level[each] == level[node] and module_path(each) == module_path(node):
                    region = sorted({*other, *region}, key=self._place)
                    found |= dict.fromkeys(region, region)
            found[node] = region
        return found

    @cached_property
    def _places(self) -> dict[fx.Node, int]:
        return {node: i for i, node in enumerate(self.graph.nodes)}

    def _place(self, node: fx.Node) -> int:
        return self._places[node]

    def _joins(self, node: fx.Node) -> bool:
        return node.op != "call_function" or _is_fused(node) or is_transparent(node)

    def region_seconds(self, region: list[fx.Node]) -> float:
        inside = set(region)
        read: dict[fx.Node, int] = {}
        for node in region:
            for x in node.all_input_nodes:
                if (base := base_of(x)) not in inside:
                    read[base] = max(read.get(base, 0), least_bytes(x))
        written = sum(bytes_of(node) for node in region if not self.stays(node, inside))
        moved = sum(read.values()) + written
        return self.kernels.gap + moved / self.bandwidth if moved else 0.0

    def stays(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        """Return True if nothing outside of a region reads a value of it, views of it included."""
        return all(
            self.stays(user, inside) if is_transparent(user) else user in inside
            for user in node.users
        )

    # ----------------------------------------------------------------------------- products

    def moved(self, node: fx.Node) -> float:
        """Return the bytes that an operation reads and writes; a broadcast operand is read once."""
        results = bytes_of(node) or sum(map(bytes_of, node.users))
        return results + sum(map(least_bytes, node.all_input_nodes))

    def product_seconds(self, node: fx.Node, count: int, moved: float) -> float:
        kernels = self.kernels
        recipe = RECIPES["bf16"] if kernels.is_wide(node) else kernels.recipe
        narrow = min(recipe.itemsize / 2, 1)
        operands = sum(map(least_bytes, node.all_input_nodes))
        moved -= operands * (1 - narrow)
        if kernels.accumulates and node in self.returned:
            moved += bytes_of(node)  # the sum is read, too
        product = count / self.product_rate(node, count, recipe.itemsize)
        seconds = max(product, moved / self.bandwidth)
        for x in self.new_operands(node, self.quantized):
            seconds += kernels.gap + recipe.passes * least_bytes(x) / 2 / self.bandwidth
        return seconds

    def new_operands(self, node: fx.Node, known: set[fx.Node]) -> list[fx.Node]:
        """Return the operands that a product quantizes, and add them to those that are.

        Weights are quantized once a step; ends of groups and sizes are none.
        """
        if not self.kernels.recipe.passes or self.kernels.is_wide(node):
            return []
        found = {base_of(x): x for x in node.all_input_nodes if base_of(x) not in known}
        known.update(found)
        return [x for base, x in found.items() if base.op != "placeholder" and is_real(base)]

    def product_rate(self, node: fx.Node, count: int, itemsize: float) -> float:
        """Return the operations per second of a product, by the depth of its sums.

        A tile's result costs as much time as DEPTH bytes of its operands' rows.
        """
        peak = self.kernels.peak(self.hardware, itemsize)
        depth = count / (2 * self.results(node)[0]) * itemsize  # bytes of a row
        return self.hardware.deep * peak / ((1 + DEPTH / depth) * self.waves(node))

    def results(self, node: fx.Node) -> tuple[int, int]:
        """Return how many numbers a product computes, and in how many parts: those of a ring."""
        if not isinstance(node.target, FusedKind):
            return math.prod(node.meta["shape"]), 1
        parts = self.mesh.count(node.meta["step"].axes)
        if "shape" in node.meta:  # each device has one part of the sum over all
            return parts * math.prod(node.meta["shape"]), parts
        return math.prod(next(iter(node.users)).meta["shape"]), parts

    def waves(self, node: fx.Node) -> float:
        """Return how much longer a product takes as its last wave of tiles is not full.

        Source: NVIDIA's Matrix Multiplication Background User's Guide.
        """
        numbers, parts = self.results(node)
        units = self.hardware.units
        tiles = math.ceil(numbers / parts / TILE)
        return math.ceil(tiles / units) * units / tiles if tiles > units > 0 else 1.0

    @cached_property
    def quantized(self) -> set[fx.Node]:
        return set()

    def attention_seconds(self, node: fx.Node, count: int) -> float:
        """Return the seconds of attention: its products and its exponentials take turns.

        Half of the pairs are visible under a causal mask.
        """
        first = 1 if "backward" in str(node.target) else 0  # behind the result's gradient
        operands = [each for each in node.args if isinstance(each, fx.Node)]
        _, keys, values = (each.meta["shape"] for each in operands[first : first + 3])
        # Two products of the pairs in the forward, three over keys and two over values behind it.
        depth = 3 * keys[-1] + 2 * values[-1] if first else keys[-1] + values[-1]
        pairs = count / (2 * depth)
        # The tiles on the diagonal are computed whole.
        is_causal = any(each is True for each in node.args)
        share = 0.5 + min(ROWS / keys[-2], 1) / 2 if is_causal else 1.0
        speed = self.hardware
        product = count / (speed.efficiency * speed.rate(2))
        # In the backward a tile of 128 x 128 reads shared memory for 3,328 cycles where its
        # products take 2,560, on tensor cores that are twice as fast as Hopper's
        # (FlashAttention-4, quoted from memory).
        bound = 1.3 if first and speed.rate(2) > 2 * 989e12 else 1.0
        return share * (bound * product + pairs / speed.exponentials)

    def is_later(self, node: fx.Node) -> bool:
        """Return True for a sum of gradients over devices that comes once a step."""
        return self.kernels.accumulates and node.target in (start, wait) and node in self.returned

    @cached_property
    def returned(self) -> set[fx.Node]:
        """Values that are only returned: gradients, and their sums over devices."""
        found: set[fx.Node] = set()
        for node in reversed(self.graph.nodes):
            if node.users and all(
                user.op == "output" or user in found and _passes_on(user) for user in node.users
            ):
                found.add(node)
        return found


def _passes_on(node: fx.Node) -> bool:
    """Return whether an operation computes nothing: a sum over devices, a view, a cast."""
    return node.target in (start, wait, aten._to_copy.default) or is_transparent(node)


def attends(node: fx.Node) -> bool:
    """Return True for attention, in a ring too."""
    return "attention" in str(node.target) and not is_transparent(node)


def base_of(node: fx.Node) -> fx.Node:
    """Return the value that a view is of."""
    while is_transparent(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def is_transparent(node: fx.Node) -> bool:
    """Return True for a view, and for one of several results."""
    return node.target is getitem or isinstance(node.target, OpOverload) and is_view(node)


def is_real(node: fx.Node) -> bool:
    """Return True for a tensor of real numbers."""
    return bool(bytes_of(node)) and node.meta["dtype"].is_floating_point


def least_bytes(node: fx.Node) -> int:
    """Return the bytes of a value, or of that which it is a view of if these are fewer."""
    sizes = [bytes_of(node)]
    while is_transparent(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
        sizes.append(bytes_of(node))
    return min((size for size in sizes if size), default=0)


def _is_fused(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and (
        torch.Tag.pointwise in target.tags or target in FUSED
    )
