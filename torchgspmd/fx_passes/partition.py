"""Decides, for every operation, which factors are sharded by which axes; `insert` puts the collectives between them.

before   meta["spec"] from `propagate` on every value
after    meta["spec"] is what the devices really hold; every operand is laid out as its operation needs it
         %mm   : f32[8@data, 64] sum@model = mm(%gelu, %w2)
         %mm_r : f32[8@data, 64]           = all_reduce(%mm, sum, model)
needs    rules; layouts of inputs and outputs that are given
source   the idea of pending sums is Shardy's `unreduced`; choosing by cost over the neighbourhood is ours

An operation's strategy is an assignment of axes to its factors, and of axes to operands whose pending sum it passes
on. Its cost: what it takes to bring the operands there from where they are, the device's arithmetic and memory
traffic, and what it takes to bring the results to where they are used. The first sweep goes by the propagated
layouts, the following ones by the neighbours' choices, until nothing gets cheaper. Then regions change at once (see
together.py). Of the states at which that ends the cheapest one is taken.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from ..mesh import Mesh
from ..rules import Rule
from ..shard_spec import Axes, ShardSpec
from .graph import Op, Rules, values
from .insert import insert
from .layout import Crowded, assemble, crowded, is_far, is_roomy, layouts_behind, operand_layout, project, result_pending
from .reshard import Resharder
from .together import Together

FLOPS_PER_BYTE = 10.0           # arithmetic worth one byte on the wire: high, so that arithmetic is always divided
WASTE_PER_BYTE = 500.0          # of what uneven parts compute on padding, as fast devices do: not worth another layout
TRAFFIC_PER_BYTE = 128.0        # bytes of memory traffic worth one byte on the wire
LATE = 1 / 8                    # of its bytes is what a sum is favoured by that stays pending: it may meet another one
TIE = 1e-9                      # the same, where it decides between equals only
DEPTH = 4                       # operations through which it is looked for whether a sum might have been left pending
SWEEPS = 6                      # at most, in each round
PHASES = ((LATE, 0), (TIE, 3), (LATE, 3), (TIE, 3))     # that favour, and how often, at most, bodies are laid out anew


@dataclass(frozen=True, slots=True, eq=False)
class Strategy:
    """What an operation needs of its operands and makes of its results. One object for equal ones of like operations."""
    assignment: tuple[tuple[str, Axes], ...]
    operands: tuple[ShardSpec, ...]
    results: tuple[ShardSpec, ...]
    work: float                         # of one device, in bytes on the wire


@dataclass(frozen=True, slots=True)
class Available:
    """The layouts of an operand that exist (the first: as it is made), how many operations share a new one, and the axes
    over which it might be left pending as well."""
    layouts: tuple[ShardSpec, ...]
    sharers: int
    deferrable: Axes = ()


@dataclass(frozen=True, slots=True, eq=False)
class Around:
    """Where the operands of an operation are, and the layouts in which its results are used. One object for equal ones."""
    available: tuple[Available, ...]
    wanted: tuple[tuple[ShardSpec, ...], ...]


class Memory:
    """What was found out about operations and values on one mesh: of those that are alike, in the same situation."""

    def __init__(self, mesh: Mesh):
        self.resharder = Resharder(mesh)
        self.around: dict[tuple, Around] = {}
        self.strategies: dict[tuple, Strategy | None] = {}                  # by operation and assignment
        self.candidates: dict[tuple, list[Strategy]] = {}                   # by operation and what each axis may shard
        self.options: dict[tuple, dict[str, tuple]] = {}                    # by operation and its neighbourhood
        self.choices: dict[tuple, Strategy | None] = {}                     # the same


Memories = dict[tuple[Mesh, Crowded], Memory]


def partition(graph: fx.Graph, mesh: Mesh, given: dict[fx.Node, ShardSpec], outputs: dict[int, ShardSpec | fx.Node],
              rules: Rules | None = None, keep_marks: bool = False, memories: Memories | None = None) -> fx.Graph:
    """given: layouts of inputs that are settled (others may be chosen). outputs: layouts of outputs by position; a node
    stands for the layout of that input. keep_marks: those too in whose layout nobody uses the value. memories: of graphs like
    this one, whose operations have the same rules."""
    solver = Solver(graph, mesh, given, outputs, rules or Rules(), {} if memories is None else memories)
    solver.solve()
    if not keep_marks:
        solver.leave_out_marks()
    return insert(solver)


class Solver:
    def __init__(self, graph, mesh, given, outputs, rules, memories):
        self.graph, self.mesh, self.given, self.outputs, self.rules = graph, mesh, given, outputs, rules
        self.ops: dict[fx.Node, Op] = {op.node: op for op in rules.ops(graph)}
        self.held = {n: n.meta["spec"] for n in graph.nodes if n.op in ("placeholder", "get_attr")}     # layout of each value
        for node in graph.nodes:
            if node.op == "get_attr":
                self.held[node] = ShardSpec.replicated(node.meta["val"].dim())
        self.held.update(given)
        self.crowded = crowded(((v.meta["val"].shape, v.meta["spec"]) for v in values(graph)), mesh)
        self.memory = memories.setdefault((mesh, self.crowded), Memory(mesh))
        self.resharder = self.memory.resharder
        self.open_inputs = [n for n in graph.nodes if n.op == "placeholder" and n not in given]
        for node in self.open_inputs:                                       # parts of axes do not leave the program unasked
            self.held[node] = self.held[node].map_axes(mesh.whole)
        self.chosen: dict[fx.Node, Strategy] = {}
        self.needs: dict[fx.Node, dict] = {}                                # value -> {(user, operand index): layout}
        self.versions = itertools.count()
        self.version = next(self.versions)                                  # of all that decisions depend on
        self.views: dict[fx.Node, dict] = {}                                # value -> what _available and _wanted say, until that changes
        self.surroundings: dict[fx.Node, Around] = {}                       # of operations, until they change
        self.left_out: set[fx.Node] = set()                                 # marks
        self.sizes = {v: (tuple(v.meta["val"].shape), v.meta["val"].element_size()) for v in values(graph)}     # shape, bytes of an element
        self.late, self.first = LATE, True
        self.stale = set(self.ops)                                          # operations around which something changed
        self.near: dict[fx.Node, set[fx.Node]] = {v: set() for v in self.sizes}     # value -> operations that make or use it
        for op in self.ops.values():
            for value in filter(None, (*op.operands, *op.results)):
                self.near[value].add(op.node)
        self.together = Together(self)
        self.made_of: dict = {}
        self.costs_behind: dict[tuple[fx.Node, ShardSpec], float] = {}      # while no value is held otherwise
        self.output = next(n for n in reversed(graph.nodes) if n.op == "output")

    # -------------------------------------------------------------------------------------- choosing

    def solve(self) -> None:
        for op in self.ops.values():
            self.choose(op, first=True)
        self.first = False
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
                found.append((self.together.exact(self.ops.values()), dict(self.chosen), dict(self.held)))
        _, chosen, held = min(found, key=lambda state: state[0])
        for value, spec in held.items():
            self._hold(value, spec)
        for node, strategy in chosen.items():
            self.take(self.ops[node], strategy)
        self._settle_outputs()

    def leave_out_marks(self) -> None:
        """Those where nobody uses the value as marked, and all that use it can have it for less as it is made."""
        for op in self.ops.values():
            if _marked(op) is None or self.held[op.results[0]] in self._wanted(op.results[0], False):
                continue
            strategy, cost, made = self.chosen[op.node], self.together.exact([op]), self.held[op.operands[0]]
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
        self.stale.discard(op.node)
        current = self.chosen.get(op.node)
        best = self.best(op, self.around(op, first), current)
        if best is current:
            return False
        self.take(op, best)
        return True

    def best(self, op: Op, around: Around, current: Strategy | None, forced: tuple[str, str | None] | None = None) -> Strategy | None:
        """What costs least; of equals the current strategy stays. forced: an axis, and what alone it may shard. None if there is no such."""
        moved = tuple(self.ops[v].key for v in op.operands if v in self.ops and self.ops[v].rule.moves is not None) if op.rule.halo else ()
        key = (op.key, around, current, forced, self.late, moved)
        if key not in self.memory.choices:
            candidates = self.candidates(op, around, {forced[0]: forced[1:]} if forced else None)
            if current is not None:
                candidates = [current, *candidates]
            self.memory.choices[key] = self.cheapest(op, candidates, around)
        return self.memory.choices[key]

    def take(self, op: Op, strategy: Strategy) -> None:
        self.chosen[op.node] = strategy
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
        needs = self.needs.setdefault(value, {})
        if needs.get((user, operand)) != spec:
            needs[user, operand] = spec
            self.version = next(self.versions)
            self.views.pop(value, None)
            for node in self.near[value]:
                if node is not user:
                    self._touch(node)

    def _touch(self, node: fx.Node) -> None:
        self.stale.add(node)
        self.surroundings.pop(node, None)

    def _touch_users(self, value: fx.Node, pending: bool, depth: int = DEPTH) -> None:
        """All that decide by the layout of a value: its users, and those behind, through moves of rows, and through sums if it
        changed over what the value is pending."""
        for user in value.users:
            op = self.ops.get(user)
            if op is not None:
                self._touch(user)
                if depth and (pending and op.rule.linear or op.rule.moves is not None):
                    for result in filter(None, op.results):
                        self._touch_users(result, pending, depth - 1)

    def _available(self, value: fx.Node, op: Op, first: bool) -> Available:
        """The layouts in which a value exists anyhow; at first, before they are known, how many operations share it."""
        if first:
            return Available((self.held[value],), self.alike(value, op))
        views = self.views.setdefault(value, {})
        if (view := views.get(op.node)) is None:
            others = (spec for (user, _), spec in self.needs.get(value, {}).items() if user is not op.node)
            view = views[op.node] = Available(tuple(dict.fromkeys((self.held[value], *others))), 1)
        if op.rule.joins:
            near = {axis for spec in (*map(self.held.get, op.operands), *self._wanted(op.results[0], False)) for axis in spec.pending}
            if near and (deferrable := tuple(a for a in self.mesh.names if a in near and self._deferrable(value, a))):
                return replace(view, deferrable=deferrable)
        return view

    def alike(self, value: fx.Node, op: Op) -> int:
        """How many operations like this one share a value."""
        return max(1, sum(user in self.ops and self.ops[user].key == op.key for user in value.users))

    def _deferrable(self, value: fx.Node, axis: str, depth: int = DEPTH) -> bool:
        """Whether a value is a sum over an axis that its operation, or one before, need not have asked for; or one number."""
        if axis in self.held[value].pending or value.meta["val"].numel() == 1:
            return True
        op = self.ops.get(value)
        if op is None or depth == 0 or len(value.users) > 1:
            return False
        return any(all(self._deferrable(op.operands[i], axis, depth - 1) for i in group) for group in op.rule.linear)

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
            found = self.surrounded(tuple(self._available(v, op, first) for v in op.operands),
                                    tuple(self._wanted(v, first) for v in op.results))
            if not first:
                self.surroundings[op.node] = found
        return found

    def surrounded(self, available: tuple[Available, ...], wanted: tuple[tuple[ShardSpec, ...], ...]) -> Around:
        key = (available, wanted)
        if (found := self.memory.around.get(key)) is None:
            found = self.memory.around[key] = Around(*key)
        return found

    def cost(self, op: Op, strategy: Strategy, around: Around, limit: float = math.inf) -> float:
        """Of one operation. limit: from there on it does not matter how much."""
        cost = strategy.work
        for value, made in zip(op.results, strategy.results):
            if made.pending and value is not None:
                cost -= self.late * self._bytes(value, made)
        for value, made, uses in zip(op.results, strategy.results, around.wanted):
            if cost >= limit:
                return cost
            cost += self._distribute(value, made, uses, limit - cost)
        for value, have, need in zip(op.operands, around.available, strategy.operands):
            if cost >= limit:
                return cost
            if need not in have.layouts:
                layouts = [self._deferred(layout, have, need) for layout in have.layouts]
                cost += self._nearest(value, layouts, need, (limit - cost) * have.sharers) / have.sharers
        return cost

    def transport(self, value: fx.Node) -> float:
        """What brings a value from where it is made to all places where it is used."""
        return self._distribute(value, self.held[value], self.needs.get(value, {}).values())

    def _distribute(self, value: fx.Node, made: ShardSpec, uses: Iterable[ShardSpec], limit: float = math.inf) -> float:
        copies, cost = [made], 0.0
        for need in uses:
            if need not in copies:
                cost += self._nearest(value, copies, need, limit - cost)
                copies.append(need)
        return cost

    def _nearest(self, value: fx.Node, layouts: Sequence[ShardSpec], need: ShardSpec, limit: float) -> float:
        """What the cheapest move from one of these layouts costs. limit: as in `cost`."""
        least, size = math.inf, self.sizes[value]
        if len(layouts) == 1:
            return self._move(value, layouts[0], need) if self.resharder.at_least(*size, layouts[0], need) < limit else math.inf
        bounds = [self.resharder.at_least(*size, layout, need) for layout in layouts]
        for bound, layout in sorted(zip(bounds, layouts), key=lambda pair: pair[0]):
            if bound < min(least, limit):
                least = min(least, self._move(value, layout, need))
        return least

    def _deferred(self, layout: ShardSpec, have: Available, need: ShardSpec) -> ShardSpec:
        """A layout as it would be, were the sums left pending that can be and that are asked for."""
        more = {a for a in need.pending if a in have.deferrable}
        return layout.with_pending(tuple(a for a in self.mesh.names if a in layout.pending or a in more)) if more else layout

    def _move(self, value: fx.Node, have: ShardSpec, need: ShardSpec) -> float:
        cost = self.resharder.cost(*self.sizes[value], have, need)
        return min(cost, self.cost_behind(value, need)) if need.windows else cost

    def behind(self, value: fx.Node, need: ShardSpec) -> tuple[ShardSpec, ...] | None:
        """For windows of a value of moved rows: the windows of the operands that it can be made of."""
        if (value, need) not in self.made_of:
            op = self.ops.get(value)
            self.made_of[value, need] = layouts_behind(op, need, self.mesh) if op is not None else None
        return self.made_of[value, need]

    def cost_behind(self, value: fx.Node, need: ShardSpec) -> float:
        specs = self.behind(value, need)
        if specs is None:
            return math.inf
        if (value, need) not in self.costs_behind:
            operands = self.ops[value].operands
            self.costs_behind[value, need] = sum(self._move(v, self.held[v], spec) for v, spec in zip(operands, specs))
        return self.costs_behind[value, need]

    def candidates(self, op: Op, around: Around, forced: dict[str, tuple] | None = None) -> list[Strategy]:
        """Strategies worth a look. forced: for some axes what alone they may shard."""
        mark = _marked(op)
        if mark is not None:
            return [Strategy((), (mark,), (mark,), 0.0)]
        options = self.options(op, around) | (forced or {})
        key = (op.key, tuple(options.items()))
        if key not in self.memory.candidates:
            made = (self._known_strategy(op, *choice) for choice in self._choices(op.rule, options))
            self.memory.candidates[key] = list(dict.fromkeys(s for s in made if s is not None))
        return [s for s in self.memory.candidates[key] if _has_terms(s, around.available)]

    def options(self, op: Op, around: Around) -> dict[str, tuple]:
        """For each axis the factors it may shard, the operand groups it may pass through (integers), and None."""
        key = (op.key, around, self.first)
        if key not in self.memory.options:
            self.memory.options[key] = self._options(op, around)
        return self.memory.options[key]

    def _options(self, op: Op, around: Around) -> dict[str, tuple]:
        rule, available, wanted = op.rule, around.available, around.wanted
        options: dict[str, dict] = {name: {None: None} for name, size in self.mesh.axes if size > 1}
        tensors = [*zip(rule.operands, (a.layouts for a in available)), *zip(rule.results, wanted)]
        for dims, specs in tensors:
            for spec in specs:
                for factor, axes in project(dims, spec, rule.sizes, self.mesh).items():
                    for axis in axes:
                        if factor not in rule.whole and not (self.first and is_far(op, factor, axes, self.mesh)):
                            options[axis][factor] = None
                        if factor in rule.whole | rule.windowed and rule.known:             # it has to leave, or had better:
                            options[axis].update(dict.fromkeys(f for f in rule.sizes if f not in rule.whole | rule.special | {factor}))
                for axis in spec.pending:
                    for g in range(len(rule.linear)):
                        options[axis][g] = None
        if rule.contraction:                                # where tensors disagree, or of inputs a sum is made, a third way may be best
            inputs = all(value.op == "placeholder" for value in op.operands)
            disputed = set() if self.first else self._disputed(rule, available)
            for axis, found in options.items():
                if axis in disputed or sum(isinstance(target, str) for target in found) > 1 or inputs and rule.reduce.keys() & found.keys():
                    found.update(dict.fromkeys(f for f in rule.sizes if f not in rule.whole))
        return {axis: tuple(found) for axis, found in options.items() if len(found) > 1}

    def _disputed(self, rule: Rule, available) -> set[str]:
        """Whole axes that divide what is summed over in one operand, as it is made, and in another one do not."""
        sides = [{axis for factor, axes in project(dims, have.layouts[0], rule.sizes, self.mesh).items() if factor in rule.reduce
                  for axis in axes} for dims, have in zip(rule.operands, available)]
        return {axis for axis in set.union(*sides) - set.intersection(*sides) if self.mesh.whole((axis,))}

    def _choices(self, rule: Rule, options: dict[str, tuple]) -> Iterator[tuple[dict[str, Axes], dict[str, int]]]:
        """All assignments; where several axes shard one factor, every order of them."""
        names = list(options)
        for targets in itertools.product(*options.values()):
            factors: dict[str, Axes] = {}
            through = {a: t for a, t in zip(names, targets) if isinstance(t, int)}
            for axis, target in zip(names, targets):
                if isinstance(target, str):
                    factors[target] = factors.get(target, ()) + (axis,)
            if not all(is_roomy(rule.sizes[f], axes, self.mesh, self.crowded) for f, axes in factors.items()):
                continue
            orders = [itertools.permutations(axes) for axes in factors.values()]
            for ordered in itertools.product(*orders):
                yield dict(zip(factors, ordered)), through

    def _known_strategy(self, op: Op, assignment: dict[str, Axes], through: dict[str, int]) -> Strategy | None:
        key = (op.key, *assignment.items(), *through.items())
        if key not in self.memory.strategies:
            self.memory.strategies[key] = self._strategy(op, assignment, through)
        return self.memory.strategies[key]

    def _strategy(self, op: Op, assignment: dict[str, Axes], through: dict[str, int]) -> Strategy | None:
        """None if no layouts express it. through: for axes the group of operands whose pending sum passes on."""
        rule = op.rule
        operands, results = [], []
        for i in range(len(rule.operands)):
            spec = operand_layout(rule, i, tuple(op.operands[i].meta["val"].shape), assignment, self.mesh)
            pending = tuple(a for a in self.mesh.names if a in through and i in rule.linear[through[a]])
            if spec is None:
                return None
            operands.append(spec.with_pending(pending))
        for dims in rule.results:
            axes = assemble(dims, assignment, rule.sizes, self.mesh)
            reduced, kind = result_pending(rule, dims, assignment)
            if axes is None or through and reduced and kind != "sum":
                return None
            pending = tuple(a for a in self.mesh.names if a in reduced or a in through)
            results.append(ShardSpec(axes, (), pending, kind if reduced else "sum"))
        return Strategy(tuple(assignment.items()), tuple(operands), tuple(results), self._work(op, assignment, operands, results))

    def _work(self, op: Op, assignment, operands, results) -> float:
        rule, work = op.rule, 0.0
        if rule.contraction:
            counts = {f: self.mesh.count(assignment.get(f, ())) for f in rule.sizes}
            even = 2 * math.prod(rule.sizes.values()) / math.prod(counts.values())
            padded = 2 * math.prod(-(-n // counts[f]) for f, n in rule.sizes.items())
            work = even / FLOPS_PER_BYTE + (padded - even) / WASTE_PER_BYTE
        for value, spec in itertools.chain(zip(op.operands, operands), zip(op.results, results)):
            if value is not None:
                work += self._bytes(value, spec) / TRAFFIC_PER_BYTE
        return work

    def _bytes(self, value: fx.Node, spec: ShardSpec) -> float:
        """Of one device's part."""
        shape, itemsize = self.sizes[value]
        return math.prod(spec.local_shape(shape, self.mesh)) * itemsize

    def _choose_input(self, node: fx.Node) -> bool:
        """An input whose layout is open is stored as it is used most cheaply."""
        wanted = self._wanted(node, first=False)
        found = (node.meta["spec"], *(spec for spec in wanted if not spec.pending))
        candidates = [self.held[node], *(spec.plain().map_axes(self.mesh.whole) for spec in found)]
        best = min(candidates, key=lambda spec: sum(self._move(node, spec, w) for w in wanted))
        changed = best != self.held[node]
        self._hold(node, best)
        return changed

    def _settle_outputs(self) -> None:
        """Outputs with a layout need it; one that is open is used as it comes, but for a pending sum."""
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
        target = (value.meta["spec"].closed() if held.pending else held.with_pending(())).map_axes(self.mesh.whole)
        if wish is None:
            return target
        fixed = {a for axes, is_open in zip(wish.dims, wish.open) if not is_open for a in axes}
        return ShardSpec(tuple(tuple(a for a in t if a not in fixed) if is_open else w
                               for w, is_open, t in zip(wish.dims, wish.open, target.dims)))


def _has_terms(strategy: Strategy, available: Sequence[Available]) -> bool:
    """Whether the sums that operands are to be terms of are pending, or can be."""
    return all(have.layouts[0].reduction == "sum" and all(a in have.layouts[0].pending or a in have.deferrable for a in need.pending)
               for need, have in zip(strategy.operands, available) if need.pending)


def _marked(op: Op) -> ShardSpec | None:
    """The layout that a mark node asks for, its open dimensions as propagated."""
    spec = op.node.meta.get("mark")
    return spec.closed() if spec is not None else None
