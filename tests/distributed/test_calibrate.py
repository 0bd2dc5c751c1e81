"""calibrate on processes: all of them get the same numbers, and estimates use them."""

import math
import os
import sys

import torch
import torch.distributed as dist
from callers_tensors import tensors, unchanged
from ranks import distributed, on_cpu

import torchgspmd as gspmd
from torchgspmd import calibrate as calibrate_function
from torchgspmd.comm import process_groups
from torchgspmd.comm.hardware import Hardware


def measure_little():
    module = sys.modules[calibrate_function.__module__]
    module.SECONDS, module.SIDES, module.BETWEEN = 0.0, (4, 64), (4, 16, 32)
    module.SHAPES, module.ROWS = ((8, 8, 1), (64, 32, 1)), ((64, 64),)
    module.SEQUENCES = (2, 4, 8), (4, 8, 8)


@distributed("data=2,model=2")
@on_cpu
def test_hosts_have_links_of_their_own(mesh):
    """Axes of one size have collectives of their own inside hosts and between them."""
    measure_little()
    groups = process_groups.groups_of(mesh, "cpu")
    os.environ["TORCHGSPMD_HOST"] = f"host {dist.get_rank() // 2}"
    groups.hosts = None
    try:
        hardware = gspmd.calibrate(mesh)
    finally:
        del os.environ["TORCHGSPMD_HOST"]
        groups.hosts = None
    assert [link.devices for link in hardware.links] == [2, math.inf]
    assert {key[1:] for key in hardware.groups} == {(2, 1), (2, 2), (4, 2)}
    measured = [hardware.measured(mesh, (axis,), "all_gather") for axis in mesh.names]
    assert measured == [hardware.groups["all_gather", 2, n] for n in (1, 2)]


@distributed("data=2")
def test_all_ranks_get_the_same(mesh):
    measure_little()
    model = gspmd.parallelize(torch.nn.Linear(8, 4), mesh, in_specs="data _")
    model(torch.ones(4, 8)).sum().backward()
    kept = {name: p.grad for name, p in model.named_parameters()} | dict(model.named_parameters())
    kept |= tensors(torch.float32, torch.float64)
    before = torch.get_rng_state(), torch.get_default_dtype(), torch.is_grad_enabled()
    with unchanged(kept):
        hardware = gspmd.calibrate(mesh)
    after = torch.get_rng_state(), torch.get_default_dtype(), torch.is_grad_enabled()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    others = [None] * dist.get_world_size()
    dist.all_gather_object(others, hardware)
    assert all(other == hardware for other in others)
    assert {kind for kind, _ in hardware.groups} >= {"all_reduce", "all_to_all", "permute", "halo"}
    assert all(n == 2 and link.bandwidth > 0 for (_, n), link in hardware.groups.items())
    assert min(hardware.launch, hardware.step, *hardware.flops.values()) > 0
    assert 0 < hardware.view and hardware.attention and min(hardware.attention) > 0
    x, w = torch.ones(4, 8), torch.ones(8, 4)
    plan = gspmd.plan(torch.matmul, x, w, mesh=mesh, in_specs=("_ data", "data _"))
    (sent,) = [e for e in plan.estimate(hardware).events if e.stream == "communication"]
    link = hardware.groups["all_reduce", 2]
    assert abs(sent.seconds - link.latency - plan.sent_bytes / link.bandwidth) < 1e-9
    assert isinstance(hardware, Hardware) and "measured" in hardware.source
