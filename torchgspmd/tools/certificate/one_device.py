"""A certificate's truth: a graph at global shapes, evaluated on one device.

Both the captured graph and the partitioned one are such graphs. A step between layouts changes no
value, so it is the identity here. Loop bodies are marked in the flat graph, as
rules/custom_ops/loops.py says; they run once for each row. Nothing from later passes is used.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...comm.local_ops import as_ordered
from ...compat.operators import draws
from ...features.pipelines.list_scheduler import Order
from ...features.pipelines.parts import SEND
from ...rules import RENAMED
from ...rules.custom_ops.loops import CARRY, ENTRIES, EXITS, NEXT, ROW, STACK, Loop, Nest, nest_of
from ...rules.registry import Orders, map_ordered, traced_orders

Rows = tuple[int, ...]
"""The rows of the loops around a value, outermost first."""
Values = dict[str, dict[Rows, Any]]
"""By the name of a node: its values by rows, in the order in which iterations compute them."""
_NOTHING: Mapping[str, Mapping[Rows, Any]] = {}


class OneDeviceRun:
    """Evaluates a graph at global shapes.

    values: all that was computed, by node names. given: values that are not computed. history:
    all values in the order in which they were computed, including early ones that stages compute
    before their inputs have arrived; kept only on request.
    """

    def __init__(
        self,
        graph: fx.Graph,
        constants: nn.Module,
        given: Mapping[str, Mapping[Rows, Any]] = _NOTHING,
        history: list[tuple[str, Rows, Any]] | None = None,
    ) -> None:
        self.graph, self.constants, self.values = graph, constants, Values()
        self.history = history
        self.order: dict[tuple[str, Rows], None] = {}  # (name, rows), as values are computed
        self.given = given
        self.node = next(iter(graph.nodes))  # that is computed
        self.nest = _nests(graph)
        self.members: dict[Nest, list[fx.Node]] = {}
        self.exits: dict[Nest, list[fx.Node]] = {}
        for node, nest in self.nest.items():
            self.members.setdefault(nest, []).append(node)
            if node.target in EXITS:
                self.exits.setdefault(nest_of(node.args[-1]), []).append(node)

    def run(self, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return the results. inputs: a global tensor for each placeholder."""
        frame = _Frame((), None, ())
        for node, value in zip(self.graph.find_nodes(op="placeholder"), inputs):
            self._keep(node, value, frame)
        for node in self.members[()]:
            self._compute(node, frame)
        returned = self.graph.output_node().args[0]
        return fx.map_arg(returned, lambda n: frame.get(n, self.nest[n]))

    def _keep(self, node: fx.Node, value: Any, frame: _Frame) -> None:
        frame.values[node] = value
        self.values.setdefault(node.name, {})[frame.rows] = value
        self.order[node.name, frame.rows] = None
        if self.history is not None:
            self.history.append((node.name, frame.rows, value))

    def _compute(self, wanted: fx.Node, frame: _Frame) -> None:
        """Compute a node, and before it all that it needs and nobody has computed."""
        # A stack instead of recursion: a chain of operations may be longer than Python allows.
        stack = [wanted]
        while stack:
            node = stack[-1]
            home = frame.of(self.nest[node])
            missing = [n for n in self._needs(node) if not frame.has(n, self.nest[n])]
            if node in home.values or node.op == "output":
                stack.pop()
            elif missing:
                stack += missing
            elif node.target in EXITS:
                self._run_loop(nest_of(node.args[-1]), home)
            else:
                self._keep(node, self._value(node, home), home)

    def _needs(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the nodes that a node needs; an exit needs all that its loop takes from outside."""
        if node.target not in EXITS:
            yield from node.all_input_nodes
            return
        nest = nest_of(node.args[-1])
        for inner, nodes in self.members.items():
            if inner[: len(nest)] == nest:
                for member in nodes:
                    yield from (
                        n for n in member.all_input_nodes if self.nest[n][: len(nest)] != nest
                    )
        for leaving in self.exits.get(nest, ()):
            yield from (n for n in leaving.all_input_nodes if self.nest[n][: len(nest)] != nest)

    def _value(self, node: fx.Node, frame: _Frame) -> Any:
        if frame.rows in self.given.get(node.name, ()):
            return self.given[node.name][frame.rows]
        if (orders := self._orders(node)) is None:
            given = node.args, dict(node.kwargs)
        else:  # what an operation asks of memory is answered as in the trace
            given = map_ordered(
                node.target,
                node.args,
                node.kwargs,
                lambda name, n: as_ordered(frame.get(n, self.nest[n]), orders.get(name)),
            )
        args, kwargs = fx.map_arg(given, lambda n: frame.get(n, self.nest[n]))
        # A step or a mark changes the layout, not the value.
        if "step" in node.meta or "mark" in node.meta:
            return args[0]
        if node.op == "get_attr":
            value: Any = self.constants
            for name in str(node.target).split("."):
                value = getattr(value, name)
            return value
        self.node = node
        return drawn(RENAMED.get(node.target, node.target), node.name, args, kwargs)

    @staticmethod
    def _orders(node: fx.Node) -> Orders | None:
        """Return the orders in memory that an operation's operands had in the trace."""
        return node.meta["order"] if "order" in node.meta else traced_orders(node)

    # ---------------------------------------------------------------------------------------- loops

    def _run_loop(self, nest: Nest, outer: _Frame) -> None:
        run = _LoopRun(self, nest, outer)
        sends = [n for n in self.members[nest] if n.target is SEND]
        for row in run.rows():
            frame = run.enter(row)
            run.compute(frame)
            if sends:
                _deliver(run, frame, sends)
            run.leave(frame, row)
        for node in self.exits[nest]:
            self._keep(node, run.result(node), outer)


def _nests(graph: fx.Graph) -> dict[fx.Node, Nest]:
    """Return the loops around each node; a draw that a loop repeats is inside it."""
    result: dict[fx.Node, Nest] = {}
    for node in graph.nodes:
        if node.target in ENTRIES:
            result[node] = nest_of(node.args[-1])
        elif node.target in EXITS:
            result[node] = nest_of(node.args[-1])[:-1]
        else:
            around = [result[x] for x in node.all_input_nodes]
            drawn_in = node.meta.get("loop", "") if draws(node.target) else ""
            result[node] = max((*around, nest_of(drawn_in) if drawn_in else ()), key=len)
    return result


class _Frame:
    """One level's values: the whole graph's, or one loop iteration's."""

    def __init__(self, nest: Nest, outer: _Frame | None, rows: Rows) -> None:
        self.nest, self.outer, self.rows = nest, outer, rows
        self.values: dict[fx.Node, Any] = {}

    def of(self, nest: Nest) -> _Frame:
        """Return the frame for a level around this one."""
        frame = self
        while len(frame.nest) > len(nest):
            assert frame.outer is not None
            frame = frame.outer
        assert frame.nest == nest, "a value of a loop is used outside of it"
        return frame

    def has(self, node: fx.Node, nest: Nest) -> bool:
        return node in self.of(nest).values

    def get(self, node: fx.Node, nest: Nest) -> Any:
        return self.of(nest).values[node]


class _LoopRun:
    """One run of a loop: its carries, and the values that its exits have collected."""

    def __init__(self, device: OneDeviceRun, nest: Nest, outer: _Frame) -> None:
        self.device, self.nest, self.outer = device, nest, outer
        self.loop: Loop = nest[-1]
        self.body = device.members[nest]
        self.exits = device.exits[nest]
        self.entries = [n for n in self.body if n.target in ENTRIES]
        self.ends = {n.args[2]: n for n in self.exits if n.target is NEXT}
        self.carried = {n: self._outside(n.args[0]) for n in self.entries if n.target is CARRY}
        self.first = dict(self.carried)
        self.collected: dict[fx.Node, list[tuple[int, Tensor]]] = {n: [] for n in self.exits}

    def _outside(self, node: fx.Node) -> Any:
        return self.outer.get(node, self.device.nest[node])

    def rows(self) -> Iterator[int]:
        """Yield the rows, in iteration order, while the loop goes on."""
        for row in self._order():
            # A value that ends the loop is its first carry.
            if self.loop.ends and not next(iter(self.carried.values())):
                break
            yield row

    def _order(self) -> Iterable[int]:
        """Return the rows, in iteration order; the gradient of a while_loop walks backwards."""
        stacked = [self._outside(n.args[0]) for n in self.entries if n.target is ROW]
        if self.loop.ends == "*" and not stacked:
            return count()
        order = range(len(stacked[0]) if self.loop.ends == "*" else self.loop.length)
        return order[::-1] if self.loop.reverse else order

    def enter(self, row: int) -> _Frame:
        frame = _Frame(self.nest, self.outer, (*self.outer.rows, row))
        for node in self.entries:
            if node.target is CARRY:
                value = self.carried[node]
            else:
                whole = self._outside(node.args[0])
                value = whole[row] if node.target is ROW else whole
            self.device._keep(node, value, frame)
        return frame

    def compute(self, frame: _Frame) -> None:
        for node in self.body:
            self.device._compute(node, frame)
        for node in self.exits:
            for value in node.args[:2]:
                if isinstance(value, fx.Node):
                    self.device._compute(value, frame)

    def value(self, node: fx.Node, frame: _Frame) -> Any:
        return frame.get(node, self.device.nest[node])

    def leave(self, frame: _Frame, row: int) -> None:
        for node in self.exits:
            self.collected[node].append((row, self.value(node.args[0], frame)))
        for carry in self.carried:
            self.carried[carry] = self.value(self.ends[carry].args[1], frame)

    def result(self, node: fx.Node) -> Any:
        """Return an exit's value after the last iteration."""
        values = self.collected[node]
        if node.target is NEXT:
            return values[-1][1] if values else self._outside(node.args[2].args[0])
        if not values:
            like = node.meta["val"]
            device = self._outside(self.entries[0].args[0]).device
            return torch.zeros(like.shape, dtype=like.dtype, device=device)
        # A loop that runs backwards collects its last row first.
        in_order = [x for _, x in sorted(values, key=lambda each: each[0])]
        if node.target is STACK:
            return torch.stack(in_order)
        return sum(in_order[1:], in_order[0])


def _deliver(run: _LoopRun, frame: _Frame, sends: list[fx.Node]) -> None:
    """Compute an iteration until each stage has the values that its neighbors send, forth and back.

    A flat body does not say that a microbatch's stages follow each other. Its carries have the
    values that its own sends deliver, and zeros where no stage comes before.
    """
    groups: dict[tuple, dict[int, tuple[fx.Node, fx.Node]]] = {}
    for send in sends:
        shift, (round_, which), axis, schedule = send.args[1:]
        carry = next(end.args[2] for end in send.users if end.target is NEXT)
        groups.setdefault((shift, which, axis, schedule), {})[round_] = send, carry
    stages = max(len(rounds) for rounds in groups.values()) * max(
        frame.get(send, run.nest).shape[0] for send in sends
    )
    # Forward passes the stages once, backward once more: then nothing changes.
    for _ in range(2 * stages + 1):
        arrived = {
            carry: value
            for (shift, _, _, order), rounds in groups.items()
            for carry, value in _arrivals(run, frame, shift, Order.parse(order), rounds)
        }
        same = all(_equal(frame.values[c], v) for c, v in arrived.items())
        if same:
            break
        for node in run.body:
            if node.target not in ENTRIES:
                # Computed again, from what has arrived by now.
                frame.values.pop(node, None)
        for carry, value in arrived.items():
            run.device._keep(carry, value, frame)
        run.compute(frame)


def _arrivals(
    run: _LoopRun,
    frame: _Frame,
    shift: int,
    order: Order,
    rounds: Mapping[int, tuple[fx.Node, fx.Node]],
) -> Iterator[tuple[fx.Node, Tensor]]:
    """Yield each carry with the value that the stage `shift` before sends to it."""
    places = order.places
    sent = {r: run.value(send.args[0], frame) for r, (send, _) in rounds.items()}
    for sender_round, (_, carry) in rounds.items():
        round_ = (sender_round + shift) % places.rounds
        arrived = run.first[carry].clone()
        for device in range(places.devices):
            sender = places.stage(device, round_) - shift
            if 0 <= sender < places.stages and places.round(sender) in sent:
                arrived[device] = sent[places.round(sender)][places.device(sender)]
        yield carry, arrived


def _equal(a: Tensor, b: Tensor) -> bool:
    # Stages without work may have NaN, which equals nothing.
    return bool(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)))


def drawn(target: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    """Call an operation. One that draws by torch's generator is seeded by a name."""
    if not draws(target):
        return target(*args, **kwargs)
    cards = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    # The user's generators are not moved.
    with torch.random.fork_rng(devices=cards):
        # crc32, since Python's hash of a text differs between processes.
        torch.manual_seed(zlib.crc32(name.encode()))
        return target(*args, **kwargs)
