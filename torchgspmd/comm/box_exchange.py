"""The exchange: from one layout of a tensor to any other at once, every device receiving only what
it lacks.

A layout gives every device a box of the tensor: a range of rows in each dimension, the last ranges
shorter where the dimension does not divide. A device wants another box than it holds. What it lacks
comes from those that hold it; where several do, they divide what they hold among them, so that
every element has one device whose duty it is to send it:

    x[6, 4] on a=2, b=2, from "a _" to "b _": both (a0, b0) and (a0, b1) hold rows 0 to 2. Devices of b0 want these,
    and (a1, b0) has to be sent them: row 0 and 1 by one of the two, row 2 by the other.

All boxes are in closed form of a device's coordinates. Nothing is summed: the same axes are pending
before and after.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..mesh import Coordinates, Mesh
from ..shard_spec import Axes, ShardSpec, nests

Box = tuple[tuple[int, int], ...]  # for every dimension its first row and the one past its last
Boxes = tuple[np.ndarray, np.ndarray]  # the same of many devices: two arrays [dimensions, devices]
WAYS = 64  # of dividing duties that are compared
MANY = 256  # devices of a group that are not counted one by one, where only the cost is asked for


@dataclass(frozen=True)
class Transfer:
    """What one device does. Boxes to send are rows of what it holds, boxes to receive rows of what
    it gets; an entry for every member of its group, None where nothing goes that way. keep: what
    stays on the device, as rows of both.
    """

    sends: tuple[Box | None, ...]
    receives: tuple[Box | None, ...]
    keep: tuple[Box, Box] | None
    shape: tuple[int, ...]  # of what it gets, padding included


@dataclass(frozen=True)
class Exchange:
    """Between two layouts of a tensor of a global shape. A group runs over `axes`, in mesh order;
    `duty` are, for every dimension, the axes whose devices hold the same and divide it among them.
    """

    mesh: Mesh
    shape: tuple[int, ...]
    before: ShardSpec
    after: ShardSpec
    axes: Axes
    duty: tuple[Axes, ...]

    def busiest(self) -> int:
        """Elements that the busiest device sends or receives, whichever is more."""
        return max(
            self.received(), int(self._sent(self._group(dict.fromkeys(self.mesh.names, 0))).max())
        )

    def received(self) -> int:
        """Elements that the device gets that lacks most of what it wants."""
        wanted = kept = 1
        for size, b, a in zip(self.shape, self.before.dims, self.after.dims):
            low, high = _blocks(self.mesh, self.axes, size, a)
            wanted = wanted * (high - low)
            if a != b:
                first, last = _blocks(self.mesh, self.axes, size, b)
                kept = kept * np.maximum(np.minimum(high, last) - np.maximum(low, first), 0)
            else:
                kept = kept * (high - low)
        return int((wanted - kept).max())

    def transfer(self, coordinates: Coordinates) -> Transfer:
        """What the device at these coordinates does."""
        group = self._group(coordinates)
        held, wanted, owed = (
            self._rows(self.before, group),
            self._rows(self.after, group),
            self._owed(group),
        )
        mine = int(self.mesh.index(self.axes, coordinates))
        have, want, owe = (_one(boxes, mine) for boxes in (held, wanted, owed))
        others = (held[0] != have[0]).any(0)  # those that hold another box
        kept = _common(have, want)
        return Transfer(
            _listed(_common(owe, wanted), have, others),
            _listed(_common(owed, want), want, others),
            (_box(kept, have), _box(kept, want)) if _volume(kept).item() else None,
            self.after.local_shape(self.shape, self.mesh),
        )

    def _group(self, coordinates: Coordinates) -> dict[str, np.ndarray]:
        """Coordinates of all members of a device's group, in the group's order."""
        places = np.indices([self.mesh.count((a,)) for a in self.axes]).reshape(len(self.axes), -1)
        fixed = {
            name: np.full(places.shape[1], self.mesh.place(name, coordinates))
            for name in self.mesh.names
        }
        return {**fixed, **dict(zip(self.axes, places))}

    def _rows(self, spec: ShardSpec, group: dict[str, np.ndarray]) -> Boxes:
        """The box of every member, without padding."""
        lows, highs = [], []
        for size, axes in zip(self.shape, spec.dims):
            rows = -(-size // self.mesh.count(axes))
            lows.append(
                np.minimum(
                    self.mesh.index(axes, group) * rows + np.zeros_like(next(iter(group.values()))),
                    size,
                )
            )
            highs.append(np.minimum(lows[-1] + rows, size))
        return np.array(lows), np.array(highs)

    def _owed(self, group: dict[str, np.ndarray]) -> Boxes:
        """Of the box that a member holds, the part that it sends to those who want it."""
        lows, highs = self._rows(self.before, group)
        for d, axes in enumerate(self.duty):
            if axes:
                rows = -(
                    -self.shape[d] // self.mesh.count(self.before.dims[d]) // self.mesh.count(axes)
                )
                lows[d] = np.minimum(lows[d] + self.mesh.index(axes, group) * rows, highs[d])
                highs[d] = np.minimum(lows[d] + rows, highs[d])
        return lows, highs

    def _sent(self, group: dict[str, np.ndarray]) -> np.ndarray:
        """Elements that each member sends: what it owes to all who want it, but for those that hold
        it already.
        """
        owed = self._owed(group)
        total = self.mesh.count(
            a for a in self.axes if a not in self.after.sharding_axes
        ) * _volume(owed)
        sharing = tuple(a for axes in self.duty for a in axes)
        for places in itertools.product(*(range(self.mesh.count((a,))) for a in sharing)):
            holders = {
                **group,
                **{a: np.full_like(group[a], place) for a, place in zip(sharing, places)},
            }
            total = total - _volume(_common(owed, self._rows(self.after, holders)))
        return total


@lru_cache(maxsize=65536)
def _blocks(mesh: Mesh, members: Axes, size: int, axes: Axes) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a dimension over `axes` that each member of the first device's group has: the
    first, and the one past the last.
    """
    places = np.indices([mesh.count((a,)) for a in members]).reshape(len(members), -1)
    at = {**dict.fromkeys(mesh.names, 0), **dict(zip(members, places))}
    rows = -(-size // mesh.count(axes))
    low = np.minimum(mesh.index(axes, at) * rows + np.zeros(places.shape[1], dtype=int), size)
    return low, np.minimum(low + rows, size)


@lru_cache(maxsize=65536)
def exchange(mesh: Mesh, shape: tuple[int, ...], before: ShardSpec, after: ShardSpec) -> Exchange:
    """The exchange whose busiest device has least to do, of the ways to divide duties."""
    made = _undivided(mesh, shape, before, after)
    sharing = [a for a in made.axes if a not in made.before.sharding_axes]
    dims = sorted(range(len(shape)), key=lambda d: before.dims[d] == after.dims[d])
    ways = itertools.islice(itertools.product(dims, repeat=len(sharing)), WAYS)
    return min(
        (
            replace(
                made,
                duty=tuple(
                    tuple(a for a, place in zip(sharing, way) if place == d)
                    for d in range(len(shape))
                ),
            )
            for way in ways
        ),
        key=Exchange.busiest,
    )


@lru_cache(maxsize=65536)
def lacking(mesh: Mesh, shape: tuple[int, ...], before: ShardSpec, after: ShardSpec) -> int:
    """Elements that some device has to be sent, at least, however that is done."""
    changed = [d for d, (b, a) in enumerate(zip(before.dims, after.dims)) if b != a]
    if any(
        shape[d] % mesh.count(axes) for d in changed for axes in (before.dims[d], after.dims[d])
    ):
        made = _undivided(mesh, shape, before, after)
        return made.received() if mesh.count(made.axes) <= MANY else 0
    wanted, kept = math.prod(after.local_shape(shape, mesh)), 1
    for n, b, a in zip(shape, before.dims, after.dims):
        short, long = sorted((b, a), key=len)
        kept *= (
            -(-n // mesh.count(long)) if long[: len(short)] == short else 0
        )  # else some device has nothing of its part
    return wanted - kept


@lru_cache(maxsize=65536)
def busiest(
    mesh: Mesh, shape: tuple[int, ...], before: ShardSpec, after: ShardSpec
) -> tuple[int, Axes]:
    """Elements that the busiest device of an exchange sends or receives; the axes of its groups. A
    closed form where all blocks divide: then nobody sends more than some device lacks. Else
    counted; in a large group estimated by the part.
    """
    made = _undivided(mesh, shape, before, after)
    if any(
        n % mesh.count(axes)
        for n, b, a in zip(shape, before.dims, after.dims)
        if b != a
        for axes in (b, a)
    ):
        few = mesh.count(made.axes) <= MANY
        count = (
            exchange(mesh, shape, before, after).busiest()
            if few
            else math.prod(after.local_shape(shape, mesh))
        )
        return count, made.axes
    return lacking(mesh, shape, before, after), made.axes


def _undivided(mesh: Mesh, shape: tuple[int, ...], before: ShardSpec, after: ShardSpec) -> Exchange:
    fine = mesh.divided(before.sharding_axes + before.pending + after.sharding_axes + after.pending)
    if fine != mesh:  # so that equal names mean equal devices
        mesh, before, after = fine, before.map_axes(fine.refine), after.map_axes(fine.refine)
    moving = {
        axis
        for n, b, a in zip(shape, before.dims, after.dims)
        if b != a
        for axes in (b, a)
        for axis in axes[_same(mesh, n, b, a) :]
    }
    return Exchange(
        mesh, shape, before, after, tuple(a for a in mesh.names if a in moving), ((),) * len(shape)
    )


def _same(mesh: Mesh, size: int, before: Axes, after: Axes) -> int:
    """How many leading axes of a dimension stay: the device's block along them contains what it has
    and what it wants.
    """
    common = len(
        [0 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after))]
    )
    return next(
        k
        for k in range(common, -1, -1)
        if nests(size, before[:k], before, mesh) and nests(size, after[:k], after, mesh)
    )


def _common(a: Boxes, b: Boxes) -> Boxes:
    return np.maximum(a[0], b[0]), np.minimum(a[1], b[1])


def _volume(boxes: Boxes) -> np.ndarray:
    return np.maximum(boxes[1] - boxes[0], 0).prod(0)


def _one(boxes: Boxes, index: int) -> Boxes:
    return boxes[0][:, index : index + 1], boxes[1][:, index : index + 1]


def _box(boxes: Boxes, within: Boxes, index: int = 0) -> Box:
    """One of the boxes, its rows counted from the start of another."""
    origin = within[0][:, 0]
    return tuple(
        zip((boxes[0][:, index] - origin).tolist(), (boxes[1][:, index] - origin).tolist())
    )


def _listed(boxes: Boxes, within: Boxes, chosen: np.ndarray) -> tuple[Box | None, ...]:
    wanted = chosen & (_volume(boxes) > 0)
    return tuple(
        _box(boxes, within, i) if found else None for i, found in enumerate(wanted.tolist())
    )


# ------------------------------------------------------------------------------------------ on tensors


def elements(box: Box) -> int:
    """How many elements a box has."""
    return math.prod(stop - start for start, stop in box)


def cut(x: Tensor, box: Box) -> Tensor:
    """The part of a tensor that a box says."""
    for d, (start, stop) in enumerate(box):
        x = x.narrow(d, start, stop - start)
    return x


def pack(x: Tensor, boxes: Sequence[Box]) -> Tensor:
    """The boxes of x one after the other, flat."""
    return torch.cat([cut(x, box).reshape(-1) for box in boxes]) if boxes else x.new_empty(0)


def unpack(
    x: Tensor,
    moved: Tensor,
    boxes: Sequence[Box],
    keep: tuple[Box, Box] | None,
    shape: Sequence[int],
    fill: float = 0.0,
) -> Tensor:
    """What arrived for each box, and what is kept of x, together; `fill` in the padding."""
    result = x.new_full(shape, fill)
    if keep is not None:
        cut(result, keep[1]).copy_(cut(x, keep[0]))
    for box, part in zip(boxes, moved.split([elements(box) for box in boxes])):
        target = cut(result, box)
        target.copy_(part.view(target.shape))
    return result
