"""Float8 and MX training of torchao on a mesh: the recipes' own tensors and products."""

import copy

import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

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


class MxNet(nn.Module):
    """Two MX linears, which compute in float8 with a scale for 32 numbers."""

    def __init__(self):
        super().__init__()
        options = {"bias": False, "kernel_preference": KernelPreference.EMULATED}
        self.up, self.down = MXFP8Linear(64, 96, **options), MXFP8Linear(96, 64, **options)

    def forward(self, x):
        return self.down(self.up(x).relu()).float().square().mean()


def test_mxfp8_linears():
    """The recipe as torchao emulates it without a Blackwell card: forward and backward."""
    torch.manual_seed(0)
    alone, x = MxNet().bfloat16(), torch.randn(64, 64, dtype=torch.bfloat16)
    marks = {"up.weight": "model _", "down.weight": "_ model"}
    model = gspmd.annotate(copy.deepcopy(alone), MESH, marks)
    loss, gradients = gspmd.plan(model, x, mesh=MESH, in_specs="data _", grad=True).simulate(x)
    expected = alone(x)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=2**-7, atol=0)
    for name, parameter in alone.named_parameters():
        error = (gradients[name] - parameter.grad).float().norm() / parameter.grad.float().norm()
        assert error < torch.finfo(torch.float8_e4m3fn).eps / 2, (name, error)


@pytest.mark.parametrize("specs", [("data _", "model _"), ("_ model", "_ model")])
def test_mxfp8_products_for_blackwell(specs):
    """`torch._scaled_mm` with scales in the order of a card; the CPU's kernel has none."""

    def product(x, w, kernel=KernelPreference.AUTO):
        a, b = (
            MXTensor.to_mx(t, torch.float8_e4m3fn, kernel_preference=kernel).t() for t in (x, w)
        )
        return torch.mm(a.t(), b)

    torch.manual_seed(0)
    x, w = torch.randn(48, 256).bfloat16(), torch.randn(160, 256).bfloat16()
    plan = gspmd.plan(product, x, w, mesh=MESH, in_specs=specs)
    assert str(plan.text(full=True)).count("block_scaled_mm(") == 1
    assert specs[0] != "data _" or not plan.sent_bytes, plan
    expected = product(x, w, KernelPreference.EMULATED)
    # Terms of shards are summed in bfloat16.
    rounding = torch.finfo(torch.bfloat16).eps * expected.abs().max()
    torch.testing.assert_close(plan.simulate(x, w), expected, rtol=0, atol=float(rounding))
