"""in_specs="auto", out_specs="same", and the warning of an axis that divides nothing."""

import warnings

import pytest
import torch
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardingError, ShardSpec


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, ids, scale):
        return self.linear(x)[ids] * scale


ARGUMENTS = torch.randn(8, 3, 4), torch.arange(6), torch.tensor(2.0)


@pytest.mark.parametrize("mesh", [Mesh(data=2, model=2), Mesh(dp=2, tp=2), Mesh(replica=2, fsdp=2)])
def test_auto(mesh):
    """The axes of the batch divide the leading dimension of each tensor; a number has none."""
    model = Scaled()
    plan = gspmd.plan(model, *ARGUMENTS[:2], scale=ARGUMENTS[2], mesh=mesh, in_specs="auto")
    axes = tuple(name for name in mesh.names if name not in ("model", "tp"))
    assert plan.in_specs[2:4] == (ShardSpec((axes, (), ())), ShardSpec((axes,)))
    torch.testing.assert_close(plan.simulate(*ARGUMENTS[:2], scale=ARGUMENTS[2]), model(*ARGUMENTS))


def test_auto_without_an_axis():
    with pytest.raises(ShardingError, match="finds no axis of the batch") as error:
        gspmd.plan(Scaled(), *ARGUMENTS, mesh=Mesh(expert=2, stage=2), in_specs="auto")
    assert "'expert _'" in str(error.value)


def test_same():
    """Results stay where they are computed; gathered they are by default on processes alone."""
    mesh = Mesh(data=2, model=2)
    x, w = torch.randn(8, 4), torch.randn(4, 8)
    plan = gspmd.plan(
        torch.matmul, x, w, mesh=mesh, in_specs=("data _", "_ model"), out_specs="same"
    )
    assert plan.out_specs == (ShardSpec.parse("data model"),) and not plan.collectives
    torch.testing.assert_close(plan.simulate(x, w), x @ w)


def test_idle_axes():
    """Each axis that divides no value is named, with the line to write."""
    mesh, model = Mesh(data=2, model=2), nn.Linear(4, 4)
    with pytest.warns(UserWarning, match="'data' divides no value.*in_specs=\"auto\"") as caught:
        assert gspmd.plan(model, torch.ones(2, 4), mesh=mesh).idle_axes == ("data", "model")
    assert "mark weights with it" in str(caught[1].message) and len(caught) == 2
    gspmd.mark_sharding(model.weight, mesh, "model _")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = gspmd.plan(model, torch.ones(2, 4), mesh=mesh, in_specs="auto")
    assert plan.idle_axes == ()
