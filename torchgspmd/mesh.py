"""A named grid of devices. Pure arithmetic: no process group and no device is touched here."""
from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import ShardingError, did_you_mean, user_line

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Coordinates = dict[str, int]            # axis name -> index along it


@dataclass(frozen=True, init=False)
class Mesh:
    """Ordered axes with their sizes, the first one major: `Mesh(data=2, model=4)` is 8 devices, rank = data * 4 + model.

    Raises ShardingError for an axis without a proper name or with a size below 1.
    """

    axes: tuple[tuple[str, int], ...]

    def __init__(self, **axes: int):
        for name, size in axes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ShardingError(f"mesh axis '{name}' has size {size!r}; a size is an integer of at least 1", where=user_line())
            if not name.isidentifier() or name == "_":
                raise ShardingError(f"'{name}' cannot name a mesh axis; use a Python identifier other than '_'", where=user_line())
        object.__setattr__(self, "axes", tuple(axes.items()))
        object.__setattr__(self, "_sizes", dict(axes))

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh) -> Mesh:
        """The mesh of a torch DeviceMesh, whose dimensions must be named."""
        if device_mesh.mesh_dim_names is None:
            raise ShardingError("the DeviceMesh has no dimension names", where=user_line(),
                                fix="init_device_mesh(..., mesh_dim_names=('data', 'model'))")
        return cls(**dict(zip(device_mesh.mesh_dim_names, map(int, device_mesh.mesh.shape))))

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """The inverse of str(): `data=2,model=4`."""
        try:
            axes = [(name.strip(), int(size)) for name, size in (part.split("=") for part in text.split(",") if part)]
        except ValueError:
            raise ShardingError(f"'{text}' is not a mesh; write it as 'data=2,model=4'", where=user_line()) from None
        twice = next((name for name, _ in axes if [n for n, _ in axes].count(name) > 1), None)
        if twice is not None:
            raise ShardingError(f"'{twice}' occurs twice in mesh '{text}'", where=user_line())
        return cls(**dict(axes))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.axes)})"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes, the major one first."""
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of devices along every axis."""
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    def count(self, axes: Iterable[str]) -> int:
        """Number of devices along these axes together: the size of a group."""
        sizes = self._sizes
        return math.prod([sizes[axis] for axis in axes])

    def check_axis(self, axis: str) -> None:
        """Raises ShardingError if the mesh has no such axis."""
        if axis not in self._sizes:
            raise ShardingError(f"mesh {self} has no axis '{axis}'; {did_you_mean(axis, self.names)}", where=user_line())

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

    def index(self, axes: Iterable[str], coordinates: Coordinates) -> int:
        """Position in a group over `axes`, the first one major."""
        index = 0
        for axis in axes:
            index = index * self._sizes[axis] + coordinates[axis]
        return index

    def groups(self, axes: tuple[str, ...]) -> Iterator[list[int]]:
        """The ranks of every group over `axes`, each ordered by index()."""
        others = [name for name in self.names if name not in axes]
        for fixed in itertools.product(*(range(self._sizes[a]) for a in others)):
            yield [self.rank({**dict(zip(others, fixed)), **dict(zip(axes, moving))})
                   for moving in itertools.product(*(range(self._sizes[a]) for a in axes))]
