"""Lower bounds of bytes: those known by hand, and none above what a plan sends."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torchgspmd as gspmd

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
BOUNDS = runpy.run_path(str(FOLDER / "bounds.py"))
MESH, N = gspmd.Mesh(m=4), 4
X, W = torch.randn(8, 12), torch.randn(12, 4)


def gradient(x: Tensor, w: Tensor, dy: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad((leaf @ w).tanh(), leaf, dy)[0]


# function, arguments, layouts, layout of the result; numbers that a device sends at least
CASES = {
    "gathered": (lambda x: x + 0, (X,), ("m _",), "_ _", X.numel() * 3 / 4),
    "exchanged": (lambda x: x.T, (X,), ("m _",), "m _", X.numel() / 4 * 3 / 4),
    "nothing": (lambda x: x.tanh(), (X,), ("m _",), "m _", 0),
    # A device has 3 of 12 columns, which change each row of 4 numbers in 3 directions.
    "sum": (torch.matmul, (X, W), ("_ m", "m _"), "_ _", 8 * 4),
    "sum, sharded": (torch.matmul, (X, W), ("_ m", "m _"), "m _", 6 * 3),
    "total": (lambda x: x.square().sum(), (X,), ("m _",), "", 1),
    # The other rows of w, fewer than the numbers of the result, decide about it.
    "backward": (gradient, (X, W, torch.randn(8, 4)), ("_ _", "_ m", "_ m"), "_ _", 12 * 3),
}


@pytest.mark.parametrize("name", CASES)
def test_bounds_that_are_known_by_hand(name: str) -> None:
    function, inputs, ins, out, numbers = CASES[name]
    found = BOUNDS["measure"](name, MESH, function, inputs, ins, out)
    assert found.bound == 4 * numbers and found.ours >= found.bound


def test_each_operation_along_a_dimension_is_computed_as_on_one_device(monkeypatch) -> None:
    """Its values on simulated devices, with poisoned padding; no bound is above the bytes."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
    along = __import__("programs.along").along.ALONG
    for p in along.values():
        plan = gspmd.plan(
            p.function, *p.inputs, mesh=p.mesh, in_specs=p.in_specs, out_specs=p.out_specs
        )
        got, want = plan.simulate(*p.inputs, _poison=True), p.function(*p.inputs)
        torch.testing.assert_close(got, want, msg=p.name, rtol=1e-4, atol=1e-4)
