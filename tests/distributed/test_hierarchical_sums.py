"""Sums over hosts and the devices in them, in steps, on processes."""

import copy
import math
import os
from unittest.mock import patch

import torch
import torch.distributed as dist
from ranks import distributed, on_cpu
from torch import nn

import torchgspmd as gspmd
from torchgspmd.comm import hardware, process_groups
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
        copy.deepcopy(one),
        mesh,
        in_specs="data+model _",
        hardware=HOSTS,
        advanced={"skip_passes": ["bucket"]},
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


@distributed("data=2,model=2")
@on_cpu
def test_parallelize_finds_the_hosts_of_its_processes(mesh):
    """Only where neighbours share a host, and only then has the plan another key in the cache."""
    groups, torch_model = process_groups.groups_of(mesh, "cpu"), nn.Linear(33, 64)
    x, identities, found = torch.randn(512, 33), set(), []
    torch_model(x).square().sum().backward()
    cases = ("one", "one"), ("host {0}", "pairs"), ("host {1}", "apart"), ("host {2}", "alone")
    try:
        for host, name in cases:
            rank = dist.get_rank()
            os.environ["TORCHGSPMD_HOST"] = host.format(rank // 2, rank % 2, rank)
            groups.hosts = None
            # As if the hosts shared a slow network.
            with patch.object(hardware, "NETWORK", 1e6):
                model = copy.deepcopy(torch_model)
                model.zero_grad()
                many = gspmd.parallelize(
                    model, mesh, in_specs="data+model _", advanced={"skip_passes": ["bucket"]}
                )
                many(x).square().sum().backward()
            torch.testing.assert_close(
                many.weight.grad.full_tensor(), torch_model.weight.grad, rtol=1e-4, atol=1e-4
            )
            kinds = {(c.kind, c.axes) for c in many.plan.collectives}
            found.append((name, ("all_reduce", ("data",)) in kinds, many._hosts))
            call = many._call((x,), {})
            identities.add(many._identity(call, "").call)
    finally:
        del os.environ["TORCHGSPMD_HOST"]
        groups.hosts = None
    flat = [(name, False, 0) for name in ("one", "apart", "alone")]
    assert found == [flat[0], ("pairs", True, 2), *flat[1:]]
    assert len(identities) == 2
