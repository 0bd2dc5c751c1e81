"""Fewer messages for a few more bytes, after the search by bytes.

before   %x_x  = all_to_all(%x, 2, 1, s);  %conv = convolution(%x_x, %w, ...)
         %conv_x = all_to_all(%conv, 1, 2, s)
after    %x_h  = halo(%x, 2, s, ...);      %conv = convolution(%x_h, %w, ...)
source   ours

A message costs a price beside its bytes (`message_price`). Only operations next to a message are
visited, and islands: operations on one tensor, one after the other, with a message before the first
and after the last. Moves of inputs and of results do not count. They are merged with others of
their kind (see schedule/bucket.py), and nothing waits for them.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from ..ir import Op, has_one_use
from .local_search import LocalSearch, Move
from .regions import Region
from .strategies import marked

MAX_OPS = 8  # Operations of an island. Longer ones compute so much that a message is no matter.


class MessageMove(Move):
    """Changes strategies next to messages, which the search's cost model prices."""

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
        at.worklist.update(op.node for op in near)
        changed = [self.search.choose(op) for op in near]
        for op in near:
            if (island := self._island(op)) is not None:
                changed.append(self._improve_island(island))
        return any(changed)

    def _improve_island(self, island: Region) -> bool:
        """Lay out an island as its result is required, or like its operands."""
        return self.try_proposal(
            island, "out", lambda: self.propose_backwards(island)
        ) or self.try_proposal(island, "in", lambda: self.propose_forwards(island))

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
