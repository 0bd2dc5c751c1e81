"""Move the start of every collective up and its wait down, to overlap it with computation.

before   %dx = einsum(%dy, %w);  %dx_r_start = start(all_reduce, [%dx], ...)
         %dx_r = wait(%dx_r_start, 0);  ... = f(%dx_r)
after    %dx = einsum(%dy, %w);  %dx_r_start = start(all_reduce, [%dx], ...)
         %dw = einsum(%dy, %x);  %dx_r = wait(%dx_r_start, 0);  ... = f(%dx_r)
needs    start_wait
ensures  one order of collectives for all ranks, as there is one text; the peak memory grows by at
         most EXTRA

early    A collective starts when its operand exists, and is waited for before its result's first
         use. Independent operations that stood before it are computed while it runs.
         So are updates of weights that are gathered only to be returned: see early_updates.
prefetch The operand of some collectives exists since the forward or backward began: mostly they are
         gathers of weights. Each starts when the one before it has arrived. While the device
         computes with one layer's weights, the next layer's are sent.
source   XLA's latency-hiding scheduler (arXiv 2105.04663 leaves it to the compiler); FSDP's
         prefetching (arXiv 2304.11277, section 3.3.2)

Both are bounded by memory. A start moves up only if its result fits below the limit all the way to
its old place. A wait moves up from its first use if the operand of the collective would not fit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import fx

from ...capture import MUTATION
from ...capture.assumed_sizes import CHECKS
from ...comm.collective import start, wait
from ...compat.fx_nodes import reached
from ...compat.operators import draws
from ..loop_call import BodyCall
from ..program import Program
from .arithmetic import stream_seconds
from .bucket import bucket, start_wait
from .collective_matmul import collective_matmul
from .liveness import Ledger, budget_of, peak

EXTRA = 0.1  # Memory that overlapping may cost, as a fraction of the peak.


def scheduled_seconds(graph: fx.Graph, program: Program) -> float:
    """Schedule a graph as the passes behind this one do, and return its seconds on two streams."""
    skipped, mesh, hardware = program.request.skip_passes, program.mesh, program.hardware
    if "collective_matmul" not in skipped:
        collective_matmul(graph, mesh, hardware)
    if "bucket" not in skipped:
        bucket(graph, mesh, hardware, program.captured.has_backward)
    return stream_seconds(overlap(start_wait(graph)), mesh, hardware)


def overlap_program(p: Program) -> fx.Graph:
    """Move starts up and waits down, for the reasons that are not skipped."""
    skip, returned = p.request.skip_passes, p.graph.output_node().args[0]
    kinds = [out.kind for out in p.captured.outputs]
    return overlap(
        p.graph,
        early="overlap" not in skip,
        prefetch="prefetch" not in skip,
        most=max(budget_of(p) - peak(p.graph), 0) if p.request.has_budget else None,
        updates={v for v, kind in zip(returned, kinds) if kind == MUTATION},
    )


def overlap(
    graph: fx.Graph,
    early: bool = True,
    prefetch: bool = True,
    room: float | None = None,
    updates: Collection[fx.Node] = (),
    most: float | None = None,
) -> fx.Graph:
    """Reorder the graph, and its loop bodies, in place and return it.

    room: bytes that it may cost; a body may cost as many as the whole program. updates: values that
    the program writes to inputs, such as weights. most: bytes that a budget leaves.
    """
    # A body gets the room of the whole program: a share of its own small peak would allow nothing.
    whole = peak(graph)
    room = EXTRA * whole if room is None else room
    room = room if most is None else min(room, most)
    inputs = graph.find_nodes(op="placeholder")
    order = [n for n in graph.nodes if n.op != "placeholder"]
    calls = [n.target for n in order if isinstance(n.target, BodyCall)]
    bodies = [body for call in calls for body in call.bodies]
    for body in bodies:
        overlap(body.graph, early, prefetch, room)
    limit = (peak(graph) if bodies else whole) + room
    # Each better order is taken only if its memory fits, so a tight program keeps the old one.
    if early and max(_profile(graph, urgent := _urgent_first(order))) <= limit:
        order = urgent
    if early and updates:
        soon = early_updates(order, updates)
        order = soon if max(_profile(graph, soon)) <= limit else order
    if early or prefetch:
        end = graph.output_node()
        for node in [*inputs, *_Scheduler(graph, order, limit, early, prefetch).run()]:
            if node is not end:
                end.prepend(node)
    return graph


def _urgent_first(order: Sequence[fx.Node]) -> list[fx.Node]:
    """Order nodes so that between two waits, those that a start needs come first.

    The others can be computed while the collectives run.
    """
    result: list[fx.Node] = []
    stretch: list[fx.Node] = []
    arrived: set[fx.Node] = set()
    for node in order:
        new = (
            [x for x in node.all_input_nodes if x.target is wait and x not in arrived]
            if node.target is not start
            else []
        )
        if new:
            result += _starts_first(stretch)
            stretch = []
            arrived.update(new)
        stretch.append(node)
    return result + _starts_first(stretch)


def _starts_first(nodes: list[fx.Node]) -> list[fx.Node]:
    """Order nodes so that those that a start needs come first; before them, those of checks.

    Random operations keep their order, so that they draw the same numbers.
    """
    urgent = [n for n in nodes if n.target is start or n.target in CHECKS]
    if not any(n.target is start for n in urgent):
        return nodes
    place = {node: i for i, node in enumerate(nodes)}
    drawing = [n for n in nodes if draws(n.target)]
    # Each draw depends on the one before it: another order would give other numbers.
    before = dict(zip(drawing[1:], drawing))
    chosen: dict[fx.Node, None] = {}
    # The link is free for those that hold up computation: results that are only returned can wait.
    # Behind a check there may be operations that fail for other sizes than it allows.
    urgent.sort(key=lambda n: -1 if n.target in CHECKS else _ends_in_output(n))
    for each in urgent:
        ancestors = [
            *reached(
                [each],
                lambda node: [
                    x
                    for x in (*node.all_input_nodes, before.get(node))
                    if x in place and x not in chosen
                ],
            )
        ]
        if (
            len(ancestors) > 1 or each.target in CHECKS
        ):  # A start without any begins as soon as memory allows.
            chosen.update(dict.fromkeys(sorted(ancestors, key=place.__getitem__)))
    return [*chosen, *(n for n in nodes if n not in chosen)]


class _Scheduler:
    """List scheduler: nodes keep their order, starts move up and waits move down."""

    def __init__(
        self, graph: fx.Graph, order: Sequence[fx.Node], limit: float, early: bool, prefetch: bool
    ) -> None:
        self.order, self.limit, self.early = order, limit, early
        self.place = {node: i for i, node in enumerate(order)}
        self.base = _profile(graph, order)
        self.ledger = Ledger(graph)
        self.scheduled: dict[fx.Node, None] = {}
        starts = [n for n in order if n.target is start]
        self.missing = {  # start -> number of operands that do not exist yet
            n: sum(x.op != "placeholder" for x in n.all_input_nodes) for n in starts
        }
        self.chains = _chains(starts) if prefetch else []
        self.next = {a: b for chain in self.chains for a, b in zip(chain, chain[1:])}
        self.fixed = {n for chain in _chains(starts) for n in chain} | (
            {*starts} if not early else set()
        )
        self.ready: dict[fx.Node, int] = {}  # start -> the first place where it may be
        self.in_flight: dict[fx.Node, None] = {}
        self.extra = 0  # Bytes of results whose start has moved up.

    def run(self) -> Iterable[fx.Node]:
        """Return the nodes in their new order."""
        # The backward's weights are not gathered during the forward: they would be alive all the
        # time.
        begins = bool(self.order[0].meta.get("backward"))  # a body, or an update
        self.ready.update({c[0]: 0 for c in self.chains if bool(c[0].meta["backward"]) == begins})
        for i, node in enumerate(self.order):
            if node in self.scheduled:
                self.extra -= node.meta["bytes"] if node.target is start else 0
            elif node.target is not wait:
                self.hoist(i)
                self.require(node)
                self.hoist(i)
                self.make_room(node)
                if node not in self.scheduled:
                    self.emit(node)
            elif not self.early:
                self.arrive(node)
        return self.scheduled

    def emit(self, node: fx.Node) -> None:
        """Append a node to the new order."""
        self.ledger.emit(node)
        self.scheduled[node] = None
        if node.target is start:
            self.in_flight[node] = None
            self.ready.pop(node, None)
        for user in node.users:
            if user.target is start:
                self.missing[user] -= 1
                if not self.missing[user] and user not in self.fixed:
                    self.ready[user] = 0

    def require(self, node: fx.Node) -> None:
        """Wait for the collectives whose results a node uses."""
        for value in node.all_input_nodes:
            if value.target is wait and value not in self.scheduled:
                self.arrive(value)

    def arrive(self, result: fx.Node) -> None:
        """Emit a wait, after its start, and let the next prefetch begin."""
        collective = result.args[0]
        if collective not in self.scheduled:
            self.require(collective)
            self.emit(collective)
        self.emit(result)
        if collective in self.in_flight:
            del self.in_flight[collective]
            if self.next.get(collective, collective) not in self.scheduled:
                self.ready[self.next[collective]] = 0

    def hoist(self, place: int) -> None:
        """Emit the ready starts whose results fit from here to their old place, in order."""
        # Up to its old place the result takes memory that the old order did not need.
        for collective, since in list(self.ready.items()):
            size, old_place = collective.meta["bytes"], self.place[collective]
            if place >= since and not self.missing[collective] and collective not in self.scheduled:
                room = self.limit - self.extra - size
                if old_place > place and max(self.base[place:old_place]) > room:
                    self.ready[collective] = (
                        max(i for i in range(place, old_place) if self.base[i] > room) + 1
                    )
                    continue
                self.extra += size if old_place > place else 0
                self.make_room(collective)
                self.emit(collective)

    def make_room(self, node: fx.Node) -> None:
        """Wait for collectives in flight, oldest first, while their operands have to be freed."""
        for collective in list(self.in_flight):
            if self.ledger.alive + self.ledger.needed(node) <= self.limit:
                return
            # Waiting frees operands that the program computed; an input would stay alive.
            if any(x.op == "call_function" for x in collective.all_input_nodes):
                self.arrive(next(iter(collective.users)))


def _chains(starts: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Return the collectives whose operands exist since the forward, or the backward, began.

    Without those that the next iteration of a loop needs: they begin first, and end last.
    """
    phases: list[list[fx.Node]] = [[], []]
    for node in starts:
        if _ends_in_output(node):
            continue
        backward = bool(node.meta["backward"])
        if all(
            x.op == "placeholder" or backward and not x.meta.get("backward")
            for x in node.all_input_nodes
        ):
            phases[backward].append(node)
    return [chain for chain in phases if chain]


def _profile(graph: fx.Graph, order: Sequence[fx.Node]) -> list[int]:
    """Return the bytes alive while each node runs."""
    ledger = Ledger(graph)
    return [ledger.emit(node) for node in order]


# A part of `overlap`: updates to weights that are gathered only to be returned.
#
#     %g1_start = start(reduce_scatter, %dw1); ... the backward up to %dw0; %g0_start = ...
#     %w1 = adam(wait(%g1_start)); start(all_gather, %w1); ... the rest of the backward
#
# Nothing else asks for such a gather before the program ends, where no computation is left to hide
# it. It begins one gradient later than the sum that it needs: that one has had a layer's time. The
# idea of sharded updates comes from arXiv 2004.13336, which gathers in the next step.


def early_updates(order: Sequence[fx.Node], updates: Collection[fx.Node]) -> list[fx.Node]:
    """Order nodes so that update messages that depend on sums follow the sum after these."""
    place = {node: i for i, node in enumerate(order)}
    last = {
        s: before
        for s in order
        if s.target is start and all(arrived in updates for arrived in s.users)
        if _is_returned(s) and (before := _ancestors(s, place))
    }
    # start -> the place from which on it can begin, which is where it will
    begins = {
        n: max((place[x] for x in n.all_input_nodes if x in place), default=0)
        for n in order
        if n.target is start and n not in last
    }
    starts = sorted(begins, key=begins.__getitem__)
    behind: dict[int, list[fx.Node]] = {}  # place -> what is to follow
    for sent, ancestors in last.items():
        sums = max((begins.get(n, len(order)) for n in ancestors if n.target is start), default=-1)
        following = next((s for s in starts if begins[s] > sums >= 0), None)
        if following is not None and begins[following] < place[sent]:
            behind.setdefault(begins[following], []).extend((following, *ancestors, sent))
    result: dict[fx.Node, None] = {}
    for i, node in enumerate(order):
        result[node] = None
        result.update(dict.fromkeys(behind.get(i, ())))
    return [*result]


def _is_returned(node: fx.Node) -> bool:
    """Return whether a node sends computed values, and the program only returns its result."""
    return _ends_in_output(node) and any(
        x.op == "call_function" and x.target is not wait for x in node.all_input_nodes
    )


def _ends_in_output(node: fx.Node) -> bool:
    """Return whether the program only returns the result of a start."""
    return all(user.op == "output" for arrived in node.users for user in arrived.users)


def _ancestors(node: fx.Node, place: dict[fx.Node, int]) -> list[fx.Node]:
    """Return a node's ancestors, in order; none if random numbers are drawn for it."""
    _, *found = reached([node], lambda n: [x for x in n.all_input_nodes if x in place])
    # Moved draws would give other numbers than one device has.
    if any(draws(n.target) for n in found):
        return []
    return sorted(found, key=place.__getitem__)
