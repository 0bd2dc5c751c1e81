"""Change the strategies of several operations at once, where none of them gains alone.

before   every operation of a region has the strategy that is cheapest while the others keep theirs
after    all of them have other ones, which cost less together
needs    the solver of `partition`, whose assignment it changes
source   ours

A proposal sets the strategies of a region. It stays if it costs less; else the former strategies
are restored.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from ..ir import Op
from .body_search import BodySearch
from .region_proposal import RegionProposals
from .regions import Region, chains, sources
from .sum_search import SumSearch

if TYPE_CHECKING:
    from .solver import Solver


class RegionSearch:
    """Proposals for all regions of a graph: sums, chains, contractions, bodies and threads."""

    def __init__(self, solver: Solver) -> None:
        self.sums, self.chains = SumSearch(solver), ChainSearch(solver)
        self.bodies = BodySearch(solver)

    def improve(self) -> list[bool]:
        """Try sums, chains and contractions once; return of each whether it changed."""
        return [*self.sums.improve(), *self.chains.improve()]

    def lay_out(self) -> bool:
        """Try other layouts for whole bodies and threads; return whether that helped."""
        return self.bodies.lay_out()

    def resolve(self) -> bool:
        """Reduce sums early that would be reduced several times; return whether that helped."""
        return self.sums.reduce_early()

    def exact_cost(self, ops: Collection[Op]) -> float:
        """Return the work of operations, and what moves their operands and results to all users."""
        return self.sums.exact_cost(ops)


class ChainSearch(RegionProposals):
    """Tries other layouts for chains, alone or with the contraction before."""

    def __init__(self, solver: Solver) -> None:
        super().__init__(solver)
        self.chains, self.sources = chains(solver.ops), sources(solver.ops)

    def improve(self) -> list[bool]:
        """Try every chain and contraction once; return of each whether it changed."""
        return [*map(self._improve_chain, self.chains), *map(self._improve_source, self.sources)]

    def _improve_chain(self, chain: Region) -> bool:
        """Lay out a chain like its operand, or as its result is required."""
        return self.try_proposal(
            chain, "in", lambda: self._propose_forwards(chain)
        ) or self.try_proposal(chain, "out", lambda: self._propose_backwards(chain))

    def _improve_source(self, source: Region) -> bool:
        """Compute a contraction as it costs least by itself; the chain behind it follows."""
        return self.try_proposal(source, "in", lambda: self._propose_forwards(source))

    def _propose_forwards(self, chain: Region) -> bool:
        """Choose strategies from the first operation to the last; each follows the one before."""
        for op in chain.ops:
            neighborhood = self.solver.neighborhood(op)
            if op is not chain.ops[-1]:  # Nothing is required of intermediate results.
                neighborhood = self.solver.new_neighborhood(op, neighborhood.operands, ((),))
            self.assign_cheapest(
                op, self.solver.strategies.candidates(op, neighborhood), neighborhood
            )
        return True

    def _propose_backwards(self, chain: Region) -> bool:
        """Choose strategies from the last operation to the first; each serves the one after."""
        for op in reversed(chain.ops):
            neighborhood = self.solver.neighborhood(op)
            self.assign_cheapest(
                op,
                self.solver.strategies.candidates(op, neighborhood),
                replace(neighborhood, operands=()),
            )
        return True
