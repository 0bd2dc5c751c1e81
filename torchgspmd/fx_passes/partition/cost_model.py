"""What a strategy costs in the current assignment, in bytes on the wire.

cost(op) = moves of its operands to where it needs them + its arithmetic and memory traffic
         + moves of its results to where they are used
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from ...mesh import Mesh
from ...shard_spec import ShardSpec
from ..ir import Op, Rules
from ..propagate.factors import layouts_behind
from .assignment import Assignment
from .search_memory import Memories
from .strategies import Neighborhood, OperandLayouts, Strategy

# Cost discount for leaving a sum unreduced, as a fraction of its bytes: a later addition may share
# its reduction.
PENDING_BONUS = 1 / 8


class CostModel(Assignment):
    """An assignment with the costs of its operations and of the moves between them."""

    def __init__(
        self,
        graph: fx.Graph,
        mesh: Mesh,
        input_specs: Mapping[fx.Node, ShardSpec],
        rules: Rules,
        memories: Memories,
    ) -> None:
        super().__init__(graph, mesh, input_specs, rules, memories)
        self.pending_bonus = PENDING_BONUS
        self.operand_window_cache: dict[
            tuple[fx.Node, ShardSpec], tuple[ShardSpec, ...] | None
        ] = {}

    def cost(
        self,
        op: Op,
        strategy: Strategy,
        neighborhood: Neighborhood,
        limit: float = math.inf,
    ) -> float:
        """Return the cost of one operation; from `limit` on any number that is no less."""
        cost = strategy.work - self.pending_bonus * strategy.pending
        for value, layout, uses in zip(op.results, strategy.results, neighborhood.required):
            if cost >= limit:
                return cost
            cost += self._distribution_cost(value, layout, uses, limit - cost)
        for value, have, need in zip(op.operands, neighborhood.operands, strategy.operands):
            if cost >= limit:
                return cost
            if need not in have.layouts:
                layouts = [self._with_deferred(layout, have, need) for layout in have.layouts]
                cost += (
                    self._nearest_cost(value, layouts, need, (limit - cost) * have.sharers)
                    / have.sharers
                )
        return cost

    def cheapest(
        self, op: Op, strategies: Iterable[Strategy], neighborhood: Neighborhood
    ) -> Strategy | None:
        """Return the first of the strategies that cost least; None if there are none."""
        least, best = math.inf, None
        for strategy in strategies:
            cost = self.cost(op, strategy, neighborhood, least)
            if best is None or cost < least:
                least, best = cost, strategy
        return best

    def transport(self, value: fx.Node) -> float:
        """Return what moves a value from its operation to all of its users."""
        return self._distribution_cost(
            value, self.layout_of[value], self.required.get(value, {}).values()
        )

    def _distribution_cost(
        self, value: fx.Node, layout: ShardSpec, uses: Iterable[ShardSpec], limit: float = math.inf
    ) -> float:
        """Return what takes a value from one layout to all others, each from the nearest copy."""
        copies, cost = [layout], 0.0
        for need in uses:
            if need not in copies:
                cost += self._nearest_cost(value, copies, need, limit - cost)
                copies.append(need)
        return cost

    def _nearest_cost(
        self, value: fx.Node, layouts: Sequence[ShardSpec], need: ShardSpec, limit: float
    ) -> float:
        """Return the cost of the cheapest move from one of the layouts. limit: as in `cost`."""
        least, size = math.inf, self.sizes[value]
        if len(layouts) == 1:
            return (
                self.move_cost(value, layouts[0], need)
                if self.resharder.at_least(*size, layouts[0], need) < limit
                else math.inf
            )
        bounds = [self.resharder.at_least(*size, layout, need) for layout in layouts]
        for bound, layout in sorted(zip(bounds, layouts), key=lambda pair: pair[0]):
            if bound < min(least, limit):
                least = min(least, self.move_cost(value, layout, need))
        return least

    def _with_deferred(self, layout: ShardSpec, have: OperandLayouts, need: ShardSpec) -> ShardSpec:
        """Return the layout with those sums left pending that `need` asks for and that can be."""
        more = {a for a in need.pending if a in have.deferrable}
        return (
            layout.with_pending(
                tuple(a for a in self.mesh.names if a in layout.pending or a in more)
            )
            if more
            else layout
        )

    def move_cost(self, value: fx.Node, have: ShardSpec, need: ShardSpec) -> float:
        """Return what takes a value from one layout to another."""
        cost = self.resharder.cost(*self.sizes[value], have, need)
        return min(cost, self.window_cost(value, need)) if need.windows else cost

    def operand_windows(self, value: fx.Node, need: ShardSpec) -> tuple[ShardSpec, ...] | None:
        """Return the operand windows from which the operation itself computes windows of a value.

        None unless the operation only moves rows.
        """
        if (value, need) not in self.operand_window_cache:
            op = self.ops.get(value)
            self.operand_window_cache[value, need] = (
                layouts_behind(op, need, self.mesh) if op is not None else None
            )
        return self.operand_window_cache[value, need]

    def window_cost(self, value: fx.Node, need: ShardSpec) -> float:
        """Return what moves the operand windows of a value there; infinite if it has none."""
        specs = self.operand_windows(value, need)
        if specs is None:
            return math.inf
        if (value, need) not in self.window_costs:
            operands = self.ops[value].operands
            self.window_costs[value, need] = sum(
                self.move_cost(v, self.layout_of[v], spec) for v, spec in zip(operands, specs)
            )
        return self.window_costs[value, need]
