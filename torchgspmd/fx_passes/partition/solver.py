"""The search for the cheapest assignment: one operation at a time, then whole regions.

The first sweep goes by the propagated layouts. The following ones go by the neighbors' choices,
until nothing gets cheaper; an operation is visited again when its neighborhood changed. Then
regions change at once (see regions.py). The result is the cheapest state in which such rounds end.
At last messages are saved. moves.py has the moves.
"""

from __future__ import annotations

from .assignment import Assignment
from .cost_model import CostModel
from .ends import Ends
from .local_search import LocalSearch
from .moves import MOVES
from .neighborhood import Strategy
from .search_memory import SearchMemory, Solution
from .strategies import marked


class Solver:
    """Searches strategies for all operations, and layouts for open inputs and outputs."""

    def __init__(self, assignment: Assignment, memory: SearchMemory, ends: Ends) -> None:
        self.assignment, self.constants, self.ends = assignment, memory.constants, ends
        self.search = LocalSearch(assignment, memory, ends, MOVES)

    @property
    def costs(self) -> CostModel:
        """The present phase's cost model."""
        return self.search.costs

    def solve(self, former: Solution | None = None) -> CostModel:
        """Assign a strategy to every operation; return the last phase's cost model.

        former: from a graph with mostly the same operations; only the last phase starts from it.
        """
        at = self.assignment
        if former is not None:
            former.assign(at)
            self.search.excess = former.excess
        for op in at.ops.values():
            if op.node not in at.strategy_of:
                self.search.choose(op, first=True)
        # Only now: an open output leaves in the layout in which it is produced.
        self.ends.require()
        if former is not None:
            self.search.run_phase(self.constants.tie_break)
        else:
            self._search_by_bytes()
            self.search.try_moves("program")
        self.search.try_moves("last")
        return self.costs

    def _search_by_bytes(self) -> None:
        """Run both phases twice; regions change in the first phase the second time only."""
        at, constants, candidates = self.assignment, self.constants, []
        for rounds in (0, constants.max_region_rounds):
            self.search.run_phase(constants.pending_bonus, rounds)
            self.search.run_phase(constants.tie_break)
            candidates.append((self.costs.exact(at.ops.values()), at.snapshot()))
        # Both ends are local minima, and neither is always the better one.
        at.restore(min(candidates, key=lambda candidate: candidate[0])[1])
        self.ends.require()

    def omit_unused_marks(self) -> None:
        """Omit each mark whose layout nobody uses, if its users get the unmarked value for less."""
        at = self.assignment
        for op in at.ops.values():
            if marked(op) is None or at.layout_of[op.results[0]] in at.required_layouts(
                op.results[0], False
            ):
                continue
            # A mark on a value costs a reshard to it and one from it, if no user wants its layout.
            strategy, cost = at.strategy_of[op.node], self.costs.exact([op])
            unmarked = at.layout_of[op.operands[0]]
            at.assign(op, Strategy((), (unmarked,), (unmarked,), 0.0))
            if self.costs.exact([op]) < cost:
                at.omitted_marks.add(op.node)
            else:
                at.assign(op, strategy)
