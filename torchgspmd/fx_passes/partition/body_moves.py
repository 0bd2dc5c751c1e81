"""Other layouts for whole bodies and threads (see regions.py).

before   a layer's residual stream is sharded along the batch by `model`
after    it is sharded along the sequence by `model`, if that costs less over all its operations
"""

from __future__ import annotations

import math
from collections.abc import Collection

from torch import fx

from ...shard_spec import Axes
from ..ir import Op
from .cost_model import values_around
from .local_search import LocalSearch, Move
from .regions import Body, bodies, divides_all, pieces, threads


class FactorMove(Move):
    """Moves mesh axes to another factor, or to none, throughout the operations of a body."""

    def __init__(self, search: LocalSearch) -> None:
        super().__init__(search)
        self.class_numbers: dict[tuple[Body, int | None], int] = {}
        # body -> the index in its classes, for those that many operations have
        self.places: dict[Body, dict[fx.Node, dict[str | int | None, int]]] = {}
        # body -> its stamp, and the options then
        self.option_lists: dict[Body, tuple[int, list[tuple[str, int | None]]]] = {}
        # body -> the stamp of its neighbors and the bonus, and the number of the situation then
        self.situations: dict[Body, tuple[tuple[int, float], int]] = {}
        # body -> the stamp of its neighbors, and the costs then
        self.body_costs: dict[Body, tuple[int, tuple[float, float, float]]] = {}
        self.likeness: dict[Body, int] = {}  # a number that is equal for like bodies
        self.neighbors: dict[Body, tuple[Op, ...]] = {}
        self.neighbor_nodes: dict[Body, tuple[fx.Node, ...]] = {}
        self.values: dict[Body, Collection[fx.Node]] = {}  # of a body's neighbors

    def add_neighbors(self, found: Collection[Body]) -> None:
        """Note the operations around bodies."""
        for body in found:
            self.neighbors[body] = near = self._neighboring_ops(body)
            self.values[body] = values_around(near)
            self.neighbor_nodes[body] = tuple(op.node for op in near)

    def pieces_of(self, body: Body, axes: Collection[str]) -> list[Axes]:
        """Return the whole axes that have these parts; parts alone where sizes are uneven."""
        mesh, sizes = self.assignment.mesh, {n for op in body.ops for n in op.rule.sizes.values()}
        found: list[Axes] = []
        for piece in pieces(mesh):
            parts = [(axis,) for axis in piece if axis in axes]
            found += [piece] if parts and divides_all(mesh, piece, sizes) else parts
        return found

    def axis_options(self, body: Body) -> list[tuple[str, int | None]]:
        """Return (axis, index in `body.classes`; None for no factor) that operations could take.

        Without the present ones, and without factors that few operations have.
        """
        stamp = self.assignment.stamp(body.nodes)
        if self.option_lists.get(body, (None,))[0] != stamp:
            self.option_lists[body] = stamp, self._new_axis_options(body)
        return self.option_lists[body][1]

    def _new_axis_options(self, body: Body) -> list[tuple[str, int | None]]:
        options: dict[tuple[str, int | None], None] = {}
        if (place := self.places.get(body)) is None:
            place = self.places[body] = {node: {} for node in body.nodes}
            for i, factors in enumerate(body.classes):
                if len(factors) >= self.constants.min_share * len(body.ops):
                    for node, factor in factors.items():
                        place[node][factor] = i
        for op in body.ops:
            have = {
                axis: factor
                for factor, axes in self.assignment.strategy_of[op.node].assignment
                for axis in axes
            }
            neighborhood, classes = self.assignment.neighborhood(op), place[op.node]
            for axis, targets in self.strategies.options(op, neighborhood).items():
                present = have.get(axis)
                for target in targets:
                    if target != present and (target is None or target in classes):
                        options[axis, classes.get(target)] = None
        return list(options)

    def try_layout(
        self, body: Body, axes: Axes, factor_class: int | None, min_saving: float = 0.0
    ) -> bool:
        """Move axes to a factor class throughout a body; return whether that costs less.

        factor_class: index in `body.classes`; None for no factor. min_saving: the share of the sent
        bytes that has to be saved. A layout that would have cost more is not tried again, nor for
        like bodies, until the body's cost differs by a share of that. It is `retry_share`, or
        `retry_share_of_large`.
        """
        class_number = self._class_number(body, factor_class)
        situation = self._situation(body), axes, min_saving, class_number
        if situation in self.memory.rejected:
            return False
        work, sent, pending = self._body_cost(body)
        cost = work + sent - min_saving * sent
        bonus = self.search.costs.pending_bonus * pending
        layout = self._likeness(body), axes, class_number
        tries = self.search.excess.setdefault(layout, [])
        constants = self.constants
        is_large = len(body.ops) >= constants.give_up_ops
        share = constants.retry_share_of_large if is_large else constants.retry_share
        if any(abs(work + sent - former) + bonus < share * excess for former, excess in tries):
            return False
        self.memory.counts[f"{self.name}_layouts"] += 1
        neighbors, values, costs = self.neighbors[body], self.values[body], self.search.costs
        worklist = self.assignment.worklist
        self.assignment.begin_trial()
        self.search.force(
            body, axes, body.classes[factor_class] if factor_class is not None else {}
        )
        other = costs.exact(neighbors, values)
        # Choices around a layout hardly save as much as the region sends now.
        limit = constants.give_up_share * sent if is_large else math.inf
        if other - cost < limit:
            self.assignment.release()
            # Backwards, then forwards: a new layout spreads to operands as well as to users.
            for op in (*reversed(neighbors), *neighbors):
                if op.node in worklist and self.assignment.sends_around(op):
                    self.search.choose(op)
            other = costs.exact(neighbors, values)
        if other < cost:
            self.assignment.keep_trial()
            return True
        tries.append((work + sent, min(other - cost, limit)))
        self.assignment.undo_trial()
        self.memory.rejected.add(situation)
        return False

    def _body_cost(self, body: Body) -> tuple[float, float, float]:
        """Return the work for a body and its neighbors, their bytes, and their pending sums.

        All in bytes.
        """
        stamp = self.assignment.stamp(self.neighbor_nodes[body])
        before, cost = self.body_costs.get(body, (None, (0.0, 0.0, 0.0)))
        if before != stamp:
            costs, neighbors = self.search.costs, self.neighbors[body]
            pending = sum(self.assignment.strategy_of[op.node].pending for op in neighbors)
            cost = costs.work(neighbors), costs.traffic(neighbors, self.values[body]), pending
            self.body_costs[body] = stamp, cost
        return cost

    def _situation(self, body: Body) -> int:
        """Return a number that is equal for like bodies in like neighborhoods."""
        state = (self.assignment.stamp(self.neighbor_nodes[body]), self.search.costs.pending_bonus)
        before, situation = self.situations.get(body, (None, 0))
        if before != state:
            content = (
                self.search.costs.pending_bonus,
                *(
                    (op.key, self.assignment.neighborhood(op), self.assignment.strategy_of[op.node])
                    for op in self.neighbors[body]
                ),
            )
            situation = self.memory.numbers.setdefault(content, len(self.memory.numbers))
            self.situations[body] = (state, situation)
        return situation

    def _likeness(self, body: Body) -> int:
        """Return a number that is equal for bodies with like operations among like neighbors."""
        if body not in self.likeness:
            keys = ("keys", *(op.key for op in self.neighbors[body]))
            self.likeness[body] = self.memory.numbers.setdefault(keys, len(self.memory.numbers))
        return self.likeness[body]

    def _class_number(self, body: Body, factor_class: int | None) -> int:
        """Return a number that is equal for classes with the same names in like bodies."""
        key = body, factor_class
        if key not in self.class_numbers:
            names = (
                tuple(map(body.classes[factor_class].get, (op.node for op in body.ops)))
                if factor_class is not None
                else ()
            )
            self.class_numbers[key] = self.memory.numbers.setdefault(
                names, len(self.memory.numbers)
            )
        return self.class_numbers[key]

    def _neighboring_ops(self, body: Body) -> tuple[Op, ...]:
        """Return a body's operations, and those that produce or use its values."""
        at = self.assignment
        values = [v for op in body.ops for v in (*op.operands, *op.results) if v is not None]
        nodes = {op.node for op in body.ops}
        nodes |= {at.producers[v].node for v in values if v in at.producers}
        nodes |= {
            user
            for op in body.ops
            for v in op.results
            if v is not None
            for user in (*v.users, *at.carries.get(v, ()))
            if user in at.ops
        }
        return tuple(at.in_order(at.ops[node] for node in nodes))


class BodyMove(FactorMove):
    """Moves an axis to another factor, or to none, throughout a body."""

    name = "body"

    def __init__(self, search: LocalSearch) -> None:
        super().__init__(search)
        self.bodies = bodies(self.assignment.ops)
        self.add_neighbors(self.bodies)

    def improve(self) -> bool:
        """Try other factors for every axis in bodies; return whether any costs less."""
        changed = [
            self.try_layout(body, axes, factor_class)
            for body in self.bodies
            for axes, factor_class in self._piece_options(body)
        ]
        return any(changed)

    def _piece_options(self, body: Body) -> list[tuple[Axes, int | None]]:
        """Return the options from `axis_options`, with all parts of a piece as one option."""
        options = self.axis_options(body)
        of_classes: dict[int | None, list[str]] = {}
        for axis, factor_class in options:
            of_classes.setdefault(factor_class, []).append(axis)
        piece_of = {
            (axis, factor_class): piece
            for factor_class, axes in of_classes.items()
            for piece in self.pieces_of(body, axes)
            for axis in piece
        }
        return list(dict.fromkeys((piece_of[option], option[1]) for option in options))


class ThreadMove(FactorMove):
    """Moves an axis to the factor that runs through a thread."""

    name = "thread"

    def __init__(self, search: LocalSearch) -> None:
        super().__init__(search)
        self.threads = threads(self.assignment.ops, self.constants)
        self.add_neighbors(self.threads)
        self.busy: set[str] = set()  # axes with traffic between operations

    def improve(self) -> bool:
        """Try the factor of every thread for each axis; return whether any costs less."""
        # Now: other moves change which axes have traffic.
        self.busy = self.search.busy_axes()
        changed = [
            self.try_layout(thread, axes, 0, self.constants.min_saving)
            for thread in self.threads
            for axes in self.pieces_of(thread, self._thread_axes(thread))
        ]
        return any(changed)

    def _thread_axes(self, thread: Body) -> list[str]:
        """Return the axes worth a try for a thread.

        These are the axes that its operations could take. Also those over which gradients are
        summed, unless the weights are sharded over them. Such an axis needs other traffic too: one
        without just divides a batch.
        """
        at, ops = self.assignment, [op for op in thread.ops if op.rule.contraction]
        summed = {
            axis
            for op in ops
            for value in op.results
            if value is not None and at.output in value.users
            for axis in at.layout_of[value].pending
        }
        inputs = {
            axis
            for op in ops
            for value in op.operands
            if value.op == "placeholder"
            for axis in at.layout_of[value].sharding_axes
        }
        options = {axis for axis, factors in self.axis_options(thread) if factors is not None}
        return [axis for axis in at.mesh.names if axis in options | summed & self.busy - inputs]
