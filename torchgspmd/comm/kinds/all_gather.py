"""all_gather(x, dim, axes): all devices get the shards along `axes`, joined at dimension `dim`."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.operators import aten, c10d
from ...layout.mesh import Mesh
from ...shard_spec import ShardSpec
from ..collective import CollectiveBuilder, Lowering, MergedLowering, split_axes
from ..gloo_rewriter import GlooRewriter
from ..hosts import HostLevels
from .kind import CollectiveKind, LocalSteps, MergedForm, ReshardProblem, Step, WireOp, in_groups


def _moves(problem: ReshardProblem, spec: ShardSpec, left: float) -> Iterator[Step]:
    """Yield gathers along each dimension's minor axes."""
    for d, axes in enumerate(spec.dims):
        # Only minor axes: a gather over a major one would leave the shard in pieces.
        for k in range(len(axes)):
            if problem.nests(d, axes[:k], axes):
                new = spec.with_dim(d, axes[:k])
                yield all_gather.step(
                    problem.mesh,
                    (d, "+".join(axes[k:])),
                    new,
                    axes[k:],
                    problem.padded_bytes(new, d, axes[k:]),
                )


def _localize(build: LocalSteps, x: fx.Node, dim: int, axes: str) -> fx.Node:
    return build.trimmed(build.collective(x, dim, axes), dim)


def _simulate(mesh: Mesh, x: list[Tensor], dim: int, axes: str) -> list[Tensor]:
    return in_groups(axes, mesh, x, lambda shards: [torch.cat(shards, dim)] * len(shards))


def _lower(build: CollectiveBuilder, x: object, shape: list[int], dim: int, axes: str) -> Lowering:
    name, positions = build.groups.group(split_axes(axes))
    n = len(positions)
    gathered = yield build.begin(
        c10d.all_gather_into_tensor.default,
        [n * shape[0], *shape[1:]],
        build.contiguous(x),
        n,
        name,
    )
    # Shards arrive in process group order, which need not be that of the axes.
    stacked = build.reorder(build.call(aten.reshape.default, gathered, [n, *shape]), positions)
    return build.contiguous(build.from_front(stacked, shape, dim, n))


def _lower_merged(
    build: CollectiveBuilder,
    xs: list[object],
    shapes: list[list[int]],
    arguments: Sequence[tuple[int, str]],
) -> MergedLowering:
    name, positions = build.groups.group(split_axes(arguments[0][1]))
    n, sizes = len(positions), [math.prod(shape) for shape in shapes]
    gathered = yield build.begin(
        c10d.all_gather_into_tensor.default, [n * sum(sizes)], build.flat(xs), n, name
    )
    rows = build.call(aten.reshape.default, gathered, [n, sum(sizes)])
    members = build.call(aten.split_with_sizes.default, build.reorder(rows, positions), sizes, 1)
    results: list[Any] = []
    for i, (shape, (dim, _)) in enumerate(zip(shapes, arguments)):
        stacked = build.call(
            aten.reshape.default, build.call(operator.getitem, members, i), [n, *shape]
        )
        results.append(build.contiguous(build.from_front(stacked, shape, dim, n)))
    return results


def _over_gloo(collective: GlooRewriter) -> None:
    shard = [collective.shape[0] // collective.ranks, *collective.shape[1:]]
    if collective.ranks == 2:
        arrived, x = collective.swap(shard), collective.x
        in_order = [arrived, x] if collective.me else [x, arrived]
        collective.replace_result(arrived, aten.cat.default, in_order)
    else:
        collective.send_all(shard)
        wait = collective.wait
        collective.replace_result(wait, aten.reshape.default, wait, collective.shape)


def _over_hosts(levels: HostLevels) -> None:
    """Gather between hosts, then inside: a shard enters a host once."""
    op, n, hosts = c10d.all_gather_into_tensor.default, levels.each, levels.count
    width = math.prod(levels.shape) // (n * hosts)
    x = levels.call(aten.reshape.default, levels.x, [1, width])
    part = levels.between(op, [hosts, width], x, hosts)
    part = levels.call(aten.reshape.default, part, [1, hosts * width])
    levels.finish(levels.exchange(levels.inside(op, [n, hosts * width], part, n), n, hosts))


all_gather = CollectiveKind(
    name="all_gather",
    signature="all_gather(f32[8@a, 6], 0, a) -> f32[8, 6]",
    meaning="Join the shards of `dim` over `axes` on every device. On one device: x.",
    picture="""
        device 0   x0   ->   x0 x1
        device 1   x1   ->   x0 x1
    """,
    suffix="g",
    payload="the gathered tensor, padding included",
    relays=True,
    sent=lambda payload, n: (n - 1) / n * payload,
    moves=_moves,
    localize=_localize,
    simulate=_simulate,
    lower=_lower,
    merged=MergedForm((1,), _lower_merged),
    wire=(WireOp(c10d.all_gather_into_tensor.default, over_gloo=_over_gloo),),
    gathers=True,
    over_hosts=_over_hosts,
    xla="all-gather",
)
