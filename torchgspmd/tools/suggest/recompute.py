"""Which parts of which layers are computed again, so that a step is shortest in the memory.

Of each layer, nothing, all, or one submodule may be computed again. Each layer adds its own time to
a step. Memory is at most the straight line between the memories of models whose layers all do the
same, since it is the largest of sums to which each layer adds. So this is an integer program:

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
    """The share of one layer in a step: its part in a model whose layers all do so."""

    seconds: float
    memory: float


@dataclass(frozen=True)
class RecomputeChoice:
    """The number of layers of each way, and seconds that are a lower bound of all choices."""

    counts: tuple[int, ...]
    bound: float


def has_solver() -> bool:
    """Return whether HiGHS is installed."""
    return find_spec("highspy") is not None


def choose(ways: Sequence[Way], layers: int, limit: float) -> RecomputeChoice | None:
    """Return the choice with the least seconds whose memory keeps to the limit; None without one.

    Args:
        ways: The ways of a layer.
        layers: How many there are.
        limit: Of the memory of all layers.

    Returns:
        The counts of the ways, and the bound of the linear program.
    """
    relaxed = _solve(ways, layers, limit, integer=False)
    chosen = _solve(ways, layers, limit, integer=True)
    if relaxed is None or chosen is None:
        return None
    bound = sum(n * way.seconds for n, way in zip(relaxed, ways))
    return RecomputeChoice(tuple(round(n) for n in chosen), bound)


def _solve(ways: Sequence[Way], layers: int, limit: float, integer: bool) -> list[float] | None:
    """Return the solution of the program; None without one. Numbers are scaled to about 1."""
    import highspy

    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
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
