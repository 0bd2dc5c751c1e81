"""An operation's strategies: which axes shard which factors, and the work on a device.

    mm(%x, %w): mk,kn->mn       {m: data, k: model}       result [data, _] sum@model

A strategy assigns axes to factors. It also assigns axes to operands whose pending sum it passes on.
Strategies worth a try follow from the layouts in the neighborhood: an axis that shards a factor in
one of these may do so here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from ...layout.mesh import Mesh
from ...rules.notation import Dims
from ...shard_spec import Axes, ShardSpec
from ..ir import Op
from ..propagate.factors import (
    Crowded,
    assemble,
    is_far,
    is_roomy,
    operand_layout,
    project,
    result_pending,
)
from .cost_constants import CostConstants
from .cost_model import local_bytes, work
from .neighborhood import Neighborhood, OperandLayouts, Strategy, Terms
from .regions import divides_all, neighboring_parts, pieces

Start = tuple[tuple[str, str | int | None], ...]  # axis, what it does in a layout
Requests = list[tuple[str, dict[str | int, None]]]  # the work that a layout gives its axes
V = TypeVar("V")
Entries = tuple[tuple[str, V], ...]
Choice = tuple[Entries[Axes], Entries[int]]  # by factor; the group that a pending axis goes through


class Strategies:
    """Lists and caches strategies for operations. crowded: see factors.py."""

    def __init__(self, mesh: Mesh, crowded: Crowded, constants: CostConstants) -> None:
        self.mesh, self.crowded, self.constants = mesh, crowded, constants
        self.long_axes = tuple(name for name, size in mesh.axes if size > 1)
        self.has_parts = bool(neighboring_parts(mesh))
        self.single_axes, self.piece_count = tuple((a,) for a in mesh.names), len(pieces(mesh))
        self.cached_strategies: dict[tuple, Strategy | None] = {}  # by operation and choice
        # by operation and whether it is its first choice; None where a device has no row
        self.roomy_strategies: dict[tuple, dict[Choice, Strategy | None]] = {}
        self.choice_cache: dict[tuple, list[Choice]] = {}  # by options and starts
        self.lists: dict[tuple, list[Strategy]] = {}  # by operation and what each axis may shard
        self.terms: dict[tuple, set[Terms]] = {}  # of the strategies in such a list
        # by operation, operand and layout: the whole axes that shard a summed factor
        self.summed_axes: dict[tuple, frozenset[str]] = {}
        self.piece_cache: dict[tuple, tuple[Axes, ...]] = {}  # by operation and neighborhood
        # by operation, and whether it is the first choice: for each tensor, by its layout
        self.requests: dict[tuple, tuple[dict[ShardSpec, Requests], ...]] = {}
        self.option_cache: dict[tuple, dict[str, tuple]] = {}  # by operation and neighborhood

    def candidates(
        self, op: Op, neighborhood: Neighborhood, forced: dict[str, tuple] | None = None
    ) -> list[Strategy]:
        """Return the strategies worth a try. forced: axis -> the only factors it may shard.

        Priorities or stages may have pinned axes, too. These hold before those that are forced, and
        both unless no layout does.
        """
        mark = marked(op)
        if mark is not None:
            return [Strategy((), (mark,), (mark,), 0.0)]
        pinned = dict(op.node.meta.get("pinned", ()))
        own = self.options(op, neighborhood)
        options = own | (forced or {})
        together = self._pieces(op, neighborhood)
        starts: tuple[Start, ...] = ()
        if len(together) > self.piece_count:  # parts of an axis stand apart
            number = math.prod(map(len, _of_pieces(options, together).values()))
            starts = self._starts(op, neighborhood) if number > self.constants.max_choices else ()
        bound = tuple(pinned.items())
        key = (op.key, neighborhood.first, tuple(options.items()), bound, together, starts)
        if key not in self.lists:
            tries = (options | pinned, own | pinned, options) if pinned else (options,)
            found = (
                self._strategies(op, neighborhood.first, _of_pieces(each, together), starts)
                for each in tries
            )
            self.lists[key] = next(filter(None, found), [])
            self.terms[key] = {s.terms for s in self.lists[key] if s.terms}
        strategies, around = self.lists[key], neighborhood.operands
        # Not cached: the same list serves neighborhoods whose operands can or cannot be pending.
        lacking = {terms for terms in self.terms[key] if not _has_terms(terms, around)}
        return [s for s in strategies if s.terms not in lacking] if lacking else strategies

    def _strategies(
        self, op: Op, first: bool, options: dict[Axes, tuple], starts: tuple[Start, ...]
    ) -> list[Strategy]:
        """Return the strategies in which each piece takes one of its options.

        first: whether this is the first choice. starts: see `_targets`.
        """
        # The first choice follows propagation, which asks for rows as the rule has them.
        rows = op.rule.sizes if first else _rows(op)
        known = self.roomy_strategies.setdefault((op.key, first), {})
        key = (tuple(options.items()), starts)
        if key not in self.choice_cache:
            self.choice_cache[key] = [*_assignments(options, starts)]
        found: dict[Strategy, None] = {}
        for choice in self.choice_cache[key]:
            if choice not in known:
                # A factor with fewer rows than devices would leave some without any.
                is_wide = all(
                    is_roomy(rows[f], axes, self.mesh, self.crowded) for f, axes in choice[0]
                )
                known[choice] = self._cached_strategy(op, choice) if is_wide else None
            if (strategy := known[choice]) is not None:
                found[strategy] = None
        return [*found]

    def options(self, op: Op, neighborhood: Neighborhood) -> dict[str, tuple]:
        """Return each axis's choices: shard a factor, pass through operands, or nothing.

        A string is a factor, an integer a group of linear operands, None nothing.
        """
        # Neither the sharers nor what could be left pending matters here.
        around: list[tuple[ShardSpec, ...]] = [have.layouts for have in neighborhood.operands]
        around += neighborhood.required
        key = (op.key, neighborhood.first, neighborhood.only_inputs, *around)
        if key not in self.option_cache:
            self.option_cache[key] = self._options(op, neighborhood)
        return self.option_cache[key]

    def _options(self, op: Op, neighborhood: Neighborhood) -> dict[str, tuple]:
        rule, available, required = op.rule, neighborhood.operands, neighborhood.required
        options: dict[str, dict] = {name: {None: None} for name in self.long_axes}
        tensors = [
            *zip(rule.operands, [have.layouts for have in available]),
            *zip(rule.results, required),
        ]
        if (known := self.requests.get((op.key, neighborhood.first))) is None:
            known = self.requests[op.key, neighborhood.first] = tuple({} for _ in tensors)
        for (dims, specs), requests in zip(tensors, known):
            for spec in specs:
                if spec not in requests:
                    requests[spec] = [*self._requests(op, dims, spec, neighborhood.first)]
                for axis, targets in requests[spec]:
                    options[axis].update(targets)
        if rule.contraction:
            # Where tensors disagree, or inputs are summed over, a third factor may be best.
            disputed = set() if neighborhood.first else self._disputed_axes(op, available)
            for axis, targets in options.items():
                if (
                    axis in disputed
                    or self._moves_alone(op, axis)
                    and sum(isinstance(target, str) for target in targets) > 1
                    or (neighborhood.only_inputs and rule.reduce.keys() & targets.keys())
                ):
                    targets.update(dict.fromkeys(f for f in rule.sizes if f not in rule.replicated))
        # Doing nothing alone is no choice.
        return {axis: tuple(targets) for axis, targets in options.items() if len(targets) > 1}

    def _requests(
        self, op: Op, dims: Dims, spec: ShardSpec, first: bool
    ) -> Iterator[tuple[str, dict[str | int, None]]]:
        """Yield axes, with what a tensor's layout gives each of them to do."""
        rule = op.rule
        for factor, axes in project(dims, spec, rule.sizes, self.mesh).items():
            targets: dict[str | int, None] = {}
            if factor not in rule.replicated and not (
                first and is_far(op, factor, axes, self.mesh)
            ):
                targets[factor] = None
            # The axis has to leave this factor, or had better: any other may do.
            if factor in rule.replicated | rule.windowed and rule.described:
                others = rule.replicated | rule.special | {factor}
                targets.update(dict.fromkeys(f for f in rule.sizes if f not in others))
            for axis in axes:
                yield axis, targets
        for axis in spec.pending:
            yield axis, dict.fromkeys(range(len(rule.linear)))

    def _moves_alone(self, op: Op, axis: str) -> bool:
        """Return whether an axis is whole, or a part that leaves sizes uneven."""
        piece = next(piece for piece in pieces(self.mesh) if axis in piece)
        return len(piece) == 1 or not divides_all(self.mesh, piece, op.rule.sizes.values())

    def _disputed_axes(self, op: Op, available: Sequence[OperandLayouts]) -> frozenset[str]:
        """Return the whole axes that shard a summed factor in one operand and not in another."""
        sides = [self._summed_axes(op, i, have.layouts[0]) for i, have in enumerate(available)]
        return frozenset().union(*sides) - sides[0].intersection(*sides)

    def _summed_axes(self, op: Op, i: int, spec: ShardSpec) -> frozenset[str]:
        """Return the whole axes that shard a summed factor in an operand."""
        key = op.key, i, spec
        if key not in self.summed_axes:
            factors = project(op.rule.operands[i], spec, op.rule.sizes, self.mesh)
            self.summed_axes[key] = frozenset(
                axis
                for factor, axes in factors.items()
                if factor in op.rule.reduce
                for axis in axes
                if self.mesh.whole((axis,))
            )
        return self.summed_axes[key]

    def _pieces(self, op: Op, neighborhood: Neighborhood) -> tuple[Axes, ...]:
        """Return the axes, together those that an operation has no reason to take apart."""
        if not self.has_parts:
            return self.single_axes
        rule, around = op.rule, neighborhood.operands
        fuses = any(len(names) > 1 for dims in (*rule.operands, *rule.results) for names in dims)
        # Where factors share a dimension, or hand over axes, only single parts may fit.
        if fuses or rule.instead is not None:
            return self.single_axes
        key = (op.key, neighborhood)
        if key not in self.piece_cache:
            specs = (*(have.layouts for have in around), *neighborhood.required)
            self.piece_cache[key] = pieces(
                self.mesh, itertools.chain(*specs), (have.deferrable for have in around)
            )
        return self.piece_cache[key]

    def _starts(self, op: Op, neighborhood: Neighborhood) -> tuple[Start, ...]:
        """Return the axes' choices in each layout around an operation; None is nothing."""
        tensors = [
            *zip(op.rule.operands, (have.layouts for have in neighborhood.operands)),
            *zip(op.rule.results, neighborhood.required),
        ]
        starts: dict[Start, None] = {}
        for i, (dims, specs) in enumerate(tensors):
            group = next((g for g, operands in enumerate(op.rule.linear) if i in operands), None)
            for spec in specs:
                projected = project(dims, spec, op.rule.sizes, self.mesh)
                start = {axis: factor for factor, axes in projected.items() for axis in axes}
                starts[(*start.items(), *((axis, group) for axis in spec.pending))] = None
        return tuple(starts)

    def _cached_strategy(self, op: Op, choice: Choice) -> Strategy | None:
        key = (op.key, choice)
        if key not in self.cached_strategies:
            self.cached_strategies[key] = self._strategy(op, dict(choice[0]), dict(choice[1]))
        return self.cached_strategies[key]

    def _strategy(
        self, op: Op, assignment: dict[str, Axes], through: dict[str, int]
    ) -> Strategy | None:
        """Return an assignment's strategy; None if no layouts express it.

        through: axis -> the operand group whose pending sum the operation passes on.
        """
        rule = op.rule
        operands, results = [], []
        for i in range(len(rule.operands)):
            spec = operand_layout(
                rule, i, tuple(op.operands[i].meta["val"].shape), assignment, self.mesh
            )
            pending = tuple(
                a for a in self.mesh.names if a in through and i in rule.linear[through[a]]
            )
            if spec is None:
                return None
            operands.append(spec.with_pending(pending))
        for dims in rule.results:
            axes = assemble(dims, assignment, rule.sizes, self.mesh)
            reduced, kind = result_pending(rule, dims, assignment)
            # Sums that pass through cannot mix with a maximum or product over other axes.
            if axes is None or through and reduced and kind != "sum":
                return None
            pending = tuple(a for a in self.mesh.names if a in reduced or a in through)
            results.append(ShardSpec(axes, (), pending, kind if reduced else "sum"))
        pending = op.runs * sum(
            local_bytes(v.meta["val"], s, self.mesh)
            for v, s in zip(op.results, results)
            if s.pending and v is not None
        )
        return Strategy(
            tuple(assignment.items()),
            tuple(operands),
            tuple(results),
            work(op, assignment, operands, results, self.mesh, self.constants),
            pending,
        )


def _assignments(options: dict[Axes, tuple], starts: Sequence[Start]) -> Iterator[Choice]:
    """Yield all choices; if several pieces shard one factor, every order of them."""
    for targets in _targets(options, starts):
        factors: dict[str, tuple[Axes, ...]] = {}
        through: list[tuple[str, int]] = []
        is_shared = False
        for piece, target in zip(options, targets):
            if isinstance(target, str):
                is_shared = is_shared or target in factors
                factors[target] = (*factors.get(target, ()), piece)
            elif isinstance(target, int):
                through += [(axis, target) for axis in piece]
        if not is_shared:  # each factor has one piece, and that has one order
            yield tuple([(f, piece) for f, (piece,) in factors.items()]), tuple(through)
            continue
        orders = [_orders(f, axes, starts) for f, axes in factors.items()]
        for ordered in itertools.product(*orders):
            yield (*zip(factors, map(_joined, ordered)),), (*through,)


def _of_pieces(options: dict[str, tuple], together: Sequence[Axes]) -> dict[Axes, tuple]:
    """Return each piece's options: those of its parts, which are all the same."""
    found: dict[Axes, tuple] = {}
    for piece in together:
        targets = [options[axis] for axis in piece if axis in options]
        if len(targets) == len(piece) and all({*t} == {*targets[0]} for t in targets):
            found[piece] = targets[0]
        else:
            found.update(((axis,), options[axis]) for axis in piece if axis in options)
    return found


def _joined(axes: Iterable[Axes]) -> Axes:
    """Return the pieces' axes, one after the other."""
    return tuple(itertools.chain(*axes))


def _targets(options: dict[Axes, tuple], starts: Sequence[Start]) -> Iterator[tuple]:
    """Yield the choices for all pieces at once, ordered like itertools.product.

    Without starts every combination. With starts those that one layout asks for, filled up by the
    others, in which one piece does something else: as many as there are pieces, not a power.
    """
    if not starts:
        yield from itertools.product(*options.values())
        return
    places = [{target: i for i, target in enumerate(targets)} for targets in options.values()]
    numbers: set[tuple[int, ...]] = set()
    merged = {axis: target for start in reversed(starts) for axis, target in start}
    for start in starts:
        full = merged | dict(start)
        near = tuple(at.get(full.get(piece[0]), 0) for piece, at in zip(options, places))
        for k, at in enumerate(places):
            numbers.update((*near[:k], i, *near[k + 1 :]) for i in range(len(at)))
    # In the order of the product, in which ties go to the earlier strategy.
    for number in sorted(numbers):
        yield tuple(targets[i] for targets, i in zip(options.values(), number))


def _orders(
    factor: str, sharding: tuple[Axes, ...], starts: Sequence[Start]
) -> Iterable[tuple[Axes, ...]]:
    """Return orders for a factor's pieces: all, or those in the starts and in the mesh."""
    if not starts or len(sharding) < 3:
        return itertools.permutations(sharding)
    orders: dict[tuple[Axes, ...], None] = {sharding: None}
    for start in starts:
        places = [axis for axis, target in start if target == factor]
        first = [piece for piece in sharding if piece[0] in places]
        first.sort(key=lambda piece: places.index(piece[0]))
        orders[(*first, *(piece for piece in sharding if piece not in first))] = None
    return orders


def _rows(op: Op) -> dict[str, int]:
    """Return each factor's rows; the operand's where its windows reach into more.

    A 2x2 pool over 15 rows on 8 devices has 7, each inside a shard: the last device has none.
    """
    rows, rule = dict(op.rule.sizes), op.rule
    for operand, d in rule.halo:
        (factor,) = rule.operands[operand][d]
        rows[factor] = max(rows[factor], op.operands[operand].meta["val"].shape[d])
    return rows


def _has_terms(terms: Terms, available: Sequence[OperandLayouts]) -> bool:
    """Return whether every operand that has to be pending is, or can be left so."""
    return all(
        have.layouts[0].reduction == "sum"
        and all(a in have.layouts[0].pending or a in have.deferrable for a in pending)
        for have, pending in ((available[i], pending) for i, pending in terms)
    )


def marked(op: Op) -> ShardSpec | None:
    """Return the layout that a mark requests, with open dimensions as propagated."""
    spec = op.node.meta.get("mark")
    return spec.closed() if spec is not None else None
