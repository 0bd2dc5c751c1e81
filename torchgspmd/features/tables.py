"""The module that puts the tables KINDS, RULES, REWRITES, PATCHES and FEATURE_PASSES together.

Importing a feature's rows adds them. PIPELINE (fx_passes/pipeline.py) places features' passes among
the core's, by name. Only compiler/plan.py imports this module; the core imports no feature.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from ..capture.trace_context import without_patches
from ..comm.kinds import without_kinds
from ..errors import ShardingError, did_you_mean
from ..fx_passes.pipeline import without_passes
from ..rules.registry import without_rules
from ..rules.rewrites import end_tables, without_rewrites
from . import (
    attention,
    exchanges,
    experts,
    lanes,
    loops,
    pairs,
    pipelines,
    recurrences,
    unknown_sizes,
    windows,
)

_FOLDERS = (
    *(attention, exchanges, experts, lanes, loops),
    *(pairs, pipelines, recurrences, unknown_sizes, windows),
)
FEATURES = tuple(folder.__name__.rpartition(".")[2] for folder in _FOLDERS)
end_tables(__name__)


@contextmanager
def without_feature(name: str) -> Generator[None, None, None]:
    """Remove a feature's rows from all tables while in this context."""
    if name not in FEATURES:
        fix = did_you_mean(name, FEATURES)
        raise ShardingError.here(f"there is no feature '{name}'", fix=fix)
    tables = without_rules, without_rewrites, without_kinds, without_patches, without_passes
    with ExitStack() as stack:
        for without in tables:
            stack.enter_context(without(name))
        yield
