"""The search of steps against an exhaustive one, and its counts while the mesh grows.

All pairs of the draw are compared where exhaustion ends. More, once by hand:

    RESHARD_PAIRS=2000 pytest tests/fx_passes/partition/test_reshard_search.py -k exhaustive -s
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import random

import pytest

from torchgspmd import Mesh, ShardSpec
from torchgspmd.comm.kinds import SEARCHED
from torchgspmd.fx_passes.partition.cost_constants import CostConstants
from torchgspmd.fx_passes.partition.reshard import Resharder
from torchgspmd.fx_passes.partition.reshard_pattern import instance
from torchgspmd.fx_passes.partition.reshard_search import ReshardSearch, step_cost

PAIRS = int(os.environ.get("RESHARD_PAIRS", "80"))
MAX_STATES = 150  # Layouts after which exhaustion is given up.
CONSTANTS = CostConstants()


def exhaustive(search: ReshardSearch, before: ShardSpec) -> float:
    """Return the cost of the cheapest path, by Dijkstra without bounds; nan if it does not end."""
    order, seen = itertools.count(), set()
    queue = [(0.0, next(order), before)]
    while queue:
        cost, _, spec = heapq.heappop(queue)
        if spec == search.after:
            return cost
        if spec in seen:
            continue
        if len(seen) == MAX_STATES:
            return math.nan
        seen.add(spec)
        for kind in SEARCHED:
            for move in kind.moves(search, spec, math.inf):
                if move.spec not in seen:
                    new = cost + step_cost(move, CONSTANTS)
                    heapq.heappush(queue, (new, next(order), move.spec))
    return math.nan


def drawn(seed: int) -> tuple[Mesh, tuple[int, ...], ShardSpec, ShardSpec]:
    """Return a mesh of up to 12 prime factors, a shape and two layouts."""
    draw = random.Random(seed)
    sizes = [draw.choice([2, 2, 3, 4, 8]) for _ in range(draw.randint(1, 4))]
    mesh = Mesh(**{name: n for name, n in zip("abcd", sizes)})
    rank = draw.randint(1, 3)
    shape = tuple(draw.choice([3, 12, 96, 768, 4096]) for _ in range(rank))
    pending = [a for a in mesh.names if draw.random() < 0.25]

    def layout(terms: list[str]) -> ShardSpec:
        """Return a layout with these pending axes."""
        dims: list[list[str]] = [[] for _ in range(rank)]
        for axis in draw.sample(mesh.names, len(mesh.names)):
            if axis not in terms and draw.random() < 0.7:
                draw.choice(dims).append(axis)
        return ShardSpec(tuple(map(tuple, dims)), (), tuple(a for a in mesh.names if a in terms))

    return mesh, shape, layout(pending), layout([a for a in pending if draw.random() < 0.3])


def test_sends_what_an_exhaustive_search_sends() -> None:
    ended = 0
    for seed in range(PAIRS):
        mesh, shape, before, after = drawn(seed)
        if before == after:
            continue
        least = exhaustive(ReshardSearch(mesh, shape, 4, after, CONSTANTS), before)
        if math.isnan(least):
            continue
        ended += 1
        resharder = Resharder(mesh)
        cost = resharder.cost(shape, 4, before, after)
        bound = resharder.at_least(shape, 4, before, after)
        fees = 2 * CONSTANTS.permute_fee  # paths of equal bytes may differ by these
        assert cost <= least + fees, f"seed {seed}: {mesh} {shape} {before} -> {after}"
        assert bound <= least * (1 + 1e-9), f"seed {seed}: {mesh} {shape} {before} -> {after}"
    print(f"{ended} of {PAIRS} pairs compared")
    assert ended >= PAIRS // 3


@pytest.mark.parametrize(
    "before, after",
    [
        ("a b c", "_ _ _"),
        ("a b c", "c a b"),
        ("_ _ _ sum@a+b", "a _ c"),
        ("a _ b sum@c", "b _ _"),
        ("a+b _ _", "_ c+a _"),
    ],
)
def test_states_do_not_grow_with_the_mesh(before: str, after: str) -> None:
    counts = []
    for n in (2, 4, 8, 16, 64):
        resharder = Resharder(Mesh(a=n, b=n, c=n))
        resharder.steps((n * 8192,) * 3, 4, ShardSpec.parse(before), ShardSpec.parse(after))
        counts.append(resharder.counts["reshard_states"])
    assert max(counts[1:]) <= max(2 * counts[0], 10), counts


def test_values_of_a_pattern_share_a_search() -> None:
    resharder = Resharder(Mesh(data=8, seq=8, model=4))
    before, after = ShardSpec.parse("data seq _"), ShardSpec.parse("data _ seq")
    for shape, itemsize in (((64, 512, 1024), 4), ((128, 1024, 4096), 2)):
        resharder.steps(shape, itemsize, before, after)
    resharder.steps((64, 512, 64), 4, ShardSpec.parse("seq data _"), ShardSpec.parse("seq _ data"))
    assert resharder.counts["reshard_searches"] == 1


@pytest.mark.parametrize(
    "before, after, shape, together",
    [
        ("data _ _ sum@{seq}", "data {seq} _", (64, 64, 64), True),  # 512 devices
        ("data _ _ sum@{seq}", "data _ _", (8, 8, 1), True),
        ("data _ _ sum@{seq}", "data _ _", (8, 4, 2), False),  # no room for 8 shards
        ("_ data _ sum@{seq}", "data _ _", (8, 64, 1), True),
        ("_ data _ sum@{seq}", "data _ _", (8, 32, 2), False),
    ],
)
def test_parts_of_an_axis_are_one_piece_of_a_reduction_where_a_dimension_has_room(
    before: str, after: str, shape: tuple[int, ...], together: bool
) -> None:
    mesh = Mesh(data=8, seq=8, model=8).split({"seq": (4, 2)})
    parts = mesh.names[1:3]
    old, new = (ShardSpec.parse(spec.format(seq="+".join(parts))) for spec in (before, after))
    assert (parts in instance(mesh, shape, 4, old, new).pieces.values()) == together


def test_axes_are_apart_in_a_reduction_where_no_dimension_has_room_for_both() -> None:
    resharder = Resharder(Mesh(a=2, b=4, c=2, d=8))
    before, after = ShardSpec.parse("_ d _ sum@a+b+c"), ShardSpec.parse("a _ d")
    steps = resharder.steps((4, 96, 16), 4, before, after)
    assert sum(step.sent for step in steps) == 4392  # 4416 with b and c in one piece


def test_a_search_at_its_limit_takes_the_best_way_so_far_and_says_so() -> None:
    mesh = Mesh(a=8, b=2, c=4)
    before, after = ShardSpec.parse("_ _ _ sum@a+b"), ShardSpec.parse("a b c")
    resharder = Resharder(mesh, CostConstants(max_layouts=1))
    steps = resharder.steps((512, 512, 512), 4, before, after)
    assert steps[-1].spec == after
    assert resharder.counts["reshard_limited"] == 1
