"""Lanes: alike, independent regions of a program, computed as one with a further dimension."""

from __future__ import annotations

from torch import fx

from ...fx_passes.expand.undivided import work_of
from ...fx_passes.pass_types import FEATURE_PASSES, FeaturePass
from ...fx_passes.program import Program
from . import batch_lanes


def _batch_lanes(program: Program) -> fx.Graph | None:
    changed = batch_lanes.batch_lanes(work_of(program), program.request.constants)
    return program.request.expand(program.graph) if changed else None


FEATURE_PASSES["batch_lanes"] = FeaturePass(_batch_lanes, ())
