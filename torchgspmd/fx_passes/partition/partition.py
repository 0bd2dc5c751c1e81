"""Decides, for every operation, which factors are sharded by which axes; `insert` puts the
collectives between them.

before   meta["spec"] from `propagate` on every value
after    meta["spec"] is what the devices really hold; every operand is laid out as its operation needs it
         %mm   : f32[8@data, 64] sum@model = mm(%gelu, %w2)
         %mm_r : f32[8@data, 64]           = all_reduce(%mm, sum, model)
needs    rules; layouts of inputs and outputs that are given
source   the idea of pending sums is Shardy's `unreduced`; choosing by cost over the neighbourhood is ours

What a strategy (see strategies.py) costs: what it takes to bring the operands there from where they
are, the device's arithmetic and memory traffic, and what it takes to bring the results to where
they are used. The first sweep goes by the propagated layouts, the following ones by the neighbours'
choices, until nothing gets cheaper: an operation is looked at again when something around it
changed. Then regions change at once (see together.py). Of the states at which that ends the
cheapest one is taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any

from torch import fx

from ...mesh import Mesh
from ...shard_spec import Axes, ShardSpec
from ..ir import Op, Rules, values
from ..propagate.factors import Crowded, crowded, layouts_behind
from .insert_collectives import insert_collectives
from .region_search import RegionSearch
from .reshard import Resharder
from .strategies import Around, Available, Strategies, Strategy, marked

LATE = (
    1 / 8
)  # of its bytes is what a sum is favoured by that stays pending: it may meet another one
TIE = 1e-9  # the same, where it decides between equals only
DEPTH = 4  # operations through which it is looked for whether a sum might have been left pending
DECIDED = (
    "chosen",
    "held",
    "needs",
    "views",
    "surroundings",
    "costs_behind",
    "stale",
    "version",
)  # of a Solver: what choices change
SWEEPS = 6  # at most, in each round
PHASES = (
    (LATE, 0),
    (TIE, 3),
    (LATE, 3),
    (TIE, 3),
)  # that favour, and how often, at most, bodies are laid out anew


class SearchMemory:
    """What was found out about operations and values on one mesh: of those that are alike, in the
    same situation.
    """

    def __init__(self, mesh: Mesh, crowded: Crowded):
        self.resharder, self.strategies = Resharder(mesh), Strategies(mesh, crowded)
        self.available: dict[tuple, Available] = {}  # by their content
        self.around: dict[tuple, Around] = {}
        self.choices: dict[tuple, Strategy | None] = {}  # by operation and what is around it
        self.proposals: dict[
            tuple, list[Strategy] | None
        ] = {}  # of Together, by region and what is around it
        self.numbers: dict[tuple, int] = {}  # of situations, and of the names of classes
        self.vain: set[tuple] = set()  # situations of bodies in which a way was no better

    def layouts(
        self, layouts: tuple[ShardSpec, ...], sharers: int = 1, deferrable: Axes = ()
    ) -> Available:
        """The object for this."""
        key = layouts, sharers, deferrable
        if (found := self.available.get(key)) is None:
            found = self.available[key] = Available(*key)
        return found

    def surroundings(self, *content: Any) -> Around:
        """The object for this."""
        if (found := self.around.get(content)) is None:
            found = self.around[content] = Around(*content)
        return found


Memories = dict[tuple[Mesh, Crowded], SearchMemory]
Cotangents = dict[fx.Node, tuple[fx.Node, ShardSpec]]
Leaving = Callable[[ShardSpec, tuple[int, ...]], ShardSpec]


def partition(
    graph: fx.Graph,
    mesh: Mesh,
    given: dict[fx.Node, ShardSpec],
    outputs: dict[int, ShardSpec | fx.Node],
    rules: Rules | None = None,
    keep_marks: bool = False,
    memories: Memories | None = None,
    leaving: Leaving | None = None,
    cotangents: Cotangents | None = None,
) -> fx.Graph:
    """given: layouts of inputs that are settled (others may be chosen). outputs: layouts of outputs
    by position; a node stands for the layout of that input. keep_marks: those too in whose layout
    nobody uses the value. memories: of graphs like this one, whose operations have the same rules.
    leaving: of the layout that an open output would have, the one it is to have. cotangents: inputs
    that come as an output has left, that output, and the open layout that is asked for.
    """
    solver = Solver(
        graph,
        mesh,
        given,
        outputs,
        rules or Rules(),
        {} if memories is None else memories,
        leaving,
        cotangents or {},
    )
    solver.solve()
    if not keep_marks:
        solver.leave_out_marks()
    return insert_collectives(solver)


class Solver:
    def __init__(self, graph, mesh, given, outputs, rules, memories, leaving, cotangents):
        self.graph, self.mesh, self.given, self.outputs, self.rules = (
            graph,
            mesh,
            given,
            outputs,
            rules,
        )
        self.leaving, self.cotangents = leaving, cotangents
        self.ops: dict[fx.Node, Op] = {op.node: op for op in rules.ops(graph)}
        self.of_inputs = {
            node: all(value.op == "placeholder" for value in op.operands)
            for node, op in self.ops.items()
        }
        self.held = {
            n: n.meta["spec"] for n in graph.nodes if n.op in ("placeholder", "get_attr")
        }  # layout of each value
        for node in graph.nodes:
            if node.op == "get_attr":
                self.held[node] = ShardSpec.replicated(node.meta["val"].dim())
        self.held.update(given)
        situation = (
            mesh,
            crowded(((v.meta["val"].shape, v.meta["spec"]) for v in values(graph)), mesh),
        )
        self.memory = memories.setdefault(situation, SearchMemory(*situation))
        self.resharder, self.strategies = self.memory.resharder, self.memory.strategies
        self.open_inputs = [n for n in graph.nodes if n.op == "placeholder" and n not in given]
        for node in self.open_inputs:  # parts of axes do not leave the program unasked
            self.held[node] = self.held[node].map_axes(mesh.whole)
        self.chosen: dict[fx.Node, Strategy] = {}
        self.needs: dict[fx.Node, dict] = {}  # value -> {(user, operand index): layout}
        self.versions = itertools.count()
        self.version = next(self.versions)  # of all that decisions depend on
        self.views: dict[
            fx.Node, dict
        ] = {}  # value -> what available and _wanted say, until that changes
        self.surroundings: dict[fx.Node, Around] = {}  # of operations, until they change
        self.left_out: set[fx.Node] = set()  # marks
        self.sizes = {
            v: (tuple(v.meta["val"].shape), v.meta["val"].element_size()) for v in values(graph)
        }  # shape, bytes of an element
        self.late = LATE
        self.stale = set(self.ops)  # operations around which something changed
        self.near: dict[fx.Node, set[fx.Node]] = {
            v: set() for v in self.sizes
        }  # value -> operations that make or use it
        for op in self.ops.values():
            for value in filter(None, (*op.operands, *op.results)):
                self.near[value].add(op.node)
        self.sharers: dict[tuple[fx.Node, int], int] = {}  # of a value, among operations of one key
        self.together = RegionSearch(self)
        self.made_of: dict = {}
        self.costs_behind: dict[
            tuple[fx.Node, ShardSpec], float
        ] = {}  # while no value is held otherwise
        self.output = next(n for n in reversed(graph.nodes) if n.op == "output")

    # -------------------------------------------------------------------------------------- choosing

    def state(self) -> dict[str, Any]:
        """All that decisions change, to come back to."""
        return {name: copy(getattr(self, name)) for name in DECIDED}

    def back_to(self, state: dict[str, Any]) -> None:
        """The state is used up."""
        vars(self).update(state)

    def solve(self) -> None:
        for op in self.ops.values():
            self.choose(op, first=True)
        self._settle_outputs()
        found = []
        for self.late, rounds in PHASES:
            self.stale.update(self.ops)
            self.version = next(self.versions)
            self._settle()
            for _ in range(rounds):
                if not any([self.together.lay_out(), self.together.resolve()]):
                    break
                self._settle()
            if rounds and self.late == TIE:
                found.append((self.together.exact(self.ops.values()), self.state()))
        self.back_to(min(found, key=lambda found: found[0])[1])
        self._settle_outputs()

    def leave_out_marks(self) -> None:
        """Those where nobody uses the value as marked, and all that use it can have it for less as
        it is made.
        """
        for op in self.ops.values():
            if marked(op) is None or self.held[op.results[0]] in self._wanted(op.results[0], False):
                continue
            strategy, cost, made = (
                self.chosen[op.node],
                self.together.exact([op]),
                self.held[op.operands[0]],
            )
            self.take(op, Strategy((), (made,), (made,), 0.0))
            if self.together.exact([op]) < cost:
                self.left_out.add(op.node)
            else:
                self.take(op, strategy)

    def _settle(self) -> None:
        for sweep in range(SWEEPS):
            order = list(self.ops.values())
            changed = [self.choose(op) for op in (order if sweep % 2 else reversed(order))]
            changed += self.together.improve()
            changed += [self._choose_input(node) for node in self.open_inputs]
            self._settle_outputs()
            if not any(changed):
                break

    def choose(self, op: Op, first: bool = False) -> bool:
        if op.node not in self.stale:
            return False
        current = self.chosen.get(op.node)
        best = self.best(op, self.around(op, first), current)
        if best is not current:
            self.take(op, best)
        self.stale.discard(op.node)
        return best is not current

    def best(
        self,
        op: Op,
        around: Around,
        current: Strategy | None,
        forced: tuple[str, str | None] | None = None,
    ) -> Strategy | None:
        """What costs least; of equals the current strategy. forced: an axis, and what alone it may
        shard. None if there is no such.
        """
        moved = (
            tuple(
                self.ops[v].key
                for v in op.operands
                if v in self.ops and self.ops[v].rule.moves is not None
            )
            if op.rule.halo
            else ()
        )
        key = (op.key, around, current, forced, self.late, moved)
        if key not in self.memory.choices:
            candidates = self.strategies.candidates(
                op, around, {forced[0]: forced[1:]} if forced else None
            )
            if current is not None:
                candidates = [current, *candidates]
            self.memory.choices[key] = self.cheapest(op, candidates, around)
        return self.memory.choices[key]

    def take(self, op: Op, strategy: Strategy) -> None:
        if self.chosen.get(op.node) is not strategy:
            self.chosen[op.node] = strategy
            self.version = next(self.versions)
            self.stale.add(op.node)  # it may have been forced on it
        for value, spec in zip(op.results, strategy.results):
            if value is not None:
                self._hold(value, spec)
        for i, (value, spec) in enumerate(zip(op.operands, strategy.operands)):
            self._need(value, op.node, i, spec)

    def _hold(self, value: fx.Node, spec: ShardSpec) -> None:
        before = self.held.get(value)
        if before != spec:
            self.held[value] = spec
            self.version = next(self.versions)
            self.costs_behind.clear()
            self.views.pop(value, None)
            self._touch_users(value, before is None or before.pending != spec.pending)

    def _need(self, value: fx.Node, user: fx.Node, operand: int, spec: ShardSpec) -> None:
        needs = self.needs.get(value, {})
        if needs.get((user, operand)) != spec:
            self.needs[value] = needs | {(user, operand): spec}  # a new one: states have the former
            self.version = next(self.versions)
            self.views.pop(value, None)
            for node in self.near[value]:
                if node is not user:
                    self._touch(node)

    def _touch(self, node: fx.Node) -> None:
        self.stale.add(node)
        self.surroundings.pop(node, None)

    def _touch_users(self, value: fx.Node, pending: bool, depth: int = DEPTH) -> None:
        """All that decide by the layout of a value: its users, and those behind, through moves of
        rows, and through sums if it changed over what the value is pending.
        """
        for user in value.users:
            op = self.ops.get(user)
            if op is not None:
                self._touch(user)
                if depth and (pending and op.rule.linear or op.rule.moves is not None):
                    for result in filter(None, op.results):
                        self._touch_users(result, pending, depth - 1)

    def available(self, value: fx.Node, op: Op, first: bool = False) -> Available:
        """The layouts in which a value exists anyhow; at first, before they are known, how many
        operations share it.
        """
        if first:
            return self.memory.layouts((self.held[value],), self.alike(value, op))
        views = self.views.setdefault(value, {})
        if (view := views.get(op.node)) is None:
            others = (
                spec for (user, _), spec in self.needs.get(value, {}).items() if user is not op.node
            )
            view = views[op.node] = self.memory.layouts(
                tuple(dict.fromkeys((self.held[value], *others)))
            )
        if op.rule.joins:
            near = {
                axis
                for spec in (*map(self.held.get, op.operands), *self._wanted(op.results[0], False))
                for axis in spec.pending
            }
            if near and (
                deferrable := tuple(
                    a for a in self.mesh.names if a in near and self._deferrable(value, a)
                )
            ):
                return self.memory.layouts(view.layouts, view.sharers, deferrable)
        return view

    def alike(self, value: fx.Node, op: Op) -> int:
        """How many operations like this one share a value."""
        if (value, op.key) not in self.sharers:
            self.sharers[value, op.key] = max(
                1, sum(user in self.ops and self.ops[user].key == op.key for user in value.users)
            )
        return self.sharers[value, op.key]

    def _deferrable(self, value: fx.Node, axis: str, depth: int = DEPTH) -> bool:
        """Whether a value is a sum over an axis that its operation, or one before, need not have
        asked for; or one number.
        """
        if axis in self.held[value].pending or value.meta["val"].numel() == 1:
            return True
        op = self.ops.get(value)
        if op is None or depth == 0 or len(value.users) > 1:
            return False
        return any(
            all(self._deferrable(op.operands[i], axis, depth - 1) for i in group)
            for group in op.rule.linear
        )

    def _wanted(self, value: fx.Node | None, first: bool) -> tuple[ShardSpec, ...]:
        """The different layouts in which a value is used; before that is known, the propagated one."""
        if value is None:
            return ()
        if first:
            return (value.meta["spec"].closed(),)
        views = self.views.setdefault(value, {})
        if None not in views:
            views[None] = tuple(dict.fromkeys(self.needs.get(value, {}).values()))
        return views[None]

    def cheapest(self, op: Op, strategies: Iterable[Strategy], around: Around) -> Strategy | None:
        """The first of those that cost least; None of none."""
        least, best = math.inf, None
        for strategy in strategies:
            cost = self.cost(op, strategy, around, least)
            if best is None or cost < least:
                least, best = cost, strategy
        return best

    def around(self, op: Op, first: bool = False) -> Around:
        """first: as the layouts are propagated, not chosen."""
        found = self.surroundings.get(op.node)
        if found is None or first:
            found = self.surrounded(
                op,
                tuple(self.available(v, op, first) for v in op.operands),
                tuple(self._wanted(v, first) for v in op.results),
                first,
            )
            if not first:
                self.surroundings[op.node] = found
        return found

    def surrounded(
        self,
        op: Op,
        available: tuple[Available, ...],
        wanted: tuple[tuple[ShardSpec, ...], ...],
        first: bool = False,
    ) -> Around:
        return self.memory.surroundings(available, wanted, first, self.of_inputs[op.node])

    def cost(self, op: Op, strategy: Strategy, around: Around, limit: float = math.inf) -> float:
        """Of one operation. limit: from there on it does not matter how much."""
        cost = strategy.work - self.late * strategy.pending
        for value, made, uses in zip(op.results, strategy.results, around.wanted):
            if cost >= limit:
                return cost
            cost += self._distribute(value, made, uses, limit - cost)
        for value, have, need in zip(op.operands, around.available, strategy.operands):
            if cost >= limit:
                return cost
            if need not in have.layouts:
                layouts = [self._deferred(layout, have, need) for layout in have.layouts]
                cost += (
                    self._nearest(value, layouts, need, (limit - cost) * have.sharers)
                    / have.sharers
                )
        return cost

    def transport(self, value: fx.Node) -> float:
        """What brings a value from where it is made to all places where it is used."""
        return self._distribute(value, self.held[value], self.needs.get(value, {}).values())

    def _distribute(
        self, value: fx.Node, made: ShardSpec, uses: Iterable[ShardSpec], limit: float = math.inf
    ) -> float:
        copies, cost = [made], 0.0
        for need in uses:
            if need not in copies:
                cost += self._nearest(value, copies, need, limit - cost)
                copies.append(need)
        return cost

    def _nearest(
        self, value: fx.Node, layouts: Sequence[ShardSpec], need: ShardSpec, limit: float
    ) -> float:
        """What the cheapest move from one of these layouts costs. limit: as in `cost`."""
        least, size = math.inf, self.sizes[value]
        if len(layouts) == 1:
            return (
                self._move(value, layouts[0], need)
                if self.resharder.at_least(*size, layouts[0], need) < limit
                else math.inf
            )
        bounds = [self.resharder.at_least(*size, layout, need) for layout in layouts]
        for bound, layout in sorted(zip(bounds, layouts), key=lambda pair: pair[0]):
            if bound < min(least, limit):
                least = min(least, self._move(value, layout, need))
        return least

    def _deferred(self, layout: ShardSpec, have: Available, need: ShardSpec) -> ShardSpec:
        """A layout as it would be, were the sums left pending that can be and that are asked for."""
        more = {a for a in need.pending if a in have.deferrable}
        return (
            layout.with_pending(
                tuple(a for a in self.mesh.names if a in layout.pending or a in more)
            )
            if more
            else layout
        )

    def _move(self, value: fx.Node, have: ShardSpec, need: ShardSpec) -> float:
        cost = self.resharder.cost(*self.sizes[value], have, need)
        return min(cost, self.cost_behind(value, need)) if need.windows else cost

    def behind(self, value: fx.Node, need: ShardSpec) -> tuple[ShardSpec, ...] | None:
        """For windows of a value of moved rows: the windows of the operands that it can be made of."""
        if (value, need) not in self.made_of:
            op = self.ops.get(value)
            self.made_of[value, need] = (
                layouts_behind(op, need, self.mesh) if op is not None else None
            )
        return self.made_of[value, need]

    def cost_behind(self, value: fx.Node, need: ShardSpec) -> float:
        specs = self.behind(value, need)
        if specs is None:
            return math.inf
        if (value, need) not in self.costs_behind:
            operands = self.ops[value].operands
            self.costs_behind[value, need] = sum(
                self._move(v, self.held[v], spec) for v, spec in zip(operands, specs)
            )
        return self.costs_behind[value, need]

    def _choose_input(self, node: fx.Node) -> bool:
        """An input whose layout is open is stored as it is used most cheaply."""
        wanted = self._wanted(node, first=False)
        found = (node.meta["spec"], *(spec for spec in wanted if not spec.pending))
        value, wish = self.cotangents.get(node, (None, None))
        if value is not None:
            found = (*found, self.held[value].with_pending(()))
        candidates = [self.held[node], *(spec.plain().map_axes(self.mesh.whole) for spec in found)]
        if value is not None:
            candidates = [self._filled(wish, spec, value) for spec in candidates]

        def cost(spec: ShardSpec) -> float:
            there = 0.0 if value is None else self._move(value, self.held[value], spec)
            return there + sum(self._move(node, spec, w) for w in wanted)

        best = min(candidates, key=cost)
        changed = best != self.held[node]
        self._hold(node, best)
        return changed

    def _settle_outputs(self) -> None:
        """Outputs with a layout need it; one that is open is used as it comes, but for a pending
        sum.
        """
        for i, value in enumerate(self.output.args[0]):
            if isinstance(value, fx.Node):
                self._need(value, self.output, i, self.output_spec(i, value))

    def output_spec(self, i: int, value: fx.Node) -> ShardSpec:
        """The layout in which output i leaves the program."""
        wish = self.outputs.get(i)
        if isinstance(wish, fx.Node):
            return self.held[wish]
        if wish is not None and not any(wish.open):
            return wish
        held = self.held[value]
        target = (value.meta["spec"].closed() if held.pending else held.with_pending(())).map_axes(
            self.mesh.whole
        )
        return target if wish is None else self._filled(wish, target, value)

    def _filled(self, wish: ShardSpec, target: ShardSpec, value: fx.Node) -> ShardSpec:
        """What is asked for, with the target's layout where that is open."""
        fixed = {a for axes, is_open in zip(wish.dims, wish.open) if not is_open for a in axes}
        spec = ShardSpec(
            tuple(
                tuple(a for a in t if a not in fixed) if is_open else w
                for w, is_open, t in zip(wish.dims, wish.open, target.dims)
            )
        )
        return self.leaving(spec, self.sizes[value][0]) if self.leaving is not None else spec
