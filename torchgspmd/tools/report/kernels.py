"""Kernels: how a framework with fused and quantized operations runs a program.

Sources: TransformerEngine's documentation for the recipes and their passes; DeepEP's README for the
dispatcher and the share of links. BabelStream's share of an H100's memory is quoted from memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from torch import fx

from ...comm.hardware import Hardware
from ...comm.kinds import Step, all_to_all
from ...fx_passes.digest import module_path
from ...fx_passes.schedule.arithmetic import step_seconds
from ...layout.mesh import Mesh


@dataclass(frozen=True)
class Recipe:
    """A numeric format of products. itemsize: bytes of a number.

    passes: bytes that a number's quantization moves: what it reads in bfloat16, and writes in both
    directions of memory that products read.
    """

    itemsize: float
    passes: float


# Largest magnitude, then the cast; a card before Blackwell has products of one order in memory
# alone, so that a second copy is written. A block of 32 (MX) or 16 (NVFP4) numbers has a scale.
RECIPES = {
    "bf16": Recipe(2, 0),
    "fp8": Recipe(1, 2 + 2 + 2),
    "mxfp8": Recipe(1, 2 + 2 * (1 + 1 / 32)),
    "nvfp4": Recipe(0.5, 2 + 2 + 2 * (1 / 2 + 1 / 16)),
}


@dataclass(frozen=True)
class Routed:
    """A dispatcher that sends a token once to each host of its experts, then to each device there.

    chosen: experts of a token. experts: all of them. in_order: a token's experts are neighbours, as
    a balanced gate for benchmarks chooses them; else they are random. Source: DeepEP.
    """

    chosen: int
    experts: int
    in_order: bool = False

    def reached(self, parts: int) -> float:
        """Return how many of so many parts of the experts a token is sent to, the own one too."""
        if self.in_order:
            return min(parts, 1 + (self.chosen - 1) * parts / self.experts)
        return parts * (1 - (1 - 1 / parts) ** self.chosen)

    def seconds(self, sent: float, hardware: Hardware, devices: int) -> float:
        """Return the seconds of an exchange without its start; sent: all choices' bytes."""
        token = sent * devices / (devices - 1) / self.chosen
        inside, *across = hardware.links
        found = token * self.reached(devices) * (1 - 1 / devices) / inside.bandwidth
        hosts = math.ceil(devices / inside.devices)
        if hosts > 1 and across:
            crossing = token * self.reached(hosts) * (1 - 1 / hosts)
            found = max(found, crossing / across[0].bandwidth)
        return found


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
    routed: Routed | None = None
    memory: float = 0.92

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.products]

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
    moved = kernels.routed.seconds(sent, hardware, mesh.count(first.axes))
    return start + moved / kernels.links
