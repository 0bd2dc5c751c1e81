"""The cheapest cut through a graph.

source   Edmonds and Karp's algorithm (1972)
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Hashable

Node = Hashable


class Cut:
    """Edges between nodes, each with the cost of having its source and target apart."""

    def __init__(self) -> None:
        self.left: dict[Node, dict[Node, float]] = defaultdict(dict)  # capacity that is left

    def add(self, source: Node, target: Node, cost: float) -> None:
        self.left[source][target] = self.left[source].get(target, 0.0) + cost
        # The way back, without capacity: flow on the edge can be taken back by it.
        self.left[target].setdefault(source, 0.0)

    def tie(self, one: Node, other: Node) -> None:
        """Keep two nodes on one side."""
        self.add(one, other, math.inf)
        self.add(other, one, math.inf)

    def first_side(self, source: Node, sink: Node) -> set[Node]:
        """Return the nodes on `source`'s side if `sink` is on the other; as few as can be."""
        while sink in (before := self._reached(source, sink)):
            path, at = [], sink
            while at != source:
                path.append((before[at], at))
                at = before[at]
            flow = min(self.left[a][b] for a, b in path)
            if flow == math.inf:
                # A path without any finite edge: no cut keeps them apart.
                raise AssertionError("the two sides of a cut are tied")
            for a, b in path:
                self.left[a][b] -= flow
                self.left[b][a] += flow
        return set(before)

    def _reached(self, source: Node, sink: Node) -> dict[Node, Node]:
        """Return the nodes that more can flow to, up to `sink`, each with the one before it."""
        before, queue = {source: source}, deque([source])
        while queue and sink not in before:
            at = queue.popleft()
            for target, left in self.left[at].items():
                if left > 0 and target not in before:
                    before[target] = at
                    queue.append(target)
        return before
