"""Moves of one operation, one open input, or one chain."""

from __future__ import annotations

from torch import fx

from ...shard_spec import ShardSpec
from .local_search import LocalSearch, Move
from .regions import Region, chains, sources


class OperationMove(Move):
    """Gives an operation the strategy that costs least while those around it keep theirs."""

    name = "operation"
    backwards = True

    def begin(self) -> None:
        # The first choices went forwards, so their users are news.
        self.backwards = True

    def improve(self) -> bool:
        """Visit the operations whose neighborhood changed, backwards and forwards in turn."""
        at, order = self.assignment, list(self.assignment.ops.values())
        visited = reversed(order) if self.backwards else order
        self.backwards = not self.backwards
        return any([self.search.choose(op) for op in visited if op.node in at.worklist])


class InputMove(Move):
    """Gives an open input the layout in which its uses cost least."""

    name = "input"

    def improve(self) -> bool:
        """Visit every open input; return whether any changed."""
        return any([self._choose(node) for node in self.assignment.open_inputs])

    def _choose(self, node: fx.Node) -> bool:
        """Give an open input the layout in which its uses cost least; return whether it changed."""
        at, ends = self.assignment, self.search.ends
        uses = at.required_layouts(node, first=False)
        layouts = (node.meta["spec"], *(spec for spec in uses if not spec.pending))
        tied = ends.cotangents.get(node)
        if tied is not None:
            layouts = (*layouts, at.layout_of[tied[0]].with_pending(()))
        candidates = [
            at.layout_of[node],
            *(spec.plain().map_axes(at.mesh.whole) for spec in layouts),
        ]
        if tied is not None:
            candidates = [ends.fill_open(tied[1], spec, tied[0]) for spec in candidates]

        def cost(spec: ShardSpec) -> float:
            """Return the cost to move the input if it is stored in this layout."""
            move_cost = self.search.costs.move_cost
            arrival = move_cost(tied[0], at.layout_of[tied[0]], spec) if tied else 0.0
            return arrival + sum(move_cost(node, spec, use) for use in uses)

        best = min(candidates, key=cost)
        changed = best != at.layout_of[node]
        at.set_layout(node, best)
        return changed


class ChainMove(Move):
    """Lays out chains: operations on one tensor each, or with the contraction before.

    A chain is laid out like its operand throughout, or as its result is needed.
    """

    name = "chain"

    def __init__(self, search: LocalSearch) -> None:
        super().__init__(search)
        ops = self.assignment.ops
        self.chains, self.sources = chains(ops), sources(ops)

    def improve(self) -> bool:
        """Try every chain and contraction once; return whether any changed."""
        changed = [*map(self._improve_chain, self.chains)]
        return any([*changed, *map(self._improve_source, self.sources)])

    def _improve_chain(self, chain: Region) -> bool:
        """Lay out a chain like its operand, or as its result is required."""
        return self.try_proposal(
            chain, "in", lambda: self.propose_forwards(chain)
        ) or self.try_proposal(chain, "out", lambda: self.propose_backwards(chain))

    def _improve_source(self, source: Region) -> bool:
        """Compute a contraction as it costs least by itself; the chain behind it follows."""
        return self.try_proposal(source, "in", lambda: self.propose_forwards(source))
