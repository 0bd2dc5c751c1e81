"""From one layout of a value to another: the cheapest sequence of steps, found by A* search over
layouts.

before   x laid out as f32[8@data, 64]
after    x laid out as f32[8, 64@data]           all_to_all(x, 0, 1, data)
source   Shardy's reshard to collectives (its steps); the exchange and the search are ours

Steps: shard (free), all_gather, all_to_all, all_reduce, reduce_scatter, and permute, the exchange
that leads from any layout to any other (see comm/box_exchange.py): the other ones are taken where
they send no more. A dimension whose size does not divide is stored as ceil(size / shards) rows a
shard, so it can be refined or gathered in place only where those blocks nest; gathering it whole is
always possible.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator

from ...comm.box_exchange import busiest, lacking
from ...comm.collective import ALPHA, sent_bytes
from ...mesh import Mesh
from ...shard_spec import Axes, ShardSpec, nests
from .halo_reshard import halo_steps
from .step import Step

STATES = 1000  # layouts that a search looks at before it settles for the direct way
FEES = {
    "shard": 0.01,
    "term": 0.01,
    "permute": 1.5 * ALPHA,
}  # bytes that a step costs besides those sent; of equals the plain one wins


class Resharder:
    """Finds and remembers the steps between layouts on one mesh."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.known, self.costs, self.bounds = mesh, {}, {}, {}

    def cost(
        self, shape: tuple[int, ...], itemsize: int, before: ShardSpec, after: ShardSpec
    ) -> float:
        """Bytes sent, plus a little for every collective; infinite where there is no way: from
        windows, or to terms of a reduction other than a sum or the one at hand.
        """
        key = (shape, itemsize, before, after)
        if (cost := self.costs.get(key)) is None:
            cost = self.costs[key] = self._find_cost(*key)
        return cost

    def _find_cost(
        self, shape: tuple[int, ...], itemsize: int, before: ShardSpec, after: ShardSpec
    ) -> float:
        if before == after:
            return 0.0
        if (
            before.windows
            or not set(after.pending) <= set(before.pending)
            and after.reduction != "sum"
        ):
            return math.inf
        if before.pending and after.pending and before.reduction != after.reduction:
            return math.inf
        return self._solve(shape, itemsize, before, after)[0]

    def at_least(
        self, shape: tuple[int, ...], itemsize: int, before: ShardSpec, after: ShardSpec
    ) -> float:
        """No more than the cost, without a search."""
        key = (shape, itemsize, before, after)
        if (bound := self.bounds.get(key)) is None:
            unknown = (
                before == after
                or before.windows
                or after.windows
                or not set(after.pending) <= set(before.pending)
            )
            uneven = before.pending == after.pending and any(
                n % self.mesh.count(axes)
                for n, b, a in zip(shape, before.dims, after.dims)
                if b != a
                for axes in (b, a)
            )
            bound = self.bounds[key] = (
                0.0
                if unknown
                else on_average(self.mesh, shape, itemsize, before, after)
                if uneven
                else (at_least(self.mesh, shape, itemsize, before, after))
            )
        return bound

    def steps(
        self, shape: tuple[int, ...], itemsize: int, before: ShardSpec, after: ShardSpec
    ) -> tuple[Step, ...]:
        return () if before == after else self._solve(shape, itemsize, before, after)[1]

    def _solve(self, shape, itemsize, before, after) -> tuple[float, tuple[Step, ...]]:
        key = (shape, itemsize, before, after)
        if key not in self.known and after.windows:
            self.known[key] = halo_steps(self, shape, itemsize, before, after)
        elif key not in self.known and (
            new := tuple(a for a in after.pending if a not in before.pending)
        ):
            self.known[key] = self._way_to_terms(shape, itemsize, before, after, new)
        elif key not in self.known:
            steps = self._slices(shape, before, after)
            if steps is None:
                steps = _Search(self.mesh, shape, itemsize, after).run(before)
            self.known[key] = sum(_cost(step) for step in steps if step.kind != "shard"), steps
        return self.known[key]

    def _way_to_terms(
        self, shape, itemsize, before, after, new: Axes
    ) -> tuple[float, tuple[Step, ...]]:
        """What is whole along axes becomes a sum over them by the way."""
        whole = after.with_pending(tuple(a for a in after.pending if a not in new))
        last = Step("term", ("+".join(new),), after, new, 0.0, 0.0)
        return self.cost(shape, itemsize, before, whole) + _cost(last), (
            *self.steps(shape, itemsize, before, whole),
            last,
        )

    def _slices(self, shape, before: ShardSpec, after: ShardSpec) -> tuple[Step, ...] | None:
        """The frequent case that only shards further: nothing to search."""
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
                spec = spec.with_dim(d, a)
                steps.append(Step("shard", (d, "+".join(a[len(b) :])), spec, a[len(b) :], 0.0, 0.0))
        return tuple(steps)


class _Search:
    """Steps that lead to one layout of one tensor. What a device lacks at least has to be sent to
    it: that is the estimate of what remains, and nothing is looked at that cannot beat the direct
    way.
    """

    def __init__(self, mesh: Mesh, shape: tuple[int, ...], itemsize: int, after: ShardSpec):
        self.mesh, self.shape, self.itemsize, self.after = mesh, shape, itemsize, after
        self.targets, self.bytes = (after, *self._finer()), {}

    def _finer(self) -> Iterator[ShardSpec]:
        """Layouts from which a gather leads to `after`: where few devices hold everything, the
        others help to pass it on.
        """
        free = tuple(
            a for a in self.mesh.names if a not in self.after.sharding_axes + self.after.pending
        )
        for d, axes in enumerate(self.after.dims):
            for more in dict.fromkeys([free, *((a,) for a in free)] if free else ()):
                if self._nests(d, axes, axes + more):
                    yield self.after.with_dim(d, axes + more)

    def run(self, before: ShardSpec) -> tuple[Step, ...]:
        least = self._rest(before)
        for move in self._plain_moves(before):
            if move.spec == self.after and _cost(move) <= least:  # no way sends less
                return (move,)
        direct = self._direct(before)
        bound = sum(_cost(step) for step in direct)
        order = itertools.count()
        queue: list = [
            (0.0, 0, next(order), 0.0, before, ())
        ]  # of equal estimates the one of fewest steps
        seen: set[ShardSpec] = set()
        while queue and len(seen) < STATES:
            _, _, _, cost, spec, steps = heapq.heappop(queue)
            if spec in seen:
                continue
            seen.add(spec)
            if spec == self.after:
                return steps
            for move in self._moves(spec, bound - cost):
                total = cost + _cost(move)
                if (
                    move.spec not in seen
                    and total < bound
                    and (in_all := total + self._rest(move.spec)) < bound
                ):
                    heapq.heappush(
                        queue,
                        (
                            round(in_all, 3),
                            len(steps) + 1,
                            next(order),
                            total,
                            move.spec,
                            (*steps, move),
                        ),
                    )
        return direct

    def _direct(self, before: ShardSpec) -> tuple[Step, ...]:
        """Reduces, and exchanges what is left."""
        axes = tuple(a for a in before.pending if a not in self.after.pending)
        first = (
            [next(m for m in self._reductions(before) if m.kind == "all_reduce" and m.axes == axes)]
            if axes
            else []
        )
        spec = first[0].spec if first else before
        return (*first, self._permute(spec, self.after)) if spec != self.after else tuple(first)

    def _rest(self, spec: ShardSpec) -> float:
        return at_least(self.mesh, self.shape, self.itemsize, spec, self.after)

    def _lacking(self, spec: ShardSpec, target: ShardSpec) -> float:
        return lacking(self.mesh, self.shape, spec, target) * self.itemsize

    def _bytes(self, spec: ShardSpec) -> float:
        if spec.dims not in self.bytes:
            self.bytes[spec.dims] = (
                math.prod(spec.local_shape(self.shape, self.mesh)) * self.itemsize
            )
        return self.bytes[spec.dims]

    def _nests(self, dim: int, coarse: Axes, fine: Axes) -> bool:
        return nests(self.shape[dim], coarse, fine, self.mesh)

    # -------------------------------------------------------------------------------------- moves

    def _moves(self, spec: ShardSpec, left: float) -> Iterator[Step]:
        yield from self._plain_moves(spec)
        for target in self.targets if spec.pending == self.after.pending else ():
            if (
                spec != target
                and self._lacking(spec, target) + self._rest(target) + FEES["permute"] < left
            ):
                yield self._permute(spec, target)

    def _plain_moves(self, spec: ShardSpec) -> Iterator[Step]:
        yield from self._shards(spec)
        yield from self._gathers(spec)
        yield from self._exchanges(spec)
        yield from self._reductions(spec)

    def _permute(self, spec: ShardSpec, target: ShardSpec) -> Step:
        count, axes = busiest(self.mesh, self.shape, spec, target)
        sent = float(count * self.itemsize)
        return Step("permute", (str(spec), str(target)), target, axes, sent, sent)

    def _shards(self, spec: ShardSpec) -> Iterator[Step]:
        """Further along the axes that a dimension is to have; before a reduction, which is cheaper
        then, any dimension.
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
        for d, axes in enumerate(spec.dims):
            for k in range(len(axes)):
                kept, moved = axes[:k], axes[k:]
                if self._nests(d, kept, axes):
                    new = spec.with_dim(d, kept)
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
        for d, axes in enumerate(spec.dims):
            for k, e in itertools.product(range(len(axes)), range(len(self.shape))):
                kept, moved = axes[:k], axes[k:]
                fine = spec.dims[e] + moved
                if e != d and self._nests(d, kept, axes) and self._nests(e, spec.dims[e], fine):
                    payload = self._padded(spec, e, moved)
                    yield Step(
                        "all_to_all",
                        (d, e, "+".join(moved)),
                        spec.with_dim(d, kept).with_dim(e, fine),
                        moved,
                        payload,
                        sent_bytes("all_to_all", payload, self.mesh.count(moved)),
                    )

    def _reductions(self, spec: ShardSpec) -> Iterator[Step]:
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
        """Bytes of a device's part, with a dimension padded so that it can be divided among further
        axes.
        """
        rows = max(-(-self.shape[dim] // self.mesh.count(spec.dims[dim])), 1)
        return (
            self._bytes(spec)
            / rows
            * -(-self.shape[dim] // self.mesh.count(spec.dims[dim] + axes))
            * self.mesh.count(axes)
        )


def at_least(
    mesh: Mesh, shape: tuple[int, ...], itemsize: int, before: ShardSpec, after: ShardSpec
) -> float:
    """What any way from one layout to another costs: a collective, and what some device lacks, or
    of terms of n devices that are summed all but one, however finely they are cut.
    """
    if before.pending == after.pending:
        missing = lacking(mesh, shape, before, after)
        return missing * itemsize + ALPHA if missing else 0.0
    terms = mesh.count(tuple(a for a in before.pending if a not in after.pending))
    return (terms - 1) * math.prod(shape) * itemsize / mesh.size + ALPHA


def on_average(
    mesh: Mesh, shape: tuple[int, ...], itemsize: int, before: ShardSpec, after: ShardSpec
) -> float:
    """The same for blocks of unequal sizes, as which a gather is charged what the devices lack on
    average.
    """
    wanted = kept = float(itemsize)
    for n, b, a in zip(shape, before.dims, after.dims):
        wanted *= n / mesh.count(a)
        kept *= n / max(mesh.count(a), mesh.count(b))
    return wanted - kept


def _cost(step: Step) -> float:
    return step.sent + FEES.get(step.kind, ALPHA)
