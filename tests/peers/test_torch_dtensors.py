"""The models with which PyTorch tests DTensor, and its converter of arguments, on two processes."""

from __future__ import annotations

import random

import pytest
import torch
from helpers import assert_same
from ranks import distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch_models import MODELS, dtensor_helpers, make, train, wrapped

import torchgspmd as gspmd

TERMS = 4096  # two steps, each with sums over some hundred rows, through a root of averages
MOST = 5  # layouts of a call: each is a program
CALLS = {  # a module of several arguments, and their shapes
    "Linear": (lambda: nn.Linear(6, 4), [(4, 6)]),
    "Bilinear": (lambda: nn.Bilinear(4, 6, 2), [(4, 4), (4, 6)]),
    "Conv2d": (lambda: nn.Conv2d(2, 4, 3, padding=1), [(2, 2, 6, 4)]),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        [(2, 4, 8), (2, 4, 8), (2, 4, 8)],
    ),
    "GRUCell": (lambda: nn.GRUCell(4, 6), [(4, 4), (4, 6)]),
    "TransformerDecoderLayer": (
        lambda: nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True),
        [(2, 4, 8), (2, 6, 8)],
    ),
}


@distributed("model=2")
@pytest.mark.parametrize("name", MODELS)
def test_model(mesh, name):
    alone = make(name)
    model = wrapped(alone, mesh, name)
    for each in (model, alone):
        train(each, name)
    got = dict(gspmd.full_state_dict(model, rank0_only=False))
    assert_same(got, dict(alone.state_dict()), name, TERMS)


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


@distributed("model=2")
@pytest.mark.parametrize("name", CALLS)
def test_arguments_in_layouts(mesh, name):
    """torch's converter makes the arguments DTensors, replicated or sharded on each dimension."""
    make_module, shapes = CALLS[name]
    alone = make_module()
    model = wrapped(alone, mesh, name)
    args = tuple(torch.randn(shape) for shape in shapes)
    want = run(alone, tuple(a.clone().requires_grad_() for a in args))
    devices = init_device_mesh("cpu", (2,), mesh_dim_names=("model",))
    layouts = [converted for converted, _ in dtensor_helpers.DTensorConverter(devices, args, {})]
    assert len(layouts) > 1
    for converted in random.Random(0).sample(layouts, min(len(layouts), MOST)):
        leaves = tuple(a.detach().requires_grad_() for a in converted)
        assert_same(run(model, leaves), want, f"{name} {[a.placements for a in leaves]}", TERMS)


def run(module: nn.Module, args: tuple) -> list:
    module.zero_grad()
    outs = module(*args)
    outs = [whole(o) for o in (outs if isinstance(outs, tuple) else (outs,)) if o is not None]
    sum(o.square().sum() for o in outs if o.requires_grad).backward()
    return [whole(t).detach() for t in (*outs, *(p.grad for p in (*module.parameters(), *args)))]
