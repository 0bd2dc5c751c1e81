"""Errors of torch while a program is captured: they say at which line, and nothing is logged."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchgspmd as gspmd

MESH = gspmd.Mesh(data=2)
X = torch.ones(3, 4)


class Deep(nn.Module):
    """A model with an error in its last layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 6))

    def forward(self, x):
        return self.layers(x)


PROGRAMS = {
    "sum": lambda x: x + torch.ones(7),
    "product": lambda x: x @ torch.ones(5, 6),
    "view": lambda x: x.view(5, 5),
    "cat": lambda x: torch.cat([x, torch.ones(3, 7)], 0),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], X[None, :, :2], X[None, :, :2]),
    "loss": lambda x: F.cross_entropy(x, torch.zeros(7, dtype=torch.long)),
    "index": lambda x: x[:, 9],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_shapes_that_do_not_fit(name, capfd):
    kind, lines = None, []
    try:
        gspmd.plan(PROGRAMS[name], X, mesh=MESH)
    except (RuntimeError, ValueError, IndexError) as error:
        kind, lines = type(error), str(error).splitlines()
    with pytest.raises(Exception) as eager:
        PROGRAMS[name](X)
    assert kind is eager.type and lines[-1].startswith("  where ")
    assert "test_failing_line.py:" in lines[-1] and f'"{name}": lambda x:' in lines[-1]
    assert capfd.readouterr() == ("", "")


def test_the_module_is_named():
    with pytest.raises(RuntimeError) as caught:
        gspmd.plan(Deep(), X, mesh=MESH)
    where, module = str(caught.value).splitlines()[1:]
    assert where.startswith("  where ")
    assert where.endswith("test_failing_line.py:24: return self.layers(x)")
    assert module == "  in    layers.1, Linear(in_features=5, out_features=6, bias=True)"


def test_an_error_that_the_program_raises_stays_as_it_is():
    def raising(x):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="^mine$"):
        gspmd.plan(raising, X, mesh=MESH)


def test_the_log_of_fake_tensors_is_back_afterwards():
    gspmd.plan(torch.relu, X, mesh=MESH)
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled
