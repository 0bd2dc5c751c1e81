"""The row that lanes add to the core's tables; PIPELINE places their pass."""

from __future__ import annotations

from torch import fx

from ...fx_passes.expand.undivided import work_of
from ...fx_passes.pass_types import FEATURE_PASSES
from ...fx_passes.program import Program
from . import batch_lanes as batching


def batch_lanes(program: Program) -> fx.Graph | None:
    """Compute lanes as one region, over the devices."""
    changed = batching.batch_lanes(work_of(program), program.request.constants)
    return program.request.expand(program.graph) if changed else None


FEATURE_PASSES["batch_lanes"] = batch_lanes
