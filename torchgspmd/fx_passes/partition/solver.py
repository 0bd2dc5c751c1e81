"""The search for the cheapest assignment: one operation at a time, then whole regions.

The first sweep goes by the propagated layouts. The following ones go by the neighbors' choices,
until nothing gets cheaper; an operation is visited again when its neighborhood changed. Then
regions change at once (see regions.py). The result is the cheapest state in which such rounds end.
At last messages are saved (see message_search.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import fx

from ...shard_spec import ShardSpec
from .assignment import Assignment
from .body_search import BodySearch
from .cost_model import CostModel
from .input_search import InputSearch
from .message_search import MessageSearch
from .neighborhood import Strategy
from .op_search import OpSearch
from .region_proposal import RegionProposals
from .regions import Region, chains, sources
from .search_memory import SearchMemory, Solution
from .strategies import marked
from .sum_search import SumSearch

Cotangents = dict[fx.Node, tuple[fx.Node, ShardSpec]]
Storable = Callable[[ShardSpec, tuple[int, ...]], ShardSpec]


class ChainSearch(RegionProposals):
    """Tries other layouts for operation chains on one tensor, or with the contraction before.

    A chain is laid out like its operand throughout, or as its result is needed.
    """

    search = "chain"

    def __init__(self, op_search: OpSearch) -> None:
        super().__init__(op_search)
        ops = self.assignment.ops
        self.chains, self.sources = chains(ops), sources(ops)

    def improve(self) -> list[bool]:
        """Try every chain and contraction once; return for each whether it changed."""
        return [*map(self._improve_chain, self.chains), *map(self._improve_source, self.sources)]

    def _improve_chain(self, chain: Region) -> bool:
        """Lay out a chain like its operand, or as its result is required."""
        return self.try_proposal(
            chain, "in", lambda: self.propose_forwards(chain)
        ) or self.try_proposal(chain, "out", lambda: self.propose_backwards(chain))

    def _improve_source(self, source: Region) -> bool:
        """Compute a contraction as it costs least by itself; the chain behind it follows."""
        return self.try_proposal(source, "in", lambda: self.propose_forwards(source))


class Solver:
    """Searches strategies for all operations, and layouts for open inputs and outputs."""

    def __init__(
        self,
        assignment: Assignment,
        memory: SearchMemory,
        outputs: Mapping[int, ShardSpec | fx.Node],
        storable: Storable | None,
        cotangents: Cotangents,
    ) -> None:
        self.assignment, self.memory, self.constants = assignment, memory, memory.constants
        self.outputs, self.storable, self.cotangents = outputs, storable, cotangents
        costs = CostModel(assignment, memory.resharder, self.constants.pending_bonus)
        self.op_search = OpSearch(assignment, costs, memory)
        self.sums, self.chains = SumSearch(self.op_search), ChainSearch(self.op_search)
        self.bodies = BodySearch(self.op_search)
        self.messages = MessageSearch(self.op_search)
        self.inputs = InputSearch(self.bodies)

    @property
    def costs(self) -> CostModel:
        """The present phase's cost model."""
        return self.op_search.costs

    def solve(self, former: Solution | None = None) -> CostModel:
        """Assign a strategy to every operation; return the last phase's cost model.

        former: from a graph with mostly the same operations; only the last phase starts from it.
        """
        at, constants = self.assignment, self.constants
        if former is not None:
            former.assign(at)
        for op in at.ops.values():
            if op.node not in at.strategy_of:
                self.op_search.choose(op, first=True)
        # Only now: an open output leaves in the layout in which it is produced.
        self._require_outputs()
        if former is not None:
            self._run_phase(constants.tie_break, constants.max_region_rounds)
        else:
            self._search_by_bytes()
        if constants.message_price:
            self._save_messages()
        return self.costs

    def _search_by_bytes(self) -> None:
        """Run both phases twice; regions change in the first phase the second time only."""
        at, constants, candidates = self.assignment, self.constants, []
        for rounds in (0, constants.max_region_rounds):
            self._run_phase(constants.pending_bonus, rounds)
            self._run_phase(constants.tie_break, constants.max_region_rounds)
            candidates.append((self.costs.exact(at.ops.values()), at.snapshot()))
        # Both ends are local minima, and neither is always the better one.
        at.restore(min(candidates, key=lambda candidate: candidate[0])[1])
        self._require_outputs()
        self._lay_out_inputs()

    def _save_messages(self) -> None:
        """Change layouts where that saves messages, unless much more is sent for it."""
        at, by_bytes = self.assignment, self.costs
        ops, before, sent = at.ops.values(), at.snapshot(), by_bytes.traffic(at.ops.values())
        priced = replace(by_bytes, resharder=self.op_search.memory.priced_resharder)
        self.op_search.costs = priced
        # Cached window prices are in bytes alone, before and after the search with messages.
        at.window_costs.clear()
        cost, changed = priced.exact(ops), self.messages.improve()
        self._require_outputs()
        saved = changed and priced.exact(ops) < cost
        at.window_costs.clear()
        # Fewer messages are no reason to send much more.
        if not saved or by_bytes.traffic(ops) > sent * (1 + self.constants.message_share):
            at.restore(before)
            self.op_search.costs = by_bytes
        at.window_costs.clear()

    def _lay_out_inputs(self) -> None:
        """Try other layouts for open inputs, with all that follows, where that sends less.

        At most a small share of the savings may be spent on new gathers along the axis. The same
        holds for open outputs that leave in another layout: to bring them back, the caller pays.
        """
        at, constants = self.assignment, self.constants
        ops = at.ops.values()
        for axis, propose in self.inputs.proposals():
            before, cost, sent = at.snapshot(), self.costs.exact(ops), self.costs.traffic(ops)
            gathers, outputs = self.costs.gathers(axis), self._open_outputs()
            propose()
            self.memory.counts["input_layouts"] += 1
            # The proposal binds inputs and their course; operations beside these follow now.
            self._run_phase(constants.tie_break, constants.max_region_rounds)
            saved = sent - self.costs.traffic(ops)
            more = (
                self.costs.gathers(axis)
                - gathers
                + sum(self.costs.extra_copy(value, spec) for value, spec in outputs)
            )
            if self.costs.exact(ops) >= cost or saved <= 0 or more > constants.min_saving * saved:
                at.restore(before)
                self._require_outputs()

    def _open_outputs(self) -> list[tuple[fx.Node, ShardSpec]]:
        """Return the outputs whose layout is the search's choice, with these layouts."""
        at = self.assignment
        return [
            (value, at.required[value][at.output, i])
            for i, value in enumerate(at.output.args[0])
            if isinstance(value, fx.Node) and i not in self.outputs
        ]

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

    def _run_phase(self, pending_bonus: float, rounds: int) -> None:
        """Search with another bonus for pending sums; regions change in `rounds` rounds at most."""
        self.op_search.costs = replace(self.costs, pending_bonus=pending_bonus)
        # Costs differ from those of the last phase, so each choice may change.
        self.assignment.worklist.update(self.assignment.ops)
        self.assignment.new_version()
        self._run_sweeps()
        for _ in range(rounds):
            # A list, not `or`: both searches take part in every round.
            if not any([self.bodies.lay_out(), self.sums.reduce_early()]):
                break
            self._run_sweeps()

    def _run_sweeps(self) -> None:
        """Visit all operations, backwards and forwards in turn, until nothing changes."""
        order = list(self.assignment.ops.values())
        for sweep in range(self.constants.max_sweeps):
            self.memory.counts["solver_sweeps"] += 1
            changed = [
                self.op_search.choose(op)
                # Backwards first: the first choices went forwards, so their users are news.
                for op in (order if sweep % 2 else reversed(order))
                if op.node in self.assignment.worklist
            ]
            changed += [*self.sums.improve(), *self.chains.improve()]
            changed += [self._choose_input(node) for node in self.assignment.open_inputs]
            self._require_outputs()
            if not any(changed):
                break

    # --------------------------------------------------------------------------- inputs and outputs

    def _choose_input(self, node: fx.Node) -> bool:
        """Give an open input the layout in which its uses cost least; return whether it changed."""
        at = self.assignment
        uses = at.required_layouts(node, first=False)
        layouts = (node.meta["spec"], *(spec for spec in uses if not spec.pending))
        tied = self.cotangents.get(node)
        if tied is not None:
            layouts = (*layouts, at.layout_of[tied[0]].with_pending(()))
        candidates = [
            at.layout_of[node],
            *(spec.plain().map_axes(at.mesh.whole) for spec in layouts),
        ]
        if tied is not None:
            candidates = [self._fill_open(tied[1], spec, tied[0]) for spec in candidates]

        def cost(spec: ShardSpec) -> float:
            """Return the cost to move the input if it is stored in this layout."""
            move_cost = self.costs.move_cost
            arrival = move_cost(tied[0], at.layout_of[tied[0]], spec) if tied else 0.0
            return arrival + sum(move_cost(node, spec, use) for use in uses)

        best = min(candidates, key=cost)
        changed = best != at.layout_of[node]
        at.set_layout(node, best)
        return changed

    def _require_outputs(self) -> None:
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
        return target if requested is None else self._fill_open(requested, target, value)

    def _fill_open(self, requested: ShardSpec, target: ShardSpec, value: fx.Node) -> ShardSpec:
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
