"""A step's estimated numbers, as a search compares, extrapolates and minimizes them.

In each layer, nothing, all, or one submodule may be computed again. Each layer adds its own time to
a step. Memory is at most the straight line between models whose layers all do the same, since it is
the largest among sums to which each layer adds. So this is an integer program:

    least  sum n[o] seconds[o]   so that   sum n[o] memory[o] <= limit   and   sum n[o] = layers

HiGHS (arXiv 1803.00820) solves it, if highspy is there. Without its integers it is a linear
program, whose optimum no choice is below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec

from ...comm.hardware import Hardware
from ..report.report import Report

ACCUMULATION = 3  # times a gradient is read or written to add it to other microbatches'


@dataclass(frozen=True)
class Numbers:
    """A step on one device: seconds, and bytes. saved: memory kept for the backward."""

    seconds: float
    memory: float
    sent_bytes: float
    gradients: float
    saved: float

    @classmethod
    def of(cls, report: Report) -> Numbers:
        memory = report.memory
        return cls(
            report.estimate.seconds,
            float(memory.peak + memory.optimizer),
            sum(row.sent_bytes for row in report.collectives),
            float(memory.gradients),
            float(memory.saved),
        )

    def towards(self, other: Numbers, share: float) -> Numbers:
        """Return numbers between these and others: 0 is these, 1 the others, 2 twice as far."""
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return Numbers(*(a + share * (b - a) for a, b in pairs))

    def plus(self, other: Numbers, less: Numbers) -> Numbers:
        """Return these with the change from `less` to `other` added."""
        names = [f.name for f in fields(self)]
        change = {n: getattr(other, n) - getattr(less, n) for n in names}
        return Numbers(*(getattr(self, n) + change[n] for n in names))

    def repeated(self, count: int, hardware: Hardware) -> Numbers:
        """Return the numbers for so many microbatches, whose gradients add up."""
        if count == 1:
            return self
        # The first microbatch writes its gradients; each later one adds to them.
        adding = (count - 1) * ACCUMULATION * self.gradients / hardware.memory_bandwidth
        return replace(
            self,
            seconds=count * self.seconds + adding,
            memory=self.memory + self.gradients,
            sent_bytes=count * self.sent_bytes,
        )


@dataclass(frozen=True)
class RecomputeChoice:
    """The number of layers for each way, and seconds that no choice is below."""

    counts: tuple[int, ...]
    bound: float


def has_solver() -> bool:
    return find_spec("highspy") is not None


def choose(ways: Sequence[Numbers], layers: int, limit: float) -> RecomputeChoice | None:
    """Return the fastest choice whose memory keeps to the limit; None without one.

    ways: a step's numbers if all layers do the same.
    """
    ways = [Numbers(0, 0, 0, 0, 0).towards(each, 1 / layers) for each in ways]
    relaxed = _solve(ways, layers, limit, integer=False)
    chosen = _solve(ways, layers, limit, integer=True)
    if relaxed is None or chosen is None:
        return None
    bound = sum(n * way.seconds for n, way in zip(relaxed, ways))
    return RecomputeChoice(tuple(round(n) for n in chosen), bound)


def _solve(ways: Sequence[Numbers], layers: int, limit: float, integer: bool) -> list[float] | None:
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
