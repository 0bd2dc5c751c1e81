"""The search for the cheapest assignment: one operation at a time, then whole regions.

The first sweep goes by the propagated layouts. The following ones go by the choices of the
neighbors, until nothing gets cheaper; an operation is visited again when its neighborhood changed.
Then regions change at once (see region_search.py). The result is the cheapest of the states in
which such rounds end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import fx

from ...mesh import Mesh
from ...shard_spec import ShardSpec
from ..ir import Op, Rules
from .cost_model import PENDING_BONUS, CostModel
from .region_search import RegionSearch
from .search_memory import Memories
from .strategies import Neighborhood, Strategy, marked

TIE_BREAK = 1e-9  # A bonus for pending sums that decides between equal costs only.
MAX_SWEEPS = 6  # per round
# (bonus for pending sums, most rounds in which regions change)
PHASES = ((PENDING_BONUS, 0), (TIE_BREAK, 3), (PENDING_BONUS, 3), (TIE_BREAK, 3))

Cotangents = dict[fx.Node, tuple[fx.Node, ShardSpec]]
Storable = Callable[[ShardSpec, tuple[int, ...]], ShardSpec]


class Solver(CostModel):
    """Finds the strategies of all operations, and the layouts of open inputs and outputs."""

    def __init__(
        self,
        graph: fx.Graph,
        mesh: Mesh,
        input_specs: Mapping[fx.Node, ShardSpec],
        outputs: Mapping[int, ShardSpec | fx.Node],
        rules: Rules,
        memories: Memories,
        storable: Storable | None,
        cotangents: Cotangents,
    ) -> None:
        super().__init__(graph, mesh, input_specs, rules, memories)
        self.outputs, self.storable, self.cotangents = outputs, storable, cotangents
        self.output = next(n for n in reversed(graph.nodes) if n.op == "output")
        self.omitted_marks: set[fx.Node] = set()
        self.region_search = RegionSearch(self)

    def solve(self) -> None:
        """Assign a strategy to every operation."""
        for op in self.ops.values():
            self.choose(op, first=True)
        self._require_outputs()
        candidates = []
        for self.pending_bonus, rounds in PHASES:
            self.worklist.update(self.ops)
            self.new_version()
            self._run_sweeps()
            for _ in range(rounds):
                if not any([self.region_search.lay_out(), self.region_search.resolve()]):
                    break
                self._run_sweeps()
            if rounds and self.pending_bonus == TIE_BREAK:
                cost = self.region_search.exact_cost(self.ops.values())
                candidates.append((cost, self.snapshot()))
        self.restore(min(candidates, key=lambda candidate: candidate[0])[1])
        self._require_outputs()

    def omit_unused_marks(self) -> None:
        """Omit each mark whose layout nobody uses, if its users get the unmarked value for less."""
        for op in self.ops.values():
            if marked(op) is None or self.layout_of[op.results[0]] in self.required_layouts(
                op.results[0], False
            ):
                continue
            strategy, cost, unmarked = (
                self.strategy_of[op.node],
                self.region_search.exact_cost([op]),
                self.layout_of[op.operands[0]],
            )
            self.assign(op, Strategy((), (unmarked,), (unmarked,), 0.0))
            if self.region_search.exact_cost([op]) < cost:
                self.omitted_marks.add(op.node)
            else:
                self.assign(op, strategy)

    def _run_sweeps(self) -> None:
        """Visit all operations, backwards and forwards in turn, until nothing changes."""
        for sweep in range(MAX_SWEEPS):
            order = list(self.ops.values())
            changed = [self.choose(op) for op in (order if sweep % 2 else reversed(order))]
            changed += self.region_search.improve()
            changed += [self._choose_input(node) for node in self.open_inputs]
            self._require_outputs()
            if not any(changed):
                break

    def choose(self, op: Op, first: bool = False) -> bool:
        """Assign the cheapest strategy to an operation; return whether it changed."""
        if op.node not in self.worklist:
            return False
        current = self.strategy_of.get(op.node)
        best = self.best_strategy(op, self.neighborhood(op, first), current)
        if best is not current:
            self.assign(op, best)
        self.worklist.discard(op.node)
        return best is not current

    def best_strategy(
        self,
        op: Op,
        neighborhood: Neighborhood,
        current: Strategy | None,
        forced: tuple[str, str | None] | None = None,
    ) -> Strategy | None:
        """Return the cheapest strategy, of equals the current one; None if there is none.

        forced: an axis, and the only factor that it may shard (None: no factor).
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
        key = (op.key, neighborhood, current, forced, self.pending_bonus, moved)
        if key not in self.memory.choices:
            candidates = self.strategies.candidates(
                op, neighborhood, {forced[0]: forced[1:]} if forced else None
            )
            if current is not None:
                candidates = [current, *candidates]
            self.memory.choices[key] = self.cheapest(op, candidates, neighborhood)
        return self.memory.choices[key]

    # --------------------------------------------------------------------------- inputs and outputs

    def _choose_input(self, node: fx.Node) -> bool:
        """Give an open input the layout in which its uses cost least; return whether it changed."""
        uses = self.required_layouts(node, first=False)
        layouts = (node.meta["spec"], *(spec for spec in uses if not spec.pending))
        output, requested = self.cotangents.get(node, (None, None))
        if output is not None:
            layouts = (*layouts, self.layout_of[output].with_pending(()))
        candidates = [
            self.layout_of[node],
            *(spec.plain().map_axes(self.mesh.whole) for spec in layouts),
        ]
        if output is not None:
            candidates = [self._fill_open(requested, spec, output) for spec in candidates]

        def cost(spec: ShardSpec) -> float:
            """Return what all moves of the input cost if it is stored in this layout."""
            arrival = (
                0.0 if output is None else self.move_cost(output, self.layout_of[output], spec)
            )
            return arrival + sum(self.move_cost(node, spec, use) for use in uses)

        best = min(candidates, key=cost)
        changed = best != self.layout_of[node]
        self.set_layout(node, best)
        return changed

    def _require_outputs(self) -> None:
        """Require the layout of every output."""
        for i, value in enumerate(self.output.args[0]):
            if isinstance(value, fx.Node):
                self.require(value, self.output, i, self.output_spec(i, value))

    def output_spec(self, i: int, value: fx.Node) -> ShardSpec:
        """Return the layout in which output i leaves the program.

        An open output leaves as it is produced, except that a pending sum is reduced.
        """
        requested = self.outputs.get(i)
        if isinstance(requested, fx.Node):
            return self.layout_of[requested]
        if requested is not None and not any(requested.open):
            return requested
        layout = self.layout_of[value]
        target = (
            value.meta["spec"].closed() if layout.pending else layout.with_pending(())
        ).map_axes(self.mesh.whole)
        return target if requested is None else self._fill_open(requested, target, value)

    def _fill_open(self, requested: ShardSpec, target: ShardSpec, value: fx.Node) -> ShardSpec:
        """Return the requested layout, with that of `target` in its open dimensions."""
        fixed = {
            a for axes, is_open in zip(requested.dims, requested.open) if not is_open for a in axes
        }
        spec = ShardSpec(
            tuple(
                tuple(a for a in t if a not in fixed) if is_open else w
                for w, is_open, t in zip(requested.dims, requested.open, target.dims)
            )
        )
        return self.storable(spec, self.sizes[value][0]) if self.storable is not None else spec
