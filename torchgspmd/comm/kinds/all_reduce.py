"""all_reduce(x, reduction, axes): all devices get the sum (or max, ...) of terms over `axes`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ...compat.operators import aten, c10d
from ...layout.mesh import Mesh
from ...shard_spec import ShardSpec
from ..collective import CollectiveBuilder, Lowering, MergedLowering, split_axes
from ..gloo_rewriter import REDUCTIONS, GlooRewriter
from ..hosts import HostLevels
from .kind import CollectiveKind, MergedForm, ReshardProblem, Step, WireOp, in_groups
from .reduce_scatter import pending_subsets, reduce_scatter


def _sent(payload: float, n: int) -> float:
    return 2 * ((n - 1) / n * payload)


def _moves(problem: ReshardProblem, spec: ShardSpec, left: float) -> Iterator[Step]:
    for subset, rest in pending_subsets(problem, spec):
        yield all_reduce.step(
            problem.mesh,
            (spec.reduction, "+".join(subset)),
            rest,
            subset,
            problem.shard_bytes(spec),
        )


def _simulate(mesh: Mesh, x: list[Tensor], reduction: str, axes: str) -> list[Tensor]:
    combine = REDUCTIONS[reduction].combine
    return in_groups(axes, mesh, x, lambda terms: [functools.reduce(combine, terms)] * len(terms))


def _lower(
    build: CollectiveBuilder, x: Any, shape: list[int], reduction: str, axes: str
) -> Lowering:
    name, _ = build.groups.group(split_axes(axes))
    # In place saves memory, but only where nobody else reads the operand.
    op = c10d.all_reduce_.default if build.owns_operand() else c10d.all_reduce.default
    return (yield build.begin(op, shape, build.contiguous(x), REDUCTIONS[reduction].c10d, name))


def _lower_merged(
    build: CollectiveBuilder,
    xs: list[Any],
    shapes: list[list[int]],
    arguments: Sequence[tuple[str, str]],
) -> MergedLowering:
    reduction, axes = arguments[0]
    name, _ = build.groups.group(split_axes(axes))
    size = sum(map(math.prod, shapes))
    total = yield build.begin(
        # `flat` copies, so that in place is safe here.
        c10d.all_reduce_.default,
        [size],
        build.flat(xs),
        REDUCTIONS[reduction].c10d,
        name,
    )
    return build.unpack(total, shapes)


def _over_gloo(collective: GlooRewriter) -> None:
    reduction = collective.reduction
    if collective.swaps:
        in_place = collective.node.target is c10d.all_reduce_.default
        arrived = collective.swap(collective.shape)
        # Later nodes may read the operand of an all_reduce_ for its result.
        op = reduction.of_two_in_place if in_place else reduction.of_two
        collective.replace_result(arrived, op, collective.x, arrived)
    elif collective.is_unsupported:
        collective.send_all(collective.shape)
        collective.reduce(False)


def _over_hosts(levels: HostLevels) -> None:
    """Reduce a part in each rank of a host, the parts between hosts, and gather them."""
    reduction, n, size = levels.options[0], levels.each, math.prod(levels.shape)
    width = -(-size // n)
    flat = levels.call(aten.reshape.default, levels.x, [-1])
    if padding := n * width - size:
        flat = levels.call(aten.constant_pad_nd.default, flat, [0, padding])
    rows = levels.call(aten.reshape.default, flat, [n, width])
    part = levels.inside(c10d.reduce_scatter_tensor.default, [1, width], rows, reduction, n)
    total = levels.between(c10d.all_reduce.default, [1, width], part, reduction)
    whole = levels.inside(c10d.all_gather_into_tensor.default, [n, width], total, n)
    whole = levels.call(aten.reshape.default, whole, [-1])
    whole = levels.call(aten.slice.Tensor, whole, 0, 0, size) if padding else whole
    if levels.node.target is c10d.all_reduce_.default:
        # Later nodes may read the operand of an all_reduce_ for its result.
        whole = levels.call(aten.reshape.default, whole, levels.shape)
        whole = levels.call(aten.copy_.default, levels.x, whole)
    levels.finish(whole)


all_reduce = CollectiveKind(
    name="all_reduce",
    signature="all_reduce(f32[8, 6] sum@a, sum, a) -> f32[8, 6]",
    meaning="Reduce terms: every device gets the sum (max, ...) over `axes`. On one device: x.",
    picture="""
        device 0   x0   ->   x0 + x1
        device 1   x1   ->   x0 + x1
    """,
    suffix="r",
    payload="the reduced tensor",
    relays=True,
    sent=_sent,
    moves=_moves,
    simulate=_simulate,
    lower=_lower,
    merged=MergedForm((0, 1), _lower_merged),
    wire=(
        WireOp(c10d.all_reduce.default, reduces=True, over_gloo=_over_gloo),
        WireOp(
            c10d.all_reduce_.default,
            reduces=True,
            functional=c10d.all_reduce.default,
            over_gloo=_over_gloo,
        ),
    ),
    reduces=True,
    sliced=reduce_scatter,
    over_hosts=_over_hosts,
    xla="all-reduce",
)
