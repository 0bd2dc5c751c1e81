"""Which devices of a mesh share a host, and collectives in two levels: inside and between hosts."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import fx

from ..compat.operators import aten
from .process_groups import ProcessGroups
from .rank_check import all_gather_rows

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def devices_of_a_host(groups: ProcessGroups) -> int:
    """Return how many neighbours in the mesh share a host; 0 if all do, or none.

    Call it on all ranks, which exchange their hosts' names at the first call.
    """
    if groups.hosts is None:
        rows = all_gather_rows(groups, [groups.rank, host_name()])
        groups.hosts = [host for _, host in sorted(rows)]
    return block_size(groups.hosts)


def crosses_hosts(groups: ProcessGroups, name: str) -> bool:
    """Return whether a group's ranks are on several hosts, as far as this is known."""
    return groups.hosts is not None and len({groups.hosts[r] for r in groups.ranks(name)}) > 1


def ranks_of_a_host(groups: ProcessGroups, name: str) -> int:
    """Return how many neighbours in a group share a host; 0 if all do, or none, or as not known."""
    return block_size([groups.hosts[r] for r in groups.ranks(name)]) if groups.hosts else 0


def host_name() -> str:
    """Return this process's host.

    TORCHGSPMD_HOST names another: that of a rack whose hosts share fast links, or one for a test.
    """
    if name := os.environ.get("TORCHGSPMD_HOST"):
        return name
    boot = network = ""
    with contextlib.suppress(OSError):  # Hosts may have equal names; no two have one boot.
        boot = _BOOT.read_text().strip()
        # Containers with networks of their own are joined as hosts are.
        network = os.readlink("/proc/self/ns/net")
    return f"{socket.gethostname()} {boot} {network}"


def block_size(hosts: Sequence[str]) -> int:
    """Return the largest n for which each n devices, one after the other, share a host.

    hosts: for each device in the mesh. 0 if one host has all, or none has two of them.
    """
    count = len(hosts)
    sizes = (n for n in range(count, 0, -1) if count % n == 0)
    size = next(n for n in sizes if all(len({*hosts[i : i + n]}) == 1 for i in range(0, count, n)))
    return size if 1 < size < count else 0


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
