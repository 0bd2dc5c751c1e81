"""Moves of one operation, one open input, or one chain."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from ...layout.mesh import Mesh
from ...shard_spec import Axes, ShardSpec
from ..ir import Op, has_one_use
from .local_search import LocalSearch, Move
from .regions import Region, chains, pieces, sources, sums
from .strategies import marked

MAX_OPS = 8  # Operations of an island. Longer ones compute so much that a message is no matter.


class MessageMove(Move):
    """Fewer messages for a few more bytes, after the search by bytes.

    before   %x_x  = all_to_all(%x, 2, 1, s);  %conv = convolution(%x_x, %w, ...)
             %conv_x = all_to_all(%conv, 1, 2, s)
    after    %x_h  = halo(%x, 2, s, ...);      %conv = convolution(%x_h, %w, ...)
    source   ours

    A message costs a price beside its bytes (`message_price`). Only operations next to a message
    are visited, and islands: operations on one tensor, one after the other, with a message before
    the first and after the last. Moves of inputs and of results do not count. They are merged with
    others of their kind (see schedule/bucket.py), and nothing waits for them.
    """

    name = "message"

    def __init__(self, search: LocalSearch) -> None:
        super().__init__(search)
        self.price = self.memory.constants.message_price

    def improve(self) -> bool:
        """Change layouts where that saves messages, unless much more is sent for it."""
        at, search, by_bytes = self.assignment, self.search, self.search.costs
        if not self.price:
            return False
        ops, before, sent = at.ops.values(), at.snapshot(), by_bytes.traffic(at.ops.values())
        search.costs = priced = replace(by_bytes, resharder=self.memory.priced_resharder)
        # Cached window prices are in bytes alone, before and after the search with messages.
        at.window_costs.clear()
        cost, changed = priced.exact(ops), self._visit()
        search.ends.require()
        saved = changed and priced.exact(ops) < cost
        at.window_costs.clear()
        # Fewer messages are no reason to send much more.
        saved = saved and by_bytes.traffic(ops) <= sent * (1 + self.constants.message_share)
        if not saved:
            at.restore(before)
            search.costs = by_bytes
        at.window_costs.clear()
        return saved

    def _visit(self) -> bool:
        """Visit each operation next to a message, then each island; return whether any changed."""
        at, near = self.assignment, self._near_messages()
        # Their neighborhoods are as before; the price of a message is new.
        at.wait(op.node for op in near)
        changed = [self.search.choose(op) for op in near]
        for op in near:
            if (island := self._island(op)) is not None:
                changed.append(self.try_like_ends(island, "out", "in"))
        return any(changed)

    def _near_messages(self) -> list[Op]:
        """Return the operations that produce or take sent values, in program order."""
        at, near = self.assignment, dict[fx.Node, Op]()
        for value, op in at.producers.items():
            for user, _ in at.required.get(value, ()):
                if user in at.ops and self._is_sent(value, user):
                    near[op.node] = op
                    near[user] = at.ops[user]
        return at.in_order(near.values())

    def _is_sent(self, value: fx.Node, user: fx.Node) -> bool:
        """Return whether a user takes a value in a layout that a message leads to."""
        at = self.assignment
        have = at.layout_of[value]
        return any(
            need != have and self.search.costs.move_cost(value, have, need) >= self.price
            for (node, _), need in at.required[value].items()
            if node is user
        )

    def _island(self, first: Op) -> Region | None:
        """Return the operations from one that takes a message to the next message; None if far.

        Also None if a value between them is used elsewhere. Values that the operations compute from
        inputs alone, like a bias in another shape, follow their needs.
        """
        at, ops, values = self.assignment, list[Op](), list[fx.Node]()
        op: Op | None = first
        if not any(v in at.producers and self._is_sent(v, first.node) for v in first.operands):
            return None
        while op is not None and marked(op) is None and len(values) < MAX_OPS:
            results = [v for v in op.results if v is not None]
            if len(results) != 1 or not has_one_use(results[0]):
                return None
            ops += [*self._of_inputs(op), op]
            values += results
            user = next(iter(results[0].users))
            op = at.ops.get(user)
            if op is not None and self._is_sent(results[0], user):
                between = {v for op in ops for v in op.results if v is not None}
                return Region(tuple(ops), frozenset(between), results[0]) if values[1:] else None
        return None

    def _of_inputs(self, op: Op) -> list[Op]:
        """Return the operations that compute operands for this one alone, of inputs alone."""
        at = self.assignment
        return [
            at.producers[v]
            for v in op.operands
            if v in at.producers and has_one_use(v) and at.only_inputs[at.producers[v].node]
        ]


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
        changed = [self.try_like_ends(chain, "in", "out") for chain in self.chains]
        # A contraction as it costs least by itself; the chain behind it follows.
        return any([*changed, *(self.try_like_ends(source, "in") for source in self.sources)])


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
