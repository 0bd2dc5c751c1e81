"""Triangles, rolls, blocks and counts along sharded dimensions send rows of neighbors or counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torchgspmd as gspmd

X, INTEGERS = torch.randn(40, 24), torch.randint(9, (40,))


def blocks(size: int, step: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return a function: blocks of rows, and the gradient of a function of them."""

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        y = leaf.unfold(0, size, step)
        weights = torch.linspace(1, 2, y.numel(), device=x.device).view(y.shape)
        return y.detach(), torch.autograd.grad((y.sin() * weights).sum(), leaf)[0]

    return run


# function, its argument, how many numbers of 4 bytes a device sends at most; None: sums alone
CASES: dict[str, tuple[Callable, Tensor, int | None]] = {
    "tril": (torch.tril, X, 0),
    "triu above": (lambda x: x.triu(2), X, 0),
    "tril of bools": (lambda x: (x > 0).tril(-3), X, 0),
    "roll": (lambda x: x.roll(3), X[:, 0], 3),
    "roll back": (lambda x: x.roll(-2), X[:, 0], 2),
    "blocks of steps": (blocks(8, 4), X, 5 * 4 * 24),
    "blocks, uneven": (blocks(5, 2), X, 5 * 4 * 24),
    "blocks apart": (
        blocks(2, 3),
        X,
        99 * 40 * 24 * 2,
    ),  # a gather: no block begins where a shard does
    "counts": (lambda x: x.bincount(minlength=9), INTEGERS, None),
    "counts of few": (lambda x: x.int().bincount(), INTEGERS, None),
    "sums of weights": (lambda x: x.bincount(x.double() / 3), INTEGERS, None),
}


@pytest.mark.parametrize("mesh", [gspmd.Mesh(x=2), gspmd.Mesh(x=4), gspmd.Mesh(x=3, y=2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str, mesh: gspmd.Mesh) -> None:
    function, x, _ = CASES[name]
    spec = " ".join(["x", "y" if "y" in mesh.names else "_"][: x.dim()])
    plan = gspmd.plan(function, x, mesh=mesh, in_specs=spec, out_specs="same")
    torch.testing.assert_close(plan.simulate(x, _poison=True), function(x))


@pytest.mark.parametrize("name", CASES)
def test_bytes(name: str) -> None:
    function, x, numbers = CASES[name]
    x = x.repeat(100, *[1] * (x.dim() - 1))
    spec = "x _" if x.dim() == 2 else "x"
    plan = gspmd.plan(function, x, mesh=gspmd.Mesh(x=4), in_specs=spec, out_specs="same")
    if numbers is None:
        assert {c.kind for c in plan.collectives} == {"all_reduce"}
    else:
        assert plan.sent_bytes <= 4 * numbers, plan.text(full=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_counts_of_other_numbers_are_the_error_of_pytorch(dtype: torch.dtype) -> None:
    x = torch.ones(8).to(dtype)
    plan = gspmd.plan(torch.bincount, x, mesh=gspmd.Mesh(x=2), in_specs="x")
    with pytest.raises(RuntimeError, match="bincount"):
        plan.simulate(x)
