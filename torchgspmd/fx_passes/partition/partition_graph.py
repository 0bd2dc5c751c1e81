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
search changes the assignment, by the moves of a table (moves.py); solver.py runs its phases.
"""

from __future__ import annotations

from torch import fx

from ...layout.mesh import Mesh
from ...shard_spec import ShardSpec
from ..ir import Rules
from .assignment import Assignment
from .cost_constants import CostConstants
from .ends import Cotangents, Ends, Storable
from .explain_costs import Decisions
from .insert_collectives import insert_collectives
from .search_counts import SearchCounts
from .search_memory import Memories, SearchMemory, Solution, Solutions, situation
from .solver import Solver


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
    counts: search effort is added here (search_counts.py).
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
