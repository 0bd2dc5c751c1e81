"""A backward in two pieces: argument gradients, and later parameter gradients.

    cotangents, saved -> gradients of arguments, values that both pieces need
    these values, saved -> gradients of parameters

Zero-bubble pipeline schedules ask for the first, send it to the stage before, and ask for the
second when they would wait otherwise. The first alone is torch.autograd.grad for inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import fx

from ..compat.private_apis import _will_engine_execute_node

Run = Callable[[list], Sequence[Any]]


class PartialBackward:
    """A backward graph's pieces. compile: returns a graph's function.

    of_arguments: the outputs that are argument gradients.
    """

    def __init__(
        self, graph: fx.Graph, of_arguments: Iterable[int], compile: Callable[[fx.Graph], Run]
    ) -> None:
        self.of_arguments = set(of_arguments)
        returned = graph.output_node().args[0]
        ours = [value for i, value in enumerate(returned) if i in self.of_arguments]
        others = [value for i, value in enumerate(returned) if i not in self.of_arguments]
        first, later = _needed_for(ours), _needed_for(others)
        # Values on the border only: what a shared value is computed from stays in the first piece.
        shared = [
            n
            for n in graph.nodes
            if n in first and n in later and n.op == "call_function"
            if n in others or any(user in later and user not in first for user in n.users)
        ]
        self.count, self.outputs = len(ours), len(returned)
        self.first = compile(_piece(graph, first, [], [*ours, *shared]))
        self.later = compile(_piece(graph, later - first, shared, others))

    def gradients_of_arguments(self, boxed: list) -> tuple[list, list]:
        """Return the argument gradients, and the values for the second piece."""
        results = self.first(boxed)
        return self._all(results[: self.count], True), list(results[self.count :])

    def gradients_of_parameters(self, boxed: list, shared: list) -> list:
        """Return the other gradients. shared: the first piece's."""
        boxed += shared
        return self._all(self.later(boxed), False)

    def _all(self, values: Sequence[object], of_arguments: bool) -> list:
        """Return values with None for the other piece's gradients."""
        rest = iter(values)
        return [
            next(rest) if (i in self.of_arguments) == of_arguments else None
            for i in range(self.outputs)
        ]


def _needed_for(values: Sequence[object]) -> set[fx.Node]:
    """Return the nodes that values are computed from, themselves included."""
    stack = [value for value in values if isinstance(value, fx.Node)]
    needed = set(stack)
    while stack:
        new = set(stack.pop().all_input_nodes) - needed
        needed |= new
        stack += new
    return needed


def _piece(
    graph: fx.Graph, nodes: set[fx.Node], inputs: list[fx.Node], outputs: Sequence[object]
) -> fx.Graph:
    """Return some nodes' graph. inputs: besides the whole graph's."""
    piece, copies = fx.Graph(), {}
    # Both pieces get the same list of inputs, so both have all placeholders.
    for node in graph.find_nodes(op="placeholder"):
        copies[node] = piece.node_copy(node)
    for node in inputs:
        copies[node] = piece.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in graph.nodes:
        if node.op == "get_attr" or node in nodes and node not in copies:
            copies[node] = piece.node_copy(node, copies.__getitem__)
    piece.output(tuple(copies[x] if isinstance(x, fx.Node) else x for x in outputs))
    piece.eliminate_dead_code()
    return piece


def is_asked_for(accumulators: Iterable[object]) -> bool:
    """Return whether the running backward needs the gradient that goes to any of these nodes."""
    return any(node is not None and _is_executed(node) for node in accumulators)


def _is_executed(node: object) -> bool:
    try:
        return _will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad computes this gradient
        return True
