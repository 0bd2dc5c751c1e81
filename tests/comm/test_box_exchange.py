"""The exchange: what every device sends and receives, in closed form, and the one line that it is
in a plan.
"""

import itertools
import math

import pytest
import torch
from expecttest import assert_expected_inline
from helpers import assert_same, layouts
from hypothesis import given, settings
from hypothesis import strategies as st

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardSpec
from torchgspmd.comm.box_exchange import busiest, elements, exchange, lacking

parse = ShardSpec.parse
MESHES = (Mesh(a=2, b=2), Mesh(a=2, b=3), Mesh(a=4, b=2))


def pairs(mesh):
    every = layouts(2, mesh.names, pending=False)
    return [(b, a) for b, a in itertools.product(every, every) if b.dims != a.dims]


@pytest.mark.parametrize("shape", [(24, 24), (5, 7), (3, 1), (0, 4)], ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_what_is_sent_arrives_and_nothing_else(mesh, shape):
    for before, after in pairs(mesh):
        plan = exchange(mesh, shape, before, after)
        transfers = [plan.transfer(mesh.coordinates(rank)) for rank in range(mesh.size)]
        for group in mesh.groups(plan.axes):
            for (i, sender), (j, receiver) in itertools.product(enumerate(group), repeat=2):
                sent, got = transfers[sender].sends[j], transfers[receiver].receives[i]
                assert (sent is None) == (got is None) and (
                    sent is None or elements(sent) == elements(got)
                ), (before, after)
        rows = [
            [-(-n // mesh.count(axes)) for n, axes in zip(shape, spec.dims)]
            for spec in (before, after)
        ]
        for rank, t in enumerate(transfers):
            c = mesh.coordinates(rank)
            wanted = [
                min(r, max(n - mesh.index(axes, c) * r, 0))
                for n, r, axes in zip(shape, rows[1], after.dims)
            ]
            kept = elements(t.keep[1]) if t.keep else 0
            assert kept + sum(elements(box) for box in t.receives if box) == math.prod(wanted), (
                before,
                after,
                rank,
            )


def counted(mesh, shape, before, after):
    plan = exchange(mesh, shape, before, after)
    return plan.received(), plan.busiest()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_even_layouts_are_at_the_bound(mesh):
    """Nobody sends more than the device receives that lacks most, which no other way can change;
    the closed form says so.
    """
    for before, after in pairs(mesh):
        found = lacking(mesh, (24, 48), before, after)
        assert counted(mesh, (24, 48), before, after) == (found, found), f"{before} -> {after}"
        assert busiest(mesh, (24, 48), before, after)[0] == found


@pytest.mark.parametrize("sizes", [(5, 7, 24), (24, 5, 7), (5, 64, 7), (9, 24, 24)], ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_size_that_does_not_change_is_a_factor_of_what_is_counted(mesh, sizes):
    """Uneven exchanges that differ in it alone are counted once; here each is counted itself."""
    every = layouts(3, mesh.names, pending=False)
    for before, after in [*itertools.product(every, every)][::5]:
        if before.dims != after.dims:
            received, most = counted(mesh, sizes, before, after)
            assert lacking(mesh, sizes, before, after) == received, f"{before} -> {after}"
            assert busiest(mesh, sizes, before, after)[0] == most, f"{before} -> {after}"


THREE = layouts(3, ("a", "b", "c"), pending=False)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.sampled_from(THREE),
    st.sampled_from(THREE),
    st.sampled_from([Mesh(a=2, b=2, c=2), Mesh(a=4, b=3, c=2)]),
)
def test_even_layouts_of_three_axes_are_at_the_bound(before, after, mesh):
    if before.dims != after.dims:
        found = lacking(mesh, (24, 24, 48), before, after)
        assert counted(mesh, (24, 24, 48), before, after) == (found, found)


@pytest.mark.parametrize(
    "before, after, duty, busiest",
    [
        ("a _", "b _", (("b",), ()), 12),
        ("a b", "b a", ((), ()), 6),
        ("b _", "a b", (("a",), ()), 6),
        ("a+b _", "_ b+a", ((), ()), 6),
    ],
)
def test_duties_are_divided_among_those_that_hold_the_same(before, after, duty, busiest):
    plan = exchange(Mesh(a=2, b=2), (6, 4), parse(before), parse(after))
    assert (plan.duty, plan.busiest()) == (duty, busiest)


def test_only_the_axes_that_change_take_part():
    mesh = Mesh(a=2, b=2, c=2)
    assert exchange(mesh, (8, 8, 8), parse("a b+c _"), parse("a c+b _")).axes == ("b", "c")
    assert exchange(mesh, (8, 8, 8), parse("a+b _ _"), parse("a _ c")).axes == ("b", "c")
    assert exchange(mesh, (9, 8, 8), parse("a+b _ _"), parse("a _ c")).axes == (
        "a",
        "b",
        "c",
    )  # blocks of 3 and of 5 rows


def test_one_line_of_a_plan():
    mesh = Mesh(x=4, y=2)

    def f(x):
        return gspmd.mark_sharding(x * 2, mesh, "y x")

    x = torch.randn(10, 7)
    plan = gspmd.plan(f, x, mesh=mesh, in_specs="x y", out_specs="y x")
    assert_expected_inline(
        str(plan),
        """\
mesh x=4 y=2
  %x             : f32[10@x, 7@y] = input
  %x_p           : f32[10@y, 7@x] = permute(%x, x y, y x)
  %mul           : f32[10@y, 7@x] = mul(%x_p, 2)
  %mark_sharding : f32[10@y, 7@x] = mark_sharding(%mul, x=4,y=2, y x)
  return %mark_sharding

permute        over x+y             1 x, 48 B sent by a device
sent by a device in all: 48 B
memory of a device: parameters 0 B, inputs 48 B, peak 128 B""",
    )
    assert_same(plan.simulate(x, _poison=True), x * 2)
