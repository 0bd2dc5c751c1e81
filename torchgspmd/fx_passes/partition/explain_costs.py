"""Why an operation has its strategy: all candidates with their costs, while others keep theirs.

    %einsum <- einsum: m k, k n -> m n
      strategy           result              arithmetic  memory  operands  results  total
    * m: data, k: model  [data _ sum@model]        12.8     2.1       0.0    200.0  214.9
      m: data            [data _]                  51.2     5.5     448.0      0.0  504.7

A plan has only the search's result; the assignment and its costs are computed again from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from ...layout.mesh import Mesh
from ...shard_spec import ShardSpec
from ..ir import Op, Rules
from .assignment import Assignment
from .cost_constants import CostConstants
from .cost_model import CostModel, arithmetic
from .neighborhood import Strategy
from .search_memory import SearchMemory, situation
from .strategies import marked

MAX_ROWS = 12  # Candidates in a table, the cheapest ones.
COLUMNS = ("arithmetic", "memory", "operands", "results")


@dataclass(frozen=True)
class Decisions:
    """The decisions that partition took, for a graph that it did not change."""

    graph: fx.Graph
    mesh: Mesh
    constants: CostConstants
    inputs: dict[fx.Node, ShardSpec]
    strategies: dict[fx.Node, Strategy]
    outputs: tuple[ShardSpec | None, ...]
    omitted_marks: frozenset[fx.Node]

    @classmethod
    def of(cls, assignment: Assignment, constants: CostConstants) -> Decisions:
        """Extract the decisions from an assignment."""
        at, output = assignment, assignment.output
        inputs = {n: spec for n, spec in at.layout_of.items() if n.op == "placeholder"}
        outputs = tuple(
            at.required[v][output, i] if isinstance(v, fx.Node) else None
            for i, v in enumerate(output.args[0])
        )
        omitted = frozenset(at.omitted_marks)
        return cls(
            graph=at.graph,
            mesh=at.mesh,
            constants=constants,
            inputs=inputs,
            strategies=at.strategy_of,
            outputs=outputs,
            omitted_marks=omitted,
        )

    def assignment(self, memory: SearchMemory) -> Assignment:
        at = Assignment(
            self.graph, self.mesh, self.inputs, Rules(), memory.interner, self.constants
        )
        for node, op in at.ops.items():
            at.assign(op, self.strategies[node])
        for i, spec in enumerate(self.outputs):
            if spec is not None:
                at.require(at.output.args[0][i], at.output, i, spec)
        return at


def explain_costs(decisions: Decisions, value: fx.Node) -> str:
    """Return all candidates' costs for a value's operation, and why one won."""
    memory = SearchMemory(*situation(decisions.graph, decisions.mesh, decisions.constants))
    at = decisions.assignment(memory)
    costs = CostModel(at, memory.priced_resharder, decisions.constants.tie_break)
    op = at.producers.get(value)
    if op is None:
        return _explain_input(costs, value)
    neighborhood, chosen = at.neighborhood(op), at.strategy_of[op.node]
    candidates = {_content(s): s for s in memory.strategies.candidates(op, neighborhood)}
    # The chosen one may be no candidate: a search for several operations may have forced it.
    candidates[_content(chosen)] = chosen
    which = op.results.index(value)

    def row(strategy: Strategy) -> CandidateRow:
        """Price a strategy."""
        compute = arithmetic(op.rule, dict(strategy.assignment), at.mesh, decisions.constants)
        # Without results, then without operands: each cost is the price of the other's moves.
        free = replace(strategy, work=0.0, pending=0.0)
        moves = [
            costs.cost(op, replace(free, **without), neighborhood)
            for without in ({"results": ()}, {"operands": ()})
        ]
        factors = ", ".join(f"{f}: {'+'.join(axes)}" for f, axes in strategy.assignment)
        return CandidateRow(
            factors or ("whole" if marked(op) is None else "marked"),
            f"[{strategy.results[which]}]",
            (compute, strategy.work - compute, *moves),
            strategy is chosen,
        )

    rows = sorted(map(row, candidates.values()), key=lambda r: (r.total, not r.chosen))
    title = f"%{value.name} <- {op.node.name}: {op.rule}"
    why = _reason(rows, op, decisions)
    return "\n".join([title, *_table(rows, decisions.constants), f"chosen: {why}"])


@dataclass(frozen=True)
class CandidateRow:
    """One candidate, with its costs in the order that COLUMNS has."""

    name: str
    result: str
    costs: tuple[float, ...]
    chosen: bool

    @property
    def total(self) -> float:
        """Its cost in all."""
        return sum(self.costs)


def _content(strategy: Strategy) -> tuple:
    """Return the content that tells strategies apart."""
    return strategy.assignment, strategy.operands, strategy.results


def _explain_input(costs: CostModel, value: fx.Node) -> str:
    """Return the cost to move an input to its users, by its layout."""
    at, chosen = costs.assignment, costs.assignment.layout_of[value]
    uses = at.required_layouts(value, first=False)
    layouts = dict.fromkeys((chosen, *(spec.plain() for spec in uses if not spec.pending)))
    lines = [
        f"{'*' if spec == chosen else ' '} [{spec}]  "
        f"{sum(costs.move_cost(value, spec, use) for use in uses):,.1f}"
        for spec in layouts
    ]
    return "\n".join(
        [f"%{value.name}: an input; bytes to send it to its users, by layout:", *lines]
    )


def _table(rows: Sequence[CandidateRow], constants: CostConstants) -> list[str]:
    shown = [row for i, row in enumerate(rows) if i < MAX_ROWS or row.chosen]
    cells = [("strategy", "result", *COLUMNS, "total")]
    cells += [(r.name, r.result, *(f"{c:,.1f}" for c in (*r.costs, r.total))) for r in shown]
    widths = [max(map(len, column)) for column in zip(*cells)]
    marks = [" ", *("*" if row.chosen else " " for row in shown)]
    lines = [
        f"{mark} {name:{widths[0]}}  {result:{widths[1]}}"
        + "".join(f"  {cell:>{width}}" for cell, width in zip(numbers, widths[2:]))
        for mark, (name, result, *numbers) in zip(marks, cells)
    ]
    if len(shown) < len(rows):
        lines.append(f"  and {len(rows) - len(shown)} that cost more")
    return [
        "cost on one device, in bytes sent or worth as much "
        f"({constants.flops_per_byte:g} operations or {constants.memory_per_byte:g} bytes of "
        "memory are worth 1 byte sent):",
        *lines,
    ]


def _reason(rows: Sequence[CandidateRow], op: Op, decisions: Decisions) -> str:
    """Return why the chosen candidate won. rows: the cheapest first."""
    if op.node in decisions.omitted_marks:
        return "nobody uses the layout of the mark, so it is left out"
    if marked(op) is not None:
        return "the layout is marked"
    pinned = ", ".join(
        f"{axis} to {' or '.join(name or 'nothing' for name in factors)}"
        for axis, factors in op.node.meta.get("pinned", ())
    )
    if pinned:
        return f"priorities of marks or stages bind {pinned}; of what is left it costs least"
    if len(rows) == 1:
        return "there is no other candidate"
    chosen = next(row for row in rows if row.chosen)
    if chosen is not rows[0]:
        return (
            f"it costs {chosen.total - rows[0].total:,.1f} more than the first here, and less in "
            "all: its neighbors changed with it"
        )
    other = rows[1]
    if other.total - chosen.total < 1e-6 * max(1.0, chosen.total):
        return "others cost the same; of equals, the one that was tried first stays"
    differences = ", ".join(
        f"{name} {theirs - ours:+,.1f}"
        for name, ours, theirs in zip(COLUMNS, chosen.costs, other.costs)
        if abs(theirs - ours) >= 0.05
    )
    more = f"{other.total - chosen.total:,.1f}"
    return f"it costs least; the next costs {more} more ({differences or 'fees'})"
