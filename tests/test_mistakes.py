"""Mistakes that a newcomer makes: each is a ShardingError that names the thing and the cure."""

import pytest
import torch
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardingError

MESH = Mesh(data=2, model=2)
X = torch.ones(4, 8)


class Net(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.linear, self.use, self.log = nn.Linear(8, 8), use, []

    def forward(self, x):
        return self.use(self, self.linear(x))


def plan_of(use):
    return gspmd.plan(Net(use), X, mesh=MESH, in_specs="data _")


def tied():
    net = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    net["b"].weight = net["a"].weight
    return gspmd.annotate(net, MESH, {"**.weight": "data _", "b.weight": "_ data"})


MISTAKES = {
    "sizes": (lambda: Mesh(2, 4), "by name", "Mesh(data=2, model=4)"),
    "mapping": (lambda: Mesh({"x": 2, "y": 3}), "by name", "Mesh(x=2, y=3)"),
    "module": (
        lambda: gspmd.mark_sharding(nn.Linear(8, 8), MESH, "model _"),
        "gets a Linear",
        "mark_sharding(module.weight, mesh, ...)",
    ),
    "no parameters": (
        lambda: gspmd.mark_sharding(nn.GELU(), MESH, "model _"),
        "gets a GELU",
        "mark its results",
    ),
    "number": (lambda: gspmd.mark_sharding(3.0, MESH, ""), "gets a float", "pass a parameter"),
    "format": (
        lambda: plan_of(lambda net, y: (f"{y.sum():.3f}", y)[1]),
        "formats a value that only a run knows",
        "or return the number",
    ),
    "tuple": (
        lambda: gspmd.plan(nn.Linear(8, 8), (X,), mesh=MESH),
        "gets a tuple",
        "plan(model, x",
    ),
    "list": (lambda: gspmd.plan(nn.Linear(8, 8), [X], mesh=MESH), "gets a list", "plan(model, x"),
    "device": (
        lambda: plan_of(lambda net, y: y + torch.ones(8, device="cuda")),
        "tensors on cpu and cuda:0",
        "device=x.device",
    ),
    "glob": (
        lambda: gspmd.annotate(
            nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), MESH, {"*.weight": "data _"}
        ),
        "gives 'data _' to '1.weight'",
        "'1.weight': 'data'",
    ),
    "wrapped": (
        lambda: gspmd.plan(nn.DataParallel(nn.Linear(8, 8)), X, mesh=MESH),
        "the model is wrapped by DataParallel",
        "in_specs='auto'",
    ),
    "wrapped inside": (
        lambda: gspmd.plan(nn.Sequential(nn.DataParallel(nn.Linear(8, 8))), X, mesh=MESH),
        "'0' is wrapped by DataParallel",
        "shard_updates='data'",
    ),
    "tied": (tied, "'a.weight' and 'b.weight' are one tensor", "'b.weight': '_ data'"),
    "keywords": (
        lambda: gspmd.plan(torch.add, X, other=X, mesh=MESH, in_specs=("data _", "data _")),
        "'other' passed by keyword",
        "'other': ...}",
    ),
    "list of numbers": (
        lambda: plan_of(lambda net, y: net.log.append(y.sum().item()) or y),
        "a number into 'self.log[0]'",
        "item() on it outside",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name):
    make, what, fix = MISTAKES[name]
    with pytest.raises(ShardingError) as error:
        make()
    text = str(error.value)
    assert what in text.splitlines()[0] and fix in error.value.fix
    assert __file__ in text or "test_mistakes.py" in text


def test_a_later_entry_mends_a_rank():
    """A glob over matrices and vectors is right if an entry behind it names the vectors."""
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    gspmd.annotate(net, MESH, {"*.weight": "data _", "1.weight": "data"})
    plan = gspmd.plan(net, X, mesh=MESH, in_specs="data _")
    assert str(plan.in_specs[2]) == "data"
