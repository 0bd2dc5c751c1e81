"""From one layout of a value to another: the cheapest sequence of steps, found by Dijkstra's algorithm over layouts.

before   x laid out as f32[8@data, 64]
after    x laid out as f32[8, 64@data]           all_to_all(x, 0, 1, data)
source   Shardy's reshard to collectives (its steps); the search is ours

Steps: shard (free), all_gather, all_to_all, permute, all_reduce, reduce_scatter. A dimension whose size does not
divide is stored as ceil(size / shards) rows a shard, so it can be refined or gathered in place only where those
blocks nest; gathering it whole is always possible.
"""
from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator

from ..comm.collective import ALPHA, sent_bytes
from ..mesh import Mesh
from ..shard_spec import Axes, ShardSpec
from .step import Step
from .windows import way_to_windows

STATES = 3000                   # layouts that a search looks at before it settles for the direct way


class Resharder:
    """Finds and remembers the steps between layouts on one mesh."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.known = mesh, {}

    def cost(self, shape: tuple[int, ...], itemsize: int, before: ShardSpec, after: ShardSpec) -> float:
        """Bytes sent, plus a little for every collective; infinite where there is no way: `after` is pending and `before` is not,
        or `before` has windows."""
        if before == after:
            return 0.0
        if before.windows or not set(after.pending) <= set(before.pending):
            return math.inf
        return self._solve(shape, itemsize, before, after)[0]

    def steps(self, shape: tuple[int, ...], itemsize: int, before: ShardSpec, after: ShardSpec) -> tuple[Step, ...]:
        return () if before == after else self._solve(shape, itemsize, before, after)[1]

    def _solve(self, shape, itemsize, before, after) -> tuple[float, tuple[Step, ...]]:
        key = (shape, itemsize, before, after)
        if key not in self.known and after.windows:
            self.known[key] = way_to_windows(self, shape, itemsize, before, after)
        elif key not in self.known:
            self.known[key] = self._quick(shape, itemsize, before, after) or self._search(shape, itemsize, before, after)
        return self.known[key]

    def _quick(self, shape, itemsize, before, after) -> tuple[float, tuple[Step, ...]] | None:
        """The frequent case that only shards further: nothing to search."""
        if before.pending or after.pending or any(b != a[:len(b)] for b, a in zip(before.dims, after.dims)):
            return None
        steps, spec = [], before
        for d, (b, a) in enumerate(zip(before.dims, after.dims)):
            if a != b:
                if not self._nests(shape[d], b, a):
                    return None
                spec = spec.with_dim(d, a)
                steps.append(Step("shard", (d, "+".join(a[len(b):])), spec, a[len(b):], 0.0, 0.0))
        return 0.0, tuple(steps)

    def _search(self, shape, itemsize, before, after) -> tuple[float, tuple[Step, ...]]:
        order = itertools.count()
        queue: list = [(0.0, next(order), before, None, None)]
        came: dict[ShardSpec, tuple[ShardSpec | None, Step | None, float]] = {}
        while queue:
            cost, _, spec, previous, step = heapq.heappop(queue)
            if spec in came:
                continue
            came[spec] = (previous, step, cost)
            if spec == after:
                return cost, self._path(came, after)
            if len(came) > STATES:
                return self._direct(shape, itemsize, before, after)
            for move in self._moves(shape, itemsize, spec, after):
                if move.spec not in came:
                    total = cost + move.sent + (ALPHA if move.kind != "shard" else 0.01)
                    heapq.heappush(queue, (total, next(order), move.spec, spec, move))
        raise AssertionError(f"no way from {before} to {after}")

    def _direct(self, shape, itemsize, before, after) -> tuple[float, tuple[Step, ...]]:
        """Reduces, gathers what is sharded otherwise, shards anew: for meshes of so many axes that a search takes too long."""
        spec, steps = before, []
        while spec != after:
            local = self._bytes(shape, itemsize, spec)
            common = [len([0 for _ in itertools.takewhile(lambda p: p[0] == p[1], zip(b, a))]) for b, a in zip(spec.dims, after.dims)]
            extra = [d for d, axes in enumerate(spec.dims) if len(axes) > common[d]]
            if set(spec.pending) - set(after.pending):
                step = next(m for m in self._reductions(shape, spec, after, local) if m.kind == "all_reduce")
            elif extra:
                kept = common[extra[0]] if self._nests(shape[extra[0]], spec.dims[extra[0]][:common[extra[0]]], spec.dims[extra[0]]) else 0
                step = [m for m in self._gathers(shape, itemsize, spec) if m.args[0] == extra[0]
                        and m.spec.dims[extra[0]] == spec.dims[extra[0]][:kept]][0]
            else:
                d = next(d for d, axes in enumerate(spec.dims) if axes != after.dims[d])
                if not self._nests(shape[d], spec.dims[d], after.dims[d]):
                    step = next(m for m in self._gathers(shape, itemsize, spec) if m.args[0] == d and not m.spec.dims[d])
                else:
                    rest = after.dims[d][common[d]:]
                    step = Step("shard", (d, "+".join(rest)), spec.with_dim(d, after.dims[d]), rest, 0.0, 0.0)
            steps.append(step)
            spec = step.spec
        return sum(s.sent + ALPHA for s in steps), tuple(steps)

    @staticmethod
    def _path(came: dict, spec: ShardSpec) -> tuple[Step, ...]:
        steps = []
        while came[spec][1] is not None:
            steps.append(came[spec][1])
            spec = came[spec][0]
        return tuple(reversed(steps))

    def _nests(self, size: int, coarse: Axes, fine: Axes) -> bool:
        """Whether the blocks of the finer sharding lie within those of the coarser one."""
        if not coarse:
            return True
        n, m = self.mesh.count(coarse), self.mesh.count(fine)
        return -(-size // m) * (m // n) == -(-size // n)

    def _bytes(self, shape, itemsize, spec: ShardSpec) -> float:
        return math.prod(spec.local_shape(shape, self.mesh)) * itemsize

    def _moves(self, shape, itemsize, spec: ShardSpec, after: ShardSpec) -> Iterator[Step]:
        local = self._bytes(shape, itemsize, spec)
        free = [a for a in self.mesh.names if a not in spec.sharding_axes and a not in spec.pending]
        wanted = {axis for axes in after.dims for axis in axes}
        for axis in free:
            if axis in wanted:
                for d, size in enumerate(shape):
                    fine = spec.dims[d] + (axis,)
                    if self.mesh.count(fine) <= max(size, 1) * 2 and self._nests(size, spec.dims[d], fine):
                        yield Step("shard", (d, axis), spec.with_dim(d, fine), (axis,), 0.0, 0.0)
        for d, (have, want) in enumerate(zip(spec.dims, after.dims)):               # at once, whatever the size
            rest = want[len(have):]
            if rest and have == want[:len(have)] and set(rest) <= set(free) and self._nests(shape[d], have, want):
                yield Step("shard", (d, "+".join(rest)), spec.with_dim(d, want), rest, 0.0, 0.0)
        yield from self._gathers(shape, itemsize, spec)
        yield from self._exchanges(shape, spec, local)
        yield from self._reductions(shape, spec, after, local)
        yield from self._permutes(shape, spec, after, local)

    def _gathers(self, shape, itemsize, spec: ShardSpec) -> Iterator[Step]:
        for d, axes in enumerate(spec.dims):
            for k in range(len(axes)):
                kept, moved = axes[:k], axes[k:]
                if self._nests(shape[d], kept, axes):
                    new = spec.with_dim(d, kept)
                    payload = self._bytes(shape, itemsize, new)
                    yield Step("all_gather", (d, "+".join(moved)), new, moved, payload,
                               sent_bytes("all_gather", payload, self.mesh.count(moved)))

    def _exchanges(self, shape, spec: ShardSpec, local: float) -> Iterator[Step]:
        for d, axes in enumerate(spec.dims):
            for k in range(len(axes)):
                kept, moved = axes[:k], axes[k:]
                for e in range(len(shape)):
                    fine = spec.dims[e] + moved
                    if e != d and self._nests(shape[d], kept, axes) and self._nests(shape[e], spec.dims[e], fine):
                        padded = local * -(-shape[e] // self.mesh.count(fine)) * self.mesh.count(moved) / max(
                            -(-shape[e] // self.mesh.count(spec.dims[e])), 1)
                        yield Step("all_to_all", (d, e, "+".join(moved)), spec.with_dim(d, kept).with_dim(e, fine), moved, padded,
                                   sent_bytes("all_to_all", padded, self.mesh.count(moved)))

    def _reductions(self, shape, spec: ShardSpec, after: ShardSpec, local: float) -> Iterator[Step]:
        axes = tuple(a for a in spec.pending if a not in after.pending)
        if not axes:
            return
        subsets = [axes] if len(axes) == 1 else [axes, *((a,) for a in axes)]
        for subset in subsets:
            rest = spec.with_pending(tuple(a for a in spec.pending if a not in subset))
            n = self.mesh.count(subset)
            yield Step("all_reduce", (spec.reduction, "+".join(subset)), rest, subset, local, sent_bytes("all_reduce", local, n))
            orders = [subset] if len(subset) == 1 else itertools.permutations(subset)
            for order in orders:
                for d, size in enumerate(shape):
                    fine = spec.dims[d] + tuple(order)
                    if size > 1 and self._nests(size, spec.dims[d], fine):
                        before = max(-(-size // self.mesh.count(spec.dims[d])), 1)
                        padded = local * -(-size // self.mesh.count(fine)) * n / before
                        yield Step("reduce_scatter", (spec.reduction, d, "+".join(order)), rest.with_dim(d, fine), tuple(order),
                                   padded, sent_bytes("reduce_scatter", padded, n))

    def _permutes(self, shape, spec: ShardSpec, after: ShardSpec, local: float) -> Iterator[Step]:
        """Other axes, or another order of them, with the same number of shards in every dimension."""
        counts = [self.mesh.count(axes) for axes in spec.dims]
        if max(counts, default=1) == 1:
            return
        names = [a for a in self.mesh.names if a not in spec.pending]
        direct = [after.dims] if counts == [self.mesh.count(axes) for axes in after.dims] else []
        for dims in self._arrangements(counts, names) if len(names) <= 5 else direct:
            if dims != spec.dims:
                new = ShardSpec(dims, (), spec.pending, spec.reduction)
                moved = tuple(sorted({a for old, axes in zip(spec.dims, dims) if old != axes for a in old + axes}))
                yield Step("permute", (str(spec), str(new)), new, moved, local, local)

    def _arrangements(self, counts: list[int], names: list[str]) -> Iterator[tuple[Axes, ...]]:
        if not counts:
            yield ()
            return
        for size in range(len(names) + 1):
            for axes in itertools.permutations(names, size):
                if self.mesh.count(axes) == counts[0]:
                    rest = [a for a in names if a not in axes]
                    yield from ((axes, *others) for others in self._arrangements(counts[1:], rest))
