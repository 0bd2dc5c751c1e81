"""Changes the strategies of several operations at once, where `partition` gets no further one by
one.

before   every operation of a region has the strategy that is cheapest while the others keep theirs
after    all of them have other ones, which cost less together
needs    the solver of `partition`, whose choices it changes
source   ours

A proposal sets the strategies of a region; it stays if it costs less, else the former ones are put
back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import fx

from ...mesh import Mesh
from ...shard_spec import ShardSpec
from ..ir import Op
from .regions import Body, Region, bodies, chains, sources, sums, threads

if TYPE_CHECKING:
    from .partition import Solver
    from .strategies import Around, Strategy


PART = 1 / 8  # of a body's operations has to have a factor that all of the body is laid out by
SAVED = (
    1 / 16
    # of what is sent, at least, for which a layer leaves the layout that its operations came to one by
    # one
)


class RegionSearch:
    """The regions of a graph, and what was proposed for them."""

    def __init__(self, solver: Solver):
        self.solver, self.memory = solver, solver.memory
        self.names: dict[tuple[Body, int | None], int] = {}
        self.situations: dict[
            Body, tuple[int, int]
        ] = {}  # the solver's version, and the situation then
        self.sums, self.chains, self.sources, self.bodies, self.threads = (
            find(solver.ops) for find in (sums, chains, sources, bodies, threads)
        )
        self.makers = {
            value: op for op in solver.ops.values() for value in op.results if value is not None
        }
        self.order = {node: i for i, node in enumerate(solver.ops)}
        self.around = {body: self._neighbours(body) for body in (*self.bodies, *self.threads)}

    def improve(self) -> list[bool]:
        """Tries all regions once; says of each whether it changed."""
        return [
            *map(self._pend, self.sums),
            *map(self._move, self.chains),
            *map(self._make, self.sources),
        ]

    def _try(self, region: Region, way: Hashable, propose: Callable[[], bool]) -> bool:
        """Takes the strategies that `propose` gives to a region, all at once, if they cost less;
        says whether.

        way: tells apart the proposals for a region, whose outcome is remembered for regions in the
        same situation.
        """
        chosen, late = self.solver.chosen, self.solver.late
        situation = (
            way,
            late,
            *((op.key, self.solver.around(op), chosen[op.node]) for op in region.ops),
        )
        if situation not in self.memory.proposals:
            before, cost = [chosen[op.node] for op in region.ops], self._cost(region)
            cheaper = propose() and self._cost(region) < cost
            self.memory.proposals[situation] = (
                [chosen[op.node] for op in region.ops] if cheaper else None
            )
            self._take(region, before)
        if self.memory.proposals[situation] is not None:
            self._take(region, self.memory.proposals[situation])
        return self.memory.proposals[situation] is not None

    def _take(self, region: Region, strategies: list[Strategy]) -> None:
        for op, strategy in zip(region.ops, strategies):
            self.solver.take(op, strategy)

    def _cost(self, region: Region) -> float:
        """Of a region: its work, what brings the operands to it and its result to where that is
        used.
        """
        cost = 0.0
        for op in region.ops:
            around = self.solver.around(op)
            uses = tuple(
                () if v in region.values and v is not region.value else w
                for v, w in zip(op.results, around.wanted)
            )
            cost += self.solver.cost(op, self.solver.chosen[op.node], replace(around, wanted=uses))
        return cost

    # -------------------------------------------------------------------------------------- sums

    def _pend(self, total: Region) -> bool:
        """Lets all summands stay pending over one more axis if one reduction of their sum is
        cheaper than what there is, or none of them, if what they are made of is at hand.

        None of them can do so alone: an addition passes on only what is pending in both operands.
        """
        solver = self.solver
        axes = [
            a
            for a, size in solver.mesh.axes
            if size > 1 and a not in solver.held[total.value].pending
        ]
        inside = {a for value in total.values for a in solver.held[value].pending}
        ways = [(axis, True) for axis in axes] + [(axis, False) for axis in axes if axis in inside]
        return any(
            [self._try(total, way, lambda way=way: self._propose_sum(total, *way)) for way in ways]
        )

    def _propose_sum(self, total: Region, axis: str, pending: bool) -> bool:
        """pending: all of it over one more axis, up to the last addition. Else each part in the
        layout that costs least to make.
        """
        for op in total.ops:
            around = self.solver.around(op)
            if op is not total.ops[-1]:
                around = self.solver.surrounded(
                    op,
                    around.available,
                    tuple(
                        tuple(_pending_too(w, axis, self.solver.mesh) for w in uses)
                        if pending
                        else ()
                        for uses in around.wanted
                    ),
                )
            candidates = [
                s
                for s in self.solver.strategies.candidates(op, around)
                if all(
                    (axis in made.pending) == pending
                    for v, made in zip(op.results, s.results)
                    if v in total.values
                )
            ]
            if not candidates:
                return False
            self._cheapest(op, candidates, around)
        return True

    def resolve(self) -> bool:
        """Has every sum that is left pending, and reduced at several places after all, reduced
        where it is made; says whether that helped.

        None of its users can ask for that alone: the others would go on to reduce what they make of
        the terms.
        """
        made = [
            (value, axis)
            for op in self.solver.ops.values()
            for value in op.results
            if value is not None
            for axis in self.solver.held[value].pending
            if not self._passes_on(op, axis)
        ]
        return any([self._resolve(value, axis) for value, axis in made])

    def _passes_on(self, op: Op, axis: str) -> bool:
        return any(axis in spec.pending for spec in self.solver.chosen[op.node].operands)

    def _resolve(self, value: fx.Node, axis: str) -> bool:
        solver, (ops, reductions) = self.solver, self._flow(value, axis)
        if reductions < 2:
            return False
        before, cost = [solver.chosen[op.node] for op in ops], self.exact(ops)
        for op in ops:
            around = solver.around(op)
            targets = tuple(
                t
                for t in solver.strategies.options(op, around).get(axis, ())
                if not isinstance(t, int)
            )
            candidates = solver.strategies.candidates(op, around, {axis: targets or (None,)})
            if not candidates:
                break
            self._cheapest(op, candidates, around)
        if self.exact(ops) < cost:
            return True
        for op, strategy in zip(ops, before):
            solver.take(op, strategy)
        return False

    def _flow(self, value: fx.Node, axis: str) -> tuple[list[Op], int]:
        """The operations that terms of a sum flow through, in program order, and how many
        reductions end that.
        """
        solver, found, reductions, stack = self.solver, {}, 0, [value]
        while stack:
            at = stack.pop()
            uses = solver.needs.get(at, {})
            reductions += len({spec for spec in uses.values() if axis not in spec.pending})
            for (user, _), spec in uses.items():
                if axis in spec.pending and user in solver.ops and user not in found:
                    found[user] = solver.ops[user]
                    stack += [
                        v
                        for v in solver.ops[user].results
                        if v is not None and axis in solver.held[v].pending
                    ]
        return sorted(found.values(), key=lambda op: self.order[op.node]), reductions

    # -------------------------------------------------------------------------------------- chains

    def _move(self, chain: Region) -> bool:
        """Brings a chain to the layout that comes into it, or to the one that is wanted of it, all
        of it at once.
        """
        return self._try(chain, "in", lambda: self._propose_flow(chain)) or self._try(
            chain, "out", lambda: self._propose_ebb(chain)
        )

    def _make(self, source: Region) -> bool:
        """Makes a product as it costs least by itself, and lets the chain that it goes through
        follow.
        """
        return self._try(source, "in", lambda: self._propose_flow(source))

    def _propose_flow(self, chain: Region) -> bool:
        for op in chain.ops:
            around = self.solver.around(op)
            if op is not chain.ops[-1]:
                around = self.solver.surrounded(
                    op, around.available, ((),)
                )  # of what is made on the way nothing is wanted
            self._cheapest(op, self.solver.strategies.candidates(op, around), around)
        return True

    def _propose_ebb(self, chain: Region) -> bool:
        for op in reversed(chain.ops):
            around = self.solver.around(op)
            self._cheapest(
                op, self.solver.strategies.candidates(op, around), replace(around, available=())
            )
        return True

    # -------------------------------------------------------------------------------------- bodies

    def lay_out(self) -> bool:
        """Tries for every body and axis to have the axis on another of its factors throughout, or
        on none, and for every thread to have it on that; says whether that helped.
        """
        changed = [
            self._lay_out(body, axis, factors)
            for body in self.bodies
            for axis, factors in self._ways(body)
        ]
        self.busy = self._busy()
        changed += [
            self._lay_out(thread, axis, 0, SAVED)
            for thread in self.threads
            for axis in self._axes(thread)
        ]
        return any(changed)

    def _ways(self, body: Body) -> list[tuple[str, int | None]]:
        """Axes with classes of factors (their place in `classes`) that an operation of the body
        might give to them, and does not; no classes of a small part.
        """
        found: dict[tuple[str, int | None], None] = {}
        place = {
            (node, factor): i
            for i, factors in enumerate(body.classes)
            if len(factors) >= PART * len(body.ops)
            for node, factor in factors.items()
        }
        for op in body.ops:
            have = {
                axis: factor
                for factor, axes in self.solver.chosen[op.node].assignment
                for axis in axes
            }
            for axis, targets in self.solver.strategies.options(op, self.solver.around(op)).items():
                for target in targets:
                    if target != have.get(axis) and (target is None or (op.node, target) in place):
                        found[axis, place.get((op.node, target))] = None
        return list(found)

    def _axes(self, thread: Body) -> list[str]:
        """Axes that its operations might give to a thread, and those over which it sums up results
        of the program: gradients of weights, if these are not sharded over them, and more is sent
        over them anyhow: they do not just divide a batch.
        """
        solver, ops = self.solver, [op for op in thread.ops if op.rule.contraction]
        summed = {
            axis
            for op in ops
            for value in op.results
            if value is not None and solver.output in value.users
            for axis in solver.held[value].pending
        }
        inputs = {
            axis
            for op in ops
            for value in op.operands
            if value.op == "placeholder"
            for axis in solver.held[value].sharding_axes
        }
        ways = {axis for axis, factors in self._ways(thread) if factors is not None}
        return [axis for axis in solver.mesh.names if axis in ways | summed & self.busy - inputs]

    def _busy(self) -> set[str]:
        """Axes over which more is sent between operations than single numbers: not only sums that
        are results.
        """
        return {
            axis
            for value, uses in self.solver.needs.items()
            if value.meta["val"].numel() > 1
            for (user, _), spec in uses.items()
            if user is not self.solver.output
            for axis in _leaving(self.solver.held[value], spec)
        }

    def _lay_out(self, body: Body, axis: str, factors: int | None, saved: float = 0.0) -> bool:
        """factors: the place of their class; None for none. saved: which part of what is sent it
        has to save.
        """
        situation = self._situation(body), axis, saved, self._names(body, factors)
        if situation in self.memory.vain:
            return False
        around, before = self.around[body], self.solver.state()
        sent = self._sent(around)
        cost = self._work(around) + sent - saved * sent
        self._force(body, axis, body.classes[factors] if factors is not None else {})
        for op in (*reversed(around), *around):
            self.solver.choose(op)
        if self.exact(around) < cost:
            return True
        self.solver.back_to(before)
        self.memory.vain.add(situation)
        return False

    def _situation(self, body: Body) -> int:
        """Equal for like bodies in like neighbourhoods."""
        version, situation = self.situations.get(body, (None, 0))
        if version != self.solver.version:
            found = (
                self.solver.late,
                *(
                    (op.key, self.solver.around(op), self.solver.chosen[op.node])
                    for op in self.around[body]
                ),
            )
            situation = self.memory.numbers.setdefault(found, len(self.memory.numbers))
            self.situations[body] = (self.solver.version, situation)
        return situation

    def _names(self, body: Body, factors: int | None) -> int:
        """Equal for classes that have the same name in every operation of like bodies."""
        key = body, factors
        if key not in self.names:
            found = (
                tuple(map(body.classes[factors].get, (op.node for op in body.ops)))
                if factors is not None
                else ()
            )
            self.names[key] = self.memory.numbers.setdefault(found, len(self.memory.numbers))
        return self.names[key]

    def _force(self, body: Body, axis: str, factors: Mapping[fx.Node, str]) -> None:
        inside = {op.node for op in body.ops}
        for op in body.ops:
            if factors.get(op.node) in op.rule.whole:
                continue
            available = tuple(
                self.memory.layouts(have.layouts, self.solver.alike(v, op), have.deferrable)
                for v, have in ((v, self.solver.available(v, op)) for v in op.operands)
            )
            wanted = tuple(
                tuple(
                    dict.fromkeys(
                        spec
                        for (user, _), spec in self.solver.needs.get(v, {}).items()
                        if user not in inside
                    )
                )
                for v in op.results
            )
            best = self.solver.best(
                op,
                self.solver.surrounded(op, available, wanted),
                None,
                (axis, factors.get(op.node)),
            )
            if best is not None:
                self.solver.take(op, best)

    def _neighbours(self, body: Body) -> tuple[Op, ...]:
        """The operations of a body, and those that make or use its values."""
        values = [v for op in body.ops for v in (*op.operands, *op.results) if v is not None]
        nodes = {op.node for op in body.ops}
        nodes |= {self.makers[v].node for v in values if v in self.makers}
        nodes |= {
            user
            for op in body.ops
            for v in op.results
            if v is not None
            for user in v.users
            if user in self.solver.ops
        }
        return tuple(self.solver.ops[node] for node in sorted(nodes, key=self.order.__getitem__))

    def exact(self, ops: Collection[Op]) -> float:
        """The work of operations, and what brings their operands and results to all places where
        those are used.
        """
        return self._work(ops) + self._sent(ops)

    def _work(self, ops: Collection[Op]) -> float:
        return sum(self.solver.chosen[op.node].work for op in ops)

    def _sent(self, ops: Collection[Op]) -> float:
        values = dict.fromkeys(
            v for op in ops for v in (*op.operands, *op.results) if v is not None
        )
        return sum(map(self.solver.transport, values))

    def _cheapest(self, op: Op, candidates: list[Strategy], around: Around) -> None:
        self.solver.take(op, self.solver.cheapest(op, candidates, around))


def _leaving(held: ShardSpec, spec: ShardSpec) -> set[str]:
    """Axes that shard a dimension, or that a sum is pending over, and do not in another layout."""
    of_dims = {
        axis for have, need in zip(held.dims, spec.dims) for axis in have if axis not in need
    }
    return of_dims | {axis for axis in held.pending if axis not in spec.pending}


def _pending_too(spec: ShardSpec, axis: str, mesh: Mesh) -> ShardSpec:
    """The layout with `axis` pending, and not on a dimension."""
    dims = tuple(tuple(a for a in axes if a != axis) for axes in spec.dims)
    return ShardSpec(
        dims, (), tuple(a for a in mesh.names if a == axis or a in spec.pending), spec.reduction
    )
