"""Sums over hosts and the devices in them, in steps, on processes."""

import copy
import math

import torch
from ranks import distributed
from torch import nn

import torchgspmd as gspmd
from torchgspmd.comm.hardware import Link

# As if two of the processes were on one host, and hosts were far from each other.
HOSTS = gspmd.Hardware(
    "hosts of two", {4: 1e12}, 1e11, 1e10, (Link(2, 1e10, 1e-6), Link(math.inf, 1e9, 1e-6))
)


@distributed("data=2,model=2")
def test_gradients_are_those_of_one_process(mesh):
    torch.set_default_dtype(torch.float64)
    one = nn.Sequential(nn.Linear(33, 64), nn.ReLU(), nn.Linear(64, 65))
    many = gspmd.parallelize(
        copy.deepcopy(one), mesh, in_specs="data+model _", hardware=HOSTS, skip_passes=["bucket"]
    )
    x = torch.randn(512, 33)
    for model in (one, many):
        model(x).square().sum().backward()
    for p, q in zip(one.parameters(), many.parameters()):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad)
    found = {(c.kind, c.axes) for c in many.plan.collectives}
    assert found >= {("reduce_scatter", ("model",)), ("all_reduce", ("data",))}
    whole = [c for c in many.plan.collectives if c.axes == ("data", "model")]
    assert all(c.payload_bytes < 33 * 64 * 8 for c in whole if c.kind == "all_reduce")  # biases
