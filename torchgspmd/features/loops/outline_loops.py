"""Loops in the local program: from marks in a flat graph to calls with a body.

before   %h = carry(%h0, 1x8); %w = row(%ws, 1x8); %y = mm(%h, %w); %end = next(%y, %y, %h, 1x8)
after    %loop = loop_1x8([%h0], [%ws], []); %end = %loop[0]
needs    the local program
ensures  no marks; values that no iteration changes stand before the loop

The call takes the last exit's place. A body begins with the coordinates, as every local program
does, and does the arithmetic on them itself.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ...compat.fx_nodes import copy_node, origin_of
from ...compat.operators import aten
from ...errors import ShardingError
from ...fx_passes.loop_call import LoopCall, LoopOperands
from ...fx_passes.schedule.liveness import bytes_of
from ...layout.mesh import Mesh
from ...rules.custom_ops.loops import (
    CONST,
    ENTRIES,
    EXITS,
    NEXT,
    ROW,
    STACK,
    TOTAL,
    Nest,
    mark_of,
    nests,
)
from ...rules.ops.pointwise import named

# `sink_exits` moves nodes that only move elements from the end of a loop body behind the loop, if
# no more bytes leave the loop then. One layer's weight gradient goes into its row of the stack over
# all layers, in the weight's dimension order; inside the body, each iteration would make that copy.
#
# before   %t = transpose(%g, 0, 1); %s = select_backward(%t, [2, 4, 8], 0, 1); %w = total(%s, 1x16)
# after    %w_t = total(%g, 1x16); %t = transpose(%w_t, 0, 1); %w = select_backward(%t, ...)
# before   %c = add(%a, %b); %w = total(%c, 1x16)        with rows of %a where %b has zeros
# after    %w = add(total(%a), total(%b))
# ensures  users of a loop's exits stand behind its last exit, where an earlier pass may have put
#          them ahead; a stack stays contiguous if another loop takes its rows


# Operations whose result elements are each one operand element, or zero.
_MOVES = {
    *named("transpose.int permute unsqueeze reshape clone alias"),
    *named("select_backward slice_backward"),
}
_ADD = aten.add.Tensor


def _behind(dim: int) -> int:
    return dim + (dim >= 0)


# Views, and their arguments with the iterations as a new first dimension.
_OF_ROWS: dict[Any, Callable[..., tuple]] = {
    aten.transpose.int: lambda x, a, b: (x, _behind(a), _behind(b)),
    aten.permute.default: lambda x, dims: (x, [0, *(d % len(dims) + 1 for d in dims)]),
    aten.unsqueeze.default: lambda x, dim: (x, _behind(dim)),
}


def sink_exits(graph: fx.Graph) -> fx.Graph | None:
    """Rewrite the graph in place and return it; None if nothing moves."""
    moved = _order_users(graph)
    ends = [n for n in graph.nodes if n.target in (TOTAL, STACK) and not mark_of(n).ends_by_value]
    if not ends:
        return graph if moved else None
    sunk = _Sunk(graph)
    for end in ends:
        sunk.sink(end)
    return graph if moved or sunk.changed else None


def _order_users(graph: fx.Graph) -> bool:
    """Move an exit's users behind the loop's last exit; return whether a node moved."""
    left = Counter(mark_of(n).loop for n in graph.nodes if n.target in EXITS)
    before = [n for n in graph.nodes if n.op != "output"]
    order: dict[fx.Node, None] = {}

    def has_inputs(node: fx.Node) -> bool:
        return all(
            x in order and not (x.target in EXITS and left[mark_of(x).loop])
            for x in node.all_input_nodes
        )

    waiting = before
    # Nodes whose loop has further exits wait until the last of them: the call stands there.
    while waiting:
        nodes, waiting = waiting, []
        for node in nodes:
            if has_inputs(node):
                order[node] = None
                if node.target in EXITS:
                    left[mark_of(node).loop] -= 1
            else:
                waiting.append(node)
        assert len(waiting) < len(nodes), "an exit of a loop is read in the loop"
    if [*order] == before:
        return False
    for node in order:
        graph.output_node().prepend(node)
    return True


class _Sunk:
    """The graph during the pass. nests: loops by node. last: each loop's last exit."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.nests, self.changed = graph, nests(graph), False
        self.last = {mark_of(n).loop: n for n in graph.nodes if n.target in EXITS}

    def sink(self, end: fx.Node) -> None:
        """Move the nodes before an exit behind the loop."""
        value = mark_of(end).value
        # The loop that takes the rows needs them as they were stacked.
        if end.target is STACK and any(user.target is ROW for user in end.users):
            return
        # Operands that are larger than the value would leave the loop in its place.
        if not self._moves(value, end) or self._inner_bytes(value, end) > bytes_of(value):
            return
        self.changed = True
        with self.graph.inserting_before(end):
            operands = {x: self._exit_of(x, end) for x in value.all_input_nodes}
        loop = mark_of(end).loop
        # The exit is erased below, so another one is the last.
        if self.last[loop] is end:
            self.last[loop] = [*operands.values()][-1]
        with self.graph.inserting_after(self.last[loop]):
            moved = copy_node(self.graph, value, operands.__getitem__)
        if end.target is STACK:
            moved.args = _OF_ROWS[value.target](*moved.args)
        moved.meta, self.nests[moved] = dict(end.meta), self.nests[end]
        end.replace_all_uses_with(moved)
        self.graph.erase_node(end)
        self.graph.erase_node(value)
        # The operands are exits now, and may sink further.
        for x in operands.values():
            self.sink(x)

    def _exit_of(self, x: fx.Node, end: fx.Node) -> fx.Node:
        """Return an exit like `end` for another value."""
        node = self.graph.call_function(end.target, (x, mark_of(end).loop))  # pyright: ignore
        node.meta = origin_of(end)
        rows = [end.meta["shape"][0]] if end.target is STACK else []
        node.meta |= {"shape": [*rows, *x.meta["shape"]], "dtype": x.meta["dtype"]}
        self.nests[node] = self.nests[end]
        return node

    def _moves(self, value: fx.Node, end: fx.Node) -> bool:
        """Return whether the loop's results suffice to compute a value."""
        operands, nest = value.all_input_nodes, mark_of(end).nest
        if end.target is STACK:
            # A stack has the rows as a new dimension, which only these views can skip.
            may_move = value.target in _OF_ROWS
        else:
            may_move = value.target in _MOVES or value.target is _ADD and len(operands) == 2
        return (
            may_move
            and len(value.users) == 1
            and all(self.nests[x] == nest for x in (value, *operands))
            and all(x.meta.get("shape") is not None for x in (value, *operands))
            and not any(x.meta.get("dynamic") for x in (value, *operands))
            # A total adds up the operands by themselves, and knows no factor.
            and value.kwargs.get("alpha", 1) == 1
            # Sums in another dtype would round otherwise.
            and len({x.meta["dtype"] for x in (value, *operands)}) == 1
        )

    def _inner_bytes(self, value: fx.Node, end: fx.Node) -> int:
        """Return the bytes that leave the loop if a value is computed behind it."""
        return sum(self._least_bytes(x, end) for x in value.all_input_nodes)

    def _least_bytes(self, value: fx.Node, end: fx.Node) -> int:
        """Return the bytes that leave the loop: the value's, or its operands' if fewer."""
        own = bytes_of(value)
        return min(own, self._inner_bytes(value, end)) if self._moves(value, end) else own


def outline_loops(graph: fx.Graph, mesh: Mesh) -> fx.Graph | None:
    """Return the graph with calls to loops; None if it has no loops."""
    if not any(node.target in EXITS for node in graph.nodes):
        return None
    outer = _Block(graph, nests(graph), (), mesh)
    for node in graph.nodes:
        outer.add(node)
    return outer.graph


class _Block:
    """The new graph for the program, or for a loop body. new: by node in the old graph."""

    def __init__(self, source: fx.Graph, nests: dict[fx.Node, Nest], nest: Nest, mesh: Mesh):
        self.source, self.nests, self.nest, self.mesh = source, nests, nest, mesh
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.exits_left: dict[Nest, list[fx.Node]] = {}
        for node in source.nodes:
            if node.target in EXITS:
                self.exits_left.setdefault(mark_of(node).nest, []).append(node)

    def add(self, node: fx.Node) -> None:
        """Copy a node that belongs to this block; a loop's last exit adds the loop."""
        if self.nests[node] != self.nest or node.target in ENTRIES and self.owns_entry(node):
            return
        if node.target in EXITS:
            nest = mark_of(node).nest
            # Everything that the call needs exists by then.
            if node is self.exits_left[nest][-1]:
                self.add_loop(nest)
            return
        self.new[node] = self.graph.node_copy(node, self.new.__getitem__)

    def owns_entry(self, node: fx.Node) -> bool:
        """Return whether an entry belongs to this body, which has a placeholder for it."""
        return mark_of(node).nest == self.nest

    def add_loop(self, nest: Nest) -> None:
        """Add the call to a loop, and getitems for its exits."""
        body = _Block(self.source, self.nests, nest, self.mesh)
        exits = self.exits_left[nest]
        entries = [n for n in self.source.nodes if n.target in ENTRIES and mark_of(n).nest == nest]
        ends = [n for n in exits if n.target is NEXT]
        carries = [carry for end in ends if (carry := mark_of(end).carry)]
        again = [value for end in ends if (value := mark_of(end).again)]
        rows = [n for n in entries if n.target is ROW]
        consts = [n for n in entries if n.target is CONST]
        inside = [n for n in self.source.nodes if self.nests[n][: len(nest)] == nest]
        # An ordered set, so that all ranks have the operands in one order.
        outside = dict.fromkeys(
            x
            for n in (*inside, *exits)
            if n not in entries
            for x in n.all_input_nodes
            if self.nests[x][: len(nest)] != nest
        )
        # The first placeholders of a local program are its coordinates.
        coordinates = [*self.source.find_nodes(op="placeholder")][: len(self.mesh.names)]
        for node in (*coordinates, *carries, *rows, *consts):
            body.new[node] = body.graph.placeholder(node.name)
            body.new[node].meta = dict(node.meta)
        others = []
        numbers = set(coordinates)
        for node in outside:
            if node in numbers:
                continue
            # The body repeats arithmetic on coordinates, so it costs no operand.
            if (
                node.op == "call_function"
                and set(node.all_input_nodes) <= numbers
                and (node.all_input_nodes)
            ):
                body.new[node] = body.graph.node_copy(node, body.new.__getitem__)
                numbers.add(node)
                continue
            others.append(node)
            body.new[node] = body.graph.placeholder(node.name)
            body.new[node].meta = dict(node.meta)
        for node in inside:
            body.add(node)
        stacks = [n for n in exits if n.target is STACK]
        totals = [n for n in exits if n.target is TOTAL]
        body.graph.output(
            tuple(
                body.new[n]
                for n in (*again, *(mark_of(n).value for n in (*ends, *stacks, *totals)))
            )
        )
        operands = LoopOperands(
            [self.new[mark_of(n).value] for n in carries],
            [self.new[mark_of(n).value] for n in rows],
            [*(self.new[mark_of(n).value] for n in consts), *(self.new[n] for n in others)],
        )
        # A loop that a value ends may not run; its results are zeros then.
        empty = [_type(n) for n in (*stacks, *totals)] if nest[-1].ends else []
        call = LoopCall(
            loop=nest[-1],
            graph=body.graph,
            carries=len(ends),
            rows=len(rows),
            others=len(operands.others),
            stacks=len(stacks),
            empty=empty,
        )
        node = self.graph.call_function(call, operands.args)
        node.meta = _meta(exits[0])
        for i, end in enumerate((*ends, *stacks, *totals)):
            self.new[end] = self.graph.call_function(operator.getitem, (node, i))
            self.new[end].meta = dict(end.meta)


def _type(node: fx.Node) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and dtype of a result that a loop stacks or sums."""
    value = mark_of(node).value
    if node.target is TOTAL and value.meta.get("dynamic"):
        raise ShardingError(
            "a branch or while_loop has the gradient of a tensor whose size only a run knows",
            where=value.meta.get("source"),
            why="it is zero if the side does not run, and needs a size",
            fix="compute both sides and choose by torch.where",
        )
    return tuple(value.meta["shape"]), value.meta["dtype"]


def _meta(node: fx.Node) -> dict[str, object]:
    """Return the metadata for a call, which has several results."""
    return {**origin_of(node), "dtype": None}
