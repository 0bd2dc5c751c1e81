"""Costs for strategies and moves, in bytes on the wire. Nothing here changes an assignment.

cost(op) = moves of its operands to where it needs them + its arithmetic and memory traffic
         + moves of its results to where they are used
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter

from torch import Tensor, fx

from ...layout.mesh import Mesh
from ...rules import FactorRule
from ...shard_spec import ShardSpec
from ..ir import Op, runs
from ..propagate.factors import Assignment as Factors
from ..propagate.factors import layouts_behind
from .assignment import Assignment
from .cost_constants import CostConstants
from .neighborhood import Neighborhood, OperandLayouts, Strategy
from .regions import Region
from .reshard import Resharder


def local_bytes(val: Tensor, spec: ShardSpec, mesh: Mesh) -> float:
    return math.prod(spec.local_shape(val.shape, mesh)) * val.element_size()


def arithmetic(rule: FactorRule, factors: Factors, mesh: Mesh, constants: CostConstants) -> float:
    """Return one device's work under an assignment of axes, in bytes on the wire."""
    if not rule.contraction:
        return 0.0
    counts = {f: mesh.count(factors.get(f, ())) for f in rule.sizes}
    sizes = {f: 1 if f in rule.chosen else n for f, n in rule.sizes.items()}
    # `even` is each device's fair share, `padded` the largest share; the rest is idle work. A
    # multiply and an add are 2 operations.
    even = 2 * math.prod(sizes.values()) / math.prod(counts.values())
    padded = 2 * math.prod(
        1 / counts[f] if f in rule.chosen else -(-n // counts[f]) for f, n in sizes.items()
    )
    return even / constants.flops_per_byte + (padded - even) / constants.padding_flops_per_byte


def work(
    op: Op,
    factors: Factors,
    operands: Sequence[ShardSpec],
    results: Sequence[ShardSpec],
    mesh: Mesh,
    constants: CostConstants,
) -> float:
    """Return one device's arithmetic and memory traffic, in bytes on the wire."""
    cost = arithmetic(op.rule, factors, mesh, constants)
    for value, spec in itertools.chain(zip(op.operands, operands), zip(op.results, results)):
        if value is not None:
            cost += local_bytes(value.meta["val"], spec, mesh) / constants.memory_per_byte
    return cost * op.runs


def values_around(ops: Iterable[Op]) -> Collection[fx.Node]:
    """Return operands and results, each once: operations that share one pay its moves once."""
    return dict.fromkeys(v for op in ops for v in (*op.operands, *op.results) if v is not None)


ROUNDING = 1e-12  # Of a sum of costs: more than its terms are rounded by.


def _rounding(cost: float) -> float:
    """Bound the rounding error in a sum of costs."""
    return ROUNDING * abs(cost)


# A place in `Strategy.layouts`, for each layout there a lower bound for the moves, the operations
# that share these, the value, and the layouts around it.
_Around = OperandLayouts | tuple[ShardSpec, ...]
_Part = tuple[int, dict[ShardSpec, float], int, fx.Node, _Around]
OperandWindows = dict[tuple[fx.Node, ShardSpec], tuple[ShardSpec, ...] | None]


@dataclass(frozen=True, eq=False)
class CostModel:
    """Costs for operations and the moves between them, in the present assignment.

    pending_bonus: see CostConstants; it differs between search phases.
    """

    assignment: Assignment
    resharder: Resharder
    pending_bonus: float
    operand_window_cache: OperandWindows = field(default_factory=dict)

    @cached_property
    def phase(self) -> tuple[float, float]:
        """The search phase; results in one are not cached for others."""
        return self.pending_bonus, self.resharder.constants.message_price

    def cost(
        self, op: Op, strategy: Strategy, neighborhood: Neighborhood, limit: float = math.inf
    ) -> float:
        """Return one operation's cost; may return early with any value >= limit."""
        cost = strategy.work - self.pending_bonus * strategy.pending
        for value, layout, uses in zip(op.results, strategy.results, neighborhood.required):
            if cost >= limit:
                return cost
            if value is not None and uses and uses != (layout,):
                cost += self._distribution_cost(value, layout, uses, limit - cost)
        for value, have, need in zip(op.operands, neighborhood.operands, strategy.operands):
            if cost >= limit:
                return cost
            if need not in have.layouts:
                # Operations that share a new layout of an operand share its price.
                cost += self._arrival_cost(value, have, need, (limit - cost) * have.sharers) / (
                    have.sharers
                )
        return cost

    def cheapest(
        self,
        op: Op,
        strategies: Sequence[Strategy],
        neighborhood: Neighborhood,
        present: Strategy | None = None,
    ) -> Strategy | None:
        """Return the first of the cheapest strategies, the present one before all others.

        Those with the least bound are priced first, so that few moves are searched for. None if
        there are none.
        """
        # Without a present one all are bounded first: the first in line may need long searches.
        best, place, least = present, -1, math.inf
        if present is not None:
            least = self.cost(op, present, neighborhood)
        elif strategies:
            best, place = strategies[0], 0
        if present is None and len(strategies) < 2:
            return best
        parts, bounded, bonus = self._bounded_parts(op, neighborhood), [], self.pending_bonus
        for i, strategy in enumerate(strategies):
            if strategy is present:
                continue
            bound = strategy.work - bonus * strategy.pending
            # Rounded down, so that a sum in another order is never above the true cost.
            bound -= ROUNDING * abs(bound)
            if bound >= least:
                continue
            of_layouts = strategy.layouts
            for at, bounds, sharers, value, around in parts:
                if (part := bounds.get(layout := of_layouts[at])) is None:
                    part = bounds[layout] = self._part_bound(value, around, layout)
                if part:
                    bound += part / sharers
                    if bound >= least:
                        break
            if bound < least:
                bounded.append((bound, i, strategy))
        bounded.sort(key=itemgetter(0, 1))
        for bound, i, strategy in bounded:
            # A later strategy wins only if it is cheaper; an earlier one also if it costs the same.
            limit = least if i > place else least + _rounding(least)
            if bound >= limit:
                continue
            cost = self.cost(op, strategy, neighborhood, limit)
            if cost < least or cost == least and i < place:
                best, place, least = strategy, i, cost
        return best

    def _bounded_parts(self, op: Op, neighborhood: Neighborhood) -> list[_Part]:
        """Return the values around an operation, each with the bounds known for its layouts.

        Strategies, and neighborhoods, share many layouts: each is bounded once, without a search.
        """
        kinds, known = self.assignment.kinds, self.resharder.part_bounds
        parts: list[_Part] = [
            (at, known.setdefault((kinds[value], uses), {}), 1, value, uses)
            for at, (value, uses) in enumerate(zip(op.results, neighborhood.required))
            if value is not None and uses
        ]
        # Without operands where their layouts are chosen later, and cost nothing.
        around = enumerate(zip(op.operands, neighborhood.operands), len(op.results))
        parts += [
            (
                at,
                known.setdefault((kinds[value], have.layouts, have.deferrable), {}),
                have.sharers,
                value,
                have,
            )
            for at, (value, have) in around
        ]
        return parts

    def _part_bound(self, value: fx.Node, around: _Around, layout: ShardSpec) -> float:
        """Return a lower bound to get an operand in a layout, or a result from it to its users."""
        if not isinstance(around, OperandLayouts):
            return self._distribution_bound(value, layout, around)
        if layout in around.layouts:
            return 0.0
        return self._nearest_bound(value, self._deferred(around, layout), layout)

    def _distribution_bound(
        self, value: fx.Node, layout: ShardSpec, uses: Iterable[ShardSpec]
    ) -> float:
        """Return a lower bound for all other layouts of a value."""
        copies, bound = [layout], 0.0
        for need in uses:
            if need not in copies:
                bound += self._nearest_bound(value, copies, need)
                copies.append(need)
        return bound

    def _nearest_bound(
        self, value: fx.Node, layouts: Sequence[ShardSpec], need: ShardSpec
    ) -> float:
        """Return a lower bound for the cheapest move from one of the layouts."""
        bound = min([self._move_bound(value, layout, need) for layout in layouts])
        return bound - _rounding(bound)

    def _move_bound(self, value: fx.Node, have: ShardSpec, need: ShardSpec) -> float:
        """Return a lower bound for `move_cost`: windows may be computed from operands for less."""
        if need.windows and self.operand_windows(value, need) is not None:
            return 0.0
        return runs(value) * self.resharder.at_least(*self.assignment.sizes[value], have, need)

    def _arrival_cost(
        self, value: fx.Node, have: OperandLayouts, need: ShardSpec, limit: float
    ) -> float:
        """Return the cost for one more layout of an operand. limit: see `cost`."""
        # Sums aside, how an operand could be left does not matter.
        around = (have.layouts, have.deferrable) if need.pending else have.layouts
        costs, key = self.resharder.transports, (self.assignment.kinds[value], around, need)
        if (cost := costs.get(key)) is None:
            cost = self._nearest_cost(value, self._deferred(have, need), need, limit)
            # Below the limit it is exact. Windows may be computed from operands.
            if cost < limit and not need.windows:
                costs[key] = cost
        return cost

    def _distribution_cost(
        self,
        value: fx.Node,
        layout: ShardSpec,
        uses: tuple[ShardSpec, ...],
        limit: float = math.inf,
    ) -> float:
        """Return the cost for all other layouts of a value, each from the nearest copy.

        limit: see `cost`. Windows may be computed from operands; other moves are priced once.
        """
        costs, key = self.resharder.transports, (self.assignment.kinds[value], layout, uses)
        if (known := costs.get(key)) is not None:
            return known
        copies, cost = [layout], 0.0
        for need in uses:
            if need not in copies:
                cost += self._nearest_cost(value, copies, need, limit - cost)
                copies.append(need)
        if cost < limit and not any(spec.windows for spec in uses):
            costs[key] = cost
        return cost

    def _nearest_cost(
        self, value: fx.Node, layouts: Sequence[ShardSpec], need: ShardSpec, limit: float
    ) -> float:
        """Return the cost for the cheapest move from one of the layouts. limit: see `cost`."""
        least = math.inf
        bounds = [self._move_bound(value, layout, need) for layout in layouts]
        if len(layouts) == 1:
            return self.move_cost(value, layouts[0], need) if bounds[0] < limit else least
        # By their bounds: the first true costs are likely the least, and end the loop early.
        for bound, layout in sorted(zip(bounds, layouts), key=lambda pair: pair[0]):
            if bound < min(least, limit):
                least = min(least, self.move_cost(value, layout, need))
        return least

    def _deferred(self, have: OperandLayouts, need: ShardSpec) -> list[ShardSpec]:
        """Return an operand's layouts, with those sums pending that `need` asks for and can be."""
        more = {a for a in need.pending if a in have.deferrable}
        if not more:
            return [*have.layouts]
        names = self.assignment.mesh.names
        return [
            layout.with_pending(tuple(a for a in names if a in layout.pending or a in more))
            for layout in have.layouts
        ]

    def move_cost(self, value: fx.Node, have: ShardSpec, need: ShardSpec) -> float:
        """Return the cost to move a value to another layout."""
        cost = runs(value) * self.resharder.cost(*self.assignment.sizes[value], have, need)
        return min(cost, self.window_cost(value, need)) if need.windows else cost

    def operand_windows(self, value: fx.Node, need: ShardSpec) -> tuple[ShardSpec, ...] | None:
        """Return the operand windows from which the operation itself computes a value's windows.

        None unless the operation only moves rows.
        """
        if (value, need) not in self.operand_window_cache:
            op = self.assignment.ops.get(value)
            self.operand_window_cache[value, need] = (
                layouts_behind(op, need, self.assignment.mesh) if op is not None else None
            )
        return self.operand_window_cache[value, need]

    def window_cost(self, value: fx.Node, need: ShardSpec) -> float:
        """Return the cost to move a value's operand windows there; infinite without any."""
        specs = self.operand_windows(value, need)
        if specs is None:
            return math.inf
        at = self.assignment
        if (value, need) not in at.window_costs:
            at.window_costs[value, need] = sum(
                self.move_cost(v, at.layout_of[v], spec)
                for v, spec in zip(at.ops[value].operands, specs)
            )
        return at.window_costs[value, need]

    # ------------------------------------------------------------------- of operations as they are

    def exact(self, ops: Collection[Op], values: Collection[fx.Node] | None = None) -> float:
        """Return the work in operations, and the cost to move operands and results (`values`)."""
        return self.work(ops) + self.traffic(ops, values)

    def work(self, ops: Collection[Op]) -> float:
        """Return the operations' arithmetic and memory traffic."""
        strategy_of = self.assignment.strategy_of
        return sum([strategy_of[op.node].work for op in ops])

    def traffic(self, ops: Collection[Op], values: Collection[fx.Node] | None = None) -> float:
        """Return the cost for all moves to operands and from results (`values`)."""
        views, resharder = self.assignment.view_cache, self.resharder
        costs = [
            (value, views.get(value, {}).get(resharder))
            for value in (values_around(ops) if values is None else values)
        ]
        return sum([self._transport(v) if cost is None else cost for v, cost in costs])

    def _transport(self, value: fx.Node) -> float:
        """Return the cost to move a value from its operation to all its users."""
        at = self.assignment
        views = at.view_cache.setdefault(value, {})
        if (cost := views.get(self.resharder)) is None:
            layout, uses = at.layout_of[value], at.required_layouts(value, False)
            if uses in ((), (layout,)):
                cost = 0.0
            else:
                cost = self._distribution_cost(value, layout, uses)
                # Windows may be computed from operands, whose layouts change by themselves.
                if any(spec.windows for spec in uses):
                    return cost
            views[self.resharder] = cost
        return cost

    def gathers(self, axis: str) -> float:
        """Return the cost for all moves after which an axis no longer shards a value."""
        at = self.assignment
        return sum(
            self.move_cost(value, at.layout_of[value], spec)
            for value in at.required
            if axis in at.layout_of[value].sharding_axes
            for spec in at.required_layouts(value, False)
            if axis not in spec.sharding_axes
        )

    def extra_copy(self, value: fx.Node, spec: ShardSpec) -> float:
        """Return the cost for one more layout of a value, from its nearest copy."""
        uses = self.assignment.required_layouts(value, False)
        copies = (self.assignment.layout_of[value], *uses)
        return 0.0 if spec in copies else self._nearest_cost(value, copies, spec, math.inf)

    def region(self, region: Region) -> float:
        """Return the work in a region and the moves to its operands and from its result."""
        cost, at = 0.0, self.assignment
        for op in region.ops:
            neighborhood = at.neighborhood(op)
            # Values within the region are paid for as operands: not twice.
            uses = tuple(
                () if v in region.values and v is not region.value else w
                for v, w in zip(op.results, neighborhood.required)
            )
            cost += self.cost(op, at.strategy_of[op.node], replace(neighborhood, required=uses))
        return cost
