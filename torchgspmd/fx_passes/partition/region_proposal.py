"""One attempt to change the strategies of a region at once.

before   every operation has the strategy that is cheapest while the others keep theirs
after    all of them have other strategies, if those cost less together
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING

from ..ir import Op
from .regions import Region

if TYPE_CHECKING:
    from .solver import Solver
    from .strategies import Neighborhood, Strategy


class RegionProposals:
    """Tries proposals for regions, and remembers their outcome for like regions."""

    def __init__(self, solver: Solver) -> None:
        self.solver, self.memory = solver, solver.memory

    def try_proposal(self, region: Region, kind: Hashable, propose: Callable[[], bool]) -> bool:
        """Assign the strategies that `propose` chooses for a region if they cost less.

        Return whether they do. kind: tells apart the proposals for one region.
        """
        strategy_of, bonus = self.solver.strategy_of, self.solver.pending_bonus
        situation = (
            kind,
            bonus,
            *((op.key, self.solver.neighborhood(op), strategy_of[op.node]) for op in region.ops),
        )
        if situation not in self.memory.proposals:
            before, cost = [strategy_of[op.node] for op in region.ops], self._region_cost(region)
            cheaper = propose() and self._region_cost(region) < cost
            self.memory.proposals[situation] = (
                [strategy_of[op.node] for op in region.ops] if cheaper else None
            )
            self._assign_all(region, before)
        if self.memory.proposals[situation] is not None:
            self._assign_all(region, self.memory.proposals[situation])
        return self.memory.proposals[situation] is not None

    def assign_cheapest(
        self, op: Op, candidates: list[Strategy], neighborhood: Neighborhood
    ) -> None:
        """Assign the cheapest of the candidates, as if `neighborhood` were around it."""
        self.solver.assign(op, self.solver.cheapest(op, candidates, neighborhood))

    def exact_cost(self, ops: Collection[Op]) -> float:
        """Return the work of operations, and what moves their operands and results to all users."""
        return self.work(ops) + self.traffic(ops)

    def work(self, ops: Collection[Op]) -> float:
        """Return the arithmetic and memory traffic of operations, in bytes on the wire."""
        return sum(self.solver.strategy_of[op.node].work for op in ops)

    def traffic(self, ops: Collection[Op]) -> float:
        """Return the cost of all moves of the operands and results of operations."""
        values = dict.fromkeys(
            v for op in ops for v in (*op.operands, *op.results) if v is not None
        )
        return sum(map(self.solver.transport, values))

    def _assign_all(self, region: Region, strategies: list[Strategy]) -> None:
        """Assign strategies to the operations of a region."""
        for op, strategy in zip(region.ops, strategies):
            self.solver.assign(op, strategy)

    def _region_cost(self, region: Region) -> float:
        """Return the work of a region and the moves of its operands and of its result."""
        cost = 0.0
        for op in region.ops:
            neighborhood = self.solver.neighborhood(op)
            uses = tuple(
                () if v in region.values and v is not region.value else w
                for v, w in zip(op.results, neighborhood.required)
            )
            cost += self.solver.cost(
                op, self.solver.strategy_of[op.node], replace(neighborhood, required=uses)
            )
        return cost
