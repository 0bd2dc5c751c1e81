"""Regions of a graph that are alike: Inductor compiles one of them for all.

    norm mm gelu mm  norm mm gelu mm  norm mm gelu mm  head
    |--- region ---| |--- region ---| |--- region ---|

Layers that a Python loop calls are one long program. It is a row of operations, in which layers are
a period: each operation is like the one a layer further on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from torch import fx
from torch.fx.node import map_arg

SHORTEST = 12  # operations of a region: fewer take no time to compile
FEWEST = 3  # regions that are alike
TRIED = 8  # periods


def like_regions(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return regions that may be alike, in order: each is a run of operations of the graph."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    keys = [_key(node) for node in nodes]
    return [nodes[start:stop] for start, stop in _periods(nodes, keys, 0, len(nodes))]


def program_key(graph: fx.Graph) -> Hashable:
    """Return a key that graphs share if they compute the same from their inputs."""
    names: dict[fx.Node, str] = {}
    rows: list[Hashable] = []
    for node in graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), names.__getitem__)
        names[node] = f"%{len(names)}"
        target = "" if node.op == "placeholder" else node.target
        # Attributes are objects: equal names in two graphs may be different ones.
        owner = graph.owning_module if node.op in ("get_attr", "call_module") else None
        rows.append((node.op, target, id(owner), repr(args), repr(kwargs)))
    return tuple(rows)


def _key(node: fx.Node) -> Hashable:
    """Return an operation, and its arguments but for the values that it reads."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: "%")
    return node.target, repr(args), repr(kwargs)


def _periods(
    nodes: Sequence[fx.Node], keys: Sequence[Hashable], start: int, stop: int
) -> list[tuple[int, int]]:
    """Return the ends of the regions between two places."""
    best = (0, 0, 0, 0)  # operations that need no compilation, period, first and last place
    for period in _candidates(keys[start:stop]):
        first = start
        for i in range(start, stop - period + 1):
            if i < stop - period and keys[i] == keys[i + period]:
                continue
            count = (i - first) // period + 1  # alike from `first` to i + period
            best = max(best, ((count - 1) * period, period, first, i + period))
            first = i + 1
    saved, period, first, last = best
    if not period or saved < (FEWEST - 1) * period:
        return []
    at = _cheapest_cut(nodes, first, last, period)
    count = (last - at) // period
    regions = [(at + i * period, at + (i + 1) * period) for i in range(count)]
    before = _periods(nodes, keys, start, at)
    return [*before, *regions, *_periods(nodes, keys, at + count * period, stop)]


def _candidates(keys: Sequence[Hashable]) -> list[int]:
    """Return the most frequent distances between an operation and the next one like it."""
    last: dict[Hashable, int] = {}
    distances = Counter[int]()
    for place, key in enumerate(keys):
        distances[place - last.get(key, place)] += 1
        last[key] = place
    return [d for d, _ in distances.most_common(4 * TRIED) if d >= SHORTEST][:TRIED]


def _cheapest_cut(nodes: Sequence[fx.Node], first: int, last: int, period: int) -> int:
    """Return the place for the first region at which fewest values pass from region to region."""
    slack = (last - first) % period
    room = period if (last - first) // period > FEWEST else slack + 1
    places = {node: i for i, node in enumerate(nodes)}

    def passing(at: int) -> tuple[int, int]:
        """Return how many values pass between the first two regions; the place, for equal ones."""
        middle = at + period
        passed = (
            any(middle <= places.get(user, -1) < middle + period for user in node.users)
            for node in nodes[at:middle]
        )
        return sum(passed), at

    return min(range(first, first + room), key=passing)
