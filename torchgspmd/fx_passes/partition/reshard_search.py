"""A* search for the cheapest steps between two layouts.

before   x laid out as f32[8@data, 64]
after    x laid out as f32[8, 64@data]           all_to_all(x, 0, 1, data)

Steps: shard (free), all_gather, all_to_all, all_reduce, reduce_scatter and permute. A permute leads
from any layout to any other (see comm/box_exchange.py); the other steps are taken where they send
no more. A dimension whose size does not divide is stored as ceil(size / shards) rows a shard. It
can be refined or gathered in place only where those blocks nest, but always gathered whole.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from functools import lru_cache

from ...comm.box_exchange import lacking
from ...comm.kinds import SEARCHED, CollectiveKind, Step, all_reduce
from ...comm.kinds.permute import permute, permute_step
from ...layout.mesh import Mesh
from ...layout.open_sizes import nests
from ...shard_spec import Axes, ShardSpec
from .cost_constants import CostConstants

MOST_CHANGED = 2  # Dimensions that must lose axes before a permute alone is best.
NEARLY_EQUAL = 1e-3  # Paths whose costs differ by less compete by their number of steps.


class ReshardSearch:
    """Searches steps to one layout for one tensor.

    states, permutes: how many layouts it expanded, and for how many permutes it knew the bytes.
    limited: whether it ended at `max_layouts`, with the best steps up to there.
    """

    def __init__(
        self,
        mesh: Mesh,
        shape: tuple[int, ...],
        itemsize: int,
        after: ShardSpec,
        constants: CostConstants,
    ) -> None:
        self.mesh, self.shape, self.itemsize, self.after = mesh, shape, itemsize, after
        self.constants = constants
        self._targets: tuple[ShardSpec, ...] = ()
        self.states, self.permutes, self.limited = 0, 0, False
        self.bounds: dict[ShardSpec, float] = {}  # remaining_cost
        self.bytes_of_shards: dict[tuple[Axes, ...], float] = {}  # by axes of the dimensions

    @property
    def targets(self) -> tuple[ShardSpec, ...]:
        """The target, and layouts from which a gather leads there."""
        if not self._targets:
            self._targets = (self.after, *self._finer())
        return self._targets

    def _finer(self) -> Iterator[ShardSpec]:
        """Yield layouts from which a gather leads to `after`.

        Where few devices have everything, the others help to pass it on.
        """
        free = tuple(
            a for a in self.mesh.names if a not in self.after.sharding_axes + self.after.pending
        )
        # A gather along free axes lets replicas send different parts in place of the same.
        for d, axes in enumerate(self.after.dims):
            for more in dict.fromkeys([free, *((a,) for a in free)] if free else ()):
                if self.nests(d, axes, axes + more):
                    yield self.after.with_dim(d, axes + more)

    def run(self, before: ShardSpec) -> tuple[Step, ...]:
        """Return the cheapest steps from a layout."""
        # One collective that costs no more than the lower bound is the best: no queue is needed.
        least = self.remaining_cost(before)
        if shrinks(before, self.after) < MOST_CHANGED:
            for move in self._moves(before, 0.0):
                if move.spec == self.after and step_cost(move, self.constants) <= least:
                    return (move,)  # no path sends less
        # The direct path: reduce, then permute.
        steps = tuple(itertools.islice(all_reduce.moves(self, before, math.inf), 1))
        spec = steps[-1].spec if steps else before
        self.permutes += spec != self.after
        direct = steps if spec == self.after else (*steps, permute_step(self, spec, self.after))
        bound = sum(step_cost(step, self.constants) for step in direct)
        # Most reshards end here: the queue is for the few that one collective cannot do.
        return direct if bound <= least else self._search(before, direct, bound)

    def alternatives(self, before: ShardSpec) -> Iterator[tuple[Step, ...]]:
        """Yield paths, the cheapest one for each first step that a search may take."""
        for move in self._moves(before, math.inf):
            yield move, *self.run(move.spec)

    def _search(self, before: ShardSpec, steps: tuple[Step, ...], bound: float) -> tuple[Step, ...]:
        """Return the cheapest steps that cost less than `bound`, or those that cost that."""
        order = itertools.count()
        # (estimate, steps, ...): of equal estimates the path with fewest steps; of these the one
        # that has most of them behind it, to go straight on, and that may still reduce later.
        queue: list[tuple] = [(0.0, 0, False, 0, next(order), 0.0, before, ())]
        seen: set[ShardSpec] = set()
        best: dict[ShardSpec, tuple[float, int]] = {}  # of those in the queue: their first two
        least, arrived = bound, steps  # the cheapest complete path so far
        lowest = self.remaining_cost(before) + self._slices(before) * self.constants.local_step_fee
        while queue:
            *_, cost, spec, steps = heapq.heappop(queue)
            # A layout may be in the queue several times: only its first and cheapest entry counts.
            if spec in seen:
                continue
            if spec == self.after:
                return steps
            # On meshes of many axes the layouts between two others grow exponentially.
            if self.states >= self.constants.max_layouts:
                self.limited = True
                break
            seen.add(spec)
            self.states += 1
            for move in self._moves(spec, bound - cost):
                total = cost + step_cost(move, self.constants)
                if (
                    move.spec in seen
                    or total >= bound
                    # The bound is admissible, so no cheaper path is lost.
                    or total + self.remaining_cost(move.spec) >= bound
                ):
                    continue
                left, count = self._usual_cost(move.spec)
                # Rounded: sums in another order differ in their last bits, and ranks have to agree.
                rank = round(total + left, 3), len(steps) + 1 + count
                if move.spec not in best or rank < best[move.spec]:
                    best[move.spec] = rank
                    if move.spec == self.after and total < least:
                        least, arrived = total, (*steps, move)
                        if least <= lowest + NEARLY_EQUAL:
                            return arrived
                        # Paths of nearly the same cost stay, of which the one with fewest steps
                        # wins.
                        bound = min(bound, least + NEARLY_EQUAL)
                    is_reduced = move.spec.pending == self.after.pending
                    path = (*steps, move)
                    entry = *rank, -len(path), is_reduced, next(order), total, move.spec, path
                    heapq.heappush(queue, entry)
        return arrived

    def _slices(self, before: ShardSpec) -> int:
        """Return how many slices a reduction needs to send least: one for each new axis.

        One slice takes all new axes on a dimension that has no others.
        """
        if before.pending == self.after.pending:
            return 0
        old, slices = {*before.sharding_axes, *before.pending}, 0
        for have, need in zip(before.dims, self.after.dims):
            new = [axis for axis in need if axis not in old]
            slices += min(len(new), 1) if (*have, *new) == need else len(new)
        return slices

    def _usual_cost(self, spec: ShardSpec) -> tuple[float, int]:
        """Return the remaining cost by as few steps as may do, and the step count.

        It orders the paths.
        """
        after, constants = self.after, self.constants
        if spec == after:
            return 0.0, 0
        sent = least_bytes(self.mesh, self.shape, self.itemsize, spec, after)
        slices, count, fees = self._slices(spec), 0, 0.0
        if sent and (spec.pending == after.pending or shrinks(spec, after)):
            count = 1
            fees = (
                constants.permute_fee if mixes(spec, after) else least_fee(spec, after, constants)
            )
        if spec.pending != after.pending:
            count, fees = count + 1, fees + constants.collective_fee
            terms = self.mesh.count(a for a in spec.pending if a not in after.pending)
            holders = self.mesh.size / self.mesh.count(after.sharding_axes)
            whole = math.prod(self.shape) * self.itemsize
            sent = max(sent, (terms + holders - 2) * whole / self.mesh.size)
        return sent + fees + slices * constants.local_step_fee, count + slices

    def fee(self, kind: CollectiveKind) -> float:
        """Return a step's cost besides the bytes sent."""
        return getattr(self.constants, kind.fee)

    def remaining_cost(self, spec: ShardSpec) -> float:
        """Return a lower bound for the cost from a layout to the target."""
        if (bound := self.bounds.get(spec)) is None:
            bound = self.bounds[spec] = at_least(
                self.mesh, self.shape, self.itemsize, spec, self.after, self.constants
            )
        return bound

    def shard_bytes(self, spec: ShardSpec) -> float:
        if spec.dims not in self.bytes_of_shards:
            self.bytes_of_shards[spec.dims] = (
                math.prod(spec.local_shape(self.shape, self.mesh)) * self.itemsize
            )
        return self.bytes_of_shards[spec.dims]

    def nests(self, dim: int, coarse: Axes, fine: Axes) -> bool:
        """Return whether fine shards along a dimension lie within coarse ones."""
        return nests(self.shape[dim], coarse, fine, self.mesh)

    def _moves(self, spec: ShardSpec, left: float) -> Iterator[Step]:
        """Yield the steps that cost less than `left`, and some others."""
        for kind in SEARCHED:
            for move in kind.moves(self, spec, left):
                self.permutes += kind is permute
                yield move

    def padded_bytes(self, spec: ShardSpec, dim: int, axes: Axes) -> float:
        """Return a shard's bytes, with a dimension padded to a multiple of further axes."""
        # At least one row, also in an empty dimension, which divides the bytes below.
        rows = max(-(-self.shape[dim] // self.mesh.count(spec.dims[dim])), 1)
        return (
            self.shard_bytes(spec)
            / rows
            * -(-self.shape[dim] // self.mesh.count(spec.dims[dim] + axes))
            * self.mesh.count(axes)
        )


def at_least(
    mesh: Mesh,
    shape: tuple[int, ...],
    itemsize: int,
    before: ShardSpec,
    after: ShardSpec,
    constants: CostConstants,
) -> float:
    """Return a lower bound for the cost that any path between two layouts has."""
    sent = least_bytes(mesh, shape, itemsize, before, after)
    if before.pending == after.pending:
        return sent + least_fee(before, after, constants) if sent else 0.0
    fee = constants.collective_fee
    if shrinks(before, after):
        fee += least_fee(before, after, constants)
    return sent + fee


def least_bytes(
    mesh: Mesh, shape: tuple[int, ...], itemsize: int, before: ShardSpec, after: ShardSpec
) -> float:
    """Return a lower bound for the bytes that any path between two layouts sends.

    Without a reduction these are the elements that some device lacks. Of a sum's n terms all
    but one are sent until the first device has the sum, however finely they are cut. Then some
    device lacks its shard but for the part that it has reduced.
    """
    if before.pending == after.pending:
        return lacking(mesh, shape, before, after) * itemsize
    sent, shards = _least_reduced(mesh, before, after)
    return sent * math.prod(shape) * itemsize / shards


@lru_cache(maxsize=2**16)
def _least_reduced(mesh: Mesh, before: ShardSpec, after: ShardSpec) -> tuple[float, int]:
    """Return the finest shards that any reduction between two layouts sends, and their count."""
    reduced = tuple(a for a in before.pending if a not in after.pending)
    terms, shards = mesh.count(reduced), mesh.count(_finest(mesh, before, after, reduced))
    sent = terms - 1 + shards / mesh.count(after.sharding_axes)
    if all(b == a[: len(b)] or a == b[: len(a)] for b, a in zip(before.dims, after.dims)):
        moved = {x for x in after.sharding_axes if x in before.sharding_axes}
        for b, a in zip(before.dims, after.dims):
            moved.difference_update(b[: len(a)])
        sent -= 1 / mesh.count(moved)
    return sent, shards


def _finest(mesh: Mesh, before: ShardSpec, after: ShardSpec, reduced: Axes) -> Axes:
    """Return all axes that may shard a value on a path without a loss."""
    stays = {*before.pending}.difference(reduced)
    return tuple(
        dict.fromkeys(
            a for a in (*before.sharding_axes, *reduced, *after.sharding_axes) if a not in stays
        )
    )


@lru_cache(maxsize=2**16)
def shrinks(before: ShardSpec, after: ShardSpec) -> int:
    """Return how many dimensions have to lose axes on any path."""
    return sum(b != a[: len(b)] for b, a in zip(before.dims, after.dims))


def mixes(before: ShardSpec, after: ShardSpec) -> bool:
    """Return whether some dimension takes a permute: no one collective does without sending more.

    Its last axes are neither all gathered nor all moved, or it has others instead.
    """
    kept = {*after.sharding_axes}
    for b, a in zip(before.dims, after.dims):
        lost = b[len(a) :]
        if a[: len(b)] != b[: len(a)] or 0 < len(kept.intersection(lost)) < len(lost):
            return True
    return False


def least_fee(before: ShardSpec, after: ShardSpec, constants: CostConstants) -> float:
    """Return the least fee for any path that sends something, without a reduction.

    A collective takes axes from one dimension, a permute from all.
    """
    return min(constants.permute_fee, max(shrinks(before, after), 1) * constants.collective_fee)


def on_average(
    mesh: Mesh, shape: tuple[int, ...], itemsize: int, before: ShardSpec, after: ShardSpec
) -> float:
    """Return a lower bound for blocks of unequal size: the elements missing on average."""
    after_bytes = shared_bytes = float(itemsize)
    for n, b, a in zip(shape, before.dims, after.dims):
        after_bytes *= n / mesh.count(a)
        shared_bytes *= n / max(mesh.count(a), mesh.count(b))
    return after_bytes - shared_bytes


def step_cost(step: Step, constants: CostConstants) -> float:
    """Return the bytes that a step sends, plus its fee."""
    return step.sent + fee_of(step, constants)


def fee_of(step: Step, constants: CostConstants) -> float:
    """Return a step's cost besides the bytes that it sends."""
    kind = step.target
    fee = kind.fee if isinstance(kind, CollectiveKind) and step.collective else "local_step_fee"
    return getattr(constants, fee)
