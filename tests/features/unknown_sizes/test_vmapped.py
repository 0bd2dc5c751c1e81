"""Functions along a dimension under torch.vmap, which a pipeline is, with sizes of a run."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Mesh


def places(x):
    return (x[:, :2] * 10).long().abs() % 2


OPERATIONS = {
    "gather": lambda x, w: x.gather(1, places(x)),
    "scatter": lambda x, w: torch.zeros_like(x).scatter(1, x.argsort(1), x),
    "scatter_value": lambda x, w: x.scatter(1, places(x), 1.0),
    "scatter_add": lambda x, w: torch.zeros_like(x).scatter_add(1, places(x), x[:, :2]),
    "index_select": lambda x, w: x.index_select(0, x[:, 0].argsort()),
    "rows": lambda x, w: x[x[:, 0].argsort()],
    "cat": lambda x, w: torch.cat([x, w, x.sin()], 0),
    "pad": lambda x, w: F.pad(x, (1, 0, 0, 2), value=3.0),
}


class Stages(nn.Module):
    """An operation of each stage's rows and table."""

    def __init__(self, operation):
        super().__init__()
        self.operation = operation
        self.tables = nn.Parameter(torch.randn(2, 5, 4, dtype=torch.float64))

    def forward(self, x):
        y = torch.vmap(self.operation)(x * self.tables.mean(1, keepdim=True), self.tables)
        return y.square().sum()


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_of_each_stage(name):
    torch.manual_seed(0)
    model = Stages(OPERATIONS[name])
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    options = {"in_specs": "stage _ _", "dynamic": {"x": {1}}, "grad": True}
    plan = gspmd.plan(model, x, mesh=Mesh(stage=2), **options)
    assert {each.kind for each in plan.collectives} == {"all_reduce"}  # of the loss
    for rows in (6, 5, 2):
        x = torch.randn(2, rows, 4, dtype=torch.float64)
        loss, gradients = plan.simulate(x, _poison=True)
        expected = model(x)
        (gradient,) = torch.autograd.grad(expected, [model.tables])
        assert_same((loss, gradients["tables"]), (expected.detach(), gradient))
