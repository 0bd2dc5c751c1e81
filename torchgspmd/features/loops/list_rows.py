"""Replace stacks that other loops read row by row by lists of rows, so that nothing is copied.

before   %l = loop_1x8([%h], [%ws], []); %a = %l[1]           f32[8, 4, 16], of which
         %b = loop_1.1x-8([%g], [%a, %ws], [])                a backward takes the rows
after    the same; %a is a list of eight tensors f32[4, 16]
before   %l = loop_1x8(...); %w = %l[2]                       the sum over an inner loop's stack
after    %l = loop_1x8(...); %r = %l[2]; %w = stack_rows(%r)  one sum a row
needs    one rank's program, before forward and backward are split
ensures  only loops take such a list

An inner loop stacks for the outer loop's stack: the result is lists in lists. Each row keeps the
memory in which it was computed. The same holds for values that a pipeline piece leaves for later
pieces, and for sums over pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

from torch import fx

from ...comm.local_ops import stack_rows
from ...fx_passes.loop_call import InnerProgram, LoopCall, LoopOperands, loop_calls
from ..pipelines.parts import LOSS, StageBody


def list_rows(graph: fx.Graph) -> fx.Graph | None:
    """Rewrite the graph and its loops in place and return it; None if there are no such stacks."""
    lists = _Lists()
    lists.add(graph, ())
    for place in lists.totals:
        place.take_whole()
    return graph if lists.listed else None


# Calls, and the body of each.
Around = tuple[tuple[fx.Node, InnerProgram], ...]


@dataclass(frozen=True)
class _Place:
    """A loop's result. around: the bodies around the loop, outermost first."""

    node: fx.Node
    result: int
    around: Around

    @property
    def call(self) -> LoopCall:
        return self.node.target  # pyright: ignore

    def values(self) -> list[fx.Node]:
        """Return the nodes that hold the result."""
        return [u for u in self.node.users if u.target is getitem and u.args[1] == self.result]

    def take_whole(self) -> None:
        """Stack the rows for all users."""
        for value in self.values():
            graph = value.graph
            with graph.inserting_after(value):
                whole = graph.call_function(stack_rows, (value,))
            whole.meta = dict(value.meta)
            value.replace_all_uses_with(whole, lambda user, whole=whole: user is not whole)


class _Lists:
    """Turns stacks into lists. totals: sums over them, which become tensors again."""

    def __init__(self) -> None:
        self.listed = False
        self.totals: dict[_Place, None] = {}

    def add(self, graph: fx.Graph, around: Around) -> None:
        """Turn the stacks of a graph's loops, and of their inner loops, into lists."""
        for node, call in loop_calls(graph):
            if not isinstance(call, LoopCall):
                for piece in call.bodies:
                    self.add(piece.graph, (*around, (node, piece)))
                continue
            # Inner loops first: their stacks may become rows in this loop's.
            self.add(call.graph, (*around, (node, call)))
            if call.loop.ends or not call.loop.length:
                continue
            for k in range(call.stacks):
                place, totals = _Place(node, call.carries + k, around), dict[_Place, None]()
                if place.values() and self.is_taken_by_rows(place, 1, totals):
                    call.listed |= {k}
                    self.listed, self.totals = True, self.totals | totals

    def is_taken_by_rows(self, place: _Place, depth: int, totals: dict[_Place, None]) -> bool:
        """Return whether only loops take a result, row by row; note sums over it.

        depth: the number of loops that stack it, which may all become lists.
        """
        return all(self._takes(v, depth, place.around, totals) for v in place.values())

    def _takes(
        self, value: fx.Node, depth: int, around: Around, totals: dict[_Place, None]
    ) -> bool:
        """Return whether all of a value's users in a loop body take its rows."""
        return bool(value.users) and all(
            self._returns(value, user.args[0], depth, around, totals)  # pyright: ignore
            if user.op == "output"
            else self._reads(value, user, depth, around, totals)
            for user in value.users
        )

    def _reads(
        self, value: fx.Node, user: fx.Node, depth: int, around: Around, totals: dict[_Place, None]
    ) -> bool:
        """Return whether a user is a loop over a value's rows."""
        call = user.target
        if not isinstance(call, LoopCall):
            return False
        operands = LoopOperands.of(user)
        if value in operands.carries or value in operands.others:
            return False
        inner = [x for x, row in zip(call.body_inputs.rows, operands.rows) if row is value]
        # Behind the last depth the loop's body may read its row in any way.
        return depth == 1 or all(
            not x.users or self._takes(x, depth - 1, (*around, (user, call)), totals) for x in inner
        )

    def _returns(
        self,
        value: fx.Node,
        results: Sequence[fx.Node],
        depth: int,
        around: Around,
        totals: dict[_Place, None],
    ) -> bool:
        """Return whether the surrounding loop stacks a value for others, or adds it up."""
        if not around:
            return False
        (node, call), outside = around[-1], around[:-1]
        if isinstance(call, StageBody):
            names = [name for name, x in zip(call.outputs, results) if x is value]
            return all(self._leaves(name, node, call, depth, outside, totals) for name in names)
        assert isinstance(call, LoopCall)
        body = call.split(results)
        if value in (*body.again, *body.held):
            return False
        for i, result in enumerate(body.returned):
            if result is not value:
                continue
            place = _Place(node, i, outside)
            if call.is_carry(i) or call.loop.ends or not call.loop.length:
                return False
            if not call.is_stack(i):
                totals[place] = None
            elif not place.values() or not self.is_taken_by_rows(place, depth + 1, totals):
                return False
        return True

    def _leaves(
        self,
        name: str,
        node: fx.Node,
        body: StageBody,
        depth: int,
        outside: Around,
        totals: dict[_Place, None],
    ) -> bool:
        """Return whether later pieces in a pipeline take the rows that one leaves."""
        call: Any = node.target
        sent = {link.sent for link in call.links}
        if body.kind == LOSS or name in call.stacks or name in sent:
            return False
        for piece in call.pieces:
            inputs = list(piece.graph.find_nodes(op="placeholder"))[-len(piece.inputs) :]
            for x in (x for x, read in zip(inputs, piece.inputs) if read == name and x.users):
                if not self._takes(x, depth, (*outside, (node, piece)), totals):
                    return False
        return True
