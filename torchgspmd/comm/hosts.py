"""Which devices of a mesh share a host."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from .process_groups import ProcessGroups
from .rank_mismatch import all_gather_rows

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
