"""permute(x, before, after): devices receive the elements that they lack in another layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...layout.mesh import Mesh
from ...shard_spec import Axes, ShardSpec
from ..box_exchange import Box, busiest, elements, exchange, lacking, pack, unpack
from ..collective import CollectiveBuilder, Lowering
from .all_to_all import ALL_TO_ALL
from .kind import CollectiveKind, LocalSteps, ReshardProblem, Step, rename_specs


def permute_step(problem: ReshardProblem, spec: ShardSpec, target: ShardSpec) -> Step:
    """Return the exchange that leads from a layout to any other."""
    count, axes = busiest(problem.mesh, problem.shape, spec, target)
    return permute.step(
        problem.mesh, (str(spec), str(target)), target, axes, float(count * problem.itemsize)
    )


def _moves(problem: ReshardProblem, spec: ShardSpec, left: float) -> Iterator[Step]:
    for target in problem.targets if left > 0 and spec.pending == problem.after.pending else ():
        if spec != target:
            # A cheap lower bound first: `permute_step` compares the ways to divide the sending.
            missing = lacking(problem.mesh, problem.shape, spec, target) * problem.itemsize
            if missing + problem.remaining_cost(target) + problem.fee(permute) < left:
                yield permute_step(problem, spec, target)


def _localize(build: LocalSteps, x: fx.Node, before: str, after: str) -> fx.Node:
    return build.exchange(x, before, after)


def _simulate(
    mesh: Mesh, x: list[Tensor], before: str, after: str, shape: tuple[int, ...]
) -> list[Tensor]:
    plan = exchange(mesh, tuple(shape), ShardSpec.parse(before), ShardSpec.parse(after))
    transfers = [plan.transfer(mesh.coordinates(rank)) for rank in range(mesh.size)]
    results = list(x)
    for group in mesh.groups(plan.axes):
        for place, rank in enumerate(group):
            arriving = [transfers[r].sends[place] for r in group]
            boxes = [pack(x[r], [box]) for r, box in zip(group, arriving) if box is not None]
            moved = torch.cat(boxes) if boxes else x[rank].new_empty(0)
            results[rank] = unpack(
                x[rank],
                moved,
                [b for b in transfers[rank].receives if b is not None],
                transfers[rank].keep,
                transfers[rank].shape,
                # NaN in padding shows a missing mask in tests.
                math.nan if moved.is_floating_point() else 0,
            )
    return results


def _lower(
    build: CollectiveBuilder,
    x: Any,
    shape: list[int],
    before: str,
    after: str,
    size: tuple[int, ...],
) -> Lowering:
    """Lower to an all_to_all on boxes of any size, empty for most peers. Gloo and NCCL have it."""
    plan = exchange(build.mesh, tuple(size), ShardSpec.parse(before), ShardSpec.parse(after))
    mine = plan.transfer(build.groups.coordinates)
    sends, receives = (
        [[] if box is None else [box] for box in boxes] for boxes in (mine.sends, mine.receives)
    )
    rest = mine.keep, mine.shape
    return (yield from send_boxes(build, x, plan.axes, sends, receives, *rest))


def send_boxes(
    build: CollectiveBuilder,
    x: Any,
    axes: Axes,
    sends: Sequence[Sequence[Box]],
    receives: Sequence[Sequence[Box]],
    *rest: object,
) -> Lowering:
    """Exchange boxes by an all_to_all, given those to and from each member. rest: of `unpack`."""
    flat = build.call(pack, build.contiguous(x), tuple(itertools.chain(*sends)))
    received, sent = ([sum(map(elements, b)) for b in side] for side in (receives, sends))
    moved = yield build.exchange(flat, received, sent, build.groups.group(axes)[0])
    return build.call(unpack, x, moved, tuple(itertools.chain(*receives)), *rest)


permute = CollectiveKind(
    name="permute",
    signature="permute(f32[8@a+b, 6], a+b _, b+a _) -> f32[8@b+a, 6]",
    meaning="""Lay x out as `after`, by any exchange of boxes. On one device: x.
        In the program of one device, the global shape is the last argument.""",
    picture="""
        device 0   x0   ->   x0          of x laid out along a+b, then along b+a
        device 1   x1   ->   x2
        device 2   x2   ->   x1
        device 3   x3   ->   x3
    """,
    suffix="p",
    fee="permute_fee",
    payload="what the busiest device sends or receives",
    sent=lambda payload, n: payload,
    moves=_moves,
    localize=_localize,
    rename=rename_specs,
    simulate=_simulate,
    lower=_lower,
    wire=(ALL_TO_ALL,),
    xla="collective-permute",
)
