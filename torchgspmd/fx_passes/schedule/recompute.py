"""Compute values of the forward again in the backward, so that a program fits a memory budget.

before   a program of one device whose peak is above the budget
after    the same, whose backward computes some values again: the peak is below the budget
needs    loops as marks in a flat graph; meta["backward"]
ensures  the same values; nothing changes if the program fits, or if no choice makes it fit
source   minimum cuts: Jain et al. (Checkmate, arXiv 1910.02653) pose the problem; torch's
         min_cut_rematerialization_partition has this network for fusion; segments: Chen et al.
         (arXiv 1604.06174)

A price per byte weighs memory against time. For a price the cheapest set of saved values is a
minimum cut. A value is saved at its bytes times the price, or at the seconds of its way to the
host's memory and back; or it is recomputed at its seconds. A higher price saves less. Recomputing
through many layers at once would need all their memory again. So the forward is divided into
segments at places where few bytes are alive; those values stay saved. Each choice is scheduled to
its end, and has the peak that the plan will have.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import accumulate
from typing import Any

from torch import fx

from ..program import Program
from .liveness import budget_of, bytes_of, peak
from .saved_values import SavedValues, Saving

UNLIMITED = 1 << 60  # ticks
TICKS = 1e12  # a second
STEPS = 7  # of each bisection
FINEST = 256  # segments
# Keys of Plan.counts.
PEAK_BEFORE, RECOMPUTED_NS = "peak_without_recomputation", "recomputed_nanoseconds"


@dataclass(frozen=True)
class _Choice:
    """Values that are saved, with the peak and the seconds that follow."""

    saving: Saving
    peak: int
    seconds: float


def recompute(program: Program) -> fx.Graph | None:
    """Return the graph with the least recomputation that fits; None if it stays."""
    budget = budget_of(program)
    values = SavedValues(program)
    search = _Search(program, values)
    if not values.uses or search.everything.peak <= budget:
        return None
    best = search.best(budget)
    without = copy.copy(program)  # as it would overlap without a budget
    without.request = replace(program.request, recompute="model", offload="never")
    program.counts[PEAK_BEFORE] = _peak_of(without, values.rewritten(search.everything.saving))
    program.counts[RECOMPUTED_NS] = round(best.seconds * 1e9)
    return values.rewritten(best.saving) if best is not search.everything else None


def _peak_of(program: Program, graph: fx.Graph) -> int:
    """Return the peak of the program that the passes behind this one make of a graph."""
    return peak(program.tried(graph).graph)


class _Search:
    """The search for the saved values of a program."""

    def __init__(self, program: Program, values: SavedValues) -> None:
        self.program, self.values = program, values
        self.known: dict[Saving, _Choice] = {}
        self.everything = self.measured(values.as_it_stands())
        self.place = {node: i for i, node in enumerate(values.forward)}

    def best(self, budget: int) -> _Choice:
        """Return the choice with the least seconds that fits; the least peak if none does."""
        smallest: list[tuple[_Choice, frozenset[fx.Node]]] = []
        for count in _segment_counts(len(self.values.forward)):
            ends = frozenset(_segment_ends(self.values, count))
            smallest.append((self.cut(ends, None), ends))
        if not (fitting := [each for each in smallest if each[0].peak <= budget]):
            smallest.sort(key=lambda each: each[0].peak)
            tried = [(c, ends) for _, ends in smallest[:2] for c in self.at_prices(ends)]
            if not (fitting := [each for each in tried if each[0].peak <= budget]):
                return min(self.known.values(), key=lambda c: (c.peak, c.seconds))
        # The least peak leaves most room; more segments keep more values, and cost less time.
        chosen = (
            min(fitting, key=lambda each: each[0].peak),
            min(fitting, key=lambda each: each[0].seconds),
            fitting[-1],
        )
        return min(  # of ways that are as good the first one: all ranks choose alike
            (self.relax(choice, ends, budget) for choice, ends in dict.fromkeys(chosen)),
            key=lambda choice: (choice.seconds, choice.peak),
        )

    def at_prices(self, ends: frozenset[fx.Node]) -> list[_Choice]:
        """Return the choices of prices around the mean of seconds for a byte."""
        scale = self.scale(ends)
        return [self.cut(ends, scale * 4.0**power) for power in range(-STEPS // 2, STEPS)]

    def scale(self, ends: frozenset[fx.Node]) -> float:
        """Return the seconds of recomputing all that may be, for a byte of all that is saved."""
        total = sum(self.values.prices[v].saved or 0 for v in self.everything.saving.kept)
        return self.cut(ends, None).seconds / max(total, 1)

    def relax(self, fits: _Choice, ends: frozenset[fx.Node], budget: int) -> _Choice:
        """Return a choice of fewer seconds that fits: of a lower price, then of fewer values."""
        scale = self.scale(ends)
        low, high, worse = 1e-3 * scale, 1e3 * scale, self.everything
        for _ in range(STEPS if scale else 0):
            middle = (low * high) ** 0.5
            choice = self.cut(ends, middle)
            if choice.peak <= budget:
                high, fits = middle, min(fits, choice, key=lambda c: c.seconds)
            else:
                low, worse = middle, choice
        return self.mix(fits, worse, budget)

    def mix(self, fits: _Choice, worse: _Choice, budget: int) -> _Choice:
        """Return a choice that fits: of the first values as `fits`, of later ones as `worse`.

        Values that are saved early live longest.
        """
        best = fits
        early, late = fits.saving, worse.saving
        changed = (early.kept ^ late.kept) | (early.moved ^ late.moved)
        places = sorted(self.place[v] for v in changed)
        low, high = 0, len(places)
        while low < high:
            middle = (low + high) // 2
            end = places[middle]
            mixed = (
                frozenset(
                    {v for v in a if self.place[v] <= end} | {v for v in b if self.place[v] > end}
                )
                for a, b in zip(early, late)
            )
            choice = self.measured(Saving(*mixed))
            if choice.peak <= budget:
                high, best = middle, min(best, choice, key=lambda c: c.seconds)
            else:
                low = middle + 1
        return best

    def cut(self, ends: frozenset[fx.Node], price: float | None) -> _Choice:
        """Return the choice of a price per byte. None: any number of seconds for a byte."""
        return self.measured(minimum_cut(self.values, ends, price))

    def measured(self, saving: Saving) -> _Choice:
        if saving not in self.known:
            found = _peak_of(self.program, self.values.rewritten(saving))
            self.known[saving] = _Choice(saving, found, self.values.seconds(saving))
        return self.known[saving]


def minimum_cut(values: SavedValues, ends: Collection[fx.Node], price: float | None) -> Saving:
    """Return the values whose saving, with the recomputation of others, costs least.

    ends: values that are not recomputed. price: seconds for a byte.
    """
    networkx: Any = import_module("networkx")
    flow = networkx.DiGraph()
    source, sink = "source", "sink"
    flow.add_nodes_from([source, sink])
    moved: set[fx.Node] = set()
    for node in values.recomputed(Saving(frozenset())):
        saved, seconds, moving = values.prices[node]
        before, behind = (node, 0), (node, 1)
        if seconds is None or node in ends:
            flow.add_edge(source, before)  # without a capacity
        else:
            flow.add_edge(source, before, capacity=1 + round(seconds * TICKS))
        if saved is None:
            flow.add_edge(before, behind)
        else:
            cost = saved * (UNLIMITED if price is None else price * TICKS)
            if moving is not None and moving * TICKS < cost:
                cost = moving * TICKS
                moved.add(node)
            flow.add_edge(before, behind, capacity=round(cost))
        for operand in node.all_input_nodes:
            if operand in values.prices:
                flow.add_edge((operand, 1), before)
    for use in values.uses:
        flow.add_edge((use.value, 1), sink)
    _, (near, _) = networkx.minimum_cut(flow, source, sink)
    cut = {n for n in values.prices if (n, 0) in near and (n, 1) not in near and (n, 1) in flow}
    return Saving(frozenset(cut - moved), frozenset(cut & moved))


def _segment_counts(nodes: int) -> Iterator[int]:
    """Yield the numbers of segments that are tried."""
    count = 1
    while count <= min(FINEST, max(nodes // 4, 1)):
        yield count
        count *= 2


def _segment_ends(values: SavedValues, count: int) -> Iterator[fx.Node]:
    """Yield the values that are alive where a forward is divided into so many segments.

    The segments compute about as many bytes each. A segment ends where fewest bytes are alive.
    """
    place = {node: i for i, node in enumerate(values.forward)}
    last: dict[fx.Node, int] = {}  # place of the last user in the forward
    for node, i in place.items():
        for operand in node.all_input_nodes:
            last[values.owner[operand]] = i
    size = {v: values.prices[v].saved or 0 for v in place}
    alive = [0] * (len(place) + 1)
    for node, i in place.items():
        alive[i] += size[node]
        alive[max(last.get(node, i), i)] -= size[node]
    alive = [*accumulate(alive)][: len(place)]
    done = [*accumulate(map(bytes_of, place))]
    for k in range(1, count):
        low, high = (bisect_left(done, done[-1] * (k + d) / count) for d in (-0.5, 0.5))
        middle = bisect_left(done, done[-1] * k / count)
        near = range(low, min(high, len(done) - 1) + 1)
        end = min(near, key=lambda i: (alive[i], abs(i - middle)))
        yield from (v for v, i in place.items() if i <= end < last.get(v, -1) and size[v])
