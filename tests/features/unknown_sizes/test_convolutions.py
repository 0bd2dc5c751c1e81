"""Convolutions over rows of an unknown number: strides, whose gradients depend on what they leave
over, transposed ones, and shapes for which PyTorch takes several kernels.
"""

import random

import pytest
import torch
from helpers import assert_same, rand
from torch import nn

import torchgspmd as gspmd

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.10", reason="torch 2.9 cannot trace rows of an unknown number"
)

MESH = gspmd.Mesh(data=2, model=2)


class OverRows(nn.Module):
    """Two convolutions over the rows that a mask chooses."""

    def __init__(self, rng: random.Random, dtype: torch.dtype, width: int):
        super().__init__()
        self.first = nn.Linear(5, width, dtype=dtype)
        self.dims = rng.choice([1, 2])
        size, stride, dilation = rng.choice([1, 2, 3]), rng.choice([2, 3]), rng.choice([1, 2])
        kinds = (
            [nn.Conv1d, nn.Conv2d]
            if rng.random() < 0.7
            else [nn.ConvTranspose1d, nn.ConvTranspose2d]
        )
        options = dict(stride=stride, padding=rng.choice([0, size // 2]), dilation=dilation)
        self.second = kinds[self.dims - 1](width, 4, size, dtype=dtype, **options)
        self.third = [nn.Conv1d, nn.Conv2d][self.dims - 1](4, 2, 3, padding=1, dtype=dtype)

    def forward(self, x, mask):
        y = self.first(x)[mask].T[None]
        y = y if self.dims == 1 else y.unsqueeze(-1).expand(-1, -1, -1, 7)
        return self.third(self.second(y)).sin()


def check(net: nn.Module, seed: int, dtype: torch.dtype, **options) -> None:
    rng = random.Random(seed)
    marks = {
        "first.weight": rng.choice(["model _", "_ _", "data model"]),
        "third.weight": " ".join(rng.choice(["_ model", "model _"]).split() + ["_"] * net.dims),
    }
    gspmd.annotate(net, MESH, marks)
    x = rand(24, 5, seed=seed).to(dtype)
    mask = rand(24, seed=seed) > 0
    specs = ("data _", "data")
    plan = gspmd.plan(net, x, mask, mesh=MESH, in_specs=specs, grad=True)
    for rows in (11, 12, 17, 24):
        mask = torch.arange(24) % 24 < rows
        want = net(x, mask)
        wanted = torch.autograd.grad(want.sum(), [*net.parameters()])
        got, grads = plan.simulate(x, mask, _poison=True)
        assert_same(got, want, terms=1024)
        for (name, _), gradient in zip(net.named_parameters(), wanted):
            assert_same(grads[name], gradient, f"{name}, {rows} rows", terms=4096)


@pytest.mark.parametrize("seed", range(12))
def test_over_rows_that_a_mask_chooses(seed):
    torch.manual_seed(seed)
    check(OverRows(random.Random(seed), torch.float64, 6), seed, torch.float64)


@pytest.mark.parametrize("seed", range(2))
def test_in_float32_each_run_takes_its_kernel(seed):
    """PyTorch takes another kernel for few rows than for many."""
    torch.manual_seed(seed)
    check(OverRows(random.Random(seed), torch.float32, 64), seed, torch.float32)


@pytest.mark.parametrize("length", [8, 9, 13])
def test_a_program_for_all_lengths(length):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv1d(5, 6, 3, padding=1), nn.Tanh(), nn.Conv1d(6, 4, 3, stride=2, padding=1)
    ).double()
    gspmd.annotate(net, MESH, {"0.weight": "model _ _"})
    x = rand(4, 5, 12).double()
    plan = gspmd.plan(net, x, mesh=MESH, in_specs="data _ _", grad=True, dynamic={"input": {2}})
    x = rand(4, 5, length).double()
    want = net(x)
    wanted = torch.autograd.grad(want.sum(), [*net.parameters()])
    named = dict(zip(dict(net.named_parameters()), wanted))
    assert_same(plan.simulate(x, _poison=True), (want, named), terms=1024)


class Regulated(nn.Module):
    """Rows that durations repeat, of which a branch replaces zeros."""

    def __init__(self, least: float):
        super().__init__()
        self.first, self.least = nn.Linear(5, 6).double(), least
        self.last = nn.Conv1d(6, 4, 3, padding=1).double()

    def forward(self, x):
        durations = (x[..., 0] * 3 - self.least).round().clamp(0).long()
        if durations.sum() == 0:
            durations[durations.sum(1).eq(0)] = 1
        out = x.new_zeros(x.shape[0], durations.sum(1).max(), 6)
        for i, (rows, counts) in enumerate(zip(self.first(x), durations)):
            repeated = rows.repeat_interleave(counts, 0)
            out[i, : len(repeated)] = repeated
        return self.last(out.mT)


@pytest.mark.parametrize("least", [0.0, 100.0])
def test_a_branch_decides_on_the_size_of_a_result(least):
    torch.manual_seed(0)
    net, x = Regulated(least), rand(2, 7, 5).double()
    plan = gspmd.plan(net, x, mesh=MESH, in_specs="data _ _", grad=True)
    want = net(x)
    wanted = torch.autograd.grad(want.sum(), [*net.parameters()])
    named = dict(zip(dict(net.named_parameters()), wanted))
    assert_same(plan.simulate(x, _poison=True), (want, named), terms=1024)
