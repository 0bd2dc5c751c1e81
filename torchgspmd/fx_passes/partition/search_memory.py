"""Results of the search that like operations share, also across graphs on the same mesh."""

from __future__ import annotations

from torch import fx

from ...mesh import Mesh
from ..ir import values
from ..propagate.factors import Crowded, crowded
from .cost_constants import CostConstants
from .neighborhood import Interner, Strategy
from .reshard import Resharder
from .strategies import Strategies


class SearchMemory:
    """Cache of strategies, choices and proposals on one mesh, by operation and neighborhood."""

    def __init__(self, mesh: Mesh, crowded: Crowded, constants: CostConstants) -> None:
        self.constants, self.interner = constants, Interner()
        self.resharder = Resharder(mesh, constants)
        self.strategies = Strategies(mesh, crowded, constants)
        self.choices: dict[tuple, Strategy | None] = {}  # by operation and neighborhood
        # by proposal, region and neighborhood; None if the former strategies are cheaper
        self.proposals: dict[tuple, list[Strategy] | None] = {}
        self.numbers: dict[tuple, int] = {}  # of situations, and of the names of factor classes
        self.rejected: set[tuple] = set()  # layouts tried for bodies that gained nothing


Situation = tuple[Mesh, Crowded, CostConstants]
Memories = dict[Situation, SearchMemory]


def situation(graph: fx.Graph, mesh: Mesh, constants: CostConstants) -> Situation:
    """Return what graphs have in common that share a memory."""
    layouts = ((v.meta["val"].shape, v.meta["spec"]) for v in values(graph))
    return mesh, crowded(layouts, mesh), constants
