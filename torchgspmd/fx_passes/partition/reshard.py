"""Reshard a value from one layout to another by the cheapest steps.

before   x laid out as f32[8@data, 64]
after    x laid out as f32[8, 64@data]           all_to_all(x, 0, 1, data)
source   Shardy's reshard to collectives (its steps); the exchange and the search are ours

Most changes only shard further, which needs no search. The others are searched for in
reshard_search.py; halo_steps adds windows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from ...comm.kinds import Step, term, window
from ...comm.kinds.halo import halo_step, halos_step
from ...comm.kinds.local_steps import shard_step
from ...layout.mesh import Mesh
from ...layout.open_sizes import is_whole, nests
from ...shard_spec import ShardSpec
from .cost_constants import CostConstants, SearchCounts, no_counts
from .reshard_pattern import Pattern, PatternSolution, instance, solve
from .reshard_search import at_least, on_average, step_cost

Path = tuple[float, tuple[Step, ...]]  # cost, steps


def start_of_halos(before: ShardSpec, after: ShardSpec) -> ShardSpec:
    """Return the plain layout from which windows are exchanged, or cut where a device has all."""
    busy, start = set(before.sharding_axes + before.pending), after.plain()
    for d, rows in enumerate(after.windows):
        # A device with all rows only cuts its window, if no other dimension uses the axis.
        if rows and not before.dims[d] and not busy & set(after.dims[d]):
            start = start.with_dim(d, ())
    return start


def halo_steps(
    mesh: Mesh,
    shape: tuple[int, ...],
    itemsize: int,
    start: ShardSpec,
    after: ShardSpec,
    constants: CostConstants,
) -> Path:
    """Return (cost, steps) in the cheapest dimension order, or at once if that sends less.

    before   x laid out as f32[4, 64@s]
    after    x laid out as f32[4, 64@s[8i-1:+10]]
             halo(x, 1, s, 8i-1:+10 in 0:64 else 0, 64)
    source   GSPMD (arXiv 2105.04663, section 4.3)

    A dimension that the device has whole is only cut: window(x, 1, s, 8i-1:+10 in 0:64 else 0).
    Halos on several dimensions have the same rows either way. Where shards change places, as in a
    flip along two dimensions, they would be sent once for each dimension.
    """
    dims = [d for d, rows in enumerate(after.windows) if rows]
    orders = (
        _in_order(mesh, shape, itemsize, start, after, order)
        for order in itertools.permutations(dims)
    )
    paths = ((sum(step_cost(step, constants) for step in steps), steps) for steps in orders)
    cost, steps = min(paths, key=lambda path: path[0])
    if sum(step.sent > 0 for step in steps) > 1 and start.dims == after.dims:
        once = halos_step(mesh, shape, itemsize, start, after)
        if once is not None and once.sent < sum(step.sent for step in steps):
            return step_cost(once, constants), (once,)
    return cost, steps


def _in_order(
    mesh: Mesh,
    shape: Sequence[int],
    itemsize: int,
    start: ShardSpec,
    after: ShardSpec,
    order: Sequence[int],
) -> tuple[Step, ...]:
    spec, steps = start, []
    for d in order:
        # Before the window is added: a later exchange also sends the halos of earlier ones.
        local = spec.local_shape(shape, mesh)
        spec = spec.with_dim(d, after.dims[d]).with_window(d, after.window(d))
        row = math.prod(n for i, n in enumerate(local) if i != d) * itemsize
        steps.append(halo_step(mesh, spec, d, shape[d], row) if start.dims[d] else _cut(d, spec))
    return tuple(steps)


def _cut(d: int, spec: ShardSpec) -> Step:
    """Return the step that cuts a window from a dimension that is whole."""
    axes = spec.dims[d]
    return Step(window, (d, "+".join(axes), str(spec.window(d))), spec, axes)


ReshardKey = tuple[tuple[int, ...], int, ShardSpec, ShardSpec]  # shape, itemsize, before, after


class Resharder:
    """Computes and caches the steps between layouts on one mesh."""

    def __init__(
        self, mesh: Mesh, constants: CostConstants | None = None, counts: SearchCounts | None = None
    ) -> None:
        self.mesh, self.constants = mesh, constants or CostConstants()
        self.counts = no_counts() if counts is None else counts
        self.paths: dict[ReshardKey, Path] = {}
        self.halos: dict[ReshardKey, Path] = {}  # from the layout before them
        self.costs: dict[ReshardKey, float] = {}
        self.bounds: dict[ReshardKey, float] = {}
        # What moves a value from its layout to several, or from several to one, by the value's kind
        # (Interner.kind) and these; and lower bounds for that, by the one layout.
        self.transports: dict[tuple, float] = {}
        self.part_bounds: dict[tuple, dict[ShardSpec, float]] = {}
        self.patterns: set[Pattern] = set()  # those that are counted

    def cost(
        self, shape: tuple[int, ...], itemsize: int, before: ShardSpec, after: ShardSpec
    ) -> float:
        """Return the bytes sent, plus a fee for every collective; infinite if there are no steps.

        No steps start from windows. None lead to terms, except in a sum or a reduction that was
        pending before, nor to shards on a dimension whose size depends on values.
        """
        key = (shape, itemsize, before, after)
        if (cost := self.costs.get(key)) is None:
            cost = self.costs[key] = self._compute_cost(*key)
        return cost

    def _compute_cost(
        self, shape: tuple[int, ...], itemsize: int, before: ShardSpec, after: ShardSpec
    ) -> float:
        if before == after:
            return 0.0
        if (
            any(is_whole(n) and b + a for n, b, a in zip(shape, before.dims, after.dims))
            or before.windows
            or not set(after.pending) <= set(before.pending)
            and after.reduction != "sum"
        ):
            return math.inf
        if before.pending and after.pending and before.reduction != after.reduction:
            return math.inf
        if (end := self._end(shape, itemsize, before, after)) is not None:
            return self.cost(shape, itemsize, before, end[0]) + end[1]
        # Slicing sends nothing: the frequent case needs no search, and has no fee.
        if self._slices(shape, before, after) is not None:
            return 0.0
        each = instance(self.mesh, shape, itemsize, before, after)
        return each.cost(self._solution(each.pattern))

    def at_least(
        self, shape: tuple[int, ...], itemsize: int, before: ShardSpec, after: ShardSpec
    ) -> float:
        """Return a lower bound for the cost, without a search."""
        key = (shape, itemsize, before, after)
        if (bound := self.bounds.get(key)) is None:
            if not before.windows and (end := self._end(shape, itemsize, before, after)):
                bound = self.bounds[key] = self.at_least(shape, itemsize, before, end[0]) + end[1]
                return bound
            has_no_bound = before == after or before.windows
            # Uneven shards have a bound of their own: the elements that a device lacks on average.
            uneven = before.pending == after.pending and any(
                n % self.mesh.count(axes)
                for n, b, a in zip(shape, before.dims, after.dims)
                if b != a
                for axes in (b, a)
            )
            bound = self.bounds[key] = (
                0.0
                if has_no_bound
                else max(
                    on_average(self.mesh, shape, itemsize, before, after) if uneven else 0.0,
                    at_least(self.mesh, shape, itemsize, before, after, self.constants),
                )
            )
        return bound

    def steps(
        self, shape: tuple[int, ...], itemsize: int, before: ShardSpec, after: ShardSpec
    ) -> tuple[Step, ...]:
        """Return the steps from one layout to another."""
        return () if before == after else self._solve(shape, itemsize, before, after)[1]

    def _solve(
        self, shape: tuple[int, ...], itemsize: int, before: ShardSpec, after: ShardSpec
    ) -> Path:
        """Return the cheapest path, cached."""
        key = (shape, itemsize, before, after)
        if key not in self.paths and (end := self._end(*key)) is not None:
            start, cost, last = end
            steps = *self.steps(shape, itemsize, before, start), *last
            self.paths[key] = self.cost(shape, itemsize, before, start) + cost, steps
        elif key not in self.paths:
            steps = self._slices(shape, before, after)
            if steps is None:
                each = instance(self.mesh, *key)
                solution = self._solution(each.pattern)
                steps = tuple(each.steps(solution, self.constants))
            self.paths[key] = self._path(steps)
        return self.paths[key]

    def _path(self, steps: tuple[Step, ...]) -> Path:
        return sum(step_cost(step, self.constants) for step in steps if step.collective), steps

    def _solution(self, pattern: Pattern) -> PatternSolution:
        """Return a pattern's steps; its work is counted once per search memory."""
        solution = solve(pattern, self.constants)
        if pattern not in self.patterns:
            self.patterns.add(pattern)
            solution.add_to(self.counts)
        return solution

    def _end(
        self, shape: tuple[int, ...], itemsize: int, before: ShardSpec, after: ShardSpec
    ) -> tuple[ShardSpec, float, tuple[Step, ...]] | None:
        """Return the steps that the pattern search does not know, with their cost and their start.

        These are a halo exchange in each dimension with windows, or else a value that becomes the
        only term in a sum. None if there are none.
        """
        if after.windows:
            start = start_of_halos(before, after)
            key = (shape, itemsize, start, after)
            if key not in self.halos:
                self.halos[key] = halo_steps(self.mesh, *key, self.constants)
            return start, *self.halos[key]
        if not (new := tuple(a for a in after.pending if a not in before.pending)):
            return None
        whole = after.with_pending(tuple(a for a in after.pending if a not in new))
        last = Step(term, ("+".join(new),), after, new)
        return whole, step_cost(last, self.constants), (last,)

    def _slices(
        self, shape: tuple[int, ...], before: ShardSpec, after: ShardSpec
    ) -> tuple[Step, ...] | None:
        """Return the steps if the value is only sharded further, else None."""
        if (
            before.pending
            or after.pending
            or any(b != a[: len(b)] for b, a in zip(before.dims, after.dims))
        ):
            return None
        if not all(nests(n, b, a, self.mesh) for n, b, a in zip(shape, before.dims, after.dims)):
            return None
        steps, spec = [], before
        for d, (b, a) in enumerate(zip(before.dims, after.dims)):
            if a != b:
                steps.append(shard_step(spec, d, a[len(b) :]))
                spec = steps[-1].spec
        return tuple(steps)


class PricedResharder(Resharder):
    """Another resharder's steps, where each message costs `message_price` beside its bytes."""

    def __init__(self, by_bytes: Resharder, constants: CostConstants) -> None:
        super().__init__(by_bytes.mesh, constants)
        self.by_bytes = by_bytes

    def _compute_cost(
        self, shape: tuple[int, ...], itemsize: int, before: ShardSpec, after: ShardSpec
    ) -> float:
        cost = self.by_bytes.cost(shape, itemsize, before, after)
        # Paths without messages, or without any steps, have no price.
        if not 0 < cost < math.inf:
            return cost
        steps = self.by_bytes.steps(shape, itemsize, before, after)
        return cost + self.constants.message_price * sum(step.sent > 0 for step in steps)

    def at_least(
        self, shape: tuple[int, ...], itemsize: int, before: ShardSpec, after: ShardSpec
    ) -> float:
        """Return a lower bound for the cost, without a search."""
        return self.by_bytes.at_least(shape, itemsize, before, after)

    def steps(
        self, shape: tuple[int, ...], itemsize: int, before: ShardSpec, after: ShardSpec
    ) -> tuple[Step, ...]:
        """Return the steps from one layout to another."""
        return self.by_bytes.steps(shape, itemsize, before, after)
