"""Branches on whether values choose any rows: a run without rows has a program of its own."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, message
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd.capture import assumed_sizes

MESH = gspmd.Mesh(a=2, m=2)

# How a program comes to its rows, from values y and a mask.
CHOOSE = {
    "mask": lambda y, mask: y[mask],
    "where": lambda y, mask: y[torch.where(mask)[0]],
    "nonzero": lambda y, mask: y.index_select(0, mask.nonzero().squeeze(1)),
    "both": lambda y, mask: y[mask & (y[:, 0] > -1)],
}
# What it asks of them.
ASK = {
    "len": lambda rows, mask: len(rows) > 0,
    "shape": lambda rows, mask: rows.shape[0] != 0,
    "numel": lambda rows, mask: rows.numel() > 0,
    "several": lambda rows, mask: rows.shape[0] > 1,
    "any": lambda rows, mask: mask.any(),
    "sum": lambda rows, mask: mask.sum() > 0,
    "item": lambda rows, mask: mask.sum().item() > 0,
}
LOSS = {
    "mean": lambda rows: rows.square().mean(),
    "cross entropy": lambda rows: F.cross_entropy(rows, rows.detach().argmax(1)),
    "norm": lambda rows: F.layer_norm(rows, rows.shape[1:]).sin().sum() / rows.shape[0],
    "largest": lambda rows: rows.amax(0).sum(),
}


class Chooses(nn.Module):
    """A head's loss over the rows that a mask chooses, or another loss without any."""

    def __init__(self, choose: str, ask: str, loss: str) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8, dtype=torch.double)
        self.choose, self.asks, self.loss = CHOOSE[choose], ASK[ask], LOSS[loss]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.layer(x)
        rows = self.choose(y, mask)
        if self.asks(rows, mask):
            return self.loss(rows)
        return y.sum() * 0.5


KINDS = [*product(CHOOSE, ASK, LOSS)]
MASKS = [[1, 0, 1, 1, 0, 0, 0, 1], [0] * 8, [0, 0, 0, 0, 0, 1, 0, 0], [1] * 8]


@pytest.mark.parametrize("kind", random.Random(1).sample(KINDS, 24), ids=" ".join)
def test_runs_with_and_without_rows(kind):
    torch.manual_seed(0)
    model, x = Chooses(*kind), torch.randn(8, 6, dtype=torch.double)
    gspmd.annotate(model, MESH, {"layer.weight": random.Random(str(kind)).choice(["m _", "_ m"])})
    for first in (0, 1):
        masks = [torch.tensor(mask) > 0 for mask in MASKS]
        options = {"mesh": MESH, "in_specs": {"x": "a _"}, "grad": True}
        plans = [gspmd.plan(model, x, masks[first], **options)]
        for mask in masks:
            wanted = model(x, mask)
            gradients = torch.autograd.grad(wanted, [*model.parameters()])
            if kind[1] in ("any", "sum"):  # a guard on an argument, which a plan does not change
                plans.append(gspmd.plan(model, x, mask, **options))
            got, found = plans[-1].simulate(x, mask, _poison=True)
            assert_same((got, [*found.values()]), (wanted, [*gradients]))


def test_a_mask_that_is_tested_alone_leaves_one_program_for_each_outcome():
    """`if mask.any()` once made a program for each mask."""
    model, x = Chooses("mask", "any", "mean"), torch.randn(8, 6, dtype=torch.double)
    plan = gspmd.plan(model, x, torch.tensor(MASKS[0]) > 0, mesh=MESH)
    for mask in (torch.tensor(MASKS[k]) > 0 for k in (0, 2, 3)):
        assert_same(plan.simulate(x, mask), model(x, mask))


@pytest.mark.parametrize("ask", [k for k in ASK if k not in ("any", "sum")])
def test_a_size_that_nothing_else_needs_is_checked(ask):
    """Such a check was once no part of the program, which doubled x for all masks."""

    def step(x, mask):
        return x * 2 if ASK[ask](x[mask & (x[:, 0] < 9)], mask) else x * 3

    x = torch.randn(8, 6)
    plan = gspmd.plan(step, x, torch.tensor(MASKS[0]) > 0, mesh=MESH, in_specs=("a m", None))
    for mask in MASKS:
        mask = torch.tensor(mask) > 0
        assert_same(plan.simulate(x, mask, _poison=True), step(x, mask))


def test_in_a_branch_it_is_an_error_where_nothing_else_needs_the_size():
    def step(x):
        if x.sum() > 0:
            rows = x[x > 0.5]
            return x * 2 if len(rows) > 0 else x * 3
        return x

    error = message(lambda: gspmd.plan(step, torch.randn(8, 6), mesh=MESH))
    assert error.startswith("a branch on a size that depends on values stands in another branch")


@pytest.mark.parametrize("count", [2, 5])
def test_a_sum_of_sizes(count):
    """As of the boxes of several levels, of which one may have none."""

    def step(x, masks):
        rows = torch.cat([x[mask] for mask in masks])
        if rows.numel() == 0:
            return x.sum()
        return rows.amax(0).sum() + (rows / len(rows)).sum()

    x = torch.randn(8, 6)
    plan = gspmd.plan(step, x, torch.rand(count, 8) > 0.5, mesh=MESH, in_specs=("a m", None))
    for share in (0.3, 0.9, 1.0):
        masks = torch.rand(count, 8) > share
        for one in (masks, masks & False, masks & (torch.arange(count) == 1)[:, None]):
            assert_same(plan.simulate(x, one, _poison=True), step(x, one))


def test_a_product_of_sizes_and_two_sizes_that_are_one():
    """As the number of elements of rows and columns that masks choose."""

    def step(x, rows, columns):
        y = x[rows][:, columns]
        if y.numel() == 0:
            return x.sum()
        one, other = x[rows], x.sin()[rows.logical_not().logical_not()]
        torch._check(one.shape[0] == other.shape[0])
        if one.shape[0] == 1:
            return (one * other).prod() + y.sum()
        return (one + other).sum() / one.shape[0] * y.mean()

    x, rows = torch.randn(8, 6), torch.tensor(MASKS[0]) > 0
    columns = torch.tensor([0, 1, 1, 0, 1, 1]) > 0
    plan = gspmd.plan(step, x, rows, columns, mesh=MESH, in_specs=("a m", None, None))
    for mask in (torch.tensor(mask) > 0 for mask in MASKS):
        for chosen in (columns, columns & False):
            got = plan.simulate(x, mask, chosen, _poison=True)
            assert_same(got, step(x, mask, chosen))


@pytest.mark.parametrize("twice", [False, True])
def test_the_greatest_of_some_sizes(twice):
    """As of rows that are padded to one length."""

    def step(x, masks):
        parts = [torch.cat([x[mask], x[mask & (x[:, 0] > 0)]][: 1 + twice]) for mask in masks]
        most = max(part.shape[0] for part in parts)
        rows = torch.stack([F.pad(part, (0, 0, 0, most - part.shape[0])) for part in parts])
        if rows.shape[1] == 0:
            return x.sum()
        return rows.amax(1).sum() if rows.shape[1] > 1 else rows.sum() * 3

    x, masks = torch.randn(8, 6), torch.rand(3, 8) > 0.5
    plan = gspmd.plan(step, x, masks, mesh=MESH, in_specs=("a m", None))
    one = torch.arange(8) == 2
    for each in (masks, masks & False, masks & one, masks & (torch.arange(3) == 1)[:, None]):
        assert_same(plan.simulate(x, each, _poison=True), step(x, each))


@pytest.mark.parametrize("seed", range(6))
def test_several_levels(seed):
    """Each level may have no rows, and a line asks it of all levels."""
    draw = random.Random(seed)

    def step(x, *masks):
        total = x.sum() * 0
        for mask in masks:
            rows = x[mask & (x[:, 1] < 2)]
            if len(rows) == 0:
                continue
            if rows.shape[0] == 1:
                total = total + rows.sum()
            else:
                total = total + rows.sin().mean()
        return total, torch.autograd.grad(total, x)[0]

    def drawn():
        return [torch.tensor(draw.choice(MASKS)) > 0 for _ in range(3)]

    x = torch.randn(8, 6, dtype=torch.double, requires_grad=True)
    plan = gspmd.plan(step, x, *drawn(), mesh=MESH, in_specs=("a m", None, None, None))
    for masks in (drawn() for _ in range(4)):
        assert_same(plan.simulate(x, *masks, _poison=True), step(x, *masks))


def test_a_run_that_no_program_fits_is_an_error(monkeypatch):
    monkeypatch.setattr(assumed_sizes, "MOST_TRIES", 0)
    model, x = Chooses("mask", "len", "mean"), torch.randn(8, 6, dtype=torch.double)
    plan = gspmd.plan(model, x, torch.tensor(MASKS[0]) > 0, mesh=MESH)
    with pytest.raises(gspmd.ShardingError, match="is 0, and the program was made for 1 and more"):
        plan.simulate(x, torch.tensor(MASKS[1]) > 0)
