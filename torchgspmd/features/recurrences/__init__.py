"""Recurrences: scans, and loops whose carry is affine, along a sharded sequence."""

from __future__ import annotations

import sys

from torch import fx

from ...capture.trace_context import PATCHES, around
from ...compat.patches import Patch
from ...compat.private_apis import generic_associative_scan, is_missing
from ...fx_passes.expand.undivided import work_of
from ...fx_passes.pass_types import FEATURE_PASSES, FeaturePass
from ...fx_passes.program import Program
from . import split_sequences
from .blocked_scan import scan_in_blocks


def _split_sequences(program: Program) -> fx.Graph | None:
    """Compute recurrences along a sharded sequence by shards."""
    changed = split_sequences.split_sequences(work_of(program))
    return program.request.expand(program.graph) if changed else None


FEATURE_PASSES["split_sequences"] = FeaturePass(_split_sequences, ())

if not is_missing(generic_associative_scan):
    PATCHES.append(
        Patch(
            sys.modules[generic_associative_scan.__module__],
            "generic_associative_scan",
            around(scan_in_blocks),
            "its steps take every second row, so shards exchange rows in each of them",
            feature="recurrences",
        )
    )
