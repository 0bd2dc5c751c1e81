"""Send the gathered rows that an iteration reads first one iteration earlier.

before   body: %w = row;  %s = start(all_gather, [%w]);  %g = wait(%s, 0);  %h1 = mm(%h, %g)
after    body: %g = held;  %w = the next row;  %s = start(all_gather, [%w])
               %h1 = mm(%h, %g);  %next = wait(%s, 0)
needs    start_wait, outline_loops
ensures  the same messages: the first iteration's are sent before it, the last one sends none;
         the peak memory grows by one row's gathered bytes, at most by the fraction EXTRA

Only gathers before the first product move: nothing in their own iteration hides them. Later weights
travel while the iteration computes (overlap.py). Source: software pipelining of a loop body (Lam,
1988).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from ...comm.collective import start, wait
from ...comm.kinds import KINDS, CollectiveKind
from ...compat.operators import draws
from ...fx_passes.loop_call import BodyCall, LoopCall, LoopOperands, loop_calls
from ...fx_passes.schedule.arithmetic import flops
from ...fx_passes.schedule.liveness import peak
from ...fx_passes.schedule.overlap import EXTRA
from ...layout.mesh import Mesh


def prefetch_rows(graph: fx.Graph, mesh: Mesh, room: float | None = None) -> None:
    """Rewrite a program, and the bodies of its loops, in place.

    room: the bytes that may be added to a loop's memory.
    """
    room = EXTRA * peak(graph) if room is None else room
    for node, call in [*loop_calls(graph)]:
        if not isinstance(call, LoopCall):
            continue
        # If a value ends the loop, nobody knows whether a next iteration comes.
        if call.loop.length > 1 and not call.loop.ends and not call.turned_rows:
            body = _Body(node, call, mesh)
            if body.starts and body.bytes <= room:
                body.rewrite()
        prefetch_rows(call.graph, mesh, room)


class _Body:
    """A loop body, and its collectives that need only rows and outside values."""

    def __init__(self, node: fx.Node, call: LoopCall, mesh: Mesh) -> None:
        self.node, self.call, self.graph = node, call, call.graph
        self.inputs = call.body_inputs
        self.needs: dict[fx.Node, list[fx.Node]] = {}  # start -> what it is computed by, in order
        self._find(mesh)
        self.starts = [*self.needs]
        self.bytes = sum(each.meta["bytes"] for each in self.starts)

    def _find(self, mesh: Mesh) -> None:
        fixed = self._fixed()
        below: dict[fx.Node, dict[fx.Node, None]] = {node: {} for node in fixed}
        for node in self.graph.nodes:
            # Later gathers have work to travel beside (overlap.py).
            if flops(node, mesh) or isinstance(node.target, BodyCall):
                break
            if node.op != "call_function" or not all(x in below for x in node.all_input_nodes):
                continue
            before = {n: None for x in node.all_input_nodes for n in below[x]}
            if node.target is start and _gathers(node.args[0]):
                if any(x in self.inputs.rows for n in (node, *before) for x in n.all_input_nodes):
                    self.needs[node] = [*before]
            elif _is_plain(node):
                below[node] = {**before, node: None}

    def rewrite(self) -> None:
        """Move the collectives one iteration ahead."""
        waits = [user for each in self.starts for user in each.users]
        rows = [r for r in self.inputs.rows if any(r in n.all_input_nodes for n in self._nodes())]
        held = self._add_inputs(self.inputs.carries or self.inputs.coordinates, waits, "held")
        table = dict(zip(rows, self._add_inputs(self.inputs.rows, rows, "ahead")))
        after = self._for_the_next({n: table.get(n, n) for n in self._fixed()}, waits)
        for value, holder in zip(waits, held):
            value.replace_all_uses_with(holder)
        # Users go before their operands: a node with users cannot be erased.
        for node in reversed([*self._nodes(), *waits]):
            if not node.users:
                self.graph.erase_node(node)
        results = self.call.body_results
        self.graph.output_node().args = ((*results.again, *after, *results.returned),)
        operands = LoopOperands.of(self.node)
        ahead = [operands.rows[self.inputs.rows.index(r)] for r in rows]
        self.node.args = replace(operands, rows=[*operands.rows, *ahead]).args
        self.call.rows += len(rows)
        self.call.ahead, self.call.held = len(rows), len(held)

    def _fixed(self) -> list[fx.Node]:
        return [*self.inputs.coordinates, *self.inputs.rows, *self.inputs.others]

    def _nodes(self) -> list[fx.Node]:
        """Return the collectives and all that they depend on, in body order."""
        moved = {n for each, needs in self.needs.items() for n in (*needs, each)}
        return [n for n in self.graph.nodes if n in moved]

    def _for_the_next(self, table: dict[fx.Node, fx.Node], waits: list[fx.Node]) -> list[fx.Node]:
        """Add the next iteration's collectives: they begin first, and are waited for last."""
        first = next(n for n in self.graph.nodes if n.op != "placeholder")
        with self.graph.inserting_before(first):
            for node in self._nodes():
                table[node] = self.graph.node_copy(node, table.__getitem__)
        with self.graph.inserting_before(self.graph.output_node()):
            return [self.graph.node_copy(node, table.__getitem__) for node in waits]

    def _add_inputs(self, behind: list[fx.Node], like: list[fx.Node], name: str) -> list[fx.Node]:
        """Add inputs behind others, with the metadata from `like`."""
        place, result = behind[-1], []
        for value in like:
            with self.graph.inserting_after(place):
                place = self.graph.placeholder(f"{value.name}_{name}")
            # An input sends nothing, so it has no step.
            place.meta = {k: v for k, v in value.meta.items() if k != "step"}
            result.append(place)
        return result


def _is_plain(node: fx.Node) -> bool:
    """Return whether an operation may be computed an iteration earlier."""
    is_sent = node.target in (start, wait)
    return not (is_sent or node.meta.get("dynamic") or draws(node.target))


def _gathers(name: Any) -> bool:
    kind = KINDS[name]
    return isinstance(kind, CollectiveKind) and kind.gathers
