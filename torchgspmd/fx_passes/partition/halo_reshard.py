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
from typing import TYPE_CHECKING

from ...comm.collective import ALPHA
from ...halo import sent_rows
from ...shard_spec import ShardSpec
from .step import Step

if TYPE_CHECKING:
    from .reshard import Path, Resharder


def halo_steps(
    resharder: Resharder, shape: tuple[int, ...], itemsize: int, before: ShardSpec, after: ShardSpec
) -> Path:
    """Return (cost, steps) in the cheapest order of the dimensions."""
    busy = set(before.sharding_axes + before.pending)
    dims = [d for d, window in enumerate(after.windows) if window]
    whole = [d for d in dims if not before.dims[d] and not busy & set(after.dims[d])]
    start = after.plain()
    for d in whole:
        start = start.with_dim(d, ())
    cost, steps = (
        resharder.cost(shape, itemsize, before, start),
        resharder.steps(shape, itemsize, before, start),
    )
    orders = (
        _in_order(resharder, shape, itemsize, start, after, order, set(whole))
        for order in itertools.permutations(dims)
    )
    more, last = min(orders, key=lambda path: path[0])
    return cost + more, (*steps, *last)


def _in_order(
    resharder: Resharder,
    shape: Sequence[int],
    itemsize: int,
    spec: ShardSpec,
    after: ShardSpec,
    order: Sequence[int],
    whole: set[int],
) -> Path:
    """Return (cost, steps) with the dimensions in this order."""
    cost, steps = 0.0, []
    for d in order:
        local = spec.local_shape(shape, resharder.mesh)
        spec = spec.with_dim(d, after.dims[d]).with_window(d, after.window(d))
        row = math.prod(n for i, n in enumerate(local) if i != d) * itemsize
        step = (
            _cut(resharder, d, spec) if d in whole else _exchange(resharder, d, spec, shape[d], row)
        )
        cost += step.sent + (ALPHA if step.sent else 0.01)
        steps.append(step)
    return cost, tuple(steps)


def _cut(resharder: Resharder, d: int, spec: ShardSpec) -> Step:
    """Return the step that cuts a window out of a dimension that is whole."""
    return Step(
        "window", (d, "+".join(spec.dims[d]), str(spec.window(d))), spec, spec.dims[d], 0.0, 0.0
    )


def _exchange(resharder: Resharder, d: int, spec: ShardSpec, size: int, row: int) -> Step:
    """Return the exchange of rows between neighbors. row: bytes of one row of a shard."""
    axes, window = spec.dims[d], spec.window(d)
    sent = float(sent_rows(window, size, resharder.mesh.count(axes)) * row)
    return Step("halo", (d, "+".join(axes), str(window), size), spec, axes, sent, sent)
