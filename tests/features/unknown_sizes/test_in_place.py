"""Updates in place of tensors whose sizes only a run knows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same

import torchgspmd as gspmd

UPDATES = {
    "clamp_": lambda s, y: s.clamp_(min=0, max=1),
    "clamp_min_": lambda s, y: s.clamp_min_(0.1),
    "clamp_max_ of a tensor": lambda s, y: s.clamp_max_(y),
    "boxes": lambda s, y: s[:, 0::2].clamp_(0, 0.5),
    "relu6": lambda s, y: F.relu6(s, inplace=True),
    "hardswish": lambda s, y: F.hardswish(s, inplace=True),
    "nan_to_num_": lambda s, y: (s / y.clamp(0)).nan_to_num_(0, 1, 2),
    "cumsum_": lambda s, y: s.cumsum_(0),
    "triu_": lambda s, y: s.triu_(1),
    "copysign_": lambda s, y: s.copysign_(y),
    "xlogy_": lambda s, y: s.xlogy_(y.abs()),
    "index_fill_": lambda s, y: s.index_fill_(1, torch.tensor([0, 2]), 1.0),
    "lerp_": lambda s, y: s.lerp_(y, 0.3),
    "add_": lambda s, y: s.add_(y, alpha=2),
    "masked_fill_": lambda s, y: s.masked_fill_(y > 0, 1.0),
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_selection_is_updated(name):
    torch.manual_seed(0)
    x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)

    def program(x):
        chosen, other = x[x[:, 0] > 0] * 1, x[x[:, 0] > 0].cos()
        result = UPDATES[name](chosen, other)
        total = (result * result).sum() + chosen.sin().sum()
        return result, chosen, torch.autograd.grad(total, x)[0]

    plan = gspmd.plan(program, x, mesh=gspmd.Mesh(a=2), in_specs=("a _",))
    assert_same(plan.simulate(x, _poison=True), program(x))


def test_a_value_of_another_dtype_is_refused_as_in_pytorch():
    def program(x):
        return (x[x[:, 0] > 0] * 1).clamp_(0.5)

    with pytest.raises(RuntimeError, match="float32 cannot be written into torch.int64"):
        gspmd.plan(program, torch.arange(12).view(4, 3), mesh=gspmd.Mesh(a=2), in_specs=("a _",))
