"""Results of the search that like operations share, also across graphs on the same mesh."""

from __future__ import annotations

from typing import Any

from ...mesh import Mesh
from ...shard_spec import Axes, ShardSpec
from ..propagate.factors import Crowded
from .reshard import Resharder
from .strategies import Neighborhood, OperandLayouts, Strategies, Strategy


class SearchMemory:
    """Cache of strategies, choices and proposals on one mesh, by operation and neighborhood."""

    def __init__(self, mesh: Mesh, crowded: Crowded) -> None:
        self.resharder, self.strategies = Resharder(mesh), Strategies(mesh, crowded)
        self.operand_layout_objects: dict[tuple, OperandLayouts] = {}  # by content
        self.neighborhoods: dict[tuple, Neighborhood] = {}  # by content
        self.choices: dict[tuple, Strategy | None] = {}  # by operation and neighborhood
        # by proposal, region and neighborhood; None if the former strategies are cheaper
        self.proposals: dict[tuple, list[Strategy] | None] = {}
        self.numbers: dict[tuple, int] = {}  # of situations, and of the names of factor classes
        self.rejected: set[tuple] = set()  # layouts tried for bodies that gained nothing

    def operand_layouts(
        self, layouts: tuple[ShardSpec, ...], sharers: int = 1, deferrable: Axes = ()
    ) -> OperandLayouts:
        """Return the one object with this content."""
        key = layouts, sharers, deferrable
        if (operand := self.operand_layout_objects.get(key)) is None:
            operand = self.operand_layout_objects[key] = OperandLayouts(*key)
        return operand

    def neighborhood(self, *content: Any) -> Neighborhood:
        """Return the one object with this content."""
        if (neighborhood := self.neighborhoods.get(content)) is None:
            neighborhood = self.neighborhoods[content] = Neighborhood(*content)
        return neighborhood


Memories = dict[tuple[Mesh, Crowded], SearchMemory]
