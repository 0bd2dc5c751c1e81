"""The arithmetic of all devices is that of the program, evenly split (benchmarks/arithmetic.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same
from torch.utils.flop_counter import FlopCounterMode

import torchgspmd as gspmd

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import arithmetic  # noqa: E402

HALO = (
    1 / 4
    # of the four rows of a device one more is read to make the gradient of the rows, a third of the
    # arithmetic
)


@pytest.mark.parametrize("name", arithmetic.PROGRAMS)
def test_arithmetic_is_split_evenly(name):
    assert 1 <= arithmetic.ratio(name) <= (1 + HALO / 3 if name == "convolutions" else 1.02)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_gradient_of_a_convolution_is_computed_on_own_rows(groups):
    """Of stride 1: of the neighbours' rows of the other gradient the device reads those that it
    needs, and computes nothing for them.
    """

    def step(x, w, dy):
        return torch.autograd.grad(
            F.conv2d(x, w, padding=(2, 1), dilation=(2, 1), groups=groups), (x, w), dy
        )

    x, w = (
        torch.randn(2, 4, 16, 5, requires_grad=True),
        torch.randn(6, 4 // groups, 3, 3, requires_grad=True),
    )
    dy = torch.randn(2, 6, 16, 5)
    plan = gspmd.plan(
        step,
        x,
        w,
        dy,
        mesh=gspmd.Mesh(s=4),
        in_specs=("_ _ s _", "_ _ _ _", "_ _ s _"),
        out_specs=("_ _ s _", "_ _ _ _"),
    )
    assert_same(plan.simulate(x, w, dy, _poison=True), step(x, w, dy), terms=256)
    with FlopCounterMode(display=False) as whole:
        step(x, w, dy)
    with FlopCounterMode(display=False) as parts:
        plan.simulate(x, w, dy)
    forward = 2 * 6 * 16 * 5 * 2 * (4 // groups) * 9  # which the plan leaves out: nobody needs it
    assert parts.get_total_flops() == whole.get_total_flops() - forward
