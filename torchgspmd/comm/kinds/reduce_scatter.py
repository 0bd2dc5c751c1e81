"""reduce_scatter(x, reduction, dim, axes): every device gets its shard of the sum along `dim`."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, fx

from ...compat.operators import aten, c10d
from ...layout.mesh import Mesh
from ...shard_spec import Axes, ShardSpec
from ..collective import CollectiveBuilder, Lowering, MergedLowering, split_axes
from ..gloo_rewriter import REDUCTIONS, GlooRewriter
from ..hosts import HostLevels
from ..local_ops import take_part
from .kind import CollectiveKind, LocalSteps, MergedForm, ReshardProblem, Step, WireOp, in_groups


def pending_subsets(problem: ReshardProblem, spec: ShardSpec) -> Iterator[tuple[Axes, ShardSpec]]:
    """Yield axes to reduce over, all that `after` does not have pending and each, and the rest."""
    axes = tuple(a for a in spec.pending if a not in problem.after.pending)
    for subset in dict.fromkeys([axes, *((a,) for a in axes)] if axes else ()):
        yield subset, spec.with_pending(tuple(a for a in spec.pending if a not in subset))


def _moves(problem: ReshardProblem, spec: ShardSpec, left: float) -> Iterator[Step]:
    for subset, rest in pending_subsets(problem, spec):
        for order, d in itertools.product(
            itertools.permutations(subset), range(len(problem.shape))
        ):
            fine = spec.dims[d] + order
            if not left and fine != problem.after.dims[d]:
                continue
            # One row over several devices would be padding on all but one.
            if problem.shape[d] > 1 and problem.nests(d, spec.dims[d], fine):
                payload = problem.padded_bytes(spec, d, order)
                if 0 < left <= reduce_scatter.sent(payload, problem.mesh.count(order)):
                    continue
                yield reduce_scatter.step(
                    problem.mesh,
                    (spec.reduction, d, "+".join(order)),
                    rest.with_dim(d, fine),
                    order,
                    payload,
                )


def _localize(build: LocalSteps, x: fx.Node, reduction: str, dim: int, axes: str) -> fx.Node:
    return build.collective(build.padded(x, dim), reduction, dim, axes)


def _simulate(mesh: Mesh, x: list[Tensor], reduction: str, dim: int, axes: str) -> list[Tensor]:
    def run(terms: list[Tensor]) -> list[Tensor]:
        total = functools.reduce(REDUCTIONS[reduction].combine, terms)
        return [take_part(total, dim, i, len(terms)) for i in range(len(terms))]

    return in_groups(axes, mesh, x, run)


def _lower(
    build: CollectiveBuilder, x: Any, shape: list[int], reduction: str, dim: int, axes: str
) -> Lowering:
    name, positions = build.groups.group(split_axes(axes))
    # [count, *shard]: row i is the shard of group member i.
    stacked, shard = build.to_front(x, shape, dim, len(positions))
    mine = yield build.begin(
        c10d.reduce_scatter_tensor.default,
        [1, *shard],
        build.in_group_order(stacked, positions),
        REDUCTIONS[reduction].c10d,
        len(positions),
        name,
    )
    return build.call(aten.reshape.default, mine, shard)


def _lower_merged(
    build: CollectiveBuilder,
    xs: list[Any],
    shapes: list[list[int]],
    arguments: Sequence[tuple[str, int, str]],
) -> MergedLowering:
    reduction, _, axes = arguments[0]
    name, positions = build.groups.group(split_axes(axes))
    n = len(positions)
    rows: list[fx.Node] = []
    shards: list[list[int]] = []
    for x, shape, (_, dim, _) in zip(xs, shapes, arguments):
        stacked, shard = build.to_front(x, shape, dim, n)
        # [n, elements of a shard]: members' rows can then be sent side by side.
        rows.append(build.call(aten.reshape.default, stacked, [n, -1]))
        shards.append(shard)
    total = yield build.begin(
        c10d.reduce_scatter_tensor.default,
        [1, sum(map(math.prod, shards))],
        build.in_group_order(build.call(aten.cat.default, rows, 1), positions),
        REDUCTIONS[reduction].c10d,
        n,
        name,
    )
    return build.unpack(build.call(aten.reshape.default, total, [-1]), shards)


def _over_gloo(collective: GlooRewriter) -> None:
    row = collective.shape[1:]
    collective.all_to_all(collective.x, [1] * collective.ranks, row)
    collective.reduce(True)


def _over_hosts(levels: HostLevels) -> None:
    """Reduce inside hosts, so that each rank sends a part, then between hosts."""
    op, n, hosts = c10d.reduce_scatter_tensor.default, levels.each, levels.count
    reduction, width = levels.options[0], math.prod(levels.shape)
    x = levels.call(aten.reshape.default, levels.exchange(levels.x, hosts, n), [n, -1])
    part = levels.inside(op, [1, hosts * width], x, reduction, n)
    part = levels.call(aten.reshape.default, part, [hosts, width])
    levels.finish(levels.between(op, [1, width], part, reduction, hosts))


reduce_scatter = CollectiveKind(
    name="reduce_scatter",
    signature="reduce_scatter(f32[8, 6] sum@a, sum, 0, a) -> f32[8@a, 6]",
    meaning="Reduce terms over `axes` and shard the result along `dim`. On one device: x.",
    picture="""
        device 0   x0 y0   ->   x0 + x1
        device 1   x1 y1   ->   y0 + y1
    """,
    suffix="rs",
    payload="the tensor before it is scattered",
    relays=True,
    sent=lambda payload, n: (n - 1) / n * payload,
    moves=_moves,
    localize=_localize,
    simulate=_simulate,
    lower=_lower,
    merged=MergedForm((0, 2), _lower_merged),
    wire=(WireOp(c10d.reduce_scatter_tensor.default, reduces=True, over_gloo=_over_gloo),),
    reduces=True,
    over_hosts=_over_hosts,
    xla="reduce-scatter",
    payload_from=lambda result, n: result * n,
)
