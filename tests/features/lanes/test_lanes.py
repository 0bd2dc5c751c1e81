"""Lanes: the numbers of one device, and the bytes of owners who divide the matrices."""

from __future__ import annotations

import copy

import pytest
import torch
from matrix_optimizers import NewtonSchulz, Shampoo, Soap
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Mesh

DATA = Mesh(data=4)
GRID = Mesh(data=2, model=2)


class Layers(nn.Module):
    """Products of residual matrices, [n, n] or [n, m] with [m, n]."""

    def __init__(self, count: int, rows: int, columns: int):
        super().__init__()
        torch.manual_seed(0)
        shapes = [(rows, columns), (columns, rows)] if rows != columns else [(rows, rows)]
        self.weights = nn.ParameterList(
            torch.randn(shapes[i % len(shapes)], dtype=torch.float64) / rows for i in range(count)
        )

    def forward(self, x):
        y = x
        for w in self.weights:
            y = y @ w
            if y.shape == x.shape:
                x = y = x + y
        return x.square().mean()


def step_of(model, kind, mesh, marks, x, **options):
    gspmd.annotate(model, mesh, marks)
    return gspmd.plan(
        gspmd.train_step(model, kind(model.parameters()), **options),
        x,
        mesh=mesh,
        in_specs=f"{mesh.names[0]} _",
    )


def lanes_of(plan):
    """Return the shapes of the stacks of lanes in a plan, with their layouts."""
    nodes = plan.sharded.nodes if hasattr(plan, "sharded") else ()
    return [n for n in nodes if "stack" in str(n.target)]


@pytest.mark.parametrize("marks", ["data _", "_ data", None])
@pytest.mark.parametrize(
    "kind, count, rows, columns, mesh",
    [
        (NewtonSchulz, 8, 16, 16, DATA),
        (NewtonSchulz, 7, 10, 10, DATA),  # uneven lanes, uneven rows
        (NewtonSchulz, 10, 12, 20, DATA),  # two groups of 5
        (NewtonSchulz, 5, 12, 12, GRID),
        (Shampoo, 4, 12, 12, DATA),
        (Shampoo, 7, 10, 10, DATA),
        (Shampoo, 8, 8, 12, GRID),
        (Soap, 4, 12, 12, DATA),
        (Soap, 5, 10, 10, DATA),
    ],
)
def test_steps_are_those_of_one_device(kind, count, rows, columns, mesh, marks):
    model = Layers(count, rows, columns)
    reference = copy.deepcopy(model)
    other = kind(reference.parameters())
    x = torch.randn(24, rows, dtype=torch.float64)
    plan = step_of(model, kind, mesh, {"weights.*": marks} if marks else {}, x)
    for _ in range(2):
        loss = plan.simulate(x)
        other.zero_grad()
        want = reference(x)
        want.backward()
        other.step()
        torch.testing.assert_close(loss, want.detach(), rtol=1e-9, atol=1e-9)
    for got, wanted in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)
