"""Moves the start of every collective up and its wait down, so that what lies between is computed
meanwhile.

before   %dx = einsum(%dy, %w);  %dx_r_start = start(all_reduce, [%dx], ...);  %dx_r = wait(%dx_r_start, 0);  ... = f(%dx_r)
after    %dx = einsum(%dy, %w);  %dx_r_start = start(all_reduce, [%dx], ...);  %dw = einsum(%dy, %x);  %dx_r = wait(...);  ... = f(%dx_r)
needs    start_wait
ensures  one order of collectives for all ranks, as there is one text; no more than EXTRA of the peak memory on top of it

early    a collective begins when its operand exists, and is waited for before its result is first used. What does not
         depend on it, and stood before it, is computed while it runs.
prefetch a collective whose operand has been there since the forward or backward began (a weight's gather, mostly) begins
         when the one before it has arrived: while the device computes with one layer's weights, the next one's travel.
source   the latency-hiding scheduler of XLA (arXiv 2105.04663 leaves it to the compiler); prefetching is FSDP's (arXiv
         2304.11277, section 3.3.2)

Both are bounded by memory. A start moves up only where its result fits below the limit all the way
to where it stood; a wait moves up from its first use if what the collective still reads would not
fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from ...comm.collective import start, wait
from .liveness import Ledger, peak

EXTRA = 0.1  # of the peak: bytes that overlapping may cost


def overlap(graph: fx.Graph, early: bool = True, prefetch: bool = True) -> fx.Graph:
    """Reorders the graph in place and returns it."""
    limit = (1 + EXTRA) * peak(graph)
    inputs = graph.find_nodes(op="placeholder")
    order = [n for n in graph.nodes if n.op != "placeholder"]
    if early and max(_profile(graph, urgent := _urgent_first(order))) <= limit:
        order = urgent
    if early or prefetch:
        _relink(graph, [*inputs, *_Sweep(graph, order, limit, early, prefetch).run()])
    return graph


def _urgent_first(order: Sequence[fx.Node]) -> list[fx.Node]:
    """Between two waits, first what the collectives begun there need: what else there is can be
    computed while they run.
    """
    made: list[fx.Node] = []
    stretch: list[fx.Node] = []
    arrived: set[fx.Node] = set()
    for node in order:
        new = (
            [x for x in node.all_input_nodes if x.target is wait and x not in arrived]
            if node.target is not start
            else []
        )
        if new:
            made += _stretch(stretch)
            stretch = []
            arrived.update(new)
        stretch.append(node)
    return made + _stretch(stretch)


def _stretch(nodes: list[fx.Node]) -> list[fx.Node]:
    """One stretch in its new order. Random operations stay in theirs, so that they draw the same
    numbers.
    """
    if not any(n.target is start for n in nodes):
        return nodes
    place = {node: i for i, node in enumerate(nodes)}
    draws = [n for n in nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())]
    before = dict(zip(draws[1:], draws))
    chosen: dict[fx.Node, None] = {}
    for begun in (n for n in nodes if n.target is start):
        found, stack = {begun}, [begun]
        while stack:
            node = stack.pop()
            needed = [
                x
                for x in (*node.all_input_nodes, before.get(node))
                if x in place and x not in found and x not in chosen
            ]
            found.update(needed)
            stack += needed
        if len(found) > 1:  # else it begins as soon as memory allows
            chosen.update(dict.fromkeys(sorted(found, key=place.__getitem__)))
    return [*chosen, *(n for n in nodes if n not in chosen)]


class _Sweep:
    """Writes the nodes down in order, starts and waits where they are to be."""

    def __init__(
        self, graph: fx.Graph, order: Sequence[fx.Node], limit: float, early: bool, prefetch: bool
    ):
        self.order, self.limit, self.early = order, limit, early
        self.place = {node: i for i, node in enumerate(order)}
        self.base = _profile(graph, order)
        self.ledger = Ledger(graph)
        self.made: dict[fx.Node, None] = {}
        starts = [n for n in order if n.target is start]
        self.missing = {
            n: sum(x.op != "placeholder" for x in n.all_input_nodes) for n in starts
        }  # operands that do not exist yet
        self.chains = _chains(starts) if prefetch else []
        self.next = {a: b for chain in self.chains for a, b in zip(chain, chain[1:])}
        self.fixed = {n for chain in _chains(starts) for n in chain} | (
            {*starts} if not early else set()
        )
        self.ready: dict[fx.Node, int] = {}  # to be begun, not before this place
        self.in_flight: dict[fx.Node, None] = {}
        self.extra = 0  # bytes of results begun before their place

    def run(self) -> Iterable[fx.Node]:
        self.ready.update({chain[0]: 0 for chain in self.chains if not chain[0].meta["backward"]})
        for i, node in enumerate(self.order):
            if node in self.made:
                self.extra -= node.meta["bytes"] if node.target is start else 0
            elif node.target is not wait:
                self.hoist(i)
                self.require(node)
                self.hoist(i)
                self.make_room(node)
                if node not in self.made:
                    self.emit(node)
            elif not self.early:
                self.arrive(node)
        return self.made

    def emit(self, node: fx.Node) -> None:
        self.ledger.emit(node)
        self.made[node] = None
        if node.target is start:
            self.in_flight[node] = None
            self.ready.pop(node, None)
        for user in node.users:
            if user.target is start:
                self.missing[user] -= 1
                if not self.missing[user] and user not in self.fixed:
                    self.ready[user] = 0

    def require(self, node: fx.Node) -> None:
        """Waits for what the node uses."""
        for value in node.all_input_nodes:
            if value.target is wait and value not in self.made:
                self.arrive(value)

    def arrive(self, result: fx.Node) -> None:
        begun = result.args[0]
        if begun not in self.made:
            self.require(begun)
            self.emit(begun)
        self.emit(result)
        if begun in self.in_flight:
            del self.in_flight[begun]
            if self.next.get(begun, begun) not in self.made:
                self.ready[self.next[begun]] = 0

    def hoist(self, place: int) -> None:
        """Begins what is ready and finds room from here to where it stood, in order."""
        for begun, since in list(self.ready.items()):
            size, stood = begun.meta["bytes"], self.place[begun]
            if place >= since and not self.missing[begun] and begun not in self.made:
                room = self.limit - self.extra - size
                if stood > place and max(self.base[place:stood]) > room:
                    self.ready[begun] = (
                        max(i for i in range(place, stood) if self.base[i] > room) + 1
                    )
                    continue
                self.extra += size if stood > place else 0
                self.make_room(begun)
                self.emit(begun)

    def make_room(self, node: fx.Node) -> None:
        """Waits for collectives in flight, oldest first, if what they read has to be freed."""
        for begun in list(self.in_flight):
            if self.ledger.alive + self.ledger.needed(node) <= self.limit:
                return
            if any(x.op == "call_function" for x in begun.all_input_nodes):
                self.arrive(next(iter(begun.users)))


def _chains(starts: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The collectives whose operands have been there since the forward began, and since the
    backward did.
    """
    phases: list[list[fx.Node]] = [[], []]
    for node in starts:
        backward = bool(node.meta["backward"])
        if all(
            x.op == "placeholder" or backward and not x.meta.get("backward")
            for x in node.all_input_nodes
        ):
            phases[backward].append(node)
    return [chain for chain in phases if chain]


def _profile(graph: fx.Graph, order: Sequence[fx.Node]) -> list[int]:
    """Bytes alive while each node runs."""
    ledger = Ledger(graph)
    return [ledger.emit(node) for node in order]


def _relink(graph: fx.Graph, order: Iterable[fx.Node]) -> None:
    end = graph.output_node()
    for node in order:
        if node is not end:
            end.prepend(node)
