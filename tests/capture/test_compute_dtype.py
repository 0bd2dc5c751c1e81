"""param_dtype in a capture: what is cast, what is not, and what cannot be."""

import pytest
import torch
from helpers import assert_same, rand
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardingError

BF16, F32 = torch.bfloat16, torch.float32
MESH = Mesh(data=2)


def planned(model, *args, **options):
    options = {"param_dtype": BF16, "grad": True} | options
    return gspmd.plan(model, *args, mesh=MESH, **options)


class Dtypes(nn.Module):
    """Reports what it computes with."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(rand(4, 4))
        self.frozen = nn.Parameter(rand(4), requires_grad=False)
        self.wide = nn.Parameter(rand(4).double())
        self.register_buffer("scale", rand(4))
        self.count = nn.Parameter(torch.arange(4), requires_grad=False)
        self.seen = ()

    def forward(self, x, more):
        tensors = x, *more.values(), *self.parameters(), *self.buffers()
        assert tuple(t.dtype for t in tensors) == self.expected
        return x @ self.weight + self.frozen + self.wide, x * self.scale


def test_what_is_cast():
    """Floating parameters and arguments, also in containers; buffers and integers stay."""
    model = Dtypes()
    model.expected = (BF16, BF16, torch.int64, BF16, BF16, BF16, torch.int64, F32)
    x, more = rand(2, 4), {"mask": rand(2), "ids": torch.arange(2)}
    plan = planned(model, x, more)
    (y, z), gradients = plan.simulate(x, more)
    assert y.dtype == BF16 and z.dtype == F32  # as computed, which is FSDP2's output_dtype=None
    assert {n: g.dtype for n, g in gradients.items()} == {"weight": F32, "wide": torch.float64}
    half = {n: p.detach().to(BF16) for n, p in model.named_parameters()}
    assert_same(y, x.to(BF16) @ half["weight"] + half["frozen"] + half["wide"], terms=4)
    assert_same(z, x.to(BF16) * model.scale)


class Changes(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.weight, self.what = nn.Parameter(rand(4)), what

    def forward(self, x):
        with torch.no_grad():
            if self.what == "weight":
                self.weight.mul_(0.9)
            elif self.what == "rebinds":
                self.weight = nn.Parameter(0.9 * self.weight)
            else:
                x.mul_(0.9)
        return x * self.weight


@pytest.mark.parametrize(
    "what, name",
    [("weight", "parameter 'weight'"), ("rebinds", "parameter 'weight'"), ("x", "tensor 0 of")],
)
def test_changes_of_a_copy_are_errors(what, name):
    with pytest.raises(ShardingError, match=f"forward changes {name}") as error:
        planned(Changes(what), rand(2, 4))
    assert "torch.autocast" in str(error.value)


def test_a_parameter_of_that_dtype_may_change():
    planned(Changes("weight").to(BF16), rand(2, 4), grad=False)


@pytest.mark.parametrize("dtype", [torch.int8, "bfloat16", torch.complex64])
def test_other_dtypes_are_errors(dtype):
    for option in ("param_dtype", "reduce_dtype"):
        with pytest.raises(ShardingError, match=f"{option}=.* is no floating dtype"):
            planned(nn.Linear(4, 4), rand(2, 4), **{option: dtype})


def test_functions_have_no_parameters():
    with pytest.raises(ShardingError, match="are options for modules"):
        planned(torch.relu, rand(2, 4), grad=False)
