"""Changes the strategies of several operations at once, where `partition` gets no further one by one.

before   every operation of a region has the strategy that is cheapest while the others keep theirs
after    all of them have other ones, which cost less together
needs    the solver of `partition`, whose choices it changes
source   ours

A proposal sets the strategies of a region; it stays if it costs less, else the former ones are put back.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..mesh import Mesh
from ..shard_spec import ShardSpec
from .graph import Op
from .regions import Region, chains, sums

if TYPE_CHECKING:
    from .partition import Solver, Strategy


class Together:
    """The regions of a graph, and what was proposed for them."""

    def __init__(self, solver: Solver):
        self.solver, self.memo = solver, {}
        self.sums, self.chains = sums(solver.ops), chains(solver.ops)

    def improve(self) -> list[bool]:
        """Tries all regions once; says of each whether it changed."""
        return [*map(self._pend, self.sums), *map(self._move, self.chains)]

    def _try(self, region: Region, way: str, propose: Callable[[], bool]) -> bool:
        """Takes the strategies that `propose` gives to a region, all at once, if they cost less; says whether.

        way: tells apart the proposals for a region, whose outcome is remembered for regions in the same situation.
        """
        chosen, late = self.solver.chosen, self.solver.late
        situation = (way, late, *((op.key, self.solver.around(op), chosen[op.node]) for op in region.ops))
        if situation not in self.memo:
            before, cost = [chosen[op.node] for op in region.ops], self._cost(region)
            cheaper = propose() and self._cost(region) < cost
            self.memo[situation] = [chosen[op.node] for op in region.ops] if cheaper else None
            self._take(region, before)
        if self.memo[situation] is not None:
            self._take(region, self.memo[situation])
        return self.memo[situation] is not None

    def _take(self, region: Region, strategies: list[Strategy]) -> None:
        for op, strategy in zip(region.ops, strategies):
            self.solver.take(op, strategy)

    def _cost(self, region: Region) -> float:
        """Of a region: its work, what brings the operands to it and its result to where that is used."""
        cost = 0.0
        for op in region.ops:
            available, wanted = self.solver.around(op)
            uses = [() if v in region.values and v is not region.value else w for v, w in zip(op.results, wanted)]
            cost += self.solver.cost(op, self.solver.chosen[op.node], available, uses)
        return cost

    # -------------------------------------------------------------------------------------- sums

    def _pend(self, total: Region) -> bool:
        """Lets all summands stay pending over one more axis if one reduction of their sum is cheaper than what there is.

        None of them can do so alone: an addition passes on only what is pending in both operands.
        """
        axes = [a for a, size in self.solver.mesh.axes if size > 1 and a not in self.solver.held[total.value].pending]
        return any([self._try(total, axis, lambda axis=axis: self._propose_pending(total, axis)) for axis in axes])

    def _propose_pending(self, total: Region, axis: str) -> bool:
        for op in total.ops:
            available, wanted = self.solver.around(op)
            if op is not total.ops[-1]:
                wanted = tuple(tuple(_pending_too(w, axis, self.solver.mesh) for w in uses) for uses in wanted)
            candidates = [s for s in self.solver.candidates(op, available, wanted)
                          if all(axis in made.pending for v, made in zip(op.results, s.results) if v in total.values)]
            if not candidates:
                return False
            self._cheapest(op, candidates, available, wanted)
        return True

    # -------------------------------------------------------------------------------------- chains

    def _move(self, chain: Region) -> bool:
        """Brings a chain to the layout that comes into it, or to the one that is wanted of it, all of it at once."""
        return (self._try(chain, "in", lambda: self._propose_flow(chain))
                or self._try(chain, "out", lambda: self._propose_ebb(chain)))

    def _propose_flow(self, chain: Region) -> bool:
        for op in chain.ops:
            available, wanted = self.solver.around(op)
            wanted = wanted if op is chain.ops[-1] else ((),)
            self._cheapest(op, self.solver.candidates(op, available, wanted), available, wanted)
        return True

    def _propose_ebb(self, chain: Region) -> bool:
        for op in reversed(chain.ops):
            available, wanted = self.solver.around(op)
            self._cheapest(op, self.solver.candidates(op, available, wanted), (), wanted)
        return True

    def _cheapest(self, op: Op, candidates: list[Strategy], available, wanted) -> None:
        self.solver.take(op, min(candidates, key=lambda s: self.solver.cost(op, s, available, wanted)))


def _pending_too(spec: ShardSpec, axis: str, mesh: Mesh) -> ShardSpec:
    """The layout with `axis` pending, and not on a dimension."""
    dims = tuple(tuple(a for a in axes if a != axis) for axes in spec.dims)
    return ShardSpec(dims, (), tuple(a for a in mesh.names if a == axis or a in spec.pending), spec.reduction)
