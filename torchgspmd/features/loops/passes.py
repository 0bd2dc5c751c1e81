"""Loop passes that take a whole program, as rows of PIPELINE call them."""

from __future__ import annotations

from torch import fx

from ...fx_passes.program import Program
from . import prefetch_rows as rows


def prefetch_rows(program: Program) -> fx.Graph:
    """Gather the first values that an iteration needs one iteration earlier."""
    rows.prefetch_rows(program.graph, program.mesh)
    return program.graph
