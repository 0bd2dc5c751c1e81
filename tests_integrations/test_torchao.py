"""Float8 training of torchao on a mesh: the recipes' own tensors and products."""

import copy

import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import torchgspmd as gspmd

MESH = gspmd.Mesh(data=2, model=2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu()).float().square().mean()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_float8_linears(recipe):
    torch.manual_seed(0)
    plain = Net().bfloat16()
    config = Float8LinearConfig.from_recipe_name(recipe)
    alone = convert_to_float8_training(plain, config=config)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    marks = {"up.weight": "model _", "down.weight": "_ model"}
    model = gspmd.annotate(copy.deepcopy(alone), MESH, marks)
    plan = gspmd.plan(model, x, mesh=MESH, in_specs="data _", grad=True)
    assert str(plan.text(full=True)).count("scaled_mm(") >= 3
    loss, gradients = plan.simulate(x)
    expected = alone(x)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=2**-7, atol=0)
    for name, parameter in alone.named_parameters():
        # A gradient in bfloat16 is off by 2^-8; at an edge its float8 is the next number.
        error = (gradients[name] - parameter.grad).float().norm() / parameter.grad.float().norm()
        assert error < torch.finfo(torch.float8_e4m3fn).eps / 2, (name, error)
    assert plan.verify().results
