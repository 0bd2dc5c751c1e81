"""The values of a forward that its backward reads, and the backward that computes some of them.

program  %h = tanh(%x);  %y = mm(%h, %w);                    %dw = mm(%h, %dy)       backward
becomes  %h = tanh(%x);  %y = mm(%h, %w);  %h_1 = tanh(%x);  %dw = mm(%h_1, %dy)
in loops %s = stack(%h, 1x8)        %r = row(%s, 1.1x-8);  %dw = mm(%r, %dy)
becomes  %s = stack(%x, 1x8)        %r = row(%s, 1.1x-8);  %h_1 = tanh(%r);  %dw = mm(%h_1, %dy)
or       %t = to_host(%h)           %h_1 = from_host(%t);      %dw = mm(%h_1, %dy)
needs    the program of one device, whose loops are marks in a flat graph; meta["backward"]

A backward loop takes the rows that a forward loop has stacked. So a value of the
forward's loop is computed again there from rows. Random seeds are rows, too: a draw that is
recomputed has the first numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from operator import getitem
from typing import Any, NamedTuple, cast

from torch import fx

from ...comm.kinds import FusedKind
from ...comm.local_ops import from_host, to_host
from ...compat.fx_nodes import copy_node, origin_of, reached
from ...compat.operators import draws
from ...rules.custom_ops.loops import (
    CARRY,
    ENTRIES,
    EXITS,
    ROW,
    STACK,
    Nest,
    axes_apart,
    mark_of,
    nest_text,
    nests,
    runs_of,
)
from ..program import Program
from .arithmetic import op_seconds, step_seconds
from .liveness import Aliasing, bytes_of


@dataclass(frozen=True)
class Use:
    """A node of the backward that reads a value of the forward, in loops of its own.

    operand: the value, or the row of its stack. nest: the loops in which a copy of it would be.
    """

    user: fx.Node
    operand: fx.Node
    value: fx.Node
    nest: Nest


class Price(NamedTuple):
    """The cost of a value. None: it is not saved by itself, not recomputed, or not moved.

    saved: bytes, of all iterations. recomputed: seconds of computing it again. moved: seconds of
    its way to the memory of the host and back.
    """

    saved: int | None
    recomputed: float | None
    moved: float | None


class Saving(NamedTuple):
    """Values that the forward saves: on the device, and in the memory of the host."""

    kept: frozenset[fx.Node]
    moved: frozenset[fx.Node] = frozenset()


class SavedValues:
    """The joint graph of one device: the values its backward reads, and each value's cost."""

    def __init__(self, program: Program) -> None:
        self.graph, self.mesh, self.hardware = program.graph, program.mesh, program.hardware
        self.request, graph = program.request, program.graph
        self.nests = nests(graph)
        apart = axes_apart(self.nests)
        self.closed = {
            nest
            for nest in {*self.nests.values()}
            if any(loop.ends for loop in nest)
            or any(nest[: i + 1] in apart for i in range(len(nest)))
        }
        self.forward = [
            n for n in graph.nodes if n.op == "call_function" and not n.meta.get("backward")
        ]
        self.uses = [
            use
            for node in graph.nodes
            if node.op == "call_function" and node.meta.get("backward")
            for operand in dict.fromkeys(node.all_input_nodes)
            if (use := self._use(node, operand)) is not None
        ]
        self.crossed = {  # forward loops that stack values for backward loops
            self.nests[use.value][: i + 1]
            for use in self.uses
            for i in range(len(self.nests[use.value]))
            if self.nests[use.value][i] != use.nest[i]
        }
        self._kept = self._kept_anyway()
        aliasing = Aliasing()
        self.owner = {n: aliasing.owner(n) for n in graph.nodes if n.op != "output"}
        self.prices = {n: self._price(n) for n in self.forward}

    def _use(self, user: fx.Node, operand: fx.Node) -> Use | None:
        """Return the use of a value of the forward; None if it is none, or has to stay."""
        if user.target is ROW and self._stacked(user) is not None:
            return None  # its users read the value
        value = self._stacked(operand) or operand
        if value.op != "call_function" or value.meta.get("backward"):
            return None
        nest = self.nests[operand][: len(self.nests[value])]
        return Use(user, operand, value, nest)

    def _stacked(self, row: fx.Node) -> fx.Node | None:
        """Return the value of the forward of which a node is the row, in as many loops."""
        rows: list[Nest] = []
        value, around = row, self.nests[row]
        while value.target is ROW:
            rows.append(mark_of(value).nest)
            value = mark_of(value).value
        for nest in reversed(rows):
            if value.target is not STACK or around in self.closed:
                return None
            loops = mark_of(value).nest
            if loops in self.closed or loops[-1].length != nest[-1].length:
                return None
            value = mark_of(value).value
        is_forward = value.op == "call_function" and not value.meta.get("backward")
        return value if rows and is_forward else None

    def _kept_anyway(self) -> set[fx.Node]:
        """Return the values that are alive to the end, or stacked, whatever the backward reads."""
        reads = {(use.user, use.operand) for use in self.uses}

        def is_free(node: fx.Node) -> bool:
            """Return whether nothing but uses reads a stack, or a row of it."""
            return all(
                (u, node) in reads or u.target in (ROW, STACK) and is_free(u) for u in node.users
            )

        kept = {*self.graph.output_node().all_input_nodes}
        return kept | {
            mark_of(n).value for n in self.forward if n.target is STACK and not is_free(n)
        }

    def _price(self, node: fx.Node) -> Price:
        saved, moved = self._bytes(node), None
        # What is not saved by itself, such as a view, follows from others at no cost.
        may_repeat = self.request.recompute == "auto" or saved is None
        if saved and self.request.offload != "never" and not node.meta.get("unknown"):
            runs, hardware = runs_of(self.nests[node]), self.hardware
            once = hardware.launch + bytes_of(node) / hardware.host_bandwidth
            moved = 2 * runs * once
        return Price(saved, self._seconds(node) if may_repeat else None, moved)

    def _bytes(self, node: fx.Node) -> int | None:
        """Return the bytes of a saved value; None if another value is saved in its place."""
        if node.meta.get("dtype") is None or "shape" not in node.meta:  # a number, or several
            numbers = all("shape" not in x.meta for x in node.all_input_nodes)
            return None if numbers or any(u.target is getitem for u in node.users) else 0
        if self.nests[node] in self.closed or node in self._kept:
            return 0
        if node.target is ROW or self.owner[node] is not node:
            return None
        nest = self.nests[node]
        crossed = (loop for i, loop in enumerate(nest) if nest[: i + 1] in self.crossed)
        return bytes_of(node) * prod(loop.length for loop in crossed)

    def _seconds(self, node: fx.Node) -> float | None:
        """Return the seconds of computing a value again; None if that is impossible."""
        target, operation = node.target, cast(Any, node)  # whose type lacks is_impure
        if (
            target in EXITS | {CARRY}
            or isinstance(target, FusedKind)
            or self.nests[node] in self.closed
            or draws(target)
            or operation.is_impure()
        ):
            return None
        return self._once(node) * runs_of(self.nests[node])

    def _once(self, node: fx.Node) -> float:
        """Return the seconds of an operation, or of a collective that nothing hides."""
        if node.target in ENTRIES:
            return 0.0
        step = node.meta.get("step")
        if step is not None and step.collective:
            return step_seconds([step], self.mesh, self.hardware)
        return op_seconds(node, self.mesh, self.hardware)

    def as_it_stands(self) -> Saving:
        """Return the values that are saved as the program stands."""
        return Saving(frozenset(use.value for use in self.uses))

    def recomputed(self, saving: Saving) -> list[fx.Node]:
        """Return the values that the backward computes again if only these are saved."""
        saved = saving.kept | saving.moved
        return [n for n in self._needed(saved) if n not in saved]

    def _needed(self, saved: Collection[fx.Node]) -> list[fx.Node]:
        """Return the values that the backward reads, and those from which it computes others."""
        values = (use.value for use in self.uses)
        found = {*reached(values, lambda n: () if n in saved else n.all_input_nodes)}
        return [n for n in self.forward if n in found]

    def seconds(self, saving: Saving) -> float:
        """Return the seconds that values take which are recomputed or moved."""
        needed = self._needed(saving.kept | saving.moved)
        moved = sum(self.prices[n].moved or 0.0 for n in needed if n in saving.moved)
        return moved + sum(self.prices[n].recomputed or 0.0 for n in self.recomputed(saving))

    def rewritten(self, saving: Saving) -> fx.Graph:
        """Return a copy of the graph whose backward reads saved values and inputs alone."""
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            new[node] = copy_node(graph, node, new.__getitem__)
        again = {*self.recomputed(saving)}
        copies = _Copies(self, graph, new, again, saving.moved)
        for use in self.uses:
            if use.value in again or use.value in saving.moved:
                with graph.inserting_before(new[use.user]):
                    copy = copies.in_nest(use.value, use.nest)
                new[use.user].replace_input_with(new[use.operand], copy)
        marks = ROW, STACK
        for node in reversed([*graph.nodes]):
            if node.target in marks and not node.users:
                graph.erase_node(node)
        return graph


class _Copies:
    """Copies of values of the forward, in loops of the backward. new: by node of the old graph."""

    def __init__(
        self,
        values: SavedValues,
        graph: fx.Graph,
        new: Mapping[fx.Node, fx.Node],
        again: Collection[fx.Node],
        moved: Collection[fx.Node],
    ) -> None:
        self.values, self.graph, self.new, self.again = values, graph, new, again
        self.moved, self.on_host = moved, dict[fx.Node, fx.Node]()
        self.copies: dict[tuple[fx.Node, Nest], fx.Node] = {}
        self.stacks: dict[tuple[fx.Node, Nest], fx.Node] = {}
        for node in values.forward:
            if node.target is STACK:
                mark = mark_of(node)
                self.stacks.setdefault((new[mark.value], mark.nest), new[node])

    def in_nest(self, node: fx.Node, nest: Nest) -> fx.Node:
        """Return a value of the forward as the body of loops of the backward reads it."""
        nest = nest[: len(self.values.nests.get(node, ()))]
        if node.op != "call_function" or node.meta.get("backward"):
            return self.new[node]
        if (node, nest) not in self.copies:
            copy = self._again if node in self.again else self._saved
            self.copies[node, nest] = copy(node, nest)
        return self.copies[node, nest]

    def _again(self, node: fx.Node, nest: Nest) -> fx.Node:
        operands = {x: self.in_nest(x, nest) for x in node.all_input_nodes}
        copy = copy_node(self.graph, node, operands.__getitem__)
        if node.target in ENTRIES:
            copy.args = (*copy.args[:-1], nest_text(nest))
        copy.meta |= {"backward": True, "recomputed": node.meta.get("value", node.name)}
        return copy

    def _saved(self, node: fx.Node, nest: Nest) -> fx.Node:
        """Return a saved value, taken row by row from loops of the forward into other ones."""
        own = self.values.nests[node]
        same = next((i for i, (a, b) in enumerate(zip(own, nest)) if a != b), len(own))
        value = self._on_host(node) if node in self.moved else self.new[node]
        for depth in range(len(own), same, -1):
            value = self._stack(value, own[:depth])
        for depth in range(same + 1, len(own) + 1):
            meta = _typed(node, value.meta["shape"][1:], {**value.meta, "backward": True})
            text = nest_text(nest[:depth])
            value = self.graph.call_function(ROW, (value, text))
            value.meta = meta
        if node not in self.moved:
            return value
        args = value, self.values.request.device.replace("meta", "cuda")
        back = self.graph.call_function(from_host, args)
        back.meta = {**self.new[node].meta, "backward": True}
        return back

    def _on_host(self, node: fx.Node) -> fx.Node:
        """Return the copy of a value in the memory of the host."""
        if node not in self.on_host:
            value = self.new[node]
            with self.graph.inserting_after(value):
                copy = self.on_host[node] = self.graph.call_function(to_host, (value,))
            copy.meta = _typed(value, value.meta["shape"], {**value.meta, "host": True})
        return self.on_host[node]

    def _stack(self, value: fx.Node, nest: Nest) -> fx.Node:
        """Return the stack of a value of a loop, which is added where there is none."""
        if (value, nest) not in self.stacks:
            length = nest[-1].length
            with self.graph.inserting_after(value):
                stack = self.graph.call_function(STACK, (value, nest_text(nest)))
            stack.meta = _typed(value, [length, *value.meta["shape"]], value.meta)
            if value.meta.get("unknown"):
                stack.meta["unknown"] = (length, *value.meta["unknown"])
            self.stacks[value, nest] = stack
        return self.stacks[value, nest]


def _typed(of: fx.Node, shape: Any, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a row or a stack of a value."""
    kept = {key: meta[key] for key in ("backward", "dynamic", "value", "host") if key in meta}
    return {**origin_of(of), **kept, "shape": [*shape], "dtype": of.meta["dtype"]}
