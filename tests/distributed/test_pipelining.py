"""Stages of torch.distributed.pipelining, each a module on its part of a DeviceMesh."""

import copy

import pytest
import torch
import torch.nn.functional as F
from ranks import distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble

import torchgspmd as gspmd

MICROBATCHES = 4
STAGES = {"1f1b": ((0,), (1,)), "zbv": ((0, 3), (1, 2))}  # of each process along the axis


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def squared(result, target):
    return (result - target).square().mean()


@distributed("stage=2,model=2")
@pytest.mark.parametrize("schedule", STAGES)
def test_gradients_are_those_of_one_process(mesh, schedule):
    devices = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "model"))
    mine = STAGES[schedule][devices.get_local_rank("stage")]
    count = 2 * len(mine)
    blocks = [Block().double() for _ in range(count)]
    alone = nn.Sequential(*copy.deepcopy(blocks))
    part = devices["model"]
    for block in (blocks[i] for i in mine):
        gspmd.annotate(block, part, {"up.weight": "model _", "down.weight": "_ model"})
    modules = {i: gspmd.parallelize(blocks[i], part, check="never") for i in mine}
    stages = [
        PipelineStage(module, i, count, torch.device("cpu"), group=devices.get_group("stage"))
        for i, module in modules.items()
    ]
    if schedule == "1f1b":
        pipeline = Schedule1F1B(stages[0], MICROBATCHES, loss_fn=squared)
    else:
        pipeline = ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_fn=squared)

    x, target = torch.randn(2, 2 * MICROBATCHES, 3, 6, dtype=torch.float64)
    losses = []
    last = {"target": target, "losses": losses} if count - 1 in mine else {}
    pipeline.step(*((x,) if 0 in mine else ()), **last)

    loss = squared(alone(x), target)
    loss.backward()
    if last:
        torch.testing.assert_close(torch.stack(losses).mean(), loss)
    for i, module in modules.items():
        for found, expected in zip(module.parameters(), alone[i].parameters()):
            gradient = found.grad.full_tensor()
            torch.testing.assert_close(gradient, expected.grad, rtol=1e-10, atol=1e-12)


@distributed("stage=2,model=2")
def test_a_part_of_a_mesh_without_this_process(mesh):
    devices = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "model"))
    rank = torch.distributed.get_rank()
    others = torch.distributed.device_mesh.DeviceMesh(
        "cpu", [2, 3] if rank < 2 else [0, 1], mesh_dim_names=("model",), _init_backend=False
    )
    with pytest.raises(gspmd.ShardingError, match=f"process {rank} is not on the DeviceMesh"):
        gspmd.parallelize(Block(), others)
    with pytest.raises(gspmd.ShardingError, match="a part of a DeviceMesh"):
        gspmd.parallelize(Block(), gspmd.Mesh(model=2))
    module = gspmd.parallelize(Block(), devices["stage"], in_specs="stage _")
    x = torch.ones(4, 6) * (1 + rank % 2)  # another one in each part
    whole = {name: p.full_tensor() for name, p in module.named_parameters()}
    torch.testing.assert_close(module(x), torch.func.functional_call(Block(), whole, (x,)))
