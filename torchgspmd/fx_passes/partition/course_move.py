"""Other layouts for open inputs, with every operation that one of their dimensions runs through.

before   %x : f32[64, 32, 16] is whole on all devices, as only expert weights are marked
after    %x : f32[64@expert, 32, 16], and so is every value after it, if that sends less
source   ours

No operation gains by dividing tokens alone, nor does a region between two contractions: the next
operation would gather them. So a dimension of an open input is laid out along an axis from its
first use to its last. Operations on weights that lie along this axis are the exception: there the
tokens are exchanged. Where they, or the weights, had to be gathered instead, the layout is another
one than the marks describe, and nobody asked for it. An example is Megatron's, with its sequence or
its weights divided.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from torch import fx

from ...shard_spec import ShardSpec
from ..ir import Op
from ..propagate.factors import is_roomy
from .local_search import Move
from .regions import Body, courses


class CourseMove(Move):
    """Lays out a dimension of open inputs along an axis, from its first use to its last."""

    name = "course"

    def improve(self) -> bool:
        """Try each course with all that follows from it; return whether any sends less.

        At most a small share of the savings may be spent on new gathers along the axis. The same
        holds for open outputs that leave in another layout: to bring them back, the caller pays.
        """
        return any([self._try_course(axis, propose) for axis, propose in self.proposals()])

    def _try_course(self, axis: str, propose: Callable[[], None]) -> bool:
        at, search, ops = self.assignment, self.search, self.assignment.ops.values()
        before, cost, sent = at.snapshot(), search.costs.exact(ops), search.costs.traffic(ops)
        gathers, outputs = search.costs.gathers(axis), search.ends.open_outputs()
        propose()
        self.memory.counts["input_layouts"] += 1
        # The proposal binds inputs and their course; operations beside these follow now.
        search.run_phase(self.constants.tie_break)
        costs = search.costs
        saved = sent - costs.traffic(ops)
        copies = sum(costs.extra_copy(value, spec) for value, spec in outputs)
        more = costs.gathers(axis) - gathers + copies
        if costs.exact(ops) < cost and saved > 0 and more <= self.constants.min_saving * saved:
            return True
        at.restore(before)
        search.ends.require()
        return False

    def proposals(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield axes, and functions that propose each for dimensions of open inputs.

        The axes are those that operations exchange values over; the dimensions run through most
        operations.
        """
        at, costs = self.assignment, self.search.costs
        axes = [a for a in at.mesh.names if a in self.search.busy_axes()] if at.open_inputs else []
        share = self.constants.min_course_share * len(at.ops)
        limit = self.constants.min_saving * costs.traffic(at.ops.values()) if axes else 0.0
        for course, places in courses(at.ops, at.open_inputs) if axes else ():
            for axis in axes if len(course.ops) >= share else ():
                factors, gathered = self._factors(course, axis)
                specs = self._specs_with(axis, places)
                if specs and gathered <= limit:
                    yield axis, partial(self._propose, course, axis, specs, factors)

    def _factors(self, course: Body, axis: str) -> tuple[dict[fx.Node, str], float]:
        """Return the factors for the axis in all operations, and the cost to gather for them.

        A weight that lies along the axis keeps it if the other operands can be exchanged for that,
        as tokens for their experts. If they cannot, either they or the weight are gathered.
        """
        factors, gathered = dict(course.classes[0]), 0.0
        # Values in the course get the axis themselves: only operands from outside have it already.
        inside = {value for op in course.ops for value in op.results}
        for op in course.ops:
            for value, weight_factor in self._weight_factors(op, axis, inside):
                if weight_factor == (factor := factors[op.node]):
                    continue
                kept = self._gathers_of_others(op, axis, factor, weight_factor)
                given_up = self._gather(value, axis)
                gathered += min(kept, given_up)
                if kept <= given_up:
                    factors[op.node] = weight_factor
        return factors, gathered

    def _weight_factors(
        self, op: Op, axis: str, inside: Collection[fx.Node | None]
    ) -> Iterator[tuple[fx.Node, str]]:
        """Yield a contraction's operands that are not inside, with their factor for an axis."""
        for value, dims in zip(op.operands, op.rule.operands) if op.rule.contraction else ():
            for axes, names in zip(self.assignment.layout_of[value].dims, dims):
                if axis in axes and names and value not in inside:
                    yield value, names[0]

    def _gathers_of_others(self, op: Op, axis: str, factor: str, weight_factor: str) -> float:
        """Return the cost to gather the operands with one factor and not another."""
        cost = 0.0
        for value, dims in zip(op.operands, op.rule.operands):
            names = [names[0] if names else None for names in dims]
            if factor in names and weight_factor not in names:
                cost += self._gather(value, axis, names.index(factor))
        return cost

    def _gather(self, value: fx.Node, axis: str, dim: int | None = None) -> float:
        """Return the cost to gather a value along an axis, from dimension `dim` if given.

        An open input may as well be stored whole.
        """
        at, costs = self.assignment, self.search.costs
        whole = (
            at.layout_of[value]
            .with_pending(())
            .map_axes(lambda axes: tuple(a for a in axes if a != axis))
        )
        if dim is not None:
            return costs.move_cost(value, whole.with_dim(dim, (*whole.dims[dim], axis)), whole)
        return (
            0.0 if value in at.open_inputs else costs.move_cost(value, at.layout_of[value], whole)
        )

    def _specs_with(
        self, axis: str, places: Sequence[tuple[fx.Node, int]]
    ) -> dict[fx.Node, ShardSpec]:
        """Return the layouts for those inputs that can have the axis in these dimensions."""
        at, specs = self.assignment, {}
        for value, d in places:
            spec = at.layout_of[value]
            axes = (*spec.dims[d], axis)
            # An axis shards a tensor once: an input that has it elsewhere stays as it is.
            is_free = axis not in spec.sharding_axes
            if is_free and is_roomy(at.sizes[value][0][d], axes, at.mesh, frozenset()):
                specs[value] = spec.with_dim(d, axes)
        return specs

    def _propose(
        self,
        course: Body,
        axis: str,
        specs: Mapping[fx.Node, ShardSpec],
        factors: Mapping[fx.Node, str],
    ) -> None:
        """Lay out inputs, and every operation that the dimension runs through, along the axis."""
        for value, spec in specs.items():
            self.assignment.set_layout(value, spec)
        self.search.force(course, (axis,), factors)
        self.assignment.release()
