"""Process groups for the axes of a mesh, and the DeviceMesh on which parameters are stored."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import ShardingError, user_line
from ..mesh import Coordinates, Mesh


class ProcessGroups:
    """The process groups of this rank. Groups are made when first asked for: by all ranks in the
    same order, since all ranks have the same program. See groups_of.
    """

    def __init__(self, mesh: Mesh, device_type: str):
        self.mesh, self.device_type, self.world = mesh, device_type, dist.group.WORLD
        names = mesh.names or ("device",)
        self.device_mesh: DeviceMesh = init_device_mesh(
            device_type, mesh.shape or (1,), mesh_dim_names=names
        )
        self.rank = dist.get_rank()
        self.coordinates: Coordinates = mesh.coordinates(self.rank)
        self.known: dict[tuple[str, ...], tuple[str, list[int]]] = {}
        beside = (
            device_type != "cpu" and dist.is_gloo_available()
        )  # to compare numbers without waiting for a GPU
        self.checks = dist.new_group(backend="gloo") if beside else None
        self.checked_on = torch.device("cpu" if beside else device_type)

    def group(self, axes: tuple[str, ...]) -> tuple[str, list[int]]:
        """(name of the group over these axes, for each of its positions in axes order the position
        in the group).
        """
        ordered = self.mesh.in_order(axes)
        if ordered not in self.known:
            self.known[ordered] = (
                self._make(ordered),
                next(g for g in self.mesh.groups(ordered) if self.rank in g),
            )
        name, ranks = self.known[ordered]
        mine = next(g for g in self.mesh.groups(axes) if self.rank in g)
        return name, [ranks.index(r) for r in mine]

    def size(self, name: str) -> int:
        """How many ranks are in a group."""
        return len(self._ranks(name))

    def position(self, name: str) -> int:
        """Which of them this rank is."""
        return self._ranks(name).index(self.rank)

    def _ranks(self, name: str) -> list[int]:
        return next(list(ranks) for known, ranks in self.known.values() if known == name)

    def _make(self, axes: tuple[str, ...]) -> str:
        if len(axes) == 1 and axes[0] in self.mesh.names:
            return self.device_mesh.get_group(axes[0]).group_name
        mine = None
        for ranks in self.mesh.groups(axes):
            made = dist.new_group(ranks)
            mine = made if self.rank in ranks else mine
        assert mine is not None
        return mine.group_name


_MADE: dict[tuple[Mesh, str], ProcessGroups] = {}


def groups_of(mesh: Mesh, device_type: str) -> ProcessGroups:
    """The groups of a mesh, the same ones for as long as the process group is: each has threads and
    connections.
    """
    check_world(mesh)
    made = _MADE.get((mesh, device_type))
    if made is None or made.world is not dist.group.WORLD:
        made = _MADE[mesh, device_type] = ProcessGroups(mesh, device_type)
    return made


def known_groups(device_mesh: DeviceMesh) -> ProcessGroups | None:
    """Those of the mesh whose parameters are stored on this one."""
    return next((groups for groups in _MADE.values() if groups.device_mesh == device_mesh), None)


def check_world(mesh: Mesh) -> None:
    """ShardingError unless there is a process group with one process for every device of the mesh."""
    if not dist.is_initialized():
        raise ShardingError(
            "there is no process group",
            where=user_line(),
            fix="start the program with torchrun and call torch.distributed.init_process_group() first",
        )
    if dist.get_world_size() != mesh.size:
        raise ShardingError(
            f"mesh {mesh} has {mesh.size} devices, but there are {dist.get_world_size()} processes",
            where=user_line(),
            fix=f"torchrun --nproc-per-node {mesh.size}, or a mesh of {dist.get_world_size()} devices",
        )
