"""Pairs: products with a value for each pair of rows, computed a block at a time round a ring."""

from __future__ import annotations

from torch import fx

from ...fx_passes.expand.undivided import work_of
from ...fx_passes.pass_types import FEATURE_PASSES, FeaturePass
from ...fx_passes.program import Program
from . import ring_pairs


def _ring_pairs(program: Program) -> fx.Graph | None:
    found = ring_pairs.ring_pairs(work_of(program), program.request.constants.pair_bytes)
    if isinstance(found, dict):
        return program.request.expand(program.graph, found)
    return program.request.expand(program.graph) if found else None


FEATURE_PASSES["ring_pairs"] = FeaturePass(_ring_pairs, ())
