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

import torch
from torch import fx

from ...compat.fx_nodes import origin_of
from ...errors import ShardingError
from ...fx_passes.loop_call import LoopCall, LoopOperands
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
