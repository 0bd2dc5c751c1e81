"""Parameters in plain lists, dicts and tuples, on processes: those of the module under a second
name, and those of layers that it does not register, as on one device. And those that a module
stores otherwise than they are set.
"""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import assert_same, rand
from ranks import distributed
from torch import nn
from torch.distributed.tensor import DTensor

import torchgspmd as gspmd


class Aliases(nn.Module):
    """Reads its own parameters, and a buffer that it changes, through a dict, list and tuple."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterDict({k: nn.Parameter(rand(8, 7).double()) for k in "abc"})
        self.register_buffer("count", torch.ones(7).double())
        self.by_name = {"a": self.weights["a"], "b": [self.weights["b"]]}
        self.pair, self.counts = (self.weights["c"], 2), [self.count]

    def forward(self, x):
        self.counts[0].add_(1)
        y = (x @ self.by_name["a"]).sin() @ self.by_name["b"][0].T
        return (y @ self.pair[0]).cos() * self.count

    def trained(self):
        return [*self.parameters()]


class Layers(nn.Module):
    """Layers in a plain list, and a weight in a dict, that `parameters()` does not have."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8).double()
        self.layers = [nn.Linear(8, 8).double(), nn.LayerNorm(8).double()]
        self.scales = {"a": nn.Parameter(rand(8).double())}

    def forward(self, x):
        y = self.first(x).sin()
        for layer in self.layers:
            y = layer(y)
        return y * self.scales["a"]

    def trained(self):
        layers = [p for layer in self.layers for p in layer.parameters()]
        return [*self.first.parameters(), *layers, self.scales["a"]]


class RealViews(nn.Module):
    """Stores the real views of complex parameters, as tltorch's factorized tensors do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.complex(*rand(2, 8, 8).double()))

    def __setattr__(self, name, value):
        if isinstance(value, nn.Parameter):
            value = nn.Parameter(torch.view_as_real(value))
        super().__setattr__(name, value)

    def __getattr__(self, name):
        value = super().__getattr__(name)
        return torch.view_as_complex(value) if isinstance(value, torch.Tensor) else value

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight).abs()

    def trained(self):
        return [*self.parameters()]


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


@distributed("data=2,model=2")
@pytest.mark.parametrize("kind", [Aliases, Layers, RealViews])
def test_steps(mesh, kind):
    torch.manual_seed(0)
    alone = kind()
    net = copy.deepcopy(alone)
    marks = {
        Aliases: {"weights.*": "data model", "count": "model"},
        Layers: {"first.weight": "model _"},
        RealViews: {"weight": "data model _"},
    }[kind]
    net = gspmd.parallelize(gspmd.annotate(net, mesh, marks), mesh, in_specs="data _")
    optimizers = [torch.optim.AdamW(m.trained(), lr=0.1) for m in (net, alone)]
    for step in range(3):
        x = rand(6, 8, seed=step).double()
        for model, optimizer in zip((net, alone), optimizers):
            optimizer.zero_grad()
            model(x).square().sum().backward()
        assert_same(
            [whole(p.grad) for p in net.trained()], [p.grad for p in alone.trained()], terms=4096
        )
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            assert_same(net(x), alone(x), terms=4096)
        assert_same([whole(b) for b in net.buffers()], [*alone.buffers()])
    if kind is Aliases:
        assert net.by_name["a"] is net.weights["a"] and net.pair[0] is net.weights["c"]
        net.weights["a"].data.mul_(2), alone.weights["a"].data.mul_(2)
        assert_same(net(x), alone(x), terms=4096)
    elif kind is Layers:
        net.layers[0], alone.layers[0] = (nn.Linear(8, 8).double() for _ in range(2))
        alone.layers[0].load_state_dict(net.layers[0].state_dict())
        assert_same(net(x), alone(x), terms=4096)
    else:  # with setattr a second view of a view was stored, or refused
        assert net._parameters["weight"].shape == (8, 8, 2) and net.weight.is_complex()
