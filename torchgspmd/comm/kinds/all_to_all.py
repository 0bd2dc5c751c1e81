"""all_to_all(x, gather_dim, scatter_dim, axes): axes move from one dimension to another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.operators import c10d
from ...layout.mesh import Mesh
from ...shard_spec import ShardSpec
from ..collective import CollectiveBuilder, Lowering, split_axes
from ..local_ops import take_part
from .kind import CollectiveKind, LocalSteps, ReshardProblem, Step, WireOp, in_groups

ALL_TO_ALL = WireOp(c10d.all_to_all_single.default)


def _moves(problem: ReshardProblem, spec: ShardSpec, left: float) -> Iterator[Step]:
    """Yield exchanges that move minor axes from one dimension to another."""
    after = problem.after.dims
    for d, axes in enumerate(spec.dims):
        for k, e in itertools.product(range(len(axes)), range(len(problem.shape))):
            major, moved = axes[:k], axes[k:]
            fine = spec.dims[e] + moved
            # left == 0: only steps that end at the target count.
            if not left and (major, fine) != (after[d], after[e]):
                continue
            if e != d and problem.nests(d, major, axes) and problem.nests(e, spec.dims[e], fine):
                payload = problem.padded_bytes(spec, e, moved)
                if 0 < left <= all_to_all.sent(payload, problem.mesh.count(moved)):
                    continue
                yield all_to_all.step(
                    problem.mesh,
                    (d, e, "+".join(moved)),
                    spec.with_dim(d, major).with_dim(e, fine),
                    moved,
                    payload,
                )


def _localize(
    build: LocalSteps, x: fx.Node, gather_dim: int, scatter_dim: int, axes: str
) -> fx.Node:
    x = build.padded(x, scatter_dim)
    return build.trimmed(build.collective(x, gather_dim, scatter_dim, axes), gather_dim)


def _simulate(
    mesh: Mesh, x: list[Tensor], gather_dim: int, scatter_dim: int, axes: str
) -> list[Tensor]:
    def run(shards: list[Tensor]) -> list[Tensor]:
        return [
            torch.cat([take_part(x, scatter_dim, i, len(shards)) for x in shards], gather_dim)
            for i in range(len(shards))
        ]

    return in_groups(axes, mesh, x, run)


def _lower(
    build: CollectiveBuilder, x: Any, shape: list[int], gather_dim: int, scatter_dim: int, axes: str
) -> Lowering:
    name, positions = build.groups.group(split_axes(axes))
    n = len(positions)
    # [n, *shard]: row i goes to group member i.
    stacked, shard = build.to_front(x, shape, scatter_dim, n)
    stacked = build.in_group_order(stacked, positions)
    if (exchange := build.row_exchange([n, *shard], name)) is not None:
        moved = build.call(exchange, stacked)
    else:
        moved = yield build.begin(ALL_TO_ALL.op, [n, *shard], stacked, [1] * n, [1] * n, name)
    return build.contiguous(build.from_front(build.reorder(moved, positions), shard, gather_dim, n))


all_to_all = CollectiveKind(
    name="all_to_all",
    signature="all_to_all(f32[8@a, 6], 0, 1, a) -> f32[8, 6@a]",
    meaning="Join the shards of `gather_dim`, and shard along `scatter_dim`. On one device: x.",
    picture="""
        device 0   x0 y0   ->   x0 x1
        device 1   x1 y1   ->   y0 y1
    """,
    suffix="x",
    payload="the tensor of one device",
    sent=lambda payload, n: (n - 1) / n * payload,
    moves=_moves,
    localize=_localize,
    simulate=_simulate,
    lower=_lower,
    wire=(ALL_TO_ALL,),
    xla="all-to-all",
)
