"""Decide which axes shard which factors in every operation, and insert the collectives between.

before   meta["spec"] from `propagate` on every value
after    meta["spec"] is the layout on the devices; every operand has the layout its operation needs
         %mm   : f32[8@data, 64] sum@model = mm(%gelu, %w2)
         %mm_r : f32[8@data, 64]           = all_reduce(%mm, sum, model)
         meta["decisions"] on the output: the strategies, for `Plan.explain`
needs    rules; layouts for the inputs and outputs that are not open
source   the idea of pending sums is Shardy's `unreduced`; choosing by cost over the neighborhood
         is ours

A strategy (see strategies.py) states the layouts that an operation needs for its operands and
returns as results. An Assignment has one for every operation, a CostModel its price. One local
search changes the assignment, by the moves of the table MOVES; Solver runs its phases.
"""

from __future__ import annotations

from torch import fx

from ...layout.mesh import Mesh
from ...shard_spec import ShardSpec
from ..ir import Rules
from .assignment import Assignment
from .body_moves import BodyMove, ThreadMove
from .cost_constants import CostConstants, SearchCounts
from .cost_model import CostModel
from .course_move import CourseMove
from .explain_costs import Decisions
from .insert_collectives import insert_collectives
from .local_search import Cotangents, Ends, LocalSearch, Row, Storable
from .neighborhood import Strategy
from .search_memory import Memories, SearchMemory, Solution, Solutions, situation
from .small_moves import ChainMove, EarlySumMove, InputMove, MessageMove, OperationMove, SumMove
from .strategies import marked

# Everything by which the search for layouts changes an assignment.
MOVES = (
    Row(
        OperationMove,
        "sweep",
        "another strategy for one operation",
        "Most operations gain alone, beside neighbors that keep theirs.",
    ),
    Row(
        SumMove,
        "sweep",
        "all summands pending over an axis, or none",
        "An addition passes on only sums that are pending in both operands, so none gains alone.",
    ),
    Row(
        ChainMove,
        "sweep",
        "views in a row laid out like the first operand, or as the last result is needed",
        "A view between two others that stay costs two messages.",
    ),
    Row(
        InputMove,
        "sweep",
        "another layout for an open input",
        "Its users see the input's layout, and none of them chooses it.",
    ),
    Row(
        BodyMove,
        "round",
        "another factor for an axis in all operations between contractions",
        "One norm of a residual stream would exchange the stream twice.",
    ),
    Row(
        ThreadMove,
        "round",
        "an axis for one dimension, through the contractions too",
        "Weights are moved once for both products of a layer, or for all rounds of a loop.",
    ),
    Row(
        EarlySumMove,
        "round",
        "the reduction of a pending sum where it is computed",
        "Each of its users would reduce its own result, whatever another one does.",
    ),
    Row(
        CourseMove,
        "program",
        "an axis for an open input's dimension, and for everything that this runs through",
        "Tokens divided over the experts' axis are gathered again at the first layer that is not.",
    ),
    Row(
        MessageMove,
        "last",
        "fewer messages, for a few bytes more",
        "By bytes alone two exchanges may cost less than one halo.",
    ),
)


class Solver:
    """The search for the cheapest assignment: one operation at a time, then whole regions.

    The first sweep goes by the propagated layouts. The following ones go by the neighbors' choices,
    until nothing gets cheaper; an operation is visited again when its neighborhood changed. Then
    regions change at once (see regions.py). The result is the cheapest state in which such rounds
    end. At last messages are saved.
    """

    def __init__(self, assignment: Assignment, memory: SearchMemory, ends: Ends) -> None:
        self.assignment, self.constants, self.ends = assignment, memory.constants, ends
        self.search = LocalSearch(assignment, memory, ends, MOVES)

    @property
    def costs(self) -> CostModel:
        """The present phase's cost model."""
        return self.search.costs

    def solve(self, former: Solution | None = None) -> CostModel:
        """Assign a strategy to every operation; return the last phase's cost model.

        former: from a graph with mostly the same operations; only the last phase starts from it.
        """
        at = self.assignment
        if former is not None:
            former.assign(at)
            self.search.excess = former.excess
        for op in at.ops.values():
            if op.node not in at.strategy_of:
                self.search.choose(op, first=True)
        # Only now: an open output leaves in the layout in which it is produced.
        self.ends.require()
        if former is not None:
            self.search.run_phase(self.constants.tie_break)
        else:
            self._search_by_bytes()
            self.search.try_moves("program")
        self.search.try_moves("last")
        # A move has its search, whose caches would be garbage that only the collector finds.
        self.search.moves.clear()
        return self.costs

    def _search_by_bytes(self) -> None:
        """Run both phases twice; regions change in the first phase the second time only."""
        at, constants, candidates = self.assignment, self.constants, []
        for rounds in (0, constants.max_region_rounds):
            self.search.run_phase(constants.pending_bonus, rounds)
            self.search.run_phase(constants.tie_break)
            candidates.append((self.costs.exact(at.ops.values()), at.snapshot()))
        # Both ends are local minima, and neither is always the better one.
        at.restore(min(candidates, key=lambda candidate: candidate[0])[1])
        self.ends.require()

    def omit_unused_marks(self) -> None:
        """Omit each mark whose layout nobody uses, if its users get the unmarked value for less."""
        at = self.assignment
        for op in at.ops.values():
            if marked(op) is None or at.layout_of[op.results[0]] in at.required_layouts(
                op.results[0], False
            ):
                continue
            # A mark on a value costs a reshard to it and one from it, if no user wants its layout.
            strategy, cost = at.strategy_of[op.node], self.costs.exact([op])
            unmarked = at.layout_of[op.operands[0]]
            at.assign(op, Strategy((), (unmarked,), (unmarked,), 0.0))
            if self.costs.exact([op]) < cost:
                at.omitted_marks.add(op.node)
            else:
                at.assign(op, strategy)


def partition_graph(
    graph: fx.Graph,
    mesh: Mesh,
    input_specs: dict[fx.Node, ShardSpec],
    outputs: dict[int, ShardSpec | fx.Node],
    rules: Rules | None = None,
    keep_marks: bool = False,
    memories: Memories | None = None,
    storable: Storable | None = None,
    cotangents: Cotangents | None = None,
    constants: CostConstants = CostConstants(),
    solutions: Solutions | None = None,
    counts: SearchCounts | None = None,
) -> fx.Graph:
    """Return the partitioned graph.

    input_specs: input layouts; those for other inputs are chosen.
    outputs: output layouts by position; a node stands for that input's layout.
    keep_marks: keep also the marks whose layout nobody uses.
    memories: from graphs like this one, whose operations have the same rules.
    storable: maps the layout that an open output would have to the one it is to have.
    cotangents: input -> (the output whose layout it comes in, the open layout requested for it).
    constants: for the cost model.
    solutions: from graphs that mostly have the same nodes, the first to start from.
    counts: search effort is added here (no_counts).
    """
    shared = situation(graph, mesh, constants)
    memory = ({} if memories is None else memories).setdefault(shared, SearchMemory(*shared))
    earlier = memory.counts.copy()
    assignment = Assignment(graph, mesh, input_specs, rules or Rules(), memory.interner, constants)
    solver = Solver(assignment, memory, Ends(assignment, outputs, storable, cotangents or {}))
    costs = solver.solve(({} if solutions is None else solutions).get(shared))
    if solutions is not None:
        solutions.setdefault(shared, Solution.of(assignment, solver.search.excess))
    # After the search: only then it shows which marks have layouts that nobody uses.
    if not keep_marks:
        solver.omit_unused_marks()
    partitioned = insert_collectives(assignment, costs)
    partitioned.output_node().meta["decisions"] = Decisions.of(
        assignment, costs.resharder.constants
    )
    if counts is not None:
        counts.update({name: n - earlier[name] for name, n in memory.counts.items()})
    return partitioned
