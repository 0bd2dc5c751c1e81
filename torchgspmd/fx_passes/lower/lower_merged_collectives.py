"""The lowering of several collectives of one kind, which are sent as one.

Like that of a single collective it is a generator. It returns the results of all of them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Generator, Sequence
from typing import Any

from torch import fx

from ...comm.collective import split_axes
from ...compat.operators import aten, c10d
from .collective_builder import CollectiveBuilder
from .lower_single_collectives import c10d_reduction

MergedLowering = Generator[fx.Node, fx.Node, list[fx.Node]]


def _all_reduce(
    build: CollectiveBuilder, xs: list[Any], shapes: list[list[int]], arguments: Sequence[tuple]
) -> MergedLowering:
    reduction, axes = arguments[0]
    name, _ = build.groups.group(split_axes(axes))
    flat = build.call(aten.cat.default, [build.call(aten.reshape.default, x, [-1]) for x in xs])
    total = yield build.begin(
        c10d.all_reduce_.default,
        [sum(map(math.prod, shapes))],
        flat,
        c10d_reduction(reduction),
        name,
    )
    return build.unpack(total, shapes)


def _all_gather(
    build: CollectiveBuilder, xs: list[Any], shapes: list[list[int]], arguments: Sequence[tuple]
) -> MergedLowering:
    name, positions = build.groups.group(split_axes(arguments[0][1]))
    n = len(positions)
    flat = build.call(aten.cat.default, [build.call(aten.reshape.default, x, [-1]) for x in xs])
    gathered = yield build.begin(
        c10d.all_gather_into_tensor.default, [n * sum(map(math.prod, shapes))], flat, n, name
    )
    rows = build.call(aten.reshape.default, gathered, [n, sum(map(math.prod, shapes))])
    members = build.call(
        aten.split_with_sizes.default,
        build.reorder(rows, positions),
        [math.prod(shape) for shape in shapes],
        1,
    )
    results = []
    for i, (shape, (dim, _)) in enumerate(zip(shapes, arguments)):
        stacked = build.call(
            aten.reshape.default, build.call(operator.getitem, members, i), [n, *shape]
        )
        results.append(build.contiguous(build.from_front(stacked, shape, dim, n)))
    return results


def _reduce_scatter(
    build: CollectiveBuilder, xs: list[Any], shapes: list[list[int]], arguments: Sequence[tuple]
) -> MergedLowering:
    reduction, _, axes = arguments[0]
    name, positions = build.groups.group(split_axes(axes))
    n = len(positions)
    rows, shards = [], []
    for x, shape, (_, dim, _) in zip(xs, shapes, arguments):
        stacked, shard = build.to_front(x, shape, dim, n)
        rows.append(build.call(aten.reshape.default, stacked, [n, -1]))
        shards.append(shard)
    flat = build.reorder(
        build.call(aten.cat.default, rows, 1), [positions.index(i) for i in range(n)]
    )
    shape = [1, sum(map(math.prod, shards))]
    total = yield build.begin(
        c10d.reduce_scatter_tensor.default,
        shape,
        build.contiguous(flat),
        c10d_reduction(reduction),
        n,
        name,
    )
    return build.unpack(build.call(aten.reshape.default, total, [-1]), shards)


MERGED: dict[str, Callable[..., MergedLowering]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
}
