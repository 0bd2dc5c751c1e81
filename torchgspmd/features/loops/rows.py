"""The rows that loops add to the core's tables; PIPELINE places their passes."""

from __future__ import annotations

from torch import fx

from ...fx_passes.pass_types import FEATURE_PASSES
from ...fx_passes.program import Program
from . import capture, recurrent, rule  # noqa: F401 (rows of REWRITES and RULES)
from .list_rows import list_rows
from .outline_loops import outline_loops
from .prefetch_rows import prefetch_rows
from .sink_exits import sink_exits


def _prefetch_rows(program: Program) -> fx.Graph:
    prefetch_rows(program.graph, program.mesh)
    return program.graph


FEATURE_PASSES |= {
    "sink_exits": lambda p: sink_exits(p.graph),
    "outline_loops": lambda p: outline_loops(p.graph, p.mesh),
    "prefetch_rows": _prefetch_rows,
    "list_rows": lambda p: list_rows(p.graph),
}
