"""One local search: its moves propose other strategies, which stay if they cost less.

before   every operation has the strategy that is cheapest while the others keep theirs
after    operations that gain only together have other strategies, if those cost less together
source   ours

partition_graph.py has the table of moves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar, Literal, NamedTuple

from torch import fx

from ...shard_spec import Axes, ShardSpec
from ..ir import Op
from .assignment import Assignment
from .cost_model import CostModel
from .neighborhood import Neighborhood, Strategy
from .regions import Body, Region
from .search_memory import Excess, SearchMemory

Cotangents = dict[fx.Node, tuple[fx.Node, ShardSpec]]
Storable = Callable[[ShardSpec, tuple[int, ...]], ShardSpec]


class Ends:
    """The layouts in which a program's inputs and outputs pass its boundary.

    outputs: output layouts by position; a node stands for that input's layout.
    storable: maps the layout that an open output would have to the one it is to have.
    cotangents: input -> (the output whose layout it comes in, the open layout requested for it).
    """

    def __init__(
        self,
        assignment: Assignment,
        outputs: Mapping[int, ShardSpec | fx.Node],
        storable: Storable | None,
        cotangents: Cotangents,
    ) -> None:
        self.assignment, self.outputs = assignment, outputs
        self.storable, self.cotangents = storable, cotangents

    def open_outputs(self) -> list[tuple[fx.Node, ShardSpec]]:
        """Return the outputs whose layout is the search's choice, with these layouts."""
        at = self.assignment
        return [
            (value, at.required[value][at.output, i])
            for i, value in enumerate(at.output.args[0])
            if isinstance(value, fx.Node) and i not in self.outputs
        ]

    def require(self) -> None:
        """Require every output's layout."""
        output = self.assignment.output
        for i, value in enumerate(output.args[0]):
            if isinstance(value, fx.Node):
                self.assignment.require(value, output, i, self._output_spec(i, value))

    def _output_spec(self, i: int, value: fx.Node) -> ShardSpec:
        """Return the layout in which output i leaves the program.

        An open output leaves as it is produced, except that a pending sum is reduced.
        """
        requested = self.outputs.get(i)
        if isinstance(requested, fx.Node):
            return self.assignment.layout_of[requested]
        if requested is not None and not any(requested.open):
            return requested
        layout = self.assignment.layout_of[value]
        target = (
            value.meta["spec"].closed() if layout.pending else layout.with_pending(())
        ).map_axes(self.assignment.mesh.whole)
        return target if requested is None else self.fill_open(requested, target, value)

    def fill_open(self, requested: ShardSpec, target: ShardSpec, value: fx.Node) -> ShardSpec:
        """Return the requested layout, with `target`'s axes in its open dimensions."""
        # An axis shards one dimension: those that the request fixes are no more free.
        fixed = {
            a for axes, is_open in zip(requested.dims, requested.open) if not is_open for a in axes
        }
        spec = ShardSpec(
            tuple(
                tuple(a for a in t if a not in fixed) if is_open else w
                for w, is_open, t in zip(requested.dims, requested.open, target.dims)
            )
        )
        return (
            self.storable(spec, self.assignment.sizes[value][0])
            if self.storable is not None
            else spec
        )


# "sweep": until nothing changes; "round": between sweeps; "program": once, judged by the whole
# program after all have followed; "last": the same, by another price.
Stage = Literal["sweep", "round", "program", "last"]


class LocalSearch:
    """The state of all moves: the assignment, its cost model, and memory for like operations.

    costs: the present phase's cost model. ends: the program's boundary. excess: layouts that lost.
    """

    def __init__(
        self, assignment: Assignment, memory: SearchMemory, ends: Ends, moves: Iterable[Row]
    ) -> None:
        self.assignment, self.memory, self.ends = assignment, memory, ends
        self.strategies, self.constants = memory.strategies, memory.constants
        self.costs = CostModel(assignment, memory.resharder, self.constants.pending_bonus)
        self.excess: Excess = {}
        self.moves = [(row.stage, row.move(self)) for row in moves]

    def try_moves(self, stage: Stage) -> bool:
        """Try all moves at a stage once; return whether any changed the assignment."""
        # A list, not a generator: every move takes part.
        return any([move.improve() for at, move in self.moves if at == stage])

    def run_phase(self, pending_bonus: float, rounds: int | None = None) -> None:
        """Search with another bonus for pending sums; regions change in `rounds` rounds at most."""
        self.costs = replace(self.costs, pending_bonus=pending_bonus)
        # Costs differ from those of the last phase, so each choice may change.
        self.assignment.wait(self.assignment.ops)
        self.assignment.new_version()
        self._run_sweeps()
        for _ in range(self.constants.max_region_rounds if rounds is None else rounds):
            if not self.try_moves("round"):
                break
            self._run_sweeps()

    def _run_sweeps(self) -> None:
        """Try the moves of a sweep until nothing changes."""
        for _, move in self.moves:
            move.begin()
        for _ in range(self.constants.max_sweeps):
            self.memory.counts["solver_sweeps"] += 1
            changed = self.try_moves("sweep")
            self.ends.require()
            if not changed:
                break

    def choose(self, op: Op, first: bool = False) -> bool:
        """Assign the cheapest strategy to an operation; return whether it changed."""
        at = self.assignment
        if op.node not in at.worklist:
            return False
        current = at.strategy_of.get(op.node)
        best = self.best_strategy(op, at.neighborhood(op, first), current)
        if best is not None and best is not current:
            at.assign(op, best)
        at.settle(op.node)
        return best is not current

    def best_strategy(
        self,
        op: Op,
        neighborhood: Neighborhood,
        current: Strategy | None,
        forced: tuple[Axes, tuple[Any, ...]] | None = None,
        move: str = "op",
    ) -> Strategy | None:
        """Return the cheapest strategy, among equals the current one; None if there is none.

        forced: axes, and the only factors that they may shard (None: no factor). move: the name of
        the move that asks, for the counts.
        """
        ops = self.assignment.ops
        # Rows that an operand only moves need no halo of their own, so the choice depends on it.
        moved = (
            tuple(ops[v].key for v in op.operands if v in ops and ops[v].rule.moves)
            if op.rule.halo
            else ()
        )
        # All that decides is in the key: equal layers share one search.
        choices, (bonus, price) = self.memory.choices, self.costs.phase
        key = (op.key, neighborhood, current, forced, moved, price, bonus)
        if key in choices:
            return choices[key]
        # Where no candidate leaves a sum pending, all phases choose alike.
        without_bonus = key[:-1]
        if without_bonus not in choices:
            candidates = self.strategies.candidates(
                op, neighborhood, dict.fromkeys(*forced) if forced else None
            )
            present = () if current is None else (current,)
            self.memory.counts[f"{move}_candidates"] += len(present) + len(candidates)
            # First among equals: an operation that gains nothing keeps its strategy, so searches
            # end.
            choice = self.costs.cheapest(op, candidates, neighborhood, current)
            if any([strategy.pending for strategy in (*present, *candidates)]):
                choices[key] = choice
                return choice
            choices[without_bonus] = choice
        choices[key] = choices[without_bonus]
        return choices[key]

    def force(self, body: Body, axes: Axes, factors: Mapping[fx.Node, str]) -> None:
        """Assign the best strategies in which axes shard these factors, or no factor.

        The caller has to release the assignment before anything looks at neighborhoods.
        """
        at, inside, leaving = self.assignment, {*body.nodes}, body.leaving
        at.hold()
        for op in body.ops:
            if factors.get(op.node) in op.rule.replicated:
                continue
            around = [at.operand_layouts(v, op) for v in op.operands]
            operands = tuple(
                [
                    self.memory.interner.operand_layouts(
                        have.layouts, at.sharers(v, op), have.deferrable
                    )
                    for v, have in zip(op.operands, around)
                ]
            )
            required = tuple(
                # Uses within the body are about to change: only those outside bind its results.
                tuple(
                    dict.fromkeys(
                        spec
                        for (user, _), spec in at.required.get(v, {}).items()
                        if user not in inside
                    )
                )
                if v in leaving
                else ()
                for v in op.results
            )
            best = self.best_strategy(
                op,
                at.new_neighborhood(op, operands, required),
                None,
                (axes, (factors.get(op.node),)),
            )
            if best is not None:
                at.assign(op, best)

    def busy_axes(self) -> set[str]:
        """Return the axes over which operations exchange more than single numbers.

        Reductions of program results do not count.
        """
        busy: set[str] = set()
        for value, uses in self.assignment.required.items():
            layout = self.assignment.layout_of[value]
            for (user, _), spec in uses.items():
                if spec is not layout and user is not self.assignment.output:
                    removed = _removed_axes(layout, spec)
                    if not removed <= busy and value.meta["val"].numel() > 1:
                        busy |= removed
            # All axes are busy: no value can add another.
            if len(busy) == len(self.assignment.mesh.names):
                break
        return busy


class Move:
    """Tries its proposals, and remembers their outcome for like regions.

    name: the move's name in the table and in counts.
    """

    name: ClassVar[str]

    def __init__(self, search: LocalSearch) -> None:
        self.search, self.assignment = search, search.assignment
        self.memory, self.strategies = search.memory, search.strategies
        self.constants = search.constants
        # proposal for a region in a phase -> the stamp of the region when it did not cost less
        self.declined: dict[tuple[Region, Hashable, tuple[float, float]], int] = {}

    def begin(self) -> None:
        """Prepare for sweeps until nothing changes."""

    def improve(self) -> bool:
        """Try every proposal once; return whether any stayed."""
        raise NotImplementedError

    def try_proposal(self, region: Region, kind: Hashable, propose: Callable[[], bool]) -> bool:
        """Assign the strategies that `propose` chooses for a region if they cost less.

        Return whether they do. kind: tells apart the proposals for one region.
        """
        at, costs = self.assignment, self.search.costs
        proposal_key = region, kind, costs.phase
        if self.declined.get(proposal_key) == at.stamp(region.nodes):
            return False
        before = [at.strategy_of[op.node] for op in region.ops]
        situation = (
            kind,
            costs.phase,
            *((op.key, at.neighborhood(op), s) for op, s in zip(region.ops, before)),
        )
        if situation not in self.memory.proposals:
            cost = costs.region(region)
            cheaper = propose() and costs.region(region) < cost
            self.memory.proposals[situation] = (
                [at.strategy_of[op.node] for op in region.ops] if cheaper else None
            )
            # Back first: a proposal from memory is assigned below in the same way.
            at.assign_all(region.ops, before)
        if (proposal := self.memory.proposals[situation]) is None:
            self.declined[proposal_key] = at.stamp(region.nodes)
            return False
        at.assign_all(region.ops, proposal)
        return True

    def assign_cheapest(
        self, op: Op, candidates: list[Strategy], neighborhood: Neighborhood
    ) -> None:
        """Assign the cheapest candidate, as if `neighborhood` were around it."""
        self.memory.counts[f"{self.name}_candidates"] += len(candidates)
        best = self.search.costs.cheapest(op, candidates, neighborhood)
        if best is not None:
            self.assignment.assign(op, best)

    def try_like_ends(self, region: Region, *ends: str) -> bool:
        """Lay out a region like its operand ("in"), or as its result is required ("out").

        Not where nothing is sent: there is nothing to save.
        """
        if not any(map(self.assignment.sends_around, region.ops)):
            return False
        propose = {"in": self._propose_forwards, "out": self._propose_backwards}
        return any(self.try_proposal(region, end, partial(propose[end], region)) for end in ends)

    def _propose_forwards(self, region: Region) -> bool:
        """Choose strategies from the first operation to the last; each follows the one before."""
        for op in region.ops:
            neighborhood = self.assignment.neighborhood(op)
            if op is not region.ops[-1]:  # Nothing is required of intermediate results.
                neighborhood = self.assignment.new_neighborhood(
                    op, neighborhood.operands, ((),) * len(op.results)
                )
            self.assign_cheapest(op, self.strategies.candidates(op, neighborhood), neighborhood)
        return True

    def _propose_backwards(self, region: Region) -> bool:
        """Choose strategies from the last operation to the first; each serves the one after."""
        for op in reversed(region.ops):
            neighborhood = self.assignment.neighborhood(op)
            self.assign_cheapest(
                op,
                self.strategies.candidates(op, neighborhood),
                # Operands follow: their layouts are chosen after this operation, and cost nothing
                # here.
                replace(neighborhood, operands=()),
            )
        return True


class Row(NamedTuple):
    """A move. proposes: its change; why: the gain that no other move finds."""

    move: type[Move]
    stage: Stage
    proposes: str
    why: str


@cache
def _removed_axes(before: ShardSpec, after: ShardSpec) -> frozenset[str]:
    """Return the axes that shard a dimension, or are pending, before and no more after."""
    of_dims = frozenset(
        axis for have, need in zip(before.dims, after.dims) for axis in have if axis not in need
    )
    return of_dims.union(axis for axis in before.pending if axis not in after.pending)
