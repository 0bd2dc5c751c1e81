"""Reshard to a layout with windows: first to the plain layout, then one step for each dimension.

before   x laid out as f32[4, 64@s]
after    x laid out as f32[4, 64@s[8i-1:+10]]
         halo(x, 1, s, 8i-1:+10 in 0:64 else 0, 64)
source   GSPMD (arXiv 2105.04663, section 4.3). Dimensions are exchanged one after the other, which
         includes the corners.

A dimension that the device has whole is only cut, and nothing is sent:
window(x, 1, s, 8i-1:+10 in 0:64 else 0).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from ...comm.kinds import Step, window
from ...comm.kinds.halo import halo_step, halos_step
from ...layout.mesh import Mesh
from ...shard_spec import ShardSpec
from .cost_constants import CostConstants
from .reshard_search import step_cost

Path = tuple[float, tuple[Step, ...]]  # cost, steps


def start_of_halos(before: ShardSpec, after: ShardSpec) -> ShardSpec:
    """Return the plain layout from which windows are exchanged, or cut where a device has all."""
    busy, start = set(before.sharding_axes + before.pending), after.plain()
    for d, rows in enumerate(after.windows):
        # A device with all rows only cuts its window, if no other dimension uses the axis.
        if rows and not before.dims[d] and not busy & set(after.dims[d]):
            start = start.with_dim(d, ())
    return start


def halo_steps(
    mesh: Mesh,
    shape: tuple[int, ...],
    itemsize: int,
    start: ShardSpec,
    after: ShardSpec,
    constants: CostConstants,
) -> Path:
    """Return (cost, steps) in the cheapest dimension order, or at once if that sends less.

    Halos on several dimensions have the same rows either way. Where shards change places, as in a
    flip along two dimensions, they would be sent once for each dimension.
    """
    dims = [d for d, rows in enumerate(after.windows) if rows]
    orders = (
        _in_order(mesh, shape, itemsize, start, after, order)
        for order in itertools.permutations(dims)
    )
    paths = ((sum(step_cost(step, constants) for step in steps), steps) for steps in orders)
    cost, steps = min(paths, key=lambda path: path[0])
    if sum(step.sent > 0 for step in steps) > 1 and start.dims == after.dims:
        once = halos_step(mesh, shape, itemsize, start, after)
        if once is not None and once.sent < sum(step.sent for step in steps):
            return step_cost(once, constants), (once,)
    return cost, steps


def _in_order(
    mesh: Mesh,
    shape: Sequence[int],
    itemsize: int,
    start: ShardSpec,
    after: ShardSpec,
    order: Sequence[int],
) -> tuple[Step, ...]:
    spec, steps = start, []
    for d in order:
        # Before the window is added: a later exchange also sends the halos of earlier ones.
        local = spec.local_shape(shape, mesh)
        spec = spec.with_dim(d, after.dims[d]).with_window(d, after.window(d))
        row = math.prod(n for i, n in enumerate(local) if i != d) * itemsize
        steps.append(halo_step(mesh, spec, d, shape[d], row) if start.dims[d] else _cut(d, spec))
    return tuple(steps)


def _cut(d: int, spec: ShardSpec) -> Step:
    """Return the step that cuts a window from a dimension that is whole."""
    axes = spec.dims[d]
    return Step(window, (d, "+".join(axes), str(spec.window(d))), spec, axes)
