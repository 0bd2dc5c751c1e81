"""Box exchange: reshard a tensor between any two layouts; a device receives only missing elements.

    x[6, 4] on a=2, b=2, from "a _" to "b _". Devices (a0, b0) and (a0, b1) both store rows 0 to 2.
    Devices of b0 need these rows, and (a1, b0) lacks them.
    One of the two sources sends rows 0 and 1, the other sends row 2.

A layout gives every device a box: a row range in each dimension. The last ranges are shorter where
the dimension does not divide. Devices with the same box divide it among them, so that every element
has exactly one sender.

All boxes follow from a device's coordinates in closed form. Nothing is summed: the same axes are
pending before and after.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..layout.mesh import Coordinates, Mesh
from ..layout.open_sizes import nests
from ..shard_spec import Axes, ShardSpec

Box = tuple[tuple[int, int], ...]  # (first row, row past the last) in each dimension
Boxes = tuple[np.ndarray, np.ndarray]  # first and past-the-last rows, each [dimensions, devices]
MAX_WAYS = 64  # Ways to divide the sending among replicas that are compared.
MAX_COUNTED_DEVICES = 256  # In larger groups, only devices at borders are counted.


@dataclass(frozen=True)
class Transfer:
    """Sends and receives: one device's part in an exchange.

    sends: boxes in its old shard, one per group member; None where nothing is sent.
    receives: boxes in its new shard, one per group member. keep: the box that stays on the device,
    as rows in the old and in the new shard.
    """

    sends: tuple[Box | None, ...]
    receives: tuple[Box | None, ...]
    keep: tuple[Box, Box] | None
    shape: tuple[int, ...]  # the new shard's shape, padding included


@dataclass(frozen=True)
class Exchange:
    """An exchange between two layouts; `shape` is the tensor's global shape.

    axes: the mesh axes that a group runs over, in mesh order. duty: for every dimension, the axes
    whose devices are replicas and divide its sending among them.
    """

    mesh: Mesh
    shape: tuple[int, ...]
    before: ShardSpec
    after: ShardSpec
    axes: Axes
    duty: tuple[Axes, ...]

    def busiest(self) -> int:
        """Return the elements that the busiest device sends or receives, whichever is more."""
        sharing = tuple(a for axes in self.duty for a in axes)
        return max(self.received(), *self.sent(sharing, [self.duty]))

    def received(self) -> int:
        """Return the most elements that a device receives."""
        required: Any = 1
        local: Any = 1
        for size, b, a in zip(self.shape, self.before.dims, self.after.dims):
            low, high = _blocks(self.mesh, self.axes, size, a)
            required = required * (high - low)
            if a != b:
                first, last = _blocks(self.mesh, self.axes, size, b)
                local = local * np.maximum(np.minimum(high, last) - np.maximum(low, first), 0)
            else:
                local = local * (high - low)
        return int((required - local).max())

    def transfer(self, coordinates: Coordinates) -> Transfer:
        """Return a device's sends and receives, by its coordinates."""
        group = self._group(coordinates)
        old, new, duty = (
            self._rows(self.before, group),
            self._rows(self.after, group),
            self._divided(self.duty, group, self._rows(self.before, group)),
        )
        mine = int(self.mesh.index(self.axes, coordinates))
        my_old, my_new, my_duty = (_select(boxes, mine) for boxes in (old, new, duty))
        others = (old[0] != my_old[0]).any(0)  # devices with another box
        keep = _intersection(my_old, my_new)
        return Transfer(
            _nonempty_boxes(_intersection(my_duty, new), my_old, others),
            _nonempty_boxes(_intersection(duty, my_new), my_new, others),
            (_box(keep, my_old), _box(keep, my_new)) if _volume(keep).item() else None,
            self.after.local_shape(self.shape, self.mesh),
        )

    def _group(self, coordinates: Coordinates) -> dict[str, np.ndarray]:
        """Return the coordinates of a group's members, in the group's order."""
        places = np.indices([self.mesh.count((a,)) for a in self.axes]).reshape(len(self.axes), -1)
        fixed = {
            name: np.full(places.shape[1], self.mesh.place(name, coordinates))
            for name in self.mesh.names
        }
        return {**fixed, **dict(zip(self.axes, places))}

    def _rows(self, spec: ShardSpec, group: dict[str, Any]) -> Boxes:
        """Return each member's box, without padding."""
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

    def _divided(self, duty: Sequence[Axes], group: dict[str, Any], boxes: Boxes) -> Boxes:
        """Return the boxes that the members send if `duty` divides the sending."""
        lows, highs = boxes[0].copy(), boxes[1].copy()
        for d, axes in enumerate(duty):
            if axes:
                rows = -(
                    -self.shape[d] // self.mesh.count(self.before.dims[d]) // self.mesh.count(axes)
                )
                lows[d] = np.minimum(lows[d] + self.mesh.index(axes, group) * rows, highs[d])
                highs[d] = np.minimum(lows[d] + rows, highs[d])
        return lows, highs

    def sent(self, sharing: Axes, duties: Iterable[tuple[Axes, ...]]) -> Iterator[int]:
        """Yield, for each duty, the most elements that a device in the first group sends.

        Without copies to devices that have them. sharing: the axes that each duty divides among.
        """
        group = self._group(dict.fromkeys(self.mesh.names, 0))
        boxes = self._rows(self.before, group)
        copies = self.mesh.count(a for a in self.axes if a not in self.after.sharding_axes)
        holders = [
            self._rows(
                self.after,
                {**group, **{a: np.full_like(group[a], n) for a, n in zip(sharing, places)}},
            )
            for places in itertools.product(*(range(self.mesh.count((a,))) for a in sharing))
        ]
        for duty in duties:
            parts = self._divided(duty, group, boxes)
            had = sum(_volume(_intersection(parts, rows)) for rows in holders)
            yield int((copies * _volume(parts) - had).max())


@lru_cache(maxsize=65536)
def _blocks(mesh: Mesh, members: Axes, size: int, axes: Axes) -> tuple[np.ndarray, np.ndarray]:
    """Return each member's first and past-the-last row; `axes` shard the dimension.

    The members are the first device's group.
    """
    places = _counted_places(tuple(mesh.count((a,)) for a in members))
    at = {**dict.fromkeys(mesh.names, 0), **dict(zip(members, places))}
    rows = -(-size // mesh.count(axes))
    # Adding zeros gives an array also where no axis shards the dimension.
    low = np.minimum(mesh.index(axes, at) * rows + np.zeros(places.shape[1], dtype=int), size)
    return low, np.minimum(low + rows, size)


@lru_cache(maxsize=1024)
def _counted_places(sizes: tuple[int, ...]) -> np.ndarray:
    """Return coordinates [axes, devices]: the devices that are counted in a group.

    Among many devices, only those at block borders count. They are at each axis's first, second and
    last place, or at the first and the last.
    """
    if math.prod(sizes) <= MAX_COUNTED_DEVICES:
        return np.indices(sizes).reshape(len(sizes), -1)
    # Fewer places on each axis if those of all axes multiply to too many.
    for places in (lambda n: {0, min(1, n - 1), n - 1}, lambda n: {0, n - 1}, lambda n: {0}):
        chosen = [sorted(places(n)) for n in sizes]
        if math.prod(map(len, chosen)) <= MAX_COUNTED_DEVICES:
            break
    return np.array(np.meshgrid(*chosen, indexing="ij")).reshape(len(sizes), -1)


def exchange(mesh: Mesh, shape: tuple[int, ...], before: ShardSpec, after: ShardSpec) -> Exchange:
    """Return the exchange with the least load on its busiest device."""
    return _least_busy(mesh, shape, before, after)[1]


@lru_cache(maxsize=65536)
def _least_busy(
    mesh: Mesh, shape: tuple[int, ...], before: ShardSpec, after: ShardSpec
) -> tuple[int, Exchange]:
    """Return (elements that the busiest device moves, exchange) for the best exchange."""
    undivided = _undivided(mesh, shape, before, after)
    sharing = tuple(a for a in undivided.axes if a not in undivided.before.sharding_axes)
    # Changed dimensions first: MAX_WAYS may end the list before the others.
    dims = sorted(range(len(shape)), key=lambda d: before.dims[d] == after.dims[d])
    duties = [
        tuple(tuple(a for a, place in zip(sharing, way) if place == d) for d in range(len(shape)))
        for way in itertools.islice(itertools.product(dims, repeat=len(sharing)), MAX_WAYS)
    ]
    received, least, best = undivided.received(), -1, duties[0]
    for duty, sent in zip(duties, undivided.sent(sharing, duties)):
        if least < 0 or max(sent, received) < least:
            least, best = max(sent, received), duty
        if least == received:  # No way is less busy.
            break
    return least, replace(undivided, duty=best)


@lru_cache(maxsize=2**18)
def lacking(mesh: Mesh, shape: tuple[int, ...], before: ShardSpec, after: ShardSpec) -> int:
    """Return the fewest elements that some device must receive, in any reshard."""
    changed = [d for d, (b, a) in enumerate(zip(before.dims, after.dims)) if b != a]
    if any(
        shape[d] % mesh.count(axes) for d in changed for axes in (before.dims[d], after.dims[d])
    ):
        # One entry in the cache then serves every batch size that divides alike.
        scale, small = _shrink(mesh, shape, before, after, 1)
        if scale > 1:
            return lacking(mesh, small, before, after) * scale
        return _undivided(mesh, shape, before, after).received()
    required, local = math.prod(after.local_shape(shape, mesh)), 1
    for n, b, a in zip(shape, before.dims, after.dims):
        short, long = sorted((b, a), key=len)
        # Without a common prefix, some device lacks its whole new shard.
        local *= -(-n // mesh.count(long)) if long[: len(short)] == short else 0
    return required - local


@lru_cache(maxsize=65536)
def busiest(
    mesh: Mesh, shape: tuple[int, ...], before: ShardSpec, after: ShardSpec
) -> tuple[int, Axes]:
    """Return (elements that the busiest device sends or receives, the group's axes).

    Where all blocks divide, this is a closed form: nobody sends more than some device lacks.
    Otherwise elements are counted. In a large group the received bytes are the estimate.
    """
    undivided = _undivided(mesh, shape, before, after)
    if any(
        n % mesh.count(axes)
        for n, b, a in zip(shape, before.dims, after.dims)
        if b != a
        for axes in (b, a)
    ):
        if mesh.count(undivided.axes) > MAX_COUNTED_DEVICES:
            return lacking(mesh, shape, before, after), undivided.axes
        scale, small = _shrink(mesh, shape, before, after, mesh.size)
        return _least_busy(mesh, small, before, after)[0] * scale, undivided.axes
    return lacking(mesh, shape, before, after), undivided.axes


def _shrink(
    mesh: Mesh, shape: tuple[int, ...], before: ShardSpec, after: ShardSpec, parts: int
) -> tuple[int, tuple[int, ...]]:
    """Return (scale, smaller shape): boxes of the given shape have `scale` times the elements.

    A dimension with the same axes before and after counts by its size alone, if each of its shards
    divides into so many equal parts. Exchanges that differ in such sizes are counted once.
    """
    scale, small = 1, []
    for n, b, a in zip(shape, before.dims, after.dims):
        least = mesh.count(b) * parts
        divides = b == a and n and n % least == 0
        scale *= n // least if divides else 1
        small.append(least if divides else n)
    return scale, tuple(small)


def _undivided(mesh: Mesh, shape: tuple[int, ...], before: ShardSpec, after: ShardSpec) -> Exchange:
    """Return the exchange in which replicas do not divide the sending."""
    fine = mesh.divided(before.sharding_axes + before.pending + after.sharding_axes + after.pending)
    if fine != mesh:  # Equal names must mean equal devices.
        mesh, before, after = fine, before.map_axes(fine.refine), after.map_axes(fine.refine)
    moving = {
        axis
        for n, b, a in zip(shape, before.dims, after.dims)
        if b != a
        for axes in (b, a)
        for axis in axes[_shared_prefix(mesh, n, b, a) :]
    }
    return Exchange(
        mesh, shape, before, after, tuple(a for a in mesh.names if a in moving), ((),) * len(shape)
    )


def _shared_prefix(mesh: Mesh, size: int, before: Axes, after: Axes) -> int:
    """Count the leading axes whose block contains the old and the new shard."""
    common = len(
        [0 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after))]
    )
    return next(
        k
        for k in range(common, -1, -1)
        if nests(size, before[:k], before, mesh) and nests(size, after[:k], after, mesh)
    )


def _intersection(a: Boxes, b: Boxes) -> Boxes:
    return np.maximum(a[0], b[0]), np.minimum(a[1], b[1])


def _volume(boxes: Boxes) -> np.ndarray:
    return np.maximum(boxes[1] - boxes[0], 0).prod(0)


def _select(boxes: Boxes, index: int) -> Boxes:
    return boxes[0][:, index : index + 1], boxes[1][:, index : index + 1]


def _box(boxes: Boxes, within: Boxes, index: int = 0) -> Box:
    """Return box number `index`, with rows relative to the start of `within`."""
    origin = within[0][:, 0]
    return tuple(
        zip((boxes[0][:, index] - origin).tolist(), (boxes[1][:, index] - origin).tolist())
    )


def _nonempty_boxes(boxes: Boxes, within: Boxes, chosen: np.ndarray) -> tuple[Box | None, ...]:
    """Return every chosen box that has elements, None for the others."""
    mask = chosen & (_volume(boxes) > 0)
    return tuple(
        _box(boxes, within, i) if is_chosen else None for i, is_chosen in enumerate(mask.tolist())
    )


# ------------------------------------------------------------------------------- on tensors


def elements(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def slice_box(x: Tensor, box: Box) -> Tensor:
    for d, (start, stop) in enumerate(box):
        x = x.narrow(d, start, stop - start)
    return x


def pack(x: Tensor, boxes: Sequence[Box]) -> Tensor:
    """Return the boxes of x, flattened and concatenated."""
    return torch.cat([slice_box(x, box).reshape(-1) for box in boxes]) if boxes else x.new_empty(0)


def unpack(
    x: Tensor,
    moved: Tensor,
    boxes: Sequence[Box],
    keep: tuple[Box, Box] | None,
    shape: Sequence[int],
    fill: float = 0.0,
) -> Tensor:
    """Return the new shard from the received boxes and the box that stays; padding is `fill`."""
    result = x.new_full(shape, fill)
    if keep is not None:
        slice_box(result, keep[1]).copy_(slice_box(x, keep[0]))
    for box, part in zip(boxes, moved.split([elements(box) for box in boxes])):
        target = slice_box(result, box)
        target.copy_(part.view(target.shape))
    return result
