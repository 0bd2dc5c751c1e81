"""One attempt to change a region's strategies at once.

before   every operation has the strategy that is cheapest while the others keep theirs
after    all have other strategies, if those cost less together
source   ours

A proposal sets a region's strategies. It stays if it costs less; else the former strategies are
restored.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import ClassVar

from ..ir import Op
from .neighborhood import Neighborhood, Strategy
from .op_search import OpSearch
from .regions import Region


class RegionProposals:
    """Tries proposals for regions, and remembers their outcome for like regions.

    search: the search whose candidates are counted.
    """

    search: ClassVar[str]

    def __init__(self, op_search: OpSearch) -> None:
        self.op_search, self.assignment = op_search, op_search.assignment
        self.memory, self.strategies = op_search.memory, op_search.strategies
        # proposal for a region in a phase -> the stamp of the region when it did not cost less
        self.declined: dict[tuple[Region, Hashable, tuple[float, float]], int] = {}

    def try_proposal(self, region: Region, kind: Hashable, propose: Callable[[], bool]) -> bool:
        """Assign the strategies that `propose` chooses for a region if they cost less.

        Return whether they do. kind: tells apart the proposals for one region.
        """
        at, costs = self.assignment, self.op_search.costs
        proposal_key = region, kind, costs.phase
        if self.declined.get(proposal_key) == at.stamp(region.nodes):
            return False
        before = [at.strategy_of[op.node] for op in region.ops]
        situation = (
            kind,
            costs.phase,
            *((op.key, at.neighborhood(op), s) for op, s in zip(region.ops, before)),
        )
        if situation not in self.memory.proposals:
            cost = costs.region(region)
            cheaper = propose() and costs.region(region) < cost
            self.memory.proposals[situation] = (
                [at.strategy_of[op.node] for op in region.ops] if cheaper else None
            )
            # Back first: a proposal from memory is assigned below in the same way.
            at.assign_all(region.ops, before)
        if (proposal := self.memory.proposals[situation]) is None:
            self.declined[proposal_key] = at.stamp(region.nodes)
            return False
        at.assign_all(region.ops, proposal)
        return True

    def assign_cheapest(
        self, op: Op, candidates: list[Strategy], neighborhood: Neighborhood
    ) -> None:
        """Assign the cheapest candidate, as if `neighborhood` were around it."""
        self.memory.counts[f"{self.search}_candidates"] += len(candidates)
        best = self.op_search.costs.cheapest(op, candidates, neighborhood)
        if best is not None:
            self.assignment.assign(op, best)

    def propose_forwards(self, region: Region) -> bool:
        """Choose strategies from the first operation to the last; each follows the one before."""
        for op in region.ops:
            neighborhood = self.assignment.neighborhood(op)
            if op is not region.ops[-1]:  # Nothing is required of intermediate results.
                neighborhood = self.assignment.new_neighborhood(
                    op, neighborhood.operands, ((),) * len(op.results)
                )
            self.assign_cheapest(op, self.strategies.candidates(op, neighborhood), neighborhood)
        return True

    def propose_backwards(self, region: Region) -> bool:
        """Choose strategies from the last operation to the first; each serves the one after."""
        for op in reversed(region.ops):
            neighborhood = self.assignment.neighborhood(op)
            self.assign_cheapest(
                op,
                self.strategies.candidates(op, neighborhood),
                # Operands follow: their layouts are chosen after this operation, and cost nothing
                # here.
                replace(neighborhood, operands=()),
            )
        return True
