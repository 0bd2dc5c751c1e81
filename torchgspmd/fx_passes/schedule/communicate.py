"""The passes on the program of one device that decide when it communicates.

Each but start_wait can be skipped by its name.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from ...mesh import Mesh
from ..partition.machine import machine_of
from .bucket import bucket
from .collective_matmul import collective_matmul
from .overlap import overlap
from .start_wait import start_wait

OPTIONAL = ("bucket", "collective_matmul", "overlap", "prefetch")


def schedule(graph: fx.Graph, mesh: Mesh, device: str, skip: Collection[str] = ()) -> fx.Graph:
    """Rewrite the graph in place and return it. device is the type of device that runs it."""
    machine = machine_of(device)
    if "collective_matmul" not in skip:
        collective_matmul(graph, mesh, machine)
    if "bucket" not in skip:
        bucket(graph, machine)
    start_wait(graph)
    return overlap(graph, early="overlap" not in skip, prefetch="prefetch" not in skip)
