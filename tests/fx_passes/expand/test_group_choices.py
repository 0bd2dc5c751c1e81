"""Rows with chosen matrices: numbers of one device, no matrix gathered, no sum between products."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from expert_layer import ChosenExperts, by_bmm, by_einsum, by_matmul
from helpers import assert_same
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import Mesh
from torchgspmd.fx_passes import pipeline

WIDTH, HIDDEN = 8, 96
ALL = {"up": "expert _ _", "down": "expert _ _"}
BIASES = {"up_bias": "expert _", "down_bias": "expert _"}


@pytest.mark.parametrize(
    "multiply, experts, high, mesh, marks, rows",
    [
        (by_bmm, 8, 8, Mesh(expert=4), ALL, "_ _"),
        (by_matmul, 8, 3, Mesh(expert=2), ALL | BIASES, "_ _"),  # five are empty
        (by_einsum, 5, 5, Mesh(expert=2), ALL, "expert _"),
        (by_bmm, 3, 3, Mesh(expert=4), ALL | BIASES, "_ _"),  # a device has none
        (by_bmm, 8, 1, Mesh(data=2, expert=2), ALL, "data _"),  # all to one
    ],
)
def test_matrices_stay_where_they_are(multiply, experts, high, mesh, marks, rows):
    model = ChosenExperts(experts, WIDTH, HIDDEN, multiply)
    x = torch.randn(14, WIDTH, dtype=torch.float64, requires_grad=True)
    low = 0 if multiply is by_einsum else -1  # index_select takes no negative ones
    chosen = torch.randint(low, high, (14, 2))
    out = model(x, chosen)
    out.sum().backward()
    gradients = {name: p.grad for name, p in [*model.named_parameters(), ("x", x)]}
    gspmd.annotate(model, mesh, marks)
    plan = gspmd.plan(model, x, chosen, mesh=mesh, in_specs=(rows, rows), out_specs=rows, grad=True)
    got, found = plan.simulate(x, chosen, _poison=True)
    assert_same([got], [out], "result")
    assert_same(found, gradients, "gradients")
    largest = max(c.payload_bytes for c in plan.collectives)
    assert largest <= 2 * x.nbytes < 14 * HIDDEN * 8


def test_small_matrices_are_gathered_and_the_plan_says_so():
    x, w = torch.randn(512, WIDTH), nn.Parameter(torch.randn(2, WIDTH, WIDTH))
    model = Chosen(w)
    gspmd.annotate(model, Mesh(expert=2), {"w": "expert _ _"})
    plan = gspmd.plan(model, x, torch.randint(0, 2, (512,)), mesh=Mesh(expert=2))
    assert [c.kind for c in plan.collectives] == ["all_gather"]
    assert [r.value for r in plan.replicated_ops] == ["w"]


class Chosen(nn.Module):
    def __init__(self, w: nn.Parameter):
        super().__init__()
        self.w = w

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return by_bmm(x, self.w, chosen)


class Normalized(ChosenExperts):
    """Between the products, operations that name dimensions."""

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        h = by_bmm(x, self.up, chosen)[:, : self.down.shape[2]].softmax(1).cumsum(1).flip(1)
        return by_bmm(h, self.down, chosen)


@contextmanager
def grouping_whatever_it_costs():
    new = replace(pipeline.PIPELINE[0], cost=lambda program: -len(program.changed))
    token = pipeline._current.set((new, *pipeline.PIPELINE[1:]))
    try:
        yield
    finally:
        pipeline._current.reset(token)


@pytest.mark.parametrize("width", [1, 4])
def test_dimensions_and_sizes_that_operations_name(width):
    model, x = Normalized(4, width, 3), torch.randn(3, width, dtype=torch.float64)
    chosen = torch.tensor([2, 0, 3])
    gspmd.annotate(model, Mesh(expert=2), ALL)
    with grouping_whatever_it_costs():
        plan = gspmd.plan(model, x, chosen, mesh=Mesh(expert=2))
    assert "block_mm" in plan.program.code
    assert_same([plan.simulate(x, chosen)], [model(x, chosen)])


@pytest.mark.parametrize("spec", [None, "a", "b"])
def test_products_of_vectors_have_no_chosen_matrices(spec):
    """torch.inner permutes its operands by negative dimensions."""
    x, y = (torch.randn(4, dtype=torch.float64) for _ in range(2))
    plan = gspmd.plan(torch.inner, x, y, mesh=Mesh(a=2, b=2), in_specs=(spec, None))
    assert_same([plan.simulate(x, y)], [torch.inner(x, y)])


def test_a_table_may_be_permuted_by_negative_dimensions():
    def multiply(x, table, chosen):
        return torch.einsum("tk,tkn->tn", x, table[chosen].permute(0, -1, -2))

    x, table = torch.randn(64, 4).double(), torch.randn(4, 64, 4).double()
    chosen = torch.randint(-4, 4, (64,))
    with grouping_whatever_it_costs():
        specs = ("_ _", "a _ _", "_")
        plan = gspmd.plan(multiply, x, table, chosen, mesh=Mesh(a=2), in_specs=specs)
    assert "block_mm" in plan.program.code
    assert_same([plan.simulate(x, table, chosen)], [multiply(x, table, chosen)])
