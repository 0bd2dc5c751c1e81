"""Process groups for a mesh's axes, the DeviceMesh of parameters, and the ranks that meet."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import default_pg_timeout

from ..compat.patches import wrapping
from ..compat.private_apis import _set_pg_timeout
from ..errors import ShardingError
from ..layout.mesh import Coordinates, Mesh
from .watcher import Watcher

_COMPARED = "comparison of ranks"


class ProcessGroups:
    """This rank's process groups; see groups_of.

    A group is created at its first use. All ranks have the same program, so they create groups in
    the same order.
    """

    hosts: list[str] | None = None  # by rank; None: not known, see hosts.py

    def __init__(self, mesh: Mesh, device_type: str, part: DeviceMesh | None = None) -> None:
        """Make them for a mesh with all processes, or with a part of them.

        device_type: where tensors are. With TORCHGSPMD_ASSUME_CUDA=1 programs are made as for CUDA.
        """
        self.mesh, self.world = mesh, dist.group.WORLD
        self.is_assumed = assumes_cuda() and device_type == "cpu"
        names = mesh.names or ("device",)
        self.device_mesh: DeviceMesh = part or init_device_mesh(
            device_type, mesh.shape or (1,), mesh_dim_names=names
        )
        self.processes: list[int] = self.device_mesh.mesh.flatten().tolist()
        self.rank = self.processes.index(dist.get_rank())  # its position in the mesh
        self.coordinates: Coordinates = mesh.coordinates(self.rank)
        self.by_axes: dict[tuple[str, ...], tuple[str, list[int]]] = {}
        self.directions: dict[tuple[str, Hashable], Any] = {}  # of stages, by axis and key
        # The processes of torch's fake backend are not there: nobody answers this rank.
        self.is_fake = dist.get_backend() == "fake"
        self.is_gloo = not self.is_assumed and backend_of(device_type) == "gloo"
        self.device = torch.device(device_type)  # where tensors are
        self.device_type = device_type = "cuda" if self.is_assumed else device_type
        self.late_checks: Any = None  # see call_comparison.py
        self.numbers: dict[torch.dtype, Any] = {}  # replicated DTensors, see dtensor/optimizers.py
        self.updates: dict[Any, Any] = {}  # programs of steps, see dtensor/optimizers.py
        self.wrap: Callable[[Any], Any] | None = None  # puts such a step on the mesh
        self.buffers: dict[str, tuple[int, Any]] = {}  # by group, see carriers.py
        self.has_compared_batch = False  # shard_batch, at its first call
        self._of_all: Any = None
        # A gloo group compares numbers without waiting for a GPU.
        needs_gloo = device_type != "cpu" and dist.is_gloo_available() and not self.is_fake
        self.timeout: timedelta | None = None  # None: the default group's
        self.checks: Any = None  # the default group
        if part is not None:
            backend = "gloo" if needs_gloo else None
            self.checks = self._new_group(range(mesh.size), _COMPARED, backend)
        elif needs_gloo:
            self.checks = dist.new_group(backend="gloo", group_desc=_COMPARED)
        self.checked_on = torch.device("cpu" if needs_gloo or self.is_fake else device_type)
        self.created = [dist.group.WORLD if self.checks is None else self.checks]
        self.created += [self.device_mesh.get_group(name) for name in mesh.names]
        self.limit = _limit_of(dist.group.WORLD, self.device)  # as init_process_group has set it
        self.watcher = watcher_of(self.processes, self.limit.total_seconds(), self.is_fake)

    def set_timeout(self, timeout: timedelta) -> None:
        """Limit waits in this mesh's groups to that time; every rank has to call it."""
        self.timeout = timeout
        self._set_timeouts(timeout)

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Limit waits as init_process_group has it: planning takes longer than a step."""
        if self.timeout is None or self.timeout >= self.limit:
            yield
            return
        self._set_timeouts(self.limit)
        try:
            yield
        finally:
            self._set_timeouts(self.timeout)

    def _set_timeouts(self, timeout: timedelta) -> None:
        # Public since torch 2.15.
        set_timeout = getattr(dist, "set_timeout", None) or _set_pg_timeout
        for group in self.created:
            set_timeout(timeout, group)
        self.watcher.limit = timeout.total_seconds()

    def group(self, axes: tuple[str, ...]) -> tuple[str, list[int]]:
        """Return (name of the group over these axes, positions in it in axes order)."""
        # a+b and b+a have the same members: one group serves both.
        ordered = self.mesh.in_order(axes)
        if ordered not in self.by_axes:
            self.by_axes[ordered] = (
                self._create(ordered),
                next(g for g in self.mesh.groups(ordered) if self.rank in g),
            )
        name, ranks = self.by_axes[ordered]
        mine = next(g for g in self.mesh.groups(axes) if self.rank in g)
        return name, [ranks.index(r) for r in mine]

    def name_of(self, ranks: list[int]) -> str:
        """Return the name of the group of these positions, this rank among them, in this order."""
        known = (name for name, members in self.by_axes.values() if list(members) == ranks)
        if (name := next(known, None)) is None:
            group = self._new_group(ranks, f"ranks {ranks[0]} to {ranks[-1]}")
            self.created.append(group)
            name = group.group_name
            self.by_axes[("ranks", *map(str, ranks))] = name, ranks
        return name

    def between_stages(self, axis: str, keys: Sequence[Hashable]) -> dict[Hashable, Any]:
        """Return groups for the messages between stages along an axis, one for each key.

        On a GPU each has its own: a group sends its messages one after the other. NCCL connects a
        group's ranks at its first call, where all have to be; so that call is here.
        """
        if self.is_gloo and self.device_type != "cpu":
            raise ShardingError.here(
                f"a pipeline between processes sends tensors of {self.device_type} over gloo",
                why="gloo sends tensors of the CPU alone to one process",
                fix='call torch.distributed.init_process_group("nccl")',
            )
        if self.device_type == "cpu":
            return dict.fromkeys(keys, self.device_mesh.get_group(axis))
        for key in keys:
            if (axis, key) not in self.directions:
                group = self.directions[axis, key] = self._new_groups((axis,), f" {key}")
                dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        return {key: self.directions[axis, key] for key in keys}

    def of_all(self) -> Any:
        """Return a group of all processes of the mesh that carries tensors of its device."""
        if len(self.processes) == dist.get_world_size():
            return self.world
        if len(self.mesh.names) == 1:
            return self.device_mesh.get_group(self.mesh.names[0])
        if self._of_all is None:
            self._of_all = self._new_groups(self.mesh.names)
        return self._of_all

    def size(self, name: str) -> int:
        return len(self.ranks(name))

    def position(self, name: str) -> int:
        return self.ranks(name).index(self.rank)

    def ranks(self, name: str) -> list[int]:
        return next(list(ranks) for other, ranks in self.by_axes.values() if other == name)

    def _create(self, axes: tuple[str, ...]) -> str:
        if len(axes) == 1 and axes[0] in self.mesh.names:
            whole: Any = self.device_mesh.get_group(axes[0])
            return whole.group_name
        return self._new_groups(axes).group_name

    def _new_groups(self, axes: tuple[str, ...], use: str = "") -> Any:
        """Create the groups over some axes by one call, and return this rank's.

        The flight recorder names them by axes and use.
        """
        groups = [list(ranks) for ranks in self.mesh.groups(axes)]
        name = "+".join(axes) + use
        if len(self.processes) == dist.get_world_size() and _can_split(self.world):
            # A communicator that exists is split: all of its ranks take part.
            mine = dist.split_group(split_ranks=groups, timeout=self.timeout, group_desc=name)
        else:
            mine = self._new_group(next(ranks for ranks in groups if self.rank in ranks), name)
        assert mine is not None
        self.created.append(mine)
        return mine

    def _new_group(self, positions: Iterable[int], name: str, backend: str | None = None) -> Any:
        """Return a group of this mesh's processes, which they alone create."""
        return dist.new_group(
            [self.processes[i] for i in positions],
            timeout=self.timeout,
            backend=backend,
            use_local_synchronization=True,
            group_desc=name,
        )


def assumes_cuda() -> bool:
    """Return whether programs are those for CUDA where tensors are on the CPU, for tests."""
    return os.environ.get("TORCHGSPMD_ASSUME_CUDA") == "1"


def backend_of(device_type: str) -> str:
    """Return the default process group's backend for a device type; "" without one."""
    group: Any = dist.group.WORLD
    try:
        return group._get_backend(torch.device(device_type)).name()
    except RuntimeError:
        return ""


def check_backend(device_type: str) -> None:
    """Raise if the default process group cannot carry tensors on a device type."""
    if not backend_of(device_type):
        on_cpu = device_type == "cpu"
        raise ShardingError.here(
            f"the process group has no backend for tensors of the device {device_type}",
            why=f"init_process_group was called with {dist.get_backend()!r}",
            fix="call model.cuda() before parallelize, after torch.cuda.set_device(local rank)"
            if on_cpu
            else 'call torch.distributed.init_process_group("nccl")',
        )


def _can_split(world: Any) -> bool:
    """Return whether groups can be split off the default group: NCCL, bound to a device."""
    device = world.bound_device_id
    return device is not None and world._get_backend(device).supports_splitting


def _limit_of(group: Any, device: torch.device) -> timedelta:
    """Return the time limit of a group's waits on a device, as far as it says.

    NCCL has 10 minutes by default, and ends the process then; gloo has 30.
    """
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return default_pg_timeout


_GROUPS: dict[tuple[Mesh, str, tuple[int, ...], bool], ProcessGroups] = {}


def groups_of(
    mesh: Mesh, device_type: str, part: DeviceMesh | None = None, timeout: timedelta | None = None
) -> ProcessGroups:
    """Return a mesh's groups, created once per default process group.

    They are reused since each group has threads and connections. part: a DeviceMesh with some
    processes; None for all. timeout: when waits end, from now on; None: as it is.
    """
    if part is None:
        check_world(mesh)
    check_backend(device_type)
    processes = () if part is None else tuple(part.mesh.flatten().tolist())
    key = mesh, device_type, processes, assumes_cuda()
    groups = _GROUPS.get(key)
    # A new default group is a new job: groups of the old one are gone.
    if groups is None or groups.world is not dist.group.WORLD:
        groups = _GROUPS[key] = ProcessGroups(mesh, device_type, part)
    if timeout is not None:
        groups.set_timeout(timeout)
    return groups


def part_of(mesh: object) -> DeviceMesh | None:
    """Return a DeviceMesh that only some processes are on, this one among them; else None."""
    if not isinstance(mesh, DeviceMesh) or mesh.mesh.numel() == dist.get_world_size():
        return None
    if dist.get_rank() not in mesh.mesh:
        raise ShardingError.here(
            f"process {dist.get_rank()} is not on the DeviceMesh {mesh.mesh.tolist()}",
            fix="pass the part that this process is on, as devices['model'] is of a mesh of axes "
            "'stage' and 'model'",
        )
    return mesh


def find_groups(device_mesh: DeviceMesh) -> ProcessGroups | None:
    """Return the process groups whose mesh has this DeviceMesh; None for other ones."""
    if len(_GROUPS) < 2:  # the common case, at every operation on a DTensor
        for each in _GROUPS.values():
            # By identity first: torch compares meshes in Python.
            if each.device_mesh is device_mesh or each.device_mesh == device_mesh:
                return each
        return None
    meshes = [each for each in _GROUPS.values() if each.device_mesh == device_mesh]
    # Tests have programs for CUDA beside those for the CPU, on equal meshes.
    same = [each for each in meshes if each.is_assumed == assumes_cuda()]
    return next(iter([*same, *meshes]), None)


def start_process_group(mesh: Mesh) -> None:
    """Start the default process group by torchrun's variables, unless there is one.

    As init_device_mesh does: gloo for tensors on the CPU and NCCL for those on a GPU, which is
    LOCAL_RANK's unless the program has chosen another. Raise a ShardingError without torchrun.
    """
    if dist.is_initialized():
        return
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= {*os.environ}:
        script = sys.argv if sys.argv and sys.argv[0].endswith(".py") else ["train.py"]
        command = f"torchrun --nproc-per-node {mesh.size} {shlex.join(script)}"
        raise ShardingError.here(
            "there is no process group",
            why=f"mesh {mesh} needs {mesh.size} processes, which torchrun starts",
            fix=f"run {command}, or call gspmd.launch(function, {mesh.size}) in a notebook",
        )
    card = int(os.environ.get("LOCAL_RANK", 0))
    is_chosen = torch.cuda.is_initialized() and torch.cuda.current_device()
    if not is_chosen and card < torch.cuda.device_count():
        torch.cuda.set_device(card)
    dist.init_process_group()


def on_own_card(model: nn.Module) -> nn.Module:
    """Move a model that `model.cuda()` put on GPU 0 to the GPU of this process of torchrun."""
    cards = {t.device.index for t in model.parameters() if t.is_cuda}
    if cards and (card := torch.cuda.current_device()) not in cards:
        if str(card) == os.environ.get("LOCAL_RANK"):
            return model.cuda()
    return model


def check_world(mesh: Mesh) -> None:
    """Raise ShardingError unless every device in the mesh has one process."""
    start_process_group(mesh)
    if dist.get_world_size() != mesh.size:
        raise ShardingError.here(
            f"mesh {mesh} has {mesh.size} devices, but there are {dist.get_world_size()} processes",
            fix=f"start {mesh.size} processes (torchrun --nproc-per-node {mesh.size}), make a "
            f"mesh of {dist.get_world_size()} devices, or pass a part of a DeviceMesh, as "
            "devices['model']",
        )


# ----------------------------------------------------------------------------- the ranks that meet


class Ranks(Protocol):
    """All ranks of a mesh, as a roll call needs them."""

    @property
    def watcher(self) -> Watcher: ...


@wrapping
def watched(method: Callable, self: Any, *args: object) -> object:
    """Wrap a method on an object with `_groups`: its waits that end say for whom."""
    return self._groups.watcher.run(method, self, *args)


_WATCHERS: dict[tuple[int, ...], Watcher] = {}


def watcher_of(processes: Sequence[int], limit: float, is_fake: bool = False) -> Watcher:
    """Return the watcher for some processes, one for all their meshes."""
    watcher = _WATCHERS.get(tuple(processes))
    if watcher is None or watcher.world is not dist.group.WORLD:
        watcher = _WATCHERS[tuple(processes)] = Watcher(processes, limit, is_fake)
    watcher.limit = limit
    return watcher


class _All(NamedTuple):
    watcher: Watcher


def all_ranks() -> Ranks | None:
    """Return all processes of the default process group; None without one."""
    if not dist.is_initialized():
        return None
    processes = range(dist.get_world_size())
    known = _WATCHERS.get(tuple(processes))
    limit = default_pg_timeout.total_seconds() if known is None else known.limit
    return _All(watcher_of(processes, limit, dist.get_backend() == "fake"))


def watched_ranks() -> Ranks | None:
    """Return all processes of the default process group, if a mesh has all of them; else None."""
    if not dist.is_initialized() or tuple(range(dist.get_world_size())) not in _WATCHERS:
        return None
    return all_ranks()


def say_farewell() -> None:
    """Tell all ranks that this process ends the default process group."""
    for watcher in _WATCHERS.values():
        if watcher.world is dist.group.WORLD:
            watcher.close()


def explain(error: RuntimeError) -> None:
    """Raise RankError if the error is from a wait that ended, in whatever mesh; else return."""
    for watcher in _WATCHERS.values():
        if watcher.world is dist.group.WORLD:
            watcher.explain(error)
