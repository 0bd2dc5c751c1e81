"""HostLevels: replaces a collective between hosts by one inside hosts and one between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from ..compat.operators import aten
from .process_groups import ProcessGroups


class HostLevels:
    """A collective in one rank's program whose group is `count` hosts of `each` ranks.

    Methods add nodes in the program's order: before the collective, and after `between` before its
    wait. Collectives inside a host are waited for at once; the one between hosts is in flight as
    long as the one that it replaces was.
    """

    def __init__(self, graph: fx.Graph, node: fx.Node, groups: ProcessGroups, each: int) -> None:
        arguments: tuple[Any, ...] = node.args
        self.graph, self.node, self.place = graph, node, node
        self.wait = next(iter(node.users))
        self.x, *self.options, group = arguments
        self.shape, self.each = list(node.meta["shape"]), each
        ranks, me = groups.ranks(group), groups.position(group)
        self.count, first = len(ranks) // each, me - me % each
        self._inside = groups.name_of(ranks[first : first + each])
        self._across = groups.name_of(ranks[me % each :: each])

    def call(self, op: Any, *args: Any) -> fx.Node:
        """Add an operation."""
        with self.graph.inserting_before(self.place):
            return self.graph.call_function(op, args)

    def inside(self, op: Any, shape: Sequence[int], *args: Any) -> fx.Node:
        """Add a collective inside the host, and return its result, which has that shape."""
        return self.call(self.wait.target, self._begin(op, shape, *args, self._inside))

    def between(self, op: Any, shape: Sequence[int], *args: Any) -> fx.Node:
        """Add the collective between hosts, and return its result, which has that shape."""
        begun = self._begin(op, shape, *args, self._across)
        self.place = self.wait
        return self.call(self.wait.target, begun)

    def exchange(self, x: fx.Node, outer: int, inner: int) -> fx.Node:
        """Reorder blocks of rows from [outer, inner] to [inner, outer]."""
        x = self.call(aten.reshape.default, x, [outer, inner, -1])
        return self.call(aten.contiguous.default, self.call(aten.permute.default, x, [1, 0, 2]))

    def finish(self, result: fx.Node) -> None:
        """Replace the collective by a result with as many elements."""
        result = self.call(aten.reshape.default, result, self.shape)
        result.meta = dict(self.wait.meta)
        self.wait.replace_all_uses_with(result)
        self.graph.erase_node(self.wait)
        self.graph.erase_node(self.node)

    def _begin(self, op: Any, shape: Sequence[int], *args: Any) -> fx.Node:
        begun = self.call(op, *args)
        begun.meta = {**self.node.meta, "shape": list(shape)}
        return begun
