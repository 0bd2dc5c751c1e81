"""Blocks of a stack or pipeline: what one has of its own is computed, or it is an error."""

from __future__ import annotations

import copy
import functools
import threading
import types
import weakref

import pytest
import torch
from torch import nn

import torchgspmd as gspmd
from torchgspmd.model_api.alike import Alike

WIDTH, DOUBLE = 4, torch.float64
X = torch.linspace(-1, 1, 8 * WIDTH, dtype=DOUBLE).view(8, WIDTH)


class Config:
    def __init__(self, factor):
        self.factor, self.itself = factor, self


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)
        self.act = torch.tanh
        self.holder = {"config": Config(1.0), "list": [1.0]}

    def forward(self, x):
        return self.act(self.up(x)) * self.holder["config"].factor * self.holder["list"][0]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def scaled(factor):
    return lambda x: x.tanh() * factor


def triple(module, args, result):
    return result * 3


def triple_after(factor):
    return lambda module, args, result: result * factor


def half(module, args):
    return (args[0] / 2,)


def own_forward(self, x):
    return self.up(x).sigmoid()


def with_other_blocks_hooks(model):
    for i, layer in enumerate(model.layers):
        layer.up.register_forward_hook(triple_after(1 + i % 2))


# What changes one block, or all in another way each.
CHANGES = {
    "closure": lambda m: setattr(m.layers[2], "act", scaled(2.0)),
    "closures": lambda m: [setattr(b, "act", scaled(i)) for i, b in enumerate(m.layers, 1)],
    "partial": lambda m: setattr(m.layers[1], "act", functools.partial(torch.mul, X[:1] + 2)),
    "bound method": lambda m: setattr(m.layers[3], "act", nn.Hardtanh(0, 0.1).forward),
    "object": lambda m: setattr(m.layers[1], "holder", {"config": Config(0.5), "list": [1.0]}),
    "number in a list": lambda m: m.layers[3].holder["list"].insert(0, 2.0),
    "tensor": lambda m: m.layers[2].holder.update(list=[X[0] + 2]),
    "forward": lambda m: setattr(
        m.layers[2], "forward", types.MethodType(own_forward, m.layers[2])
    ),
    "hook": lambda m: m.layers[2].register_forward_hook(triple),
    "hook of a part": lambda m: m.layers[1].up.register_forward_hook(triple),
    "hook before": lambda m: m.layers[3].up.register_forward_pre_hook(half),
    "hooks that alternate": with_other_blocks_hooks,
    "frozen": lambda m: m.layers[0].requires_grad_(False),
    "frozen and not": lambda m: [b.up.bias.requires_grad_(i > 1) for i, b in enumerate(m.layers)],
    "shared": lambda m: setattr(m.layers[3], "up", m.layers[1].up),
    "shared bias": lambda m: setattr(m.layers[3].up, "bias", m.layers[2].up.bias),
    "shared outside": lambda m: setattr(m.head, "weight", m.layers[2].up.weight),
    "gradient hook": lambda m: m.layers[2].up.weight.register_hook(torch.neg),
}


def stacked(model, make):
    mesh = gspmd.Mesh(stage=2)
    if make == "stack":
        model.layers = gspmd.stack(model.layers)
    elif make == "pipeline":
        model.layers = gspmd.pipeline(model.layers, mesh, microbatches=2)
    return mesh


@pytest.mark.parametrize("make", ["stack", "pipeline"])
@pytest.mark.parametrize("change", CHANGES)
def test_blocks_compute_what_they_do_on_one_device_or_raise(change, make):
    torch.manual_seed(0)
    model = Model()
    CHANGES[change](model)
    expected = model(X)
    expected.sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    try:
        mesh = stacked(model, make)
        plan = gspmd.plan(model, X, mesh=mesh, grad=True)
    except gspmd.ShardingError as error:
        assert error.why and error.fix
        assert change not in ("hook", "frozen", "frozen and not", "forward")
        return
    found, rows = plan.simulate(X)
    torch.testing.assert_close(found, expected.detach())
    with_gradient = 0
    for stack, weights in zip(model.layers.stack_names, model.layers.weights()):
        for name in weights:
            for layer in model.layers.of_stack(model.layers.stack_names.index(stack)):
                own = gradients[f"layers.{layer}.{name}"]
                row = rows.get(f"layers.{stack}.{name}")
                assert (own is None) == (row is None)
                if own is not None and row is not None:
                    torch.testing.assert_close(row[model.layers.place(layer)], own)
                    with_gradient += 1
    assert with_gradient == sum(g is not None for n, g in gradients.items() if "layers" in n)


@pytest.mark.parametrize("make", ["stack", "pipeline"])
def test_a_function_that_keeps_its_block_is_an_error(make):
    def twice(call):
        return lambda *args: call(*args) * 2

    model = Model()
    for layer in model.layers:
        layer.up.forward = twice(layer.up.forward)
    with pytest.raises(gspmd.ShardingError, match="a function that keeps the block"):
        stacked(model, make)


@pytest.mark.parametrize("make", ["stack", "pipeline"])
def test_blocks_are_frozen_before_they_are_stacked(make):
    model = Model()
    stacked(model, make)
    for layer in model.layers:
        with pytest.raises(gspmd.ShardingError, match="freeze blocks"):
            layer.requires_grad_(False)


def test_buffers_that_differ_are_not_loaded():
    blocks = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(3)]
    model, trained = gspmd.stack(copy.deepcopy(blocks)), nn.Sequential(*blocks)
    model.load_state_dict(trained.state_dict())
    trained(torch.randn(8, 2))
    with pytest.raises(gspmd.ShardingError, match="0.1.running_mean and 1.1.running_mean differ"):
        model.load_state_dict(trained.state_dict())


def counted(n, value=0):
    def count(x=n, *, y=n):
        return x + value + y

    return count


LINEAR = nn.Linear(2, 2)
SAME = [
    (1, 1),
    (scaled(2), scaled(2)),
    (counted(1), counted(1)),
    (functools.partial(scaled, 2), functools.partial(scaled, 2)),
    (Config([torch.ones(2)]), Config([torch.ones(2)])),
    (nn.ReLU(), nn.ReLU()),
    ([{"a": {1, 2}}], [{"a": {1, 2}}]),
    (LINEAR.forward, LINEAR.forward),
    (weakref.ref(LINEAR), weakref.ref(LINEAR)),
    (torch.tanh, torch.tanh),
    (torch.float32, torch.float32),
]
OTHER = [
    (1, True),
    (1, 1.0),
    (scaled(2), scaled(3)),
    (counted(1), counted(2)),
    (counted(1), counted(1, 2)),
    (functools.partial(scaled, 2), functools.partial(scaled, 3)),
    (Config([torch.ones(2)]), Config([torch.zeros(2)])),
    (nn.Hardtanh(0, 1), nn.Hardtanh(0, 2)),
    (nn.Linear(2, 2), nn.Linear(2, 2)),
    ([{"a": {1, 2}}], [{"a": {1, 3}}]),
    (nn.Hardtanh(0, 1).forward, nn.Hardtanh(0, 2).forward),
    (weakref.ref(LINEAR), weakref.ref(X)),
    (torch.tanh, torch.sigmoid),
    (torch.float32, torch.float64),
    (torch.ones(2), torch.ones(2, dtype=DOUBLE)),
    (threading.Lock(), threading.Lock()),
    ((1, 2), (1,)),
    ({"a": 1}, {"b": 1}),
    (torch.nn.ReLU, torch.nn.GELU),
]


def test_values_that_behave_alike():
    assert [pair for pair in SAME if not Alike({}, {})(*pair)] == []
    assert [pair for pair in OTHER if Alike({}, {})(*pair)] == []
