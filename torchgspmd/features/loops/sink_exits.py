"""Move nodes that only move elements from the end of a loop body behind the loop.

before   %t = transpose(%g, 0, 1); %s = select_backward(%t, [2, 4, 8], 0, 1); %w = total(%s, 1x16)
after    %w_t = total(%g, 1x16); %t = transpose(%w_t, 0, 1); %w = select_backward(%t, ...)
before   %c = add(%a, %b); %w = total(%c, 1x16)        with rows of %a where %b has zeros
after    %w = add(total(%a), total(%b))
needs    the local program, whose loops are marks in a flat graph
ensures  the same values; a loop adds up or stacks no more bytes than before; users of a loop's
         exits stand behind its last exit, where an earlier pass may have put them ahead

One layer's weight gradient goes into its row of the stack over all layers, in the weight's
dimension order. Inside the body, each iteration would make that copy.

A stack stays contiguous if another loop takes its rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import fx

from ...compat.fx_nodes import copy_node, origin_of
from ...compat.operators import aten
from ...fx_passes.schedule.liveness import bytes_of
from ...rules.custom_ops.loops import EXITS, ROW, STACK, TOTAL, mark_of, nests

# Operations whose result elements are each one operand element, or zero.
_MOVES = frozenset(
    {
        aten.transpose.int,
        aten.permute.default,
        aten.unsqueeze.default,
        aten.reshape.default,
        aten.clone.default,
        aten.alias.default,
        aten.select_backward.default,
        aten.slice_backward.default,
    }
)
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
