"""The steps that send nothing: shard, term, window."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch import fx

from ...layout.halo_window import Window
from ...shard_spec import Axes, ShardSpec
from ..local_ops import only_first, take_part, take_window
from .kind import LocalStepKind, LocalSteps, ReshardProblem, Step


def shard_step(spec: ShardSpec, dim: int, axes: Axes) -> Step:
    """Return the step that shards a dimension further along `axes`."""
    return Step(shard, (dim, "+".join(axes)), spec.with_dim(dim, spec.dims[dim] + axes), axes)


def _shards(problem: ReshardProblem, spec: ShardSpec, left: float) -> Iterator[Step]:
    """Yield shards along the axes that the target has.

    Before a reduction, which is cheaper on shards, they may shard any dimension.
    """
    after, taken = problem.after, {*spec.sharding_axes, *spec.pending}
    if spec.pending != after.pending:
        for axis, d in itertools.product(
            [a for a in after.sharding_axes if a not in taken], range(len(problem.shape))
        ):
            if problem.shape[d] > 1 and problem.nests(d, spec.dims[d], spec.dims[d] + (axis,)):
                yield shard_step(spec, d, (axis,))
    for d, (have, need) in enumerate(zip(spec.dims, after.dims)):
        rest = need[len(have) :]
        if have == need[: len(have)]:
            # One axis, or all: repeated steps over one axis reach the rest.
            for end in {1, len(rest)} if rest else ():
                if not taken & set(rest[:end]) and problem.nests(d, have, have + rest[:end]):
                    yield shard_step(spec, d, rest[:end])


def _localize_shard(build: LocalSteps, x: fx.Node, dim: int, axes: str) -> fx.Node:
    return build.call(take_part, build.padded(x, dim), dim, build.index(axes), build.count(axes))


shard = LocalStepKind(
    name="shard",
    signature="shard(f32[8, 6], 0, a) -> f32[8@a, 6]",
    meaning="Slice x to each device's shard along `dim`. On one device: x.",
    picture="""
        device 0   x0 x1   ->   x0
        device 1   x0 x1   ->   x1
    """,
    suffix="s",
    moves=_shards,
    localize=_localize_shard,
)


def _localize_term(build: LocalSteps, x: fx.Node, axes: str) -> fx.Node:
    return build.call(only_first, x, build.index(axes))


term = LocalStepKind(
    name="term",
    signature="term(f32[8, 6], a) -> f32[8, 6] sum@a",
    meaning="Take x for an unreduced sum, all of it on the first device. On one device: x.",
    picture="""
        device 0   x   ->   x
        device 1   x   ->   0
    """,
    suffix="t",
    localize=_localize_term,
)


def _localize_window(build: LocalSteps, x: fx.Node, dim: int, axes: str, window: str) -> fx.Node:
    rows = (build.shard_rows(dim),) if Window.parse(window).open else ()
    return build.call(take_window, x, dim, build.index(axes), window, *rows)


window = LocalStepKind(
    name="window",
    signature="window(f32[8], 0, a, 4i-1:+6 in 0:8 else 0) -> f32[8@a[4i-1:+6 in 0:8 else 0]]",
    meaning="Slice a dimension that is whole to each device's window. On one device: x, with fill.",
    picture="""
        device 0   x0 x1 x2 x3   ->    0 x0 x1 x2
        device 1   x0 x1 x2 x3   ->   x1 x2 x3  0
    """,
    suffix="w",
    localize=_localize_window,
)
