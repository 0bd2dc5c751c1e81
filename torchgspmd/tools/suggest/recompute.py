"""Which layer parts are computed again, so that a step is shortest within the memory.

In each layer, nothing, all, or one submodule may be computed again. Each layer adds its own time to
a step. Memory is at most the straight line between models whose layers all do the same, since it is
the largest among sums to which each layer adds. So this is an integer program:

    least  sum n[o] seconds[o]   so that   sum n[o] memory[o] <= limit   and   sum n[o] = layers

HiGHS (arXiv 1803.00820) solves it, if highspy is there. Without its integers it is a linear
program, whose optimum no choice is below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(frozen=True)
class Way:
    """One layer's share in a step, in a model whose layers all do the same."""

    seconds: float
    memory: float


@dataclass(frozen=True)
class RecomputeChoice:
    """The number of layers for each way, and seconds that no choice is below."""

    counts: tuple[int, ...]
    bound: float


def has_solver() -> bool:
    """Return whether HiGHS is installed."""
    return find_spec("highspy") is not None


def choose(ways: Sequence[Way], layers: int, limit: float) -> RecomputeChoice | None:
    """Return the fastest choice whose memory keeps to the limit; None without one.

    Args:
        ways: The ways for a layer.
        layers: How many there are.
        limit: The limit for all layers' memory.

    Returns:
        The count for each way, and the linear program's bound.
    """
    relaxed = _solve(ways, layers, limit, integer=False)
    chosen = _solve(ways, layers, limit, integer=True)
    if relaxed is None or chosen is None:
        return None
    bound = sum(n * way.seconds for n, way in zip(relaxed, ways))
    return RecomputeChoice(tuple(round(n) for n in chosen), bound)


def _solve(ways: Sequence[Way], layers: int, limit: float, integer: bool) -> list[float] | None:
    """Solve the program; None without a solution. Numbers are scaled to about 1."""
    # Optional, so it is imported here.
    import highspy

    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    # Seconds are near 1e-3 and bytes near 1e9: scaled, both suit the solver's tolerances.
    longest = max(abs(way.seconds) for way in ways) or 1.0
    largest = max(max(abs(way.memory) for way in ways), limit / layers) or 1.0
    for way in ways:
        solver.addVar(0.0, float(layers))
        solver.changeColCost(solver.getNumCol() - 1, way.seconds / longest)
    columns = list(range(len(ways)))
    if integer:
        for column in columns:
            solver.changeColIntegrality(column, highspy.HighsVarType.kInteger)
    sizes = [way.memory / largest for way in ways]
    solver.addRow(-highspy.kHighsInf, limit / largest, len(ways), columns, sizes)
    solver.addRow(float(layers), float(layers), len(ways), columns, [1.0] * len(ways))
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    return list(solver.getSolution().col_value)
