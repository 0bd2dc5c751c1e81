"""The cheapest strategy for one operation, while those around it keep theirs."""

from __future__ import annotations

from ...shard_spec import Axes
from ..ir import Op
from .assignment import Assignment
from .cost_model import CostModel
from .neighborhood import Neighborhood, Strategy
from .search_memory import SearchMemory


class OpSearch:
    """Chooses strategies for single operations. costs: the present phase's cost model."""

    def __init__(self, assignment: Assignment, costs: CostModel, memory: SearchMemory) -> None:
        self.assignment, self.costs, self.memory = assignment, costs, memory
        self.strategies = memory.strategies

    def choose(self, op: Op, first: bool = False) -> bool:
        """Assign the cheapest strategy to an operation; return whether it changed."""
        at = self.assignment
        if op.node not in at.worklist:
            return False
        current = at.strategy_of.get(op.node)
        best = self.best_strategy(op, at.neighborhood(op, first), current)
        if best is not None and best is not current:
            at.assign(op, best)
        at.worklist.discard(op.node)
        return best is not current

    def best_strategy(
        self,
        op: Op,
        neighborhood: Neighborhood,
        current: Strategy | None,
        forced: tuple[Axes, str | None] | None = None,
    ) -> Strategy | None:
        """Return the cheapest strategy, among equals the current one; None if there is none.

        forced: axes, and the only factor that they may shard (None: no factor).
        """
        ops = self.assignment.ops
        # Rows that an operand only moves need no halo of their own, so the choice depends on it.
        moved = (
            tuple(ops[v].key for v in op.operands if v in ops and ops[v].rule.moves)
            if op.rule.halo
            else ()
        )
        # All that decides is in the key: equal layers share one search.
        key = (op.key, neighborhood, current, forced, self.costs.phase, moved)
        if key not in self.memory.choices:
            candidates = self.strategies.candidates(
                op, neighborhood, dict.fromkeys(forced[0], forced[1:]) if forced else None
            )
            if current is not None:
                # First among equals: an operation that gains nothing keeps its strategy, so
                # searches end.
                candidates = [current, *candidates]
            self.memory.counts["op_candidates"] += len(candidates)
            self.memory.choices[key] = self.costs.cheapest(op, candidates, neighborhood)
        return self.memory.choices[key]
