"""Tensors in plain lists, dicts, tuples, objects and variables: parameters that the module has
under another name, buffers, and tensors that no module has.
"""

import copy
import random
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_same, rand
from torch import Tensor, nn

import torchgspmd as gspmd

MESH = gspmd.Mesh(data=2, model=2)


class Holding(nn.Module):
    """A product with a weight that is at a place, and a layer before it."""

    def __init__(self, place: str, weight: Tensor):
        super().__init__()
        self.first = nn.Linear(5, 7).double()
        self.read = PLACES[place](self, weight)

    def forward(self, x):
        y = self.first(x).sin() @ self.read()
        return y + self.read().sum(0)


def cell(module, weight):
    return lambda: weight


def in_list(module, weight):
    module.weights = [None, weight]
    return lambda: module.weights[1]


def in_dict(module, weight):
    module.weights = {"a": {"b": [weight]}}
    return lambda: module.weights["a"]["b"][0]


def in_tuple(module, weight):
    module.pair = ("a", (weight, 3))
    return lambda: module.pair[1][0]


def in_list_in_tuple(module, weight):
    module.pair = ("a", [weight])
    return lambda: module.pair[1][0]


def on_object(module, weight):
    module.config = SimpleNamespace(weight=weight)
    return lambda: module.config.weight


def attribute(module, weight):
    module.__dict__["weight"] = weight
    return lambda: module.weight


def in_both(module, weight):
    module.weights, module.again = [weight], {"a": weight}
    return lambda: module.weights[0] * 2 - module.again["a"].cos()


def in_module(module, weight):
    module.layers = [nn.Module(), nn.Sequential(nn.Module())]
    module.layers[1][0].register_parameter("weight", weight)
    return lambda: module.layers[1][0].weight


PLACES = {
    each.__name__: each
    for each in (
        *(in_list, in_dict, in_tuple, in_list_in_tuple, cell),
        *(on_object, attribute, in_both, in_module),
    )
}


def check(net: nn.Module, alone: nn.Module, weights: list[Tensor], seed: int) -> gspmd.Plan:
    """A module's results, gradients and buffers against eager; two steps with one plan.

    weights: those of `alone`, as `net` has them.
    """
    x, rng = rand(5, 5, seed=seed).double(), random.Random(seed)
    spec = rng.choice(["data _", "_ _", "_ data"])
    plan = gspmd.plan(net, x, mesh=MESH, in_specs=spec, grad=True)
    for _ in range(2):
        got, grads = plan.simulate(x, _poison=True)
        want = alone(x)
        named = dict(alone.named_parameters())
        own = [w for w in weights if all(w is not p for p in named.values())]
        wanted = torch.autograd.grad(want.sum(), [*named.values(), *own])
        assert_same(got, want)
        for name, gradient in zip(named, wanted):
            assert_same(grads.pop(name), gradient, name)
        assert_same([*grads.values()], [*wanted[len(named) :]])
        assert_same(dict(net.named_buffers()), dict(alone.named_buffers()))
        with torch.no_grad():
            for each in (*net.parameters(), *(w for w in weights_of(net) if w.requires_grad)):
                each.mul_(1.5)
            for each in (*alone.parameters(), *own):
                each.mul_(1.5)
    return plan


def weights_of(net: nn.Module) -> list[Tensor]:
    weight = net.weight_of()
    return [] if any(weight is p for p in net.parameters()) else [weight]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_of_no_module_has_a_gradient(place, seed):
    nets = []
    for _ in range(2):
        torch.manual_seed(seed)
        weight = nn.Parameter(rand(7, 3, seed=seed).double())
        nets.append(net := Holding(place, weight))
        net.weight_of = lambda weight=weight: weight
    rng = random.Random(seed)
    gspmd.annotate(
        nets[0], MESH, {"first.weight": rng.choice(["model _", "_ model", "data model"])}
    )
    plan = check(*nets, [nets[1].weight_of()], seed)
    # The next call has another tensor, and needs no other plan.
    if place == "in_list":
        for net in nets:
            net.weights[1] = nn.Parameter(rand(7, 3, seed=9).double())
        x = rand(5, 5).double()
        assert_same(plan.simulate(x, _poison=True)[0], nets[1](x))


class Owning(nn.Module):
    """A weight, and a buffer that forward changes, under names of a module and elsewhere."""

    def __init__(self, place: str, frozen: bool):
        super().__init__()
        weight = nn.Parameter(rand(7, 3).double(), requires_grad=not frozen)
        if place == "in_module":
            self.twin = nn.Module()
            self.twin.weight = weight
        else:
            self.weight_2 = weight
        self.inner = Holding(place, weight)
        self.register_buffer("count", torch.ones(3).double())
        self.counts = [self.count]
        self.weight_of = lambda: weight

    def forward(self, x):
        self.counts[0].add_(1)
        return self.inner(x) * self.count


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_a_parameter_of_the_module_is_read_elsewhere(place, frozen):
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(Owning(place, frozen))
    name = "twin.weight" if place == "in_module" else "weight_2"
    gspmd.annotate(nets[0], MESH, {name: "model data", "count": "model"})
    for net in nets if frozen else ():
        net.inner.first.requires_grad_(True)
    x = rand(5, 5).double()
    plan = gspmd.plan(nets[0], x, mesh=MESH, in_specs="data _", grad=True)
    assert "7@model, 3@data" in plan.text(full=True)
    for _ in range(2):
        named = {n: p for n, p in nets[1].named_parameters() if p.requires_grad}
        want = nets[1](x)
        grads = dict(zip(named, torch.autograd.grad(want.sum(), [*named.values()])))
        assert_same(plan.simulate(x, _poison=True), (want, grads))
        assert_same(nets[0].count, nets[1].count)
        with torch.no_grad():
            for net in nets:
                for p in net.parameters():
                    p.mul_(1.5)


def test_another_tensor_in_the_place_of_a_parameter():
    """It is not the parameter any more."""
    net, x = Owning("in_dict", False), rand(5, 5).double()
    plan = gspmd.plan(net, x, mesh=MESH)
    net.inner.weights["a"]["b"][0] = nn.Parameter(rand(7, 3, seed=4).double())
    with pytest.raises(gspmd.ShardingError, match="weights"):
        plan.simulate(x)


class Layers(nn.Module):
    """Layers in a plain list, one with statistics of its own, in training."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7).double()
        self.layers = [nn.Conv1d(3, 3, 3, padding=1).double(), nn.BatchNorm1d(3).double()]
        self.by_name = {"a": nn.Sequential(nn.Linear(7, 7), nn.LSTM(7, 5)).double()}

    def forward(self, x):
        y = self.first(x)
        for layer in self.layers:
            y = layer(y).tanh()
        return self.by_name["a"](y)[0]

    def parts(self):
        return [*self.layers, *self.by_name.values()]


def test_layers_in_a_plain_list():
    torch.manual_seed(0)
    net = Layers()
    alone, x = copy.deepcopy(net), rand(4, 3, 5).double()
    gspmd.annotate(net, MESH, {"first.weight": "model _"})
    plan = gspmd.plan(net, x, mesh=MESH, in_specs="data _ _", grad=True)
    for _ in range(2):
        got, grads = plan.simulate(x, _poison=True)
        want = alone(x)
        named = {
            **{f"first.{n}": p for n, p in alone.first.named_parameters()},
            **{
                f"layers.{i}.{n}": p
                for i, m in enumerate(alone.layers)
                for n, p in m.named_parameters()
            },
            **{f"by_name.a.{n}": p for n, p in alone.by_name["a"].named_parameters()},
        }
        assert_same(got, want)
        wanted = torch.autograd.grad(want.sum(), [*named.values()])
        assert_same(grads, dict(zip(named, wanted)))
        for one, other in zip(net.parts(), alone.parts()):
            assert_same(one.state_dict(), other.state_dict())
    # In evaluation they are as they are now.
    with torch.no_grad():
        plan = gspmd.plan(net, x, mesh=MESH, in_specs="data _ _")
        for each in (net, alone):
            each.layers[0].weight.mul_(2)
        assert_same(plan.simulate(x, _poison=True), alone(x))
    # So do their modes.
    for each in (net, alone):
        each.layers[1].eval()
    with pytest.raises(gspmd.ShardingError, match="training"):
        plan.simulate(x)
    plan = gspmd.plan(net, x, mesh=MESH, in_specs="data _ _", grad=True)
    assert_same(plan.simulate(x, _poison=True)[0], alone(x))
