"""The largest rows of a table with sharded rows: the bags are reduced, not the rows in them."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same

import torchgspmd as gspmd

ROWS, WIDTH = 29, 6  # uneven over 2 and 3 devices


def step_of(padding, ragged):
    def step(table, index, offsets, dy):
        bounds = {"offsets": offsets} if ragged else {}
        bags = F.embedding_bag(index, table, mode="max", padding_idx=padding, **bounds)
        return bags.detach(), *torch.autograd.grad(bags, table, dy)

    return step


def arguments(ragged, dtype):
    torch.manual_seed(0)
    # Few different numbers: rows tie within a shard, and in several ones.
    table = torch.randint(-2, 3, (ROWS, WIDTH)).to(dtype).requires_grad_()
    index = torch.randint(ROWS, (5, 7))
    index[1], index[2, 3:], index[3, 2] = 3, 3, ROWS - 1
    offsets = torch.tensor([0, 4, 4, 11, 30])  # an empty bag among them
    dy = torch.randn(5, WIDTH).to(dtype)
    return table, index.flatten() if ragged else index, offsets, dy


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("padding", [None, 3, -1])
@pytest.mark.parametrize(
    ("mesh", "table", "index"),
    [
        (gspmd.Mesh(m=3), "m _", "_ _"),
        (gspmd.Mesh(m=2, e=2), "m e", "_ _"),
        (gspmd.Mesh(m=2, d=2), "m _", "d _"),
        (gspmd.Mesh(m=2, s=3), "m _", "_ s"),
        (gspmd.Mesh(m=2), "m _", "m _"),
        (gspmd.Mesh(d=3), "_ _", "d _"),
    ],
    ids=str,
)
def test_numbers(mesh, table, index, padding, ragged):
    args, step = arguments(ragged, torch.float64), step_of(padding, ragged)
    index = " ".join(index.split()[::-1][:1]) if ragged else index
    specs = (table, index, None, None)
    plan = gspmd.plan(step, *args, mesh=mesh, in_specs=specs, out_specs=(None, table))
    assert_same(plan.simulate(*args, _poison=True), step(*args))


@pytest.mark.parametrize("ragged", [False, True])
def test_a_device_sends_its_bags(ragged):
    """Forward: the largest rows. Backward: the positions that they have, one byte each or four."""
    table, index = torch.randn(4096, 32, requires_grad=True), torch.randint(4096, (64, 8))
    index = index.flatten() if ragged else index
    args = (table, index, torch.arange(0, 512, 8), torch.randn(64, 32))
    mesh, step = gspmd.Mesh(m=8), step_of(None, ragged)
    plan = gspmd.plan(step, *args, mesh=mesh, in_specs=("m _", None, None, None))
    numbers = 64 * 32
    assert [(c.kind, c.payload_bytes) for c in plan.collectives] == [
        ("all_reduce", 4 * numbers),
        ("all_reduce", (4 if ragged else 1) * numbers),
    ]
    assert_same(plan.simulate(*args), step(*args))


def test_largest_rows_that_are_no_numbers():
    table = torch.randn(6, 4)
    table[0], table[1, 0], table[2, 1] = -torch.inf, torch.nan, torch.inf
    index = torch.tensor([[0, 0], [1, 4], [2, 3]])

    def bags(table, index):
        return F.embedding_bag(index, table, mode="max")

    plan = gspmd.plan(bags, table, index, mesh=gspmd.Mesh(m=2), in_specs=("m _", None))
    want = F.embedding(index, table).amax(1)
    torch.testing.assert_close(plan.simulate(table, index), want, equal_nan=True)


@pytest.mark.parametrize("length", [3, 130])
def test_bags_of_any_number(length):
    """Calls with other batches, and with bags for whose positions a byte is too small."""
    table = torch.randn(ROWS, WIDTH, requires_grad=True)
    step = step_of(None, False)

    def pooled(index, table, dy):
        return step(table, index, None, dy[: index.shape[0]])

    mesh, index = gspmd.Mesh(m=2), torch.randint(ROWS, (6, 5))
    plan = gspmd.plan(
        pooled,
        index,
        table,
        torch.randn(9, WIDTH),
        mesh=mesh,
        in_specs=(None, "m _", None),
        dynamic={"index": {0, 1}},
    )
    for bags in (2, 9):
        args = torch.randint(ROWS, (bags, length)), table, torch.randn(9, WIDTH)
        assert_same(plan.simulate(*args), pooled(*args))
