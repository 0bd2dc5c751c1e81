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

from ...comm.box_exchange import busiest, lacking
from ...comm.collective import sent_bytes
from ...mesh import Mesh
from ...shard_spec import Axes, ShardSpec, nests
from .cost_constants import CostConstants
from .step import Step


class ReshardSearch:
    """Searches steps to one layout of one tensor.

    The estimate of the remaining cost is what a device lacks: at least that has to be sent to it.
    Paths that cannot beat the direct one are not followed.
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
        self.targets = (after, *self._finer())
        self.shard_bytes: dict[tuple[Axes, ...], float] = {}  # by axes of the dimensions

    def _finer(self) -> Iterator[ShardSpec]:
        """Yield layouts from which a gather leads to `after`.

        Where few devices have everything, the others help to pass it on.
        """
        free = tuple(
            a for a in self.mesh.names if a not in self.after.sharding_axes + self.after.pending
        )
        for d, axes in enumerate(self.after.dims):
            for more in dict.fromkeys([free, *((a,) for a in free)] if free else ()):
                if self._nests(d, axes, axes + more):
                    yield self.after.with_dim(d, axes + more)

    def run(self, before: ShardSpec) -> tuple[Step, ...]:
        """Return the cheapest steps from a layout."""
        least = self._remaining(before)
        for move in self._plain_moves(before):
            if (
                move.spec == self.after and step_cost(move, self.constants) <= least
            ):  # no path sends less
                return (move,)
        direct = self._direct(before)
        bound = sum(step_cost(step, self.constants) for step in direct)
        order = itertools.count()
        # (estimate, steps so far, ...): of equal estimates the path with fewest steps.
        queue: list[tuple] = [(0.0, 0, next(order), 0.0, before, ())]
        seen: set[ShardSpec] = set()
        while queue and len(seen) < self.constants.max_layouts:
            _, _, _, cost, spec, steps = heapq.heappop(queue)
            if spec in seen:
                continue
            seen.add(spec)
            if spec == self.after:
                return steps
            for move in self._moves(spec, bound - cost):
                total = cost + step_cost(move, self.constants)
                if (
                    move.spec not in seen
                    and total < bound
                    and (estimate := total + self._remaining(move.spec)) < bound
                ):
                    heapq.heappush(
                        queue,
                        (
                            round(estimate, 3),
                            len(steps) + 1,
                            next(order),
                            total,
                            move.spec,
                            (*steps, move),
                        ),
                    )
        return direct

    def _direct(self, before: ShardSpec) -> tuple[Step, ...]:
        """Return the direct path: reduce, then permute."""
        axes = tuple(a for a in before.pending if a not in self.after.pending)
        first = (
            [next(m for m in self._reductions(before) if m.kind == "all_reduce" and m.axes == axes)]
            if axes
            else []
        )
        spec = first[0].spec if first else before
        return (*first, self._permute(spec, self.after)) if spec != self.after else tuple(first)

    def _remaining(self, spec: ShardSpec) -> float:
        """Return a lower bound of the cost from a layout to the target."""
        return at_least(self.mesh, self.shape, self.itemsize, spec, self.after, self.constants)

    def _lacking(self, spec: ShardSpec, target: ShardSpec) -> float:
        """Return the bytes that some device needs for `target` and does not have."""
        return lacking(self.mesh, self.shape, spec, target) * self.itemsize

    def _bytes(self, spec: ShardSpec) -> float:
        """Return the bytes of one shard."""
        if spec.dims not in self.shard_bytes:
            self.shard_bytes[spec.dims] = (
                math.prod(spec.local_shape(self.shape, self.mesh)) * self.itemsize
            )
        return self.shard_bytes[spec.dims]

    def _nests(self, dim: int, coarse: Axes, fine: Axes) -> bool:
        """Return whether fine shards of a dimension lie within coarse ones."""
        return nests(self.shape[dim], coarse, fine, self.mesh)

    # -------------------------------------------------------------------------------------- moves

    def _moves(self, spec: ShardSpec, left: float) -> Iterator[Step]:
        """Yield all steps from a layout, without permutes that cost `left` or more."""
        yield from self._plain_moves(spec)
        for target in self.targets if spec.pending == self.after.pending else ():
            if (
                spec != target
                and self._lacking(spec, target)
                + self._remaining(target)
                + self.constants.permute_fee
                < left
            ):
                yield self._permute(spec, target)

    def _plain_moves(self, spec: ShardSpec) -> Iterator[Step]:
        """Yield all steps from a layout but permutes."""
        yield from self._shards(spec)
        yield from self._gathers(spec)
        yield from self._exchanges(spec)
        yield from self._reductions(spec)

    def _permute(self, spec: ShardSpec, target: ShardSpec) -> Step:
        """Return the exchange that leads from a layout to any other."""
        count, axes = busiest(self.mesh, self.shape, spec, target)
        sent = float(count * self.itemsize)
        return Step("permute", (str(spec), str(target)), target, axes, sent, sent)

    def _shards(self, spec: ShardSpec) -> Iterator[Step]:
        """Yield shards along the axes that the target has.

        Before a reduction, which is cheaper on shards, they may shard any dimension.
        """
        taken = {*spec.sharding_axes, *spec.pending}
        if spec.pending != self.after.pending:
            for axis, d in itertools.product(
                [a for a in self.after.sharding_axes if a not in taken], range(len(self.shape))
            ):
                if self.shape[d] > 1 and self._nests(d, spec.dims[d], spec.dims[d] + (axis,)):
                    yield Step(
                        "shard",
                        (d, axis),
                        spec.with_dim(d, spec.dims[d] + (axis,)),
                        (axis,),
                        0.0,
                        0.0,
                    )
        for d, (have, want) in enumerate(zip(spec.dims, self.after.dims)):
            rest = want[len(have) :]
            if have == want[: len(have)]:
                for end in {1, len(rest)} if rest else ():
                    if not taken & set(rest[:end]) and self._nests(d, have, have + rest[:end]):
                        yield Step(
                            "shard",
                            (d, "+".join(rest[:end])),
                            spec.with_dim(d, have + rest[:end]),
                            rest[:end],
                            0.0,
                            0.0,
                        )

    def _gathers(self, spec: ShardSpec) -> Iterator[Step]:
        """Yield gathers along the minor axes of each dimension."""
        for d, axes in enumerate(spec.dims):
            for k in range(len(axes)):
                major, moved = axes[:k], axes[k:]
                if self._nests(d, major, axes):
                    new = spec.with_dim(d, major)
                    payload = self._bytes(new)
                    yield Step(
                        "all_gather",
                        (d, "+".join(moved)),
                        new,
                        moved,
                        payload,
                        sent_bytes("all_gather", payload, self.mesh.count(moved)),
                    )

    def _exchanges(self, spec: ShardSpec) -> Iterator[Step]:
        """Yield exchanges that move minor axes from one dimension to another."""
        for d, axes in enumerate(spec.dims):
            for k, e in itertools.product(range(len(axes)), range(len(self.shape))):
                major, moved = axes[:k], axes[k:]
                fine = spec.dims[e] + moved
                if e != d and self._nests(d, major, axes) and self._nests(e, spec.dims[e], fine):
                    payload = self._padded(spec, e, moved)
                    yield Step(
                        "all_to_all",
                        (d, e, "+".join(moved)),
                        spec.with_dim(d, major).with_dim(e, fine),
                        moved,
                        payload,
                        sent_bytes("all_to_all", payload, self.mesh.count(moved)),
                    )

    def _reductions(self, spec: ShardSpec) -> Iterator[Step]:
        """Yield reductions over pending axes, also those that scatter the result."""
        axes = tuple(a for a in spec.pending if a not in self.after.pending)
        local = self._bytes(spec)
        for subset in dict.fromkeys([axes, *((a,) for a in axes)] if axes else ()):
            rest = spec.with_pending(tuple(a for a in spec.pending if a not in subset))
            n = self.mesh.count(subset)
            yield Step(
                "all_reduce",
                (spec.reduction, "+".join(subset)),
                rest,
                subset,
                local,
                sent_bytes("all_reduce", local, n),
            )
            for order, d in itertools.product(
                itertools.permutations(subset), range(len(self.shape))
            ):
                fine = spec.dims[d] + order
                if self.shape[d] > 1 and self._nests(d, spec.dims[d], fine):
                    payload = self._padded(spec, d, order)
                    yield Step(
                        "reduce_scatter",
                        (spec.reduction, d, "+".join(order)),
                        rest.with_dim(d, fine),
                        order,
                        payload,
                        sent_bytes("reduce_scatter", payload, n),
                    )

    def _padded(self, spec: ShardSpec, dim: int, axes: Axes) -> float:
        """Return the bytes of a shard, with a dimension padded to a multiple of further axes."""
        rows = max(-(-self.shape[dim] // self.mesh.count(spec.dims[dim])), 1)
        return (
            self._bytes(spec)
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

    Without a reduction that is one collective and what some device lacks. A sum of n terms sends
    all terms but one, however finely they are cut.
    """
    if before.pending == after.pending:
        missing = lacking(mesh, shape, before, after)
        return missing * itemsize + constants.collective_fee if missing else 0.0
    terms = mesh.count(tuple(a for a in before.pending if a not in after.pending))
    return (terms - 1) * math.prod(shape) * itemsize / mesh.size + constants.collective_fee


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
    if step.kind in ("shard", "term", "window") or step.kind == "halo" and not step.sent:
        return step.sent + constants.local_step_fee
    return step.sent + (
        constants.permute_fee if step.kind == "permute" else constants.collective_fee
    )
