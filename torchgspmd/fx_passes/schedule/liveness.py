"""What is alive while a program of one device runs, in bytes.

A value lives from its operation to its last use; inputs and outputs to the end. A collective's
result lives from its `start` on, and what it sends until it has been waited for.
"""

from __future__ import annotations

import math

from torch import fx

from ...comm.collective import start, wait


def bytes_of(node: fx.Node) -> int:
    """Of a value; 0 for what is no single tensor."""
    shape, dtype = node.meta.get("shape"), node.meta.get("dtype")
    return math.prod(shape) * dtype.itemsize if shape is not None and dtype is not None else 0


def inputs_bytes(graph: fx.Graph) -> int:
    return sum(map(bytes_of, graph.find_nodes(op="placeholder")))


def peak(graph: fx.Graph) -> int:
    """Most bytes alive at once."""
    ledger = Ledger(graph)
    for node in graph.nodes:
        ledger.emit(node)
    return ledger.peak


class Ledger:
    """Bytes alive as a program is written down node by node, in this order or another."""

    def __init__(self, graph: fx.Graph):
        self.uses = {node: len(node.users) for node in graph.nodes}
        self.alive = self.peak = inputs_bytes(graph)
        self.sent: set[fx.Node] = set()  # starts of which something has been waited for

    @staticmethod
    def needed(node: fx.Node) -> int:
        """Bytes that the node allocates."""
        if node.op != "call_function" or node.target is wait:
            return 0
        return node.meta["bytes"] if node.target is start else bytes_of(node)

    def emit(self, node: fx.Node) -> int:
        """The next node; returns what is alive while it runs."""
        self.alive += self.needed(node)
        during = self.alive
        self.peak = max(self.peak, during)
        if node.target is wait and (begun := node.args[0]) not in self.sent:
            self.sent.add(begun)
            self._used(begun)
        if node.target is not start:
            self._used(node)
        if node.op == "call_function" and not node.users and node.target is not start:
            self.alive -= bytes_of(node)
        return during

    def _used(self, node: fx.Node) -> None:
        for value in node.all_input_nodes:
            self.uses[value] -= 1
            if not self.uses[value] and value.op == "call_function" and value.target is not start:
                self.alive -= bytes_of(value)
