"""Mesh: a named grid of devices. Pure arithmetic, without process groups or devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ..errors import ShardingError, did_you_mean
from .sub_axes import (
    check_named_size,
    common_splits,
    finer_axes,
    merge_axes,
    split_axes,
    sub_axis,
    unnamed_axes,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Coordinates = dict[str, int]  # axis name -> index along it


@dataclass(frozen=True, init=False)
class Mesh:
    """Ordered axes with their sizes, the first one major.

    `Mesh(data=2, model=4)` is 8 devices, with rank = data * 4 + model.

    Args:
        axes: Device count along each axis, by name.

    Raises:
        ShardingError: An axis name is no identifier, or a size is below 1.

    Example:
        >>> Mesh(data=2, model=4).size
        8
    """

    axes: tuple[tuple[str, int], ...]
    _sizes: dict[str, int] = field(repr=False, compare=False)
    _wholes: dict[str, int] = field(repr=False, compare=False)  # sizes before any split()
    _counts: dict[tuple[str, ...], int] = field(repr=False, compare=False)  # memo of count()

    def __init__(self, *unnamed: object, **axes: int) -> None:
        if unnamed:
            raise unnamed_axes(unnamed)
        for name, size in axes.items():
            check_named_size(name, size)
        self._set(tuple(axes.items()), axes)

    def _set(self, axes: tuple[tuple[str, int], ...], wholes: dict[str, int]) -> None:
        fields = {"axes": axes, "_sizes": dict(axes), "_wholes": wholes, "_counts": {}}
        self.__dict__.update(fields)  # frozen

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh) -> Mesh:
        """Convert a torch DeviceMesh.

        Args:
            device_mesh: The DeviceMesh, with named dimensions.

        Returns:
            The mesh.

        Raises:
            ShardingError: The dimensions have no names.

        Example:
            >>> import torch.distributed as dist
            >>> from torch.distributed.device_mesh import init_device_mesh
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> devices = init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
            >>> Mesh.from_device_mesh(devices)
            Mesh(data=1)
            >>> dist.destroy_process_group()
        """
        if device_mesh.mesh_dim_names is None:
            raise ShardingError.here(
                "the DeviceMesh has no dimension names",
                fix="call init_device_mesh(..., mesh_dim_names=('data', 'model'))",
            )
        return cls(**dict(zip(device_mesh.mesh_dim_names, map(int, device_mesh.mesh.shape))))

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Parse the notation that str() prints.

        Args:
            text: Axes with their sizes.

        Returns:
            The mesh.

        Raises:
            ShardingError: The text is malformed, or an axis occurs twice.

        Example:
            >>> Mesh.parse("data=2,model=4")
            Mesh(data=2, model=4)
        """
        try:
            axes = [
                (name.strip(), int(size))
                for name, size in (entry.split("=") for entry in text.split(",") if entry)
            ]
        except ValueError:
            raise ShardingError.here(
                f"'{text}' is not a mesh; write it as 'data=2,model=4'"
            ) from None
        twice = next((name for name, _ in axes if [n for n, _ in axes].count(name) > 1), None)
        if twice is not None:
            raise ShardingError.here(f"'{twice}' occurs twice in mesh '{text}'")
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
        """Device count along every axis."""
        return tuple(size for _, size in self.axes)

    @cached_property
    def size(self) -> int:
        """Device count."""
        return math.prod(self.shape)

    def count(self, axes: Iterable[str]) -> int:
        """Count the devices along some axes together: the group size.

        Args:
            axes: Axis names.

        Returns:
            The product of their sizes; 1 for no axes.

        Example:
            >>> Mesh(data=2, model=4).count(("data", "model"))
            8
        """
        axes = tuple(axes)
        count = self._counts.get(axes)
        if count is None:
            count = self._counts[axes] = math.prod(map(self._size_of, axes))
        return count

    def _size_of(self, axis: str) -> int:
        if axis in self._sizes:
            return self._sizes[axis]
        sub = sub_axis(axis)
        return sub[2] if sub else self._wholes[axis]

    def check_axis(self, axis: str) -> None:
        """Raise an error if the mesh has no such axis.

        Args:
            axis: The axis name.

        Raises:
            ShardingError: The mesh has no axis by that name.

        Example:
            >>> Mesh(data=2).check_axis("data")
        """
        if axis not in self._sizes:
            raise ShardingError.here(
                f"mesh {self} has no axis '{axis}'; {did_you_mean(axis, self.names)}"
            )

    def coordinates(self, rank: int) -> Coordinates:
        """Return a device's position on each axis.

        Args:
            rank: The device.

        Returns:
            Positions by axis.

        Example:
            >>> Mesh(data=2, model=4).coordinates(5)
            {'data': 1, 'model': 1}
        """
        result: Coordinates = {}
        for name, size in reversed(self.axes):
            rank, result[name] = divmod(rank, size)
        return {name: result[name] for name in self.names}

    def rank(self, coordinates: Coordinates) -> int:
        """Return the rank for a position on each axis.

        Args:
            coordinates: Positions by axis.

        Returns:
            The rank.

        Example:
            >>> Mesh(data=2, model=4).rank({"data": 1, "model": 1})
            5
        """
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinates[name]
        return rank

    def place(self, axis: str, coordinates: Coordinates) -> int:
        """Return a device's position on an axis or a sub-axis.

        Args:
            axis: The axis, or a sub-axis such as `model:(2)4`.
            coordinates: The device's positions by axis.

        Returns:
            The position.

        Example:
            >>> Mesh(model=8).place("model:(2)4", {"model": 6})
            2
        """
        if axis in coordinates:
            return coordinates[axis]
        sub = sub_axis(axis)
        assert sub is not None, axis
        whole, before, size = sub
        return coordinates[whole] // (self._wholes[whole] // (before * size)) % size

    def index(self, axes: Iterable[str], coordinates: Coordinates) -> int:
        """Return a device's position in a group over `axes`.

        Args:
            axes: The group's axes, the first one major.
            coordinates: The device's positions by axis.

        Returns:
            The position.

        Example:
            >>> Mesh(data=2, model=4).index(("model", "data"), {"data": 1, "model": 2})
            5
        """
        index = 0
        for axis in axes:
            index = index * self.count((axis,)) + self.place(axis, coordinates)
        return index

    def groups(self, axes: tuple[str, ...]) -> Iterator[list[int]]:
        """Yield the ranks of every group over `axes`.

        Args:
            axes: The groups' axes.

        Returns:
            Groups; each is ordered by index().

        Example:
            >>> list(Mesh(data=2, model=2).groups(("data",)))
            [[0, 2], [1, 3]]
        """
        mesh = self.divided(axes)
        axes = mesh.refine(axes)
        others = [name for name in mesh.names if name not in axes]
        for fixed in itertools.product(*(range(mesh._sizes[a]) for a in others)):
            yield [
                mesh.rank({**dict(zip(others, fixed)), **dict(zip(axes, moving))})
                for moving in itertools.product(*(range(mesh._sizes[a]) for a in axes))
            ]

    # ---------------------------------------------------------------------------------- sub-axes

    def split(self, splits: Mapping[str, tuple[int, ...]]) -> Mesh:
        """Return the same devices in the same order, with axes split into sub-axes.

        Args:
            splits: Sub-axis sizes by axis, the major one first.

        Returns:
            The mesh.

        Example:
            >>> Mesh(model=8).split({"model": (2, 4)}).names
            ('model:(1)2', 'model:(2)4')
        """
        if not splits:
            return self
        mesh = object.__new__(Mesh)
        mesh._set(split_axes(self.axes, splits), self._wholes)
        return mesh

    def unsplit(self) -> Mesh:
        """Return the mesh before any split().

        Returns:
            The mesh.

        Example:
            >>> Mesh(model=8).split({"model": (2, 4)}).unsplit()
            Mesh(model=8)
        """
        return Mesh(**self._wholes)

    def divided(self, axes: Iterable[str]) -> Mesh:
        """Return the mesh split so that all sub-axes among `axes` are its axes.

        Args:
            axes: Axes and sub-axes.

        Returns:
            The mesh.

        Example:
            >>> Mesh(model=8).divided(("model:(2)2",)).shape
            (2, 2, 2)
        """
        return self.split(common_splits(axes, self._sizes))

    def refine(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Translate axes from before split(), or larger sub-axes, to this mesh's axes.

        Args:
            axes: Axes and sub-axes.

        Returns:
            Axes in this mesh.

        Example:
            >>> Mesh(model=8).split({"model": (2, 4)}).refine(("model",))
            ('model:(1)2', 'model:(2)4')
        """
        refined: list[str] = []
        for axis in axes:
            refined += [axis] if axis in self._sizes else finer_axes(axis, self.names)
        return tuple(refined)

    def merge(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Merge sub-axes that follow on each other, as the inverse to refine().

        Args:
            axes: Axes and sub-axes.

        Returns:
            The axes; an axis replaces its sub-axes where all are present.

        Example:
            >>> Mesh(model=8).merge(("model:(1)2", "model:(2)4"))
            ('model',)
        """
        return merge_axes(axes, self._wholes)

    def whole(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Keep the axes that make up whole axes in the mesh before split().

        Args:
            axes: Axes and sub-axes.

        Returns:
            Axes in this mesh.

        Example:
            >>> Mesh(data=2, model=8).whole(("data", "model:(2)4"))
            ('data',)
        """
        return self.refine(tuple(a for a in self.merge(axes) if a in self._wholes))

    def in_order(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Sort axes and sub-axes as they lie in the mesh: the major one first.

        Args:
            axes: Axes and sub-axes.

        Returns:
            The sorted axes.

        Example:
            >>> Mesh(data=2, model=4).in_order(("model", "data"))
            ('data', 'model')
        """

        def key(axis: str) -> tuple[int, int]:
            name, before, _ = sub_axis(axis) or (axis, 0, 0)
            return self.names.index(name), 0 if axis in self._sizes else before

        return tuple(sorted(axes, key=key))
