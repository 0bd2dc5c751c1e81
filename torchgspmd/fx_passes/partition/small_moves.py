"""Moves of one operation, one open input, or one chain."""

from __future__ import annotations

from torch import fx

from ...layout.mesh import Mesh
from ...shard_spec import Axes, ShardSpec
from ..ir import Op
from .local_search import LocalSearch, Move
from .pieces import pieces
from .regions import Region, chains, sources, sums


class OperationMove(Move):
    """Gives an operation the strategy that costs least while those around it keep theirs."""

    name = "operation"
    backwards = True

    def begin(self) -> None:
        # The first choices went forwards, so their users are news.
        self.backwards = True

    def improve(self) -> bool:
        """Visit the operations whose neighborhood changed, backwards and forwards in turn."""
        at, order = self.assignment, list(self.assignment.ops.values())
        visited = reversed(order) if self.backwards else order
        self.backwards = not self.backwards
        return any([self.search.choose(op) for op in visited if op.node in at.worklist])


class InputMove(Move):
    """Gives an open input the layout in which its uses cost least."""

    name = "input"

    def improve(self) -> bool:
        """Visit every open input; return whether any changed."""
        return any([self._choose(node) for node in self.assignment.open_inputs])

    def _choose(self, node: fx.Node) -> bool:
        """Give an open input the layout in which its uses cost least; return whether it changed."""
        at, ends = self.assignment, self.search.ends
        uses = at.required_layouts(node, first=False)
        layouts = (node.meta["spec"], *(spec for spec in uses if not spec.pending))
        tied = ends.cotangents.get(node)
        if tied is not None:
            layouts = (*layouts, at.layout_of[tied[0]].with_pending(()))
        candidates = [
            at.layout_of[node],
            *(spec.plain().map_axes(at.mesh.whole) for spec in layouts),
        ]
        if tied is not None:
            candidates = [ends.fill_open(tied[1], spec, tied[0]) for spec in candidates]

        def cost(spec: ShardSpec) -> float:
            """Return the cost to move the input if it is stored in this layout."""
            move_cost = self.search.costs.move_cost
            arrival = move_cost(tied[0], at.layout_of[tied[0]], spec) if tied else 0.0
            return arrival + sum(move_cost(node, spec, use) for use in uses)

        best = min(candidates, key=cost)
        changed = best != at.layout_of[node]
        at.set_layout(node, best)
        return changed


class ChainMove(Move):
    """Lays out chains: operations on one tensor each, or with the contraction before.

    A chain is laid out like its operand throughout, or as its result is needed.
    """

    name = "chain"

    def __init__(self, search: LocalSearch) -> None:
        super().__init__(search)
        ops = self.assignment.ops
        self.chains, self.sources = chains(ops), sources(ops)

    def improve(self) -> bool:
        """Try every chain and contraction once; return whether any changed."""
        changed = [*map(self._improve_chain, self.chains)]
        return any([*changed, *map(self._improve_source, self.sources)])

    def _improve_chain(self, chain: Region) -> bool:
        """Lay out a chain like its operand, or as its result is required."""
        return self.try_proposal(
            chain, "in", lambda: self.propose_forwards(chain)
        ) or self.try_proposal(chain, "out", lambda: self.propose_backwards(chain))

    def _improve_source(self, source: Region) -> bool:
        """Compute a contraction as it costs least by itself; the chain behind it follows."""
        return self.try_proposal(source, "in", lambda: self.propose_forwards(source))


# Where sums are reduced: several summands share one reduction, or each is reduced at once.
#
# before   %c = add(all_reduce(mm(...), sum, model), all_reduce(mm(...), sum, model))
# after    %c = all_reduce(add(mm(...), mm(...)), sum, model)


class SumMove(Move):
    """Reduces all summands of a sum by one reduction, or each summand before the addition."""

    name = "sum"

    def __init__(self, search: LocalSearch) -> None:
        super().__init__(search)
        self.sums = sums(self.assignment)

    def improve(self) -> bool:
        """Try all sums once; return whether any changed."""
        return any([*map(self._improve_sum, self.sums)])

    def _improve_sum(self, total: Region) -> bool:
        """Try, for each axis, all summands pending over it, and none of them.

        No summand gains alone: an addition passes on only sums that are pending in both operands.
        """
        at = self.assignment
        now = at.layout_of[total.value].pending
        inside = {a for value in total.values for a in at.layout_of[value].pending}
        whole = [piece for piece in pieces(at.mesh) if at.mesh.count(piece) > 1]
        open_axes = [axes for axes in whole if not all(a in now for a in axes)]
        kinds = [(axes, True) for axes in open_axes]
        # None pending is worth a try only where one is.
        kinds += [(axes, False) for axes in open_axes if inside.intersection(axes)]
        return any(
            [
                self.try_proposal(total, kind, lambda kind=kind: self._propose(total, *kind))
                for kind in kinds
            ]
        )

    def _propose(self, total: Region, axes: Axes, pending: bool) -> bool:
        """Leave everything up to the last addition pending over axes, or nothing.

        If nothing (`pending` is False), each summand gets the layout that costs least to compute.
        """
        for op in total.ops:
            neighborhood = self.assignment.neighborhood(op)
            # The last result goes to users outside the sum, whose needs stay as they are.
            if op is not total.ops[-1]:
                neighborhood = self.assignment.new_neighborhood(
                    op,
                    neighborhood.operands,
                    tuple(
                        tuple(_with_pending(w, axes, self.assignment.mesh) for w in uses)
                        if pending
                        else ()
                        for uses in neighborhood.required
                    ),
                )
            candidates = [
                s
                for s in self.strategies.candidates(op, neighborhood)
                if all(
                    (axis in layout.pending) == pending
                    for axis in axes
                    for v, layout in zip(op.results, s.results)
                    if v in total.values
                )
            ]
            if not candidates:
                return False
            self.assign_cheapest(op, candidates, neighborhood)
        return True


class EarlySumMove(Move):
    """Reduces a pending sum right away where several users reduce it.

    No user can ask for that alone: the others would still reduce their results. A sum is reduced
    where its terms are computed, or where such sums have been added.
    """

    name = "early_sum"

    def __init__(self, search: LocalSearch) -> None:
        super().__init__(search)
        # operations on a sum, axis, phase -> their stamp when an earlier reduction did not help
        self.kept: dict[tuple[tuple[fx.Node, ...], str, tuple[float, float]], int] = {}

    def improve(self) -> bool:
        """Try all pending sums once; return whether any is reduced earlier."""
        pending = [
            (value, axis)
            for op in self.assignment.ops.values()
            for value in op.results
            if value is not None
            for axis in self.assignment.layout_of[value].pending
            if op.rule.joins or not self._passes_on(op, axis)
        ]
        return any([self._reduce_at_origin(value, axis) for value, axis in pending])

    def _passes_on(self, op: Op, axis: str) -> bool:
        """Return whether an operation takes an operand that is pending over an axis."""
        return any(axis in spec.pending for spec in self.assignment.strategy_of[op.node].operands)

    def _reduce_at_origin(self, value: fx.Node, axis: str) -> bool:
        """Reduce a pending sum where it is computed if that costs less; return whether."""
        at, (ops, reductions) = self.assignment, self._pending_users(value, axis)
        # One reduction cannot be shared, and without such operations nothing can change.
        if reductions < 2 or not ops:
            return False
        nodes = tuple(op.node for op in ops)
        attempt, stamp = (nodes, axis, self.search.costs.phase), at.stamp(nodes)
        if self.kept.get(attempt) == stamp:
            return False
        before, cost = [at.strategy_of[op.node] for op in ops], self.search.costs.exact(ops)
        for op in ops:
            neighborhood = at.neighborhood(op)
            targets = tuple(
                t
                for t in self.strategies.options(op, neighborhood).get(axis, ())
                if not isinstance(t, int)
            )
            # The axis may shard a factor of these operations, but leave no sum behind.
            forced = ((axis,), targets or (None,))
            best = self.search.best_strategy(op, neighborhood, None, forced, self.name)
            if best is None:
                break
            at.assign(op, best)
        if self.search.costs.exact(ops) < cost:
            return True
        at.assign_all(ops, before)
        self.kept[attempt] = at.stamp(nodes)
        return False

    def _pending_users(self, value: fx.Node, axis: str) -> tuple[list[Op], int]:
        """Return the operations that pass on a sum's terms, and the reduction count.

        The operations are in program order.
        """
        at, users, reductions, stack = self.assignment, {}, 0, [value]
        while stack:
            uses = at.required.get(stack.pop(), {})
            # Users that need the same layout share a reduction: count different layouts.
            reductions += len({spec for spec in uses.values() if axis not in spec.pending})
            for (user, _), spec in uses.items():
                if axis in spec.pending and user in at.ops and user not in users:
                    users[user] = at.ops[user]
                    stack += [
                        v
                        for v in at.ops[user].results
                        if v is not None and axis in at.layout_of[v].pending
                    ]
        return at.in_order(users.values()), reductions


def _with_pending(spec: ShardSpec, axes: Axes, mesh: Mesh) -> ShardSpec:
    """Return the layout with axes pending, and not on a dimension."""
    dims = tuple(tuple(a for a in of_dim if a not in axes) for of_dim in spec.dims)
    pending = tuple(a for a in mesh.names if a in axes or a in spec.pending)
    return ShardSpec(dims, (), pending, spec.reduction)
