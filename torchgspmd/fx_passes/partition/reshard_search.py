"""A* search for the cheapest sequence of steps between two layouts.

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

from ...comm.box_exchange import lacking
from ...comm.kinds import SEARCHED, CollectiveKind, Step, StepKind, all_reduce
from ...comm.kinds.permute import permute, permute_step
from ...mesh import Mesh
from ...open_sizes import nests
from ...shard_spec import Axes, ShardSpec
from .cost_constants import CostConstants
from .search_counts import (
    RESHARD_PERMUTES,
    RESHARD_SEARCHES,
    RESHARD_STATES,
    SearchCounts,
    no_counts,
)

CommonMoves = dict[tuple[StepKind, ShardSpec, Axes], tuple[Step, ...]]
MOST_CHANGED = 2  # Dimensions that a step may change, as an all_to_all does; a permute changes all.


class ReshardSearch:
    """Searches steps to one layout of one tensor.

    The estimate of the remaining cost is what a device lacks: at least that has to be sent to it.
    Paths that cannot beat the direct one are not followed. common: by layout, the moves of kinds
    that have the same ones for all targets with the same pending axes; searches of a tensor share
    them.
    """

    def __init__(
        self,
        mesh: Mesh,
        shape: tuple[int, ...],
        itemsize: int,
        after: ShardSpec,
        constants: CostConstants,
        common: CommonMoves | None = None,
        counts: SearchCounts | None = None,
    ) -> None:
        self.mesh, self.shape, self.itemsize, self.after = mesh, shape, itemsize, after
        self.constants, self.counts = constants, no_counts() if counts is None else counts
        self.common: CommonMoves = {} if common is None else common
        self.bounds: dict[ShardSpec, float] = {}  # remaining_cost
        self.targets = (after, *self._finer())
        self.bytes_of_shards: dict[tuple[Axes, ...], float] = {}  # by axes of the dimensions

    def _finer(self) -> Iterator[ShardSpec]:
        """Yield layouts from which a gather leads to `after`.

        Where few devices have everything, the others help to pass it on.
        """
        free = tuple(
            a for a in self.mesh.names if a not in self.after.sharding_axes + self.after.pending
        )
        for d, axes in enumerate(self.after.dims):
            for more in dict.fromkeys([free, *((a,) for a in free)] if free else ()):
                if self.nests(d, axes, axes + more):
                    yield self.after.with_dim(d, axes + more)

    def run(self, before: ShardSpec) -> tuple[Step, ...]:
        """Return the cheapest steps from a layout."""
        self.counts[RESHARD_SEARCHES] += 1
        least = self.remaining_cost(before)
        changed = sum(b != a for b, a in zip(before.dims, self.after.dims))
        for move in self._moves(before, 0.0) if changed <= MOST_CHANGED else ():
            if (
                move.spec == self.after and step_cost(move, self.constants) <= least
            ):  # no path sends less
                return (move,)
        direct = self._direct(before)
        bound = sum(step_cost(step, self.constants) for step in direct)
        order = itertools.count()
        # (estimate, steps so far, has all sums, ...): of equal estimates the path with fewest
        # steps; of these, one that may still reduce later.
        queue: list[tuple] = [(0.0, 0, False, next(order), 0.0, before, ())]
        seen: set[ShardSpec] = set()
        best: dict[ShardSpec, tuple[float, int]] = {}  # of those in the queue: their first two
        while queue and len(seen) < self.constants.max_layouts:
            *_, cost, spec, steps = heapq.heappop(queue)
            if spec in seen:
                continue
            seen.add(spec)
            self.counts[RESHARD_STATES] += 1
            if spec == self.after:
                return steps
            for move in self._moves(spec, bound - cost):
                self.counts[RESHARD_PERMUTES] += move.target is permute
                total = cost + step_cost(move, self.constants)
                if (
                    move.spec in seen
                    or total >= bound
                    or (estimate := total + self.remaining_cost(move.spec)) >= bound
                ):
                    continue
                rank = round(estimate, 3), len(steps) + 1
                if move.spec not in best or rank < best[move.spec]:
                    best[move.spec] = rank
                    is_reduced = move.spec.pending == self.after.pending
                    entry = *rank, is_reduced, next(order), total, move.spec, (*steps, move)
                    heapq.heappush(queue, entry)
        return direct

    def _direct(self, before: ShardSpec) -> tuple[Step, ...]:
        """Return the direct path: reduce, then permute."""
        steps = tuple(itertools.islice(all_reduce.moves(self, before, math.inf), 1))
        spec = steps[-1].spec if steps else before
        return steps if spec == self.after else (*steps, permute_step(self, spec, self.after))

    def fee(self, kind: CollectiveKind) -> float:
        """Return what a step costs besides the bytes sent."""
        return getattr(self.constants, kind.fee)

    def remaining_cost(self, spec: ShardSpec) -> float:
        """Return a lower bound of the cost from a layout to the target."""
        if (bound := self.bounds.get(spec)) is None:
            bound = self.bounds[spec] = at_least(
                self.mesh, self.shape, self.itemsize, spec, self.after, self.constants
            )
        return bound

    def shard_bytes(self, spec: ShardSpec) -> float:
        """Return the bytes of one shard."""
        if spec.dims not in self.bytes_of_shards:
            self.bytes_of_shards[spec.dims] = (
                math.prod(spec.local_shape(self.shape, self.mesh)) * self.itemsize
            )
        return self.bytes_of_shards[spec.dims]

    def nests(self, dim: int, coarse: Axes, fine: Axes) -> bool:
        """Return whether fine shards of a dimension lie within coarse ones."""
        return nests(self.shape[dim], coarse, fine, self.mesh)

    def _moves(self, spec: ShardSpec, left: float) -> Iterator[Step]:
        """Yield the steps that cost less than `left`, and some others."""
        for kind in SEARCHED:
            if not kind.common_moves:
                yield from kind.moves(self, spec, left)
                continue
            key = kind, spec, self.after.pending
            if (moves := self.common.get(key)) is None:
                moves = self.common[key] = tuple(kind.moves(self, spec, math.inf))
            yield from moves

    def padded_bytes(self, spec: ShardSpec, dim: int, axes: Axes) -> float:
        """Return the bytes of a shard, with a dimension padded to a multiple of further axes."""
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
    """Return a lower bound of the cost of any path between two layouts.

    Without a reduction that is one collective and what some device lacks. Of n terms of a sum all
    but one are sent until the first device has the sum, however finely they are cut; then it is
    sent to each other device that shall have it.
    """
    if before.pending == after.pending:
        missing = lacking(mesh, shape, before, after)
        return missing * itemsize + constants.collective_fee if missing else 0.0
    terms = mesh.count(tuple(a for a in before.pending if a not in after.pending))
    devices = 1 if after.pending else mesh.size // mesh.count(after.sharding_axes)
    sends = terms + devices - 2  # of each element
    return sends * math.prod(shape) * itemsize / mesh.size + constants.collective_fee


def on_average(
    mesh: Mesh, shape: tuple[int, ...], itemsize: int, before: ShardSpec, after: ShardSpec
) -> float:
    """Return a lower bound for blocks of unequal sizes: what the devices lack on average."""
    after_bytes = shared_bytes = float(itemsize)
    for n, b, a in zip(shape, before.dims, after.dims):
        after_bytes *= n / mesh.count(a)
        shared_bytes *= n / max(mesh.count(a), mesh.count(b))
    return after_bytes - shared_bytes


def step_cost(step: Step, constants: CostConstants) -> float:
    """Return the bytes that a step sends, plus its fee."""
    kind = step.target
    fee = kind.fee if isinstance(kind, CollectiveKind) and step.collective else "local_step_fee"
    return step.sent + getattr(constants, fee)
