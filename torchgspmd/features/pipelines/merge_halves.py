"""Merge programs that have no value in common, as a device with two streams comes to them.

    half 0    a0  x0 = all_to_all(a0)  b0 of x0  c0
    half 1    a1  x1 = all_to_all(a1)  b1 of x1  c1
    merged    a0 x0 a1 x1 b0 b1 c0 c1                x0 travels beside a1, x1 beside b0

Each half keeps its order. A collective begins when its half comes to it. Where both halves may go
on, a rule decides; where neither may, further halves (weight gradients) do, or the device waits.
Two loops of the same length, over the layers of a stage, become one, whose second half may go from
the last row to the first (LoopCall.turned_rows).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import getitem
from typing import Any

from torch import fx

from ...comm.collective import start
from ...comm.hardware import Hardware
from ...comm.kinds import StepKind
from ...compat.fx_nodes import copy_node
from ...compat.private_apis import OpOverload
from ...fx_passes.loop_call import BodyCall, LoopCall, LoopOperands, copy_loops, loop_calls
from ...fx_passes.schedule.arithmetic import flops, op_seconds, step_seconds
from ...layout.mesh import Mesh

# Which half goes on: the one that comes to an exchange first, or always the same.
RULES = "exchange", "first", "second"
MAIN = 2  # halves; those behind them fill gaps


class MergedHalves:
    """Writes one graph for several. new: its nodes, by those of the halves."""

    def __init__(
        self, graphs: Sequence[fx.Graph], mesh: Mesh, hardware: Hardware, rule: str
    ) -> None:
        self.graph, self.mesh, self.hardware, self.rule = fx.Graph(), mesh, hardware, rule
        self.queues = [
            [n for n in g.nodes if n.op not in ("placeholder", "output")] for g in graphs
        ]
        self.at = [0] * len(graphs)
        self.source: dict[fx.Node, fx.Node] = {}  # an input -> the value that it is
        self.new: dict[fx.Node, fx.Node] = {}
        # A loop -> the joint one, and the number there of each of its results.
        self.loops: dict[fx.Node, tuple[fx.Node, list[int]]] = {}
        self.now = self.free = 0.0  # the device's time; when the links are free
        self.arrival: dict[fx.Node, float] = {}
        self.ahead = [self._seconds_to_exchange(queue) for queue in self.queues]

    def add_inputs(self, inputs: Sequence[fx.Node]) -> None:
        for node in inputs:
            self.new[node] = self.graph.placeholder(node.name)
            self.new[node].meta = dict(node.meta)

    def share(self, inputs: Sequence[fx.Node], values: Sequence[fx.Node]) -> None:
        """Take values of other halves as inputs."""
        self.source |= dict(zip(inputs, values))

    def return_values(self, values: Sequence[fx.Node]) -> None:
        self.graph.output(tuple(self._of(x) for x in values))
        copy_loops(self.graph)

    def run(self) -> None:
        """Copy the halves' nodes."""
        while any(self._head(i) is not None for i in range(len(self.queues))):
            ready = {i: t for i in range(len(self.queues)) if (t := self._ready(i)) is not None}
            sent = [i for i, t in ready.items() if t <= self.now and self._is_sent(i)]
            able = [i for i, t in ready.items() if t <= self.now]
            if sent:
                self._copy(sent[0])
            elif able:
                self._copy(min(able, key=self._urgency))
            elif ready:
                self._copy(min(ready, key=ready.__getitem__))
            else:
                self._join_loops()

    # --------------------------------------------------------------------------- which goes on

    def _head(self, i: int) -> fx.Node | None:
        return self.queues[i][self.at[i]] if self.at[i] < len(self.queues[i]) else None

    def _ready(self, i: int) -> float | None:
        """Return when a half's next operands have arrived; None if it waits for another half."""
        head = self._head(i)
        if head is None or self._waits_for_loop(i):
            return None
        values = [*map(self._source, head.all_input_nodes)]
        if not all(x in self.new for x in values):
            return None
        return max((self.arrival.get(x, 0.0) for x in values), default=0.0)

    def _waits_for_loop(self, i: int) -> bool:
        """Return whether a half has come to a loop that the other one has, too."""
        head = self._head(i)
        if i >= MAIN or head is None or not isinstance(head.target, LoopCall):
            return False
        other = 1 - i
        loops = [n for n in self.queues[other][self.at[other] :] if isinstance(n.target, LoopCall)]
        return bool(loops) and _fit(head.target, loops[0].target)

    def _is_sent(self, i: int) -> bool:
        head = self._head(i)
        return head is not None and isinstance(head.target, StepKind)

    def _urgency(self, i: int) -> tuple[bool, float]:
        order = {"exchange": self.ahead[i][self.at[i]], "first": i, "second": -i}
        return i >= MAIN, order[self.rule]

    def _seconds_to_exchange(self, queue: Sequence[fx.Node]) -> list[float]:
        """Return for each node how long a half computes from there to its next collective."""
        left, found = float("inf"), list[float]()
        for node in reversed(queue):
            left = 0.0 if isinstance(node.target, StepKind) else left + self._seconds(node)
            found.append(left)
        return found[::-1]

    def _seconds(self, node: fx.Node) -> float:
        if isinstance(node.target, (BodyCall, StepKind)) or node.op != "call_function":
            return 0.0
        return op_seconds(node, self.mesh, self.hardware)

    # ---------------------------------------------------------------------------------- copies

    def _source(self, x: fx.Node) -> fx.Node:
        return self.source.get(x, x)

    def _of(self, x: fx.Node) -> fx.Node:
        return self.new[self._source(x)]

    def _copy(self, i: int) -> None:
        node = self.queues[i][self.at[i]]
        values = [*map(self._source, node.all_input_nodes)]
        self.now = max([self.now, *(self.arrival.get(x, 0.0) for x in values)])
        args: Any = node.args
        if node.target is getitem and args[0] in self.loops:
            joint, numbers = self.loops[args[0]]
            new = self.graph.call_function(getitem, (joint, numbers[args[1]]))
            new.meta = dict(node.meta)
        else:
            new = copy_node(self.graph, node, self._of)
        self.new[node] = new
        new.meta["backward"] = i > 0  # which half it is from
        if isinstance(node.target, StepKind):
            seconds = step_seconds([node.meta["step"]], self.mesh, self.hardware)
            self.free = self.arrival[node] = max(self.now, self.free) + seconds
        self.now += self._seconds(node)
        self.at[i] += 1

    def _join_loops(self) -> None:
        """Write one loop for the two that the first halves have come to."""
        nodes = [self.queues[i][self.at[i]] for i in range(MAIN)]
        calls: list[Any] = [node.target for node in nodes]
        one, other = calls
        inner = MergedHalves([call.graph for call in calls], self.mesh, self.hardware, self.rule)
        inputs, results = [c.body_inputs for c in calls], [c.body_results for c in calls]
        inner.add_inputs(inputs[0].coordinates)
        inner.share(inputs[1].coordinates, inputs[0].coordinates)
        for kind in ("carries", "rows", "others"):
            for each in inputs:
                inner.add_inputs(getattr(each, kind))
        inner.run()
        kinds = ("again", "ends", "stacks", "totals")
        inner.return_values([x for kind in kinds for each in results for x in getattr(each, kind)])
        operands = [LoopOperands.of(node) for node in nodes]
        args = tuple(
            [self._of(x) for each in operands for x in getattr(each, kind)]
            for kind in ("carries", "rows", "others")
        )
        is_turned = one.loop.reverse != other.loop.reverse
        joint = LoopCall(
            one.loop,
            inner.graph,
            *(getattr(one, kind) + getattr(other, kind) for kind in ("carries", "rows", "others")),
            stacks=one.stacks + other.stacks,
            empty=_joined(one, other),
            turned_rows=other.rows * is_turned,
            turned_stacks=other.stacks * is_turned,
        )
        new = self.graph.call_function(joint, args)
        new.meta = dict(nodes[0].meta)
        counts = [[c.carries, c.stacks, len(r.totals)] for c, r in zip(calls, results)]
        first = [0, sum(c[0] for c in counts), sum(c[0] + c[1] for c in counts)]
        for i, node in enumerate(nodes):
            starts = [at + i * counts[0][kind] for kind, at in enumerate(first)]
            numbers = [at + k for at, n in zip(starts, counts[i]) for k in range(n)]
            self.loops[node], self.new[node] = (new, numbers), new
            self.at[i] += 1


def beside(graph: fx.Graph) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yield each start in a scheduled program, with the other half's products up to its wait."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    order = [*place]
    for node in graph.find_nodes(op="call_function", target=start):
        end = min(place[arrived] for arrived in node.users)
        between = order[place[node] : end]
        products = [n for n in between if isinstance(n.target, OpOverload) and flops(n)]
        yield node, [n for n in products if _is_second(n) != _is_second(node)]
    for _, call in loop_calls(graph):
        for body in call.bodies:
            yield from beside(body.graph)


def _is_second(node: fx.Node) -> bool:
    return bool(node.meta.get("backward"))


def _fit(one: Any, other: Any) -> bool:
    """Return whether two loops can be one."""
    calls: tuple[LoopCall, LoopCall] = one, other
    plain = all(
        not (c.loop.ends or c.held or c.ahead or c.listed or c.turned_rows or c.turned_stacks)
        for c in calls
    )
    return plain and one.loop.length == other.loop.length


def _joined(one: LoopCall, other: LoopCall) -> Sequence[Any]:
    """Return the shapes for stacks, then for sums, of loops without iterations."""
    a, b = [*one.empty], [*other.empty]
    if not a or not b:
        return ()
    return [*a[: one.stacks], *b[: other.stacks], *a[one.stacks :], *b[other.stacks :]]
