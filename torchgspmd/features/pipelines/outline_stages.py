"""Pipeline pieces in the local program: from a loop body to forward and backward.

before   %loop = loop_1x8([%c, %g], [%xs], [%w]), whose body sends %y on and %dx back (stage_send)
after    %loop = stages_1x8([%c, %g], [%xs], [%w]), with one body a kind
needs    loops outlined; no collective in the body is over the stages' axis
ensures  no stage_send, no stage_head

    forward    values that are sent on need it
    loss       depends on stage_head, not on a gradient that the next stage has sent
    backward   depends on such a gradient; values that are sent back need it, or a stacked result
    weights    depends on such a gradient, and only totals need it: a piece of its own in a
               zero-bubble schedule, otherwise the end of the backward

Everything else (a mask for the backward, one-hot targets) goes to the first piece that reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import getitem

from torch import fx

from ...comm.kinds import CollectiveKind
from ...errors import ShardingError
from ...fx_passes.localize.sizes_in_a_run import needs_number
from ...fx_passes.loop_call import LoopCall, copy_loops, loop_calls
from ...fx_passes.schedule.arithmetic import is_view
from ...fx_passes.schedule.liveness import bytes_of
from ...layout.mesh import Mesh
from ...layout.open_sizes import product_of
from ..loops.split_loops import drop_unused_results, split_loop
from .call import StageCall
from .list_scheduler import Order, order_within
from .parts import BACKWARD, FORWARD, HEAD, LOSS, SEND, WEIGHTS, LossSize, StageBody, StageLink

_KINDS = FORWARD, LOSS, BACKWARD, WEIGHTS


def outline_stages(graph: fx.Graph, mesh: Mesh) -> fx.Graph | None:
    """Cut a graph's pipelines in place, and return it; None if it has none."""
    changed = False
    for node, call in list(loop_calls(graph)):
        if isinstance(call, LoopCall) and any(n.target is SEND for n in call.graph.nodes):
            _replace(node, _Cut(call, mesh).run(), call.carries)
            changed = True
    return graph if changed else None


def _replace(node: fx.Node, call: StageCall, carries: int) -> None:
    """Replace a loop, whose last carries nobody reads, by a pipeline."""
    node.target, node.name = call, call.__name__
    for user in list(node.users):
        assert user.target is getitem
        if user.args[1] < carries:  # pyright: ignore
            assert not user.users, "what stages send does not leave the pipeline"
            node.graph.erase_node(user)
        else:
            user.update_arg(1, user.args[1] - carries)  # pyright: ignore


class _Cut:
    def __init__(self, call: LoopCall, mesh: Mesh) -> None:
        self.call, self.mesh, self.graph = call, mesh, call.graph
        inputs, self.ends = call.body_inputs, call.body_results
        self.coordinates, self.carries = inputs.coordinates, inputs.carries
        self.rows, self.others = inputs.rows, inputs.others
        for value in self.ends.again:
            assert value.target is SEND, "a pipeline has no other carries"
        self.axis, self.text = self.ends.again[0].args[3:]
        self.shifts = [value.args[1] for value in self.ends.again]
        self.spots = [tuple(value.args[2]) for value in self.ends.again]  # pyright: ignore
        self.rounds = 1 + max(round_ for round_, _ in self.spots)
        # A carry belongs to the round in which it arrives, as stages may send to another round.
        self.arrives = [(r + s) % self.rounds for (r, _), s in zip(self.spots, self.shifts)]
        self.order = Order.parse(self.text)
        if self.order.may_split:
            self._split_loops()
        self.of_coordinates = self._of_coordinates()
        self.place = self._places()

    # ------------------------------------------------------------------------- assigning pieces

    def _of_coordinates(self) -> set[fx.Node]:
        """Return the nodes that follow from the coordinates alone: each piece computes them."""
        result = set(self.coordinates)
        for node in self.graph.nodes:
            inputs = node.all_input_nodes
            if node.op == "call_function" and inputs and set(inputs) <= result:
                result.add(node)
        return result

    def _split_loops(self) -> None:
        """Give weight gradients in a loop's backward a loop of their own."""
        needed = _reached([*self._sends(-1), *self.ends.stacks], "all_input_nodes")
        of_gradients = _reached(self._carries(-1), "users")
        for node, call in list(loop_calls(self.graph)):
            if isinstance(call, LoopCall) and node in of_gradients & needed:
                split_loop(node, {u.args[1] for u in node.users if u in needed})  # pyright: ignore

    def _places(self) -> dict[fx.Node, int]:
        """Return each node's piece: four a round, in _KINDS order."""
        place: dict[fx.Node, int] = {}
        heads = [n for n in self.graph.nodes if n.target is HEAD]
        of_heads, last = _reached(heads, "users"), 4 * (self.rounds - 1)
        # The last round's forward ends with the loss's operands, which no send needs.
        before_heads = [x for head in heads for x in head.all_input_nodes]
        backward = _reached([*self._sends(-1), *self.ends.stacks], "all_input_nodes")
        of_gradients = [_reached(self._carries(-1, r), "users") for r in range(self.rounds)]
        forward = [
            _reached(
                [*self._sends(1, r), *before_heads * (r == self.rounds - 1)], "all_input_nodes"
            )
            for r in range(self.rounds)
        ]
        # Users go first: a node that no send needs joins its first reader.
        for node in reversed(self.graph.nodes):
            if node.op != "call_function" or node in self.of_coordinates:
                continue
            after = next((r for r, nodes in enumerate(of_gradients) if node in nodes), None)
            ahead = next((r for r, nodes in enumerate(forward) if node in nodes), None)
            if after is not None:
                place[node] = 4 * after + (2 if node in backward else 3)
            elif node in of_heads:
                place[node] = last + 1
            elif ahead is not None:
                place[node] = 4 * ahead
            else:
                users = [place[user] for user in node.users if user in place]
                place[node] = min(users, key=self._moment, default=3)
        for node in self.graph.nodes:  # the results of an operation stay together
            if node.target is getitem and node in place:
                place[node] = place.get(node.args[0], place[node])
        return place

    def _moment(self, piece: int) -> tuple[int, int, int]:
        """Return when a microbatch passes a piece: forwards by round, then back, weights last."""
        round_, kind = divmod(piece, 4)
        return (0, round_, kind) if kind == 0 else (1, -round_, kind)

    def _sends(self, shift: int, round_: int | None = None) -> list[fx.Node]:
        """Return the sends in a direction, from stages in one round or in all."""
        each = zip(self.ends.again, self.shifts, self.spots)
        return [v for v, s, (r, _) in each if s == shift and round_ in (r, None)]

    def _carries(self, shift: int, round_: int | None = None) -> list[fx.Node]:
        """Return the arrivals from a direction, at stages in one round or in all."""
        each = zip(self.carries, self.shifts, self.arrives)
        return [c for c, s, r in each if s == shift and round_ in (r, None)]

    # ----------------------------------------------------------------------------------- the pieces

    def run(self) -> StageCall:
        self._check()
        # The order depends on the bytes that a stage keeps, and these depend on the pieces.
        self._fill()
        self.order = order_within(self.order, self._kept_bytes(), bool(self._carries(-1)))
        if not self.order.splits:
            # Without W pieces, weight gradients end the backward.
            self.place = {n: p - 1 if p % 4 == 3 else p for n, p in self.place.items()}
            self._fill()
        return StageCall(
            loop=self.call.loop,
            axis=self.axis,
            order=self.order,
            pieces=tuple(self._piece(i) for i, nodes in enumerate(self.nodes) if nodes),
            links=tuple(map(self._link, range(len(self.carries)))),
            carries=_names(self.carries),
            rows=_names(self.rows),
            others=_names(self.others),
            stacks=_names(self.ends.stacks),
            totals=_names(self.ends.totals),
            kept_bytes=self._kept_bytes(),
            sizes=tuple(self._sizes_of_loss()),
        )

    def _sizes_of_loss(self) -> Iterator[LossSize]:
        """Yield the sizes in loss values that only a run knows.

        Stages without the loss have zeros in place of these values.
        """
        sizes = [n for n in self.others if "size" in n.meta]
        names = {n.meta["size"][0]: n.name for n in sizes}
        for node in self._outputs(4 * (self.rounds - 1) + 1):
            pairs = zip(node.meta.get("shape") or (), node.meta.get("unknown") or ())
            for dim, (rows, other) in enumerate(pairs):
                if rows == other:  # not only a run knows it
                    continue
                devices = self.mesh.count(node.meta["spec"].dims[dim])
                size = product_of(
                    rows * devices, other * devices, dict(n.meta["size"] for n in sizes)
                )
                if size is None or not size.factors:  # it depends on values
                    raise needs_number(node.name, node.meta.get("source"))
                factors = tuple(names[which] for which in size.factors)
                yield LossSize(node.name, dim, size.times, devices, factors)

    def _link(self, i: int) -> StageLink:
        """Return the link by which a round's stages send."""
        shift, (round_, leaf) = self.shifts[i], self.spots[i]
        names = {
            r: carry.name
            for carry, r, other, (_, which) in zip(
                self.carries, self.arrives, self.shifts, self.spots
            )
            if other == shift and which == leaf
        }
        carries = tuple(names[r] for r in range(self.rounds))
        # One permute serves all rounds, so the carries have to agree.
        layouts = {c.meta["spec"] for c in self.carries if c.name in carries}
        assert len(layouts) == 1, "a message has one layout, at whatever round it arrives"
        send = self.ends.again[i]
        kind, message = "F" if shift > 0 else "B", send.meta["step"]
        return StageLink(kind, round_, leaf, _source(send).name, carries, message)

    def _fill(self) -> None:
        """Collect each piece's nodes, and its operands from outside."""
        self.nodes: list[list[fx.Node]] = [[] for _ in range(4 * self.rounds)]
        for node in self.graph.nodes:
            if node in self.place and not _is_mark(node):
                self.nodes[self.place[node]].append(node)
        if self.order.recompute:
            for round_ in range(self.rounds):
                self._recompute(4 * round_)
        self.inputs = [self._taken(nodes) for nodes in self.nodes]
        # The order in which a microbatch passes the pieces.
        self.moments = sorted(range(len(self.nodes)), key=self._moment)

    def _recompute(self, first: int) -> None:
        """Recompute, in the backward, forward values for it and for weight gradients."""
        forward, back = set(self.nodes[first]), self.nodes[first + 2] + self.nodes[first + 3]
        again = _reached(self._taken(back), "all_input_nodes") & forward
        self.nodes[first + 2] = [n for n in self.graph.nodes if n in again] + self.nodes[first + 2]

    def _taken(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """Return the values that nodes take from others."""
        own = {*nodes, *self.of_coordinates}
        sources = dict.fromkeys(_source(x) for node in nodes for x in node.all_input_nodes)
        return [x for x in sources if x not in own]

    def _outputs(self, piece: int) -> list[fx.Node]:
        """Return the values that a piece leaves for later ones, or for outside."""
        at = self.moments.index(piece)
        used: set[fx.Node] = set()
        # A value that a piece in between computes again is not taken from here.
        between: set[fx.Node] = set()
        for later in self.moments[at + 1 :]:
            used |= {x for x in self.inputs[later] if x not in between}
            between |= {*self.nodes[later]}
        ends = map(_source, (*self.ends.again, *self.ends.stacks, *self.ends.totals))
        before = {n for i in self.moments[:at] for n in self.nodes[i]}
        used |= {x for x in ends if x not in before}
        return [node for node in self.nodes[piece] if node in used]

    def _piece(self, piece: int) -> StageBody:
        inputs, nodes, outputs = self.inputs[piece], self.nodes[piece], self._outputs(piece)
        graph, new = fx.Graph(), {}
        for node in (*self.coordinates, *inputs):
            new[node] = graph.placeholder(node.name)
            new[node].meta = dict(node.meta)
        for node in nodes:
            for value in node.all_input_nodes:
                if value not in new and value in self.of_coordinates:
                    self._copy_number(graph, value, new)
            new[node] = graph.node_copy(node, lambda n: new[_source(n)])
        graph.output(tuple(new[node] for node in outputs))
        copy_loops(graph)  # so that the backward has its own recomputed loops
        drop_unused_results(graph)
        round_, kind = divmod(piece, 4)
        forward = {*self.nodes[4 * round_]} if _KINDS[kind] == BACKWARD else ()
        for node in nodes:
            if node in forward:
                _mark_recomputed(new[node])
        return StageBody(_KINDS[kind], round_, graph, _names(inputs), _names(outputs))

    def _copy_number(self, graph: fx.Graph, node: fx.Node, new: dict[fx.Node, fx.Node]) -> fx.Node:
        """Copy arithmetic on coordinates into a piece."""
        for value in node.all_input_nodes:
            if value not in new:
                self._copy_number(graph, value, new)
        new[node] = graph.node_copy(node, new.__getitem__)
        return new[node]

    def _kept_bytes(self) -> int:
        """Return the most bytes that a stage keeps for a microbatch between two of its pieces."""
        outside, most = {*self.rows, *self.others}, 0
        # Four pieces a round: forward, loss, backward, weights.
        for first in range(0, len(self.nodes), 4):
            received = self._carries(1, first // 4)
            back = {*self.inputs[first + 2], *self.inputs[first + 3]}
            most = max(most, _bytes_of_all({*self._outputs(first), *received} & back))
            # Weight gradients may wait longer than the backward, and so do their operands.
            if self.order.may_split:
                most = max(most, _bytes_of_all({*self.inputs[first + 3]} - outside))
        return most

    def _check(self) -> None:
        """Raise ShardingError if stages would have to communicate inside a piece."""
        for node in _with_loops(self.graph):
            step = node.meta.get("step")
            if isinstance(node.target, CollectiveKind) and step and self.axis in step.axes:
                raise ShardingError(
                    f"a stage of a pipeline along '{self.axis}' exchanges {node.name} with others",
                    where=node.meta.get("source"),
                    why="while a stage computes the forward another one computes its backward",
                    fix="mark no weight or value of the blocks and of the loss along that axis, "
                    "or use schedule='gpipe' without loss=",
                )


def _with_loops(graph: fx.Graph) -> Iterator[fx.Node]:
    for node in graph.nodes:
        yield node
        if isinstance(node.target, LoopCall):
            yield from _with_loops(node.target.graph)


def _mark_recomputed(node: fx.Node) -> None:
    """Note that the forward has a node, and those in its loops, too."""
    node.meta["recomputed"] = node.meta.get("value", node.name)
    if isinstance(node.target, LoopCall):
        for inner in node.target.graph.nodes:
            if inner.op == "call_function":
                _mark_recomputed(inner)


def _names(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _is_mark(node: fx.Node) -> bool:
    return node.target is SEND or node.target is HEAD


def _source(node: fx.Node) -> fx.Node:
    """Return the value that a mark stands for."""
    while _is_mark(node):
        node = node.all_input_nodes[0]
    return node


def _bytes_of_all(nodes: Iterable[fx.Node]) -> int:
    """Sum values' bytes; views of one value count once."""
    return sum(_bytes(node) for node in {_base(node) for node in nodes})


def _bytes(node: fx.Node) -> int:
    """Return a value's bytes; a tuple has those of its results that are read."""
    return bytes_of(node) or sum(bytes_of(u) for u in node.users if u.target is getitem)


def _base(node: fx.Node) -> fx.Node:
    """Return the value whose memory a view has."""
    while node.op == "call_function" and node.target is not getitem and is_view(node):
        inputs = node.all_input_nodes
        if not inputs:
            break
        node = inputs[0]
    return node


def _reached(nodes: Iterable[fx.Node], direction: str) -> set[fx.Node]:
    """Return nodes, and those before (all_input_nodes) or behind (users) them."""
    result: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in result:
            result.add(node)
            stack += getattr(node, direction)
    return result
