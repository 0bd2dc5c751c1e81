"""A named grid of devices. Pure arithmetic: no process group and no device is touched here."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from .errors import ShardingError, did_you_mean, user_line

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Coordinates = dict[str, int]  # axis name -> index along it
_SUB_AXIS = re.compile(r"(\w+):\((\d+)\)(\d+)")


@lru_cache(maxsize=1024)
def sub_axis(name: str) -> tuple[str, int, int] | None:
    """The axis, how many devices along it lie before (major), and the size of a part of an axis:
    `model:(2)4` is the minor part of model=8 behind one of two. None for the name of an axis. The
    notation is Shardy's.
    """
    match = _SUB_AXIS.fullmatch(name)
    return (match[1], int(match[2]), int(match[3])) if match else None


@dataclass(frozen=True, init=False)
class Mesh:
    """Ordered axes with their sizes, the first one major: `Mesh(data=2, model=4)` is 8 devices,
    rank = data * 4 + model.

    Raises ShardingError for an axis without a proper name or with a size below 1.
    """

    axes: tuple[tuple[str, int], ...]

    def __init__(self, **axes: int):
        for name, size in axes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ShardingError(
                    f"mesh axis '{name}' has size {size!r}; a size is an integer of at least 1",
                    where=user_line(),
                )
            if not name.isidentifier() or name == "_":
                raise ShardingError(
                    f"'{name}' cannot name a mesh axis; use a Python identifier other than '_'",
                    where=user_line(),
                )
        object.__setattr__(self, "axes", tuple(axes.items()))
        object.__setattr__(self, "_sizes", dict(axes))
        object.__setattr__(self, "_wholes", dict(axes))  # of axes that were split, too
        object.__setattr__(self, "_counts", {})

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh) -> Mesh:
        """The mesh of a torch DeviceMesh, whose dimensions must be named."""
        if device_mesh.mesh_dim_names is None:
            raise ShardingError(
                "the DeviceMesh has no dimension names",
                where=user_line(),
                fix="init_device_mesh(..., mesh_dim_names=('data', 'model'))",
            )
        return cls(**dict(zip(device_mesh.mesh_dim_names, map(int, device_mesh.mesh.shape))))

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """The inverse of str(): `data=2,model=4`."""
        try:
            axes = [
                (name.strip(), int(size))
                for name, size in (part.split("=") for part in text.split(",") if part)
            ]
        except ValueError:
            raise ShardingError(
                f"'{text}' is not a mesh; write it as 'data=2,model=4'", where=user_line()
            ) from None
        twice = next((name for name, _ in axes if [n for n, _ in axes].count(name) > 1), None)
        if twice is not None:
            raise ShardingError(f"'{twice}' occurs twice in mesh '{text}'", where=user_line())
        return cls(**dict(axes))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.axes)})"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the axes, the major one first."""
        return tuple(name for name, _ in self.axes)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Number of devices along every axis."""
        return tuple(size for _, size in self.axes)

    @cached_property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    def count(self, axes: Iterable[str]) -> int:
        """Number of devices along these axes together: the size of a group."""
        axes = tuple(axes)
        count = self._counts.get(axes)
        if count is None:
            count = self._counts[axes] = math.prod(map(self._size_of, axes))
        return count

    def _size_of(self, axis: str) -> int:
        if axis in self._sizes:
            return self._sizes[axis]
        part = sub_axis(axis)
        return part[2] if part else self._wholes[axis]

    def check_axis(self, axis: str) -> None:
        """Raises ShardingError if the mesh has no such axis."""
        if axis not in self._sizes:
            raise ShardingError(
                f"mesh {self} has no axis '{axis}'; {did_you_mean(axis, self.names)}",
                where=user_line(),
            )

    def coordinates(self, rank: int) -> Coordinates:
        """Where a device lies on each axis."""
        result = {}
        for name, size in reversed(self.axes):
            rank, result[name] = divmod(rank, size)
        return {name: result[name] for name in self.names}

    def rank(self, coordinates: Coordinates) -> int:
        """The inverse of coordinates()."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinates[name]
        return rank

    def place(self, axis: str, coordinates: Coordinates) -> int:
        """Where a device lies on an axis or on a part of one."""
        if axis in coordinates:
            return coordinates[axis]
        whole, before, size = sub_axis(axis)
        return coordinates[whole] // (self._wholes[whole] // (before * size)) % size

    def index(self, axes: Iterable[str], coordinates: Coordinates) -> int:
        """Position in a group over `axes`, the first one major."""
        index = 0
        for axis in axes:
            index = index * self.count((axis,)) + self.place(axis, coordinates)
        return index

    def groups(self, axes: tuple[str, ...]) -> Iterator[list[int]]:
        """The ranks of every group over `axes`, each ordered by index()."""
        mesh = self.divided(axes)
        axes = mesh.refine(axes)
        others = [name for name in mesh.names if name not in axes]
        for fixed in itertools.product(*(range(mesh._sizes[a]) for a in others)):
            yield [
                mesh.rank({**dict(zip(others, fixed)), **dict(zip(axes, moving))})
                for moving in itertools.product(*(range(mesh._sizes[a]) for a in axes))
            ]

    # -------------------------------------------------------------------------------- parts of axes

    def split(self, parts: Mapping[str, tuple[int, ...]]) -> Mesh:
        """The same devices in the same order, with axes of it as several: {"model": (2, 4)} for
        model=8.
        """
        if not parts:
            return self
        axes = []
        for name, size in self.axes:
            whole, before, _ = sub_axis(name) or (name, 1, size)
            for part in parts.get(name, (size,)):
                axes.append((f"{whole}:({before}){part}" if part != size else name, part))
                before *= part
        made = object.__new__(Mesh)
        object.__setattr__(made, "axes", tuple(axes))
        object.__setattr__(made, "_sizes", dict(axes))
        object.__setattr__(made, "_wholes", self._wholes)
        object.__setattr__(made, "_counts", {})
        return made

    def unsplit(self) -> Mesh:
        """The mesh before any split()."""
        return Mesh(**self._wholes)

    def divided(self, axes: Iterable[str]) -> Mesh:
        """The mesh in which all the parts of axes among these are axes."""
        borders: dict[str, set[int]] = {}
        for name, before, size in (
            part for axis in axes if axis not in self._sizes and (part := sub_axis(axis))
        ):
            borders.setdefault(name, {1, self._sizes[name]}).update((before, before * size))
        return self.split(
            {
                name: tuple(b // a for a, b in itertools.pairwise(sorted(found)))
                for name, found in borders.items()
            }
        )

    def refine(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Axes of the mesh that this one was split from, or larger parts of them, as axes of this
        one.
        """
        found: list[str] = []
        for axis in axes:
            name, before, size = sub_axis(axis) or (axis, 1, 0)
            found += (
                [axis]
                if axis in self._sizes
                else [
                    part
                    for part in self.names
                    if (inner := sub_axis(part))
                    and inner[0] == name
                    and before <= inner[1]
                    and (not size or inner[1] * inner[2] <= before * size)
                ]
            )
        return tuple(found)

    def merge(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Parts of an axis that follow on each other as one, all of them as the axis: the inverse
        of refine().
        """
        found: list[str] = []
        for axis in axes:
            last, part = sub_axis(found[-1]) if found else None, sub_axis(axis)
            if last and part and last[0] == part[0] and last[1] * last[2] == part[1]:
                axis = f"{part[0]}:({last[1]}){last[2] * part[2]}"
                found.pop()
                if last[1] == 1 and last[2] * part[2] == self._wholes[part[0]]:
                    axis = part[0]
            found.append(axis)
        return tuple(found)

    def whole(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Of these axes those that are not mere parts."""
        return self.refine(tuple(a for a in self.merge(axes) if a in self._wholes))

    def in_order(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Axes, and parts of them, as they lie in the mesh: the major one first."""

        def key(axis: str) -> tuple[int, int]:
            name, before, _ = sub_axis(axis) or (axis, 0, 0)
            return (
                (self.names.index(axis), 0)
                if axis in self._sizes
                else (self.names.index(name), before)
            )

        return tuple(sorted(axes, key=key))
