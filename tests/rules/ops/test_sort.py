"""Sorts of a sharded vector by columnsort: order, places, ties, special numbers, bytes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import torchgspmd as gspmd

N, SIZE = 8, 1024
MESH = gspmd.Mesh(m=N)
MOVED = 2 * (N - 1) / N**2 + 1 / N  # of a vector: two transpositions, two shifts by half a block
SPECIAL = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1.0, -1.0, 2.5])


def shuffled(x: Tensor) -> Tensor:
    return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]


def bits(x: Tensor) -> Tensor:
    """Numbers with the sign of zeros; one NaN is like the other."""
    return torch.stack([x.isnan(), x.signbit() & ~x.isnan()]) if x.is_floating_point() else x


@pytest.mark.parametrize("descending", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int32))
def test_a_stable_sort_keeps_the_order_of_equal_elements(
    dtype: torch.dtype, descending: bool
) -> None:
    x = shuffled(SPECIAL.repeat(SIZE // 8))
    x = x.to(dtype) if dtype.is_floating_point else x.nan_to_num(3, 7, -7).to(dtype)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(x.sort(stable=True, descending=descending))

    plan = gspmd.plan(function, x, mesh=MESH, in_specs="m", out_specs=("m", "m"))
    values, places = plan.simulate(x, _poison=True)
    want = function(x)
    torch.testing.assert_close(values, want[0], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(bits(values), bits(want[0])) and torch.equal(places, want[1])
    if dtype != torch.bfloat16:  # a gather of 2 bytes sends less than keys of 8
        assert plan.sent_bytes == MOVED * SIZE * 8


@pytest.mark.parametrize("size", (SIZE, 4 * SIZE))
def test_values_alone_move_as_they_are(size: int) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(0))
    plan = gspmd.plan(lambda x: x.sort()[0], x, mesh=MESH, in_specs="m", out_specs="m")
    assert torch.equal(plan.simulate(x), x.sort()[0])
    assert plan.sent_bytes == MOVED * x.nbytes


@pytest.mark.parametrize("size", (SIZE + 6, 256))
def test_a_vector_that_columnsort_cannot_sort_is_gathered(size: int) -> None:
    """It needs even blocks, and 2 (n - 1)^2 elements in each."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(0))
    plan = gspmd.plan(lambda x: x.sort()[0], x, mesh=MESH, in_specs="m", out_specs="m")
    assert torch.equal(plan.simulate(x, _poison=True), x.sort()[0])
    assert [e.kind for e in plan.collectives] == ["all_gather"]


def test_the_gradient_of_a_sorted_vector() -> None:
    x = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))

    def gradient(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        loss = (leaf.sort()[0] * torch.arange(SIZE, dtype=x.dtype)).sum()
        return torch.autograd.grad(loss, leaf)[0]

    plan = gspmd.plan(gradient, x, mesh=MESH, in_specs="m", out_specs="m")
    assert torch.equal(plan.simulate(x, _poison=True), gradient(x))
    assert plan.sent_bytes <= 7 / 8 * x.nbytes
