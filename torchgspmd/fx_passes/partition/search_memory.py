"""Search results that like operations share, also across graphs on the same mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from ...layout.mesh import Mesh
from ...shard_spec import Axes, ShardSpec
from ..ir import values
from ..propagate.factors import Crowded, crowded
from .assignment import Assignment
from .cost_constants import CostConstants, no_counts
from .neighborhood import Interner, Strategy
from .reshard import PricedResharder, Resharder
from .strategies import Strategies, marked


class SearchMemory:
    """Cache for strategies, choices and proposals on one mesh, by operation and neighborhood."""

    def __init__(self, mesh: Mesh, crowded: Crowded, constants: CostConstants) -> None:
        self.constants, self.interner = constants, Interner()
        self.counts = no_counts()
        self.resharder = Resharder(mesh, replace(constants, message_price=0.0), self.counts)
        self.priced_resharder = PricedResharder(self.resharder, constants)
        self.strategies = Strategies(mesh, crowded, constants)
        self.choices: dict[tuple, Strategy | None] = {}  # by operation and neighborhood
        # by proposal, region and neighborhood; None if the former strategies are cheaper
        self.proposals: dict[tuple, list[Strategy] | None] = {}
        self.numbers: dict[tuple, int] = {}  # of situations, and of the names of factor classes
        self.rejected: set[tuple] = set()  # layouts tried for bodies that gained nothing


# layout tried for like bodies -> what one cost, how much more it would have cost
Excess = dict[tuple[int, Axes, int], list[tuple[float, float]]]
Situation = tuple[Mesh, Crowded, CostConstants]
Memories = dict[Situation, SearchMemory]


@dataclass(frozen=True)
class Solution:
    """A search's end, by node names: strategies with operation keys, inputs.

    excess: see LocalSearch.
    """

    strategies: Mapping[str, tuple[int | None, Strategy]]
    inputs: Mapping[str, ShardSpec]
    excess: Excess

    @classmethod
    def of(cls, assignment: Assignment, excess: Excess) -> Solution:
        """Extract a search's solution."""
        return cls(
            {
                node.name: (assignment.ops[node].key, strategy)
                for node, strategy in assignment.strategy_of.items()
            },
            {node.name: assignment.layout_of[node] for node in assignment.open_inputs},
            excess,
        )

    def assign(self, assignment: Assignment) -> None:
        """Assign it to another graph, where that has the same operations; not to marks."""
        for node in assignment.open_inputs:
            if node.name in self.inputs:
                assignment.set_layout(node, self.inputs[node.name])
        for op in assignment.ops.values():
            key, strategy = self.strategies.get(op.node.name, (None, None))
            # A name may stand for another operation in this graph: its key tells.
            if strategy is not None and key == op.key and marked(op) is None:
                assignment.assign(op, strategy)


Solutions = dict[Situation, Solution]


def situation(graph: fx.Graph, mesh: Mesh, constants: CostConstants) -> Situation:
    """Return the key for graphs that share a memory."""
    layouts = ((v.meta["val"].shape, v.meta["spec"]) for v in values(graph.nodes))
    return mesh, crowded(layouts, mesh), constants
