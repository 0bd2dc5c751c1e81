"""The process groups of a rank that has no process, for its lowered program."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from ...comm.process_groups import ProcessGroups
from ...layout.mesh import Mesh


class RankGroups(ProcessGroups):
    """The part of ProcessGroups that lowering asks. A group has the name of its axes on all ranks.

    device_type: where tensors of the program are; between CPUs the program is that for gloo.
    """

    def __init__(self, mesh: Mesh, rank: int, device_type: str) -> None:
        self.mesh, self.rank, self.coordinates = mesh, rank, mesh.coordinates(rank)
        self.device_type, self.is_gloo = device_type, device_type == "cpu"
        self.processes, self.checked_on = [*range(mesh.size)], torch.device(device_type)
        self.is_fake = True  # no sum travels with a comparison of the ranks
        self.by_axes: dict[tuple[str, ...], tuple[str, list[int]]] = {}

    def between_stages(self, axis: str, keys: Sequence[Hashable]) -> dict[Hashable, Any]:
        """Return no groups: the walk has messages of its own."""
        return dict.fromkeys(keys)

    def _create(self, axes: tuple[str, ...]) -> str:
        return "+".join(axes)
