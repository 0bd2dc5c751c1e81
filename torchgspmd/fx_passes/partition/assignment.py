"""The search state: each operation's strategy and each value's layout.

    %a = mm(%x, %w)      strategy_of[%a] = {m: data}      layout_of[%a] = [data, _]
    %b = relu(%a)        required[%a] = {(%b, 0): [data, _]}

A change puts the operations that depend on it on the worklist.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from copy import copy

from torch import fx

from ...layout.mesh import Mesh
from ...rules.custom_ops.loops import CARRY
from ...shard_spec import ShardSpec
from ..ir import Op, Rules, has_one_use, operands_of, planned_shape, runs, values
from .cost_constants import CostConstants
from .neighborhood import Interner, Neighborhood, OperandLayouts, Strategy

_MISSING = object()  # the former value of a key that a table lacked

SNAPSHOT_FIELDS = (
    "strategy_of",
    "layout_of",
    "required",
    "view_cache",
    "neighborhood_cache",
    "window_costs",
    "worklist",
    "version",
    "stamps",
)


class Assignment:
    """One graph's strategies, layouts and requirements, with the worklist for their changes."""

    def __init__(
        self,
        graph: fx.Graph,
        mesh: Mesh,
        input_specs: Mapping[fx.Node, ShardSpec],
        rules: Rules,
        interner: Interner,
        constants: CostConstants,
    ) -> None:
        self.graph, self.mesh, self.interner = graph, mesh, interner
        self.pending_depth = constants.pending_depth
        self.ops: dict[fx.Node, Op] = {op.node: op for op in rules.ops(graph)}
        self.order = {node: i for i, node in enumerate(self.ops)}
        self.producers = {v: op for op in self.ops.values() for v in op.results if v is not None}
        self.output = graph.output_node()
        # next carry -> the entries of the loop that take it, before it in the graph
        self.carries: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.find_nodes(op="call_function", target=CARRY):
            self.carries.setdefault(operands_of(node)[-1], []).append(node)
        self.only_inputs = {
            node: all(value.op == "placeholder" for value in op.operands)
            for node, op in self.ops.items()
        }
        inputs = graph.find_nodes(op="placeholder")
        self.open_inputs = [n for n in inputs if n not in input_specs]
        self.layout_of = self._initial_layouts(input_specs)
        self.layout_of.update((value, value.meta["spec"]) for value in self.carries)
        self.strategy_of: dict[fx.Node, Strategy] = {}
        self.omitted_marks: set[fx.Node] = set()  # Their users take the unmarked value.
        # value -> {(user, operand index): layout}
        self.required: dict[fx.Node, dict[tuple[fx.Node, int], ShardSpec]] = {}
        self.versions = itertools.count()
        self.version = next(self.versions)  # changes with everything that a decision depends on
        # operation -> the version in which its strategy or its neighborhood changed last
        self.stamps = dict.fromkeys(self.ops, self.version)
        # value -> {user: its OperandLayouts, None: the layouts required}, until these change
        self.view_cache: dict[fx.Node, dict] = {}
        self.neighborhood_cache: dict[fx.Node, Neighborhood] = {}
        self.window_costs: dict[tuple[fx.Node, ShardSpec], float] = {}  # until a layout changes
        # A trial's changes, each as (table, key, former value); None outside of trials.
        self.undo_log: list[tuple[dict, object, object]] | None = None
        self.before_trial = self.version, self.window_costs
        # Values that changed since `hold`: whether their layout did, and its pending axes.
        self.held: dict[fx.Node, tuple[bool, bool]] | None = None
        self.held_ops: list[fx.Node] = []  # operations that changed since `hold`
        self.dropped: set[fx.Node] = set()  # values whose views changed in a trial
        self.sizes: dict[fx.Node, tuple[tuple[int, ...], int]] = {  # shape, bytes of an element
            v: (planned_shape(v), v.meta["val"].element_size()) for v in values(graph.nodes)
        }
        passed = self._passes_windows
        self.kinds = {v: interner.kind(n, runs(v), passed(v)) for v, n in self.sizes.items()}
        # operations whose neighborhood changed; a dict, so that a trial can log it
        self.worklist: dict[fx.Node, None] = dict.fromkeys(self.ops)
        # value -> operations that produce or use it
        self.neighbors: dict[fx.Node, set[fx.Node]] = {v: set() for v in self.sizes}
        for op in self.ops.values():
            for value in filter(None, (*op.operands, *op.results)):
                self.neighbors[value].add(op.node)
        # by value, whether its pending axes change, and the depth: see _users_behind
        self.users_behind: dict[tuple[fx.Node, bool, int], frozenset[fx.Node]] = {}
        self.sharer_counts: dict[
            tuple[fx.Node, int | None], int
        ] = {}  # by value and key of operations

    def _initial_layouts(self, input_specs: Mapping[fx.Node, ShardSpec]) -> dict:
        """Return the layouts for inputs and constants; an open input uses whole axes only."""
        layout_of = {n: n.meta["spec"] for n in self.graph.find_nodes(op="placeholder")}
        for node in self.graph.find_nodes(op="get_attr"):
            layout_of[node] = ShardSpec.replicated(node.meta["val"].dim())
        layout_of.update(input_specs)
        # Inputs are stored by whole axes, which a DTensor can express.
        for node in self.open_inputs:
            layout_of[node] = layout_of[node].map_axes(self.mesh.whole)
        return layout_of

    def _passes_windows(self, value: fx.Node) -> bool:
        """Return whether a value's windows may be computed from its operands' windows."""
        users = (self.ops[user] for user in value.users if user in self.ops)
        moves = value in self.producers and self.producers[value].rule.moves
        return moves and any(bool(op.rule.halo) for op in users)

    def in_order(self, ops: Iterable[Op]) -> list[Op]:
        return sorted(ops, key=lambda op: self.order[op.node])

    # ------------------------------------------------------------------------------------- changes

    def snapshot(self) -> dict[str, object]:
        """Copy everything that decisions change."""
        return {name: copy(getattr(self, name)) for name in SNAPSHOT_FIELDS}

    def restore(self, snapshot: dict[str, object]) -> None:
        """Go back to a snapshot, which cannot be used again."""
        vars(self).update(snapshot)

    def begin_trial(self) -> None:
        """Log every change from here on, for `undo_trial`. Few values change: no copy of all."""
        self.undo_log, self.before_trial = [], (self.version, self.window_costs)
        self.dropped = set()

    def keep_trial(self) -> None:
        """End a trial, and keep its changes."""
        self.undo_log = None

    def undo_trial(self) -> None:
        """End a trial, and take its changes back."""
        log, self.undo_log = self.undo_log, None
        assert log is not None
        for table, key, former in reversed(log):
            if former is _MISSING:
                table.pop(key, None)
            else:
                table[key] = former
        self.version, self.window_costs = self.before_trial
        self.held = None

    def hold(self) -> None:
        """Touch no operation before `release`: nothing looks at neighborhoods until then."""
        self.held, self.held_ops = {}, []

    def release(self) -> None:
        """Touch the operations around all values that changed since `hold`, each once."""
        held, self.held = self.held, None
        touched = {*self.held_ops}
        self.new_version()
        for value, (moved, pending) in (held or {}).items():
            touched |= self.neighbors[value]
            if moved:
                touched |= self._users_behind(value, pending)
        self._touch(touched)

    def _log(self, table: dict, key: object) -> None:
        """Log an entry that is about to change."""
        if self.undo_log is not None:
            self.undo_log.append((table, key, table.get(key, _MISSING)))

    def wait(self, nodes: Iterable[fx.Node]) -> None:
        """Put operations on the worklist."""
        for node in nodes:
            self._log(self.worklist, node)
            self.worklist[node] = None

    def settle(self, node: fx.Node) -> None:
        """Take an operation from the worklist."""
        self._log(self.worklist, node)
        self.worklist.pop(node, None)

    def assign(self, op: Op, strategy: Strategy) -> None:
        """Give an operation a strategy: set its results' layouts, require its operands'."""
        if self.strategy_of.get(op.node) is not strategy:
            self._log(self.strategy_of, op.node)
            self.strategy_of[op.node] = strategy
            # The strategy may be forced and not the cheapest; its neighborhood is as it was.
            if self.held is not None:
                self.held_ops.append(op.node)
            else:
                self.new_version()
                self._touch((op.node,), around=False)
        for value, spec in zip(op.results, strategy.results):
            if value is not None:
                self.set_layout(value, spec)
        for i, (value, spec) in enumerate(zip(op.operands, strategy.operands)):
            self.require(value, op.node, i, spec)

    def assign_all(self, ops: Sequence[Op], strategies: Sequence[Strategy]) -> None:
        """Give operations their strategies, in this order."""
        for op, strategy in zip(ops, strategies):
            self.assign(op, strategy)

    def set_layout(self, value: fx.Node, spec: ShardSpec) -> None:
        before = self.layout_of.get(value)
        if before != spec:
            self._log(self.layout_of, value)
            self.layout_of[value] = spec
            # A new dict, as a trial gives the old one back.
            self.window_costs = {}
            self._drop_views(value)
            pending = before is None or before.pending != spec.pending
            if self.held is not None:
                self.held[value] = True, pending or self.held.get(value, (True, False))[1]
                return
            self.new_version()
            self._touch(self._users_behind(value, pending))

    def require(self, value: fx.Node, user: fx.Node, operand: int, spec: ShardSpec) -> None:
        """Set the layout in which a user needs a value."""
        uses = self.required.get(value, {})
        if uses.get((user, operand)) != spec:
            self._log(self.required, value)
            # A new dict, as snapshots and trials share the old one.
            self.required[value] = uses | {(user, operand): spec}
            self._drop_views(value)
            if self.held is not None:
                self.held.setdefault(value, (False, False))
                return
            self.new_version()
            self._touch([node for node in self.neighbors[value] if node is not user])

    def new_version(self) -> None:
        """Record that something changed that decisions depend on."""
        self.version = next(self.versions)

    def stamp(self, nodes: Iterable[fx.Node]) -> int:
        """Return the last version in which any of these operations changed, or their neighbors."""
        return max(map(self.stamps.__getitem__, nodes))

    def _touch(self, nodes: Iterable[fx.Node], around: bool = True) -> None:
        """Put operations on the worklist: they changed or, with `around`, their neighborhoods."""
        stamps, cached, version, log = (
            self.stamps,
            self.neighborhood_cache,
            self.version,
            self.undo_log,
        )
        for node in nodes:
            if log is not None:
                # Once in a trial is enough: `undo_trial` brings back the first entry.
                if stamps[node] <= self.before_trial[0]:
                    log.append((stamps, node, stamps[node]))
                    log.append((cached, node, cached.get(node, _MISSING)))
                if node not in self.worklist:
                    log.append((self.worklist, node, _MISSING))
            stamps[node] = version
            self.worklist[node] = None
            if around:
                cached.pop(node, None)

    def _drop_views(self, value: fx.Node) -> None:
        # Also one that is not there: a trial may cache an entry that is wrong after it.
        if self.undo_log is not None and value not in self.dropped:
            self.dropped.add(value)
            self._log(self.view_cache, value)
        self.view_cache.pop(value, None)

    def _users_behind(
        self, value: fx.Node, pending: bool, depth: int | None = None
    ) -> frozenset[fx.Node]:
        """Return all operations that decide by a value's layout.

        These are its users, and the users behind row moves. With `pending` (the pending axes
        changed) also those behind linear operations.
        """
        depth = self.pending_depth if depth is None else depth
        key = value, pending, depth
        if key not in self.users_behind:
            found: set[fx.Node] = set()
            for user in (*value.users, *self.carries.get(value, ())):
                op = self.ops.get(user)
                if op is not None:
                    found.add(user)
                    if depth and (pending and op.rule.linear or op.rule.moves):
                        for result in filter(None, op.results):
                            found |= self._users_behind(result, pending, depth - 1)
            self.users_behind[key] = frozenset(found)
        return self.users_behind[key]

    # ------------------------------------------------------------------------------- neighborhoods

    def neighborhood(self, op: Op, first: bool = False) -> Neighborhood:
        """Return the layouts around an operation; with `first` those that propagation proposes."""
        neighborhood = self.neighborhood_cache.get(op.node)
        if neighborhood is None or first:
            neighborhood = self.new_neighborhood(
                op,
                tuple([self.operand_layouts(v, op, first) for v in op.operands]),
                tuple([self.required_layouts(v, first) for v in op.results]),
                first,
            )
            if not first:
                self.neighborhood_cache[op.node] = neighborhood
        return neighborhood

    def new_neighborhood(
        self,
        op: Op,
        operands: tuple[OperandLayouts, ...],
        required: tuple[tuple[ShardSpec, ...], ...],
        first: bool = False,
    ) -> Neighborhood:
        """Return an operation's neighborhood with other layouts around it."""
        return self.interner.neighborhood(operands, required, first, self.only_inputs[op.node])

    def operand_layouts(self, value: fx.Node, op: Op, first: bool = False) -> OperandLayouts:
        """Return the layouts in which a value exists without `op`.

        With `first` only the layout it is produced in, and how many operations share a new one.
        """
        if first:
            layouts = (self.layout_of[value],)
            return self.interner.operand_layouts(layouts, self.sharers(value, op), ())
        views = self.view_cache.setdefault(value, {})
        if (view := views.get(op.node)) is None:
            layouts = {self.layout_of[value]: None}
            for (user, _), spec in self.required.get(value, {}).items():
                if user is not op.node:
                    layouts[spec] = None
            view = views[op.node] = self.interner.operand_layouts(tuple(layouts), 1, ())
        if op.rule.joins:
            layouts_around = map(self.layout_of.__getitem__, op.operands)
            near = {
                axis
                for spec in (*layouts_around, *self.required_layouts(op.results[0], False))
                if spec.pending
                for axis in spec.pending
            }
            if near and (
                deferrable := tuple(
                    a
                    for a in self.mesh.names
                    if a in near and self._is_deferrable(value, a, self.pending_depth)
                )
            ):
                return self.interner.operand_layouts(view.layouts, view.sharers, deferrable)
        return view

    def required_layouts(self, value: fx.Node | None, first: bool) -> tuple[ShardSpec, ...]:
        """Return the different layouts that users require; with `first` the propagated one."""
        if value is None:
            return ()
        if first:
            return (value.meta["spec"].closed(),)
        views = self.view_cache.setdefault(value, {})
        if None not in views:
            views[None] = tuple(dict.fromkeys(self.required.get(value, {}).values()))
        return views[None]

    def sends_around(self, op: Op) -> bool:
        """Return whether an operand or a result of an operation is moved to another layout."""
        strategy = self.strategy_of[op.node]
        for value, need in zip(op.operands, strategy.operands):
            if self.layout_of[value] is not need:
                return True
        for value, layout in zip(op.results, strategy.results):
            if (uses := self.required_layouts(value, False)) and uses != (layout,):
                return True
        return False

    def sharers(self, value: fx.Node, op: Op) -> int:
        """Count the operations like this one that use a value."""
        if (value, op.key) not in self.sharer_counts:
            self.sharer_counts[value, op.key] = max(
                1, sum(user in self.ops and self.ops[user].key == op.key for user in value.users)
            )
        return self.sharer_counts[value, op.key]

    def _is_deferrable(self, value: fx.Node, axis: str, depth: int) -> bool:
        """Return whether a value could be pending over an axis.

        True if it is, if a sum before it could have been left unreduced, and for single numbers.
        """
        if axis in self.layout_of[value].pending or value.meta["val"].numel() == 1:
            return True
        op = self.ops.get(value)
        if op is None or depth == 0 or value.users and not has_one_use(value):
            return False
        return any(
            all(self._is_deferrable(op.operands[i], axis, depth - 1) for i in group)
            for group in op.rule.linear
        )
