"""Bytes that are alive while one device's program runs.

A value lives from its operation to the last use of it or of its views, which have no memory of
their own; inputs and outputs live to the end. A collective's result lives from its `start` on, its
operand until its first wait. While a loop runs, its results are alive, and one iteration's values.
"""

from __future__ import annotations

import math
from operator import getitem

from torch import fx

from ...comm.collective import start, wait
from ..loop_call import BodyCall, LoopCall
from .aliasing import Aliasing


def bytes_of(node: fx.Node) -> int:
    """Return a value's bytes; 0 if it is not one tensor, or lies in the host's memory."""
    if node.meta.get("host"):
        return 0
    shape, dtype = node.meta.get("shape"), node.meta.get("dtype")
    return math.prod(shape) * dtype.itemsize if shape is not None and dtype is not None else 0


def inputs_bytes(graph: fx.Graph) -> int:
    return sum(map(bytes_of, graph.find_nodes(op="placeholder")))


def peak(graph: fx.Graph) -> int:
    """Return the most bytes that are alive at once."""
    ledger = Ledger(graph)
    for node in graph.nodes:
        ledger.emit(node)
    return ledger.peak


def iteration_bytes(call: BodyCall) -> int:
    """Return the most bytes that a loop iteration allocates, with the carry that it gets."""
    if not isinstance(call, LoopCall):
        return call.iteration_bytes(_own_bytes)
    inputs = call.body_inputs
    return _own_bytes(call.graph) + sum(map(bytes_of, (*inputs.carries, *inputs.held)))


def _own_bytes(body: fx.Graph) -> int:
    """Return the most bytes that a body has in a run besides its inputs."""
    return peak(body) - inputs_bytes(body)


class Ledger:
    """Bytes alive as a program's nodes are emitted, in any legal order."""

    def __init__(self, graph: fx.Graph) -> None:
        self.aliasing = Aliasing()
        self.uses: dict[fx.Node, int] = {}  # of a value, and of its views
        self.iterations: dict[fx.Node, int] = {}  # bytes of a loop's iteration
        for node in graph.nodes:
            self.uses[node] = len(node.users)
            if isinstance(node.target, BodyCall):
                self.iterations[node] = iteration_bytes(node.target)
        self.alive = self.peak = inputs_bytes(graph)
        self.sent: set[fx.Node] = set()  # Starts that have been waited for.

    def needed(self, node: fx.Node) -> int:
        """Return the bytes that a node allocates."""
        if node.op != "call_function" or node.target is wait:
            return 0
        if isinstance(node.target, BodyCall):  # all of its results
            return sum(map(bytes_of, node.users))
        # The call itself counts all of its results.
        if node.target is getitem and isinstance(node.args[0].target, BodyCall):
            return 0
        if node.target is start:
            return node.meta["bytes"]
        return bytes_of(node) if self.aliasing.owner(node) is node else 0

    def workspace(self, node: fx.Node) -> int:
        """Return the bytes that a node allocates, besides its results, while it runs."""
        return 0 if node.target is start else self.aliasing.workspace(node)

    def emit(self, node: fx.Node) -> int:
        """Emit the next node, and return the bytes that are alive while it runs."""
        self.alive += self.needed(node)
        during = self.alive + self.workspace(node)
        if node in self.iterations:  # the last carries are values of its last iteration
            carries = node.target.carries if isinstance(node.target, LoopCall) else 0
            last = (u for u in node.users if u.args[1] < carries)
            during += self.iterations[node] - sum(map(bytes_of, last))
        self.peak = max(self.peak, during)
        # A message reads its operands until it is waited for, so they are alive until then.
        if node.target is wait and (begun := node.args[0]) not in self.sent:
            self.sent.add(begun)
            self._release_operands(begun)
        # A view keeps the memory of its owner alive.
        if (owner := self.aliasing.owner(node)) is not node:
            self.uses[owner] += len(node.users)
        if node.target is not start:
            self._release_operands(node)
        if not node.users and owner is node:
            self._release(node)
        return during

    def _release_operands(self, node: fx.Node) -> None:
        """Count a use for each operand, and free those that have no further use."""
        for value in node.all_input_nodes:
            owner = self.aliasing.owner(value)
            self.uses[owner] -= 1
            self._release(owner)

    def _release(self, value: fx.Node) -> None:
        """Free a value without further uses."""
        if not self.uses[value] and value.op == "call_function" and value.target is not start:
            self.alive -= bytes_of(value)
