"""Stages of torch.distributed.pipelining, each a module on its part of a DeviceMesh."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import torchgspmd as gspmd
from torchgspmd.features.pipelines.list_scheduler import list_schedule

MICROBATCHES = 4
STAGES = {
    "1f1b": ((0,), (1,)),
    "zbv": ((0, 3), (1, 2)),
    "listed": ((0,), (1,)),
}  # of each process along the axis


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def squared(result, target):
    return (result - target).square().mean()


@pytest.mark.skipif(
    torch.__version__ < "2.10", reason="over gloo torch 2.9's schedules fail for plain modules too"
)
@distributed("stage=2,model=2")
@pytest.mark.parametrize("schedule", STAGES)
def test_gradients_are_those_of_one_process(mesh, schedule, tmp_path):
    devices = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "model"))
    mine = STAGES[schedule][devices.get_local_rank("stage")]
    count = 2 * len(mine)
    blocks = [Block() for _ in range(count)]
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
    elif schedule == "listed":
        table = list_schedule(2, MICROBATCHES, split=True, memory=2).table
        file = tmp_path / f"schedule-{dist.get_rank()}.csv"  # all ranks have this folder
        file.write_text("\n".join(map(",".join, table)))
        pipeline = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=squared)
        pipeline._load_csv(str(file))
    else:
        pipeline = ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_fn=squared)

    x, target = torch.randn(2, 2 * MICROBATCHES, 3, 6)
    losses = []
    last = {"target": target, "losses": losses} if count - 1 in mine else {}
    pipeline.step(*((x,) if 0 in mine else ()), **last)

    loss = squared(alone(x), target)
    loss.backward()
    if last:
        torch.testing.assert_close(torch.stack(losses).mean(), loss)
    for i, module in modules.items():
        programs = [program for each in module._programs.values() for program in each]
        if schedule != "1f1b":
            assert any(program.pieces for program in programs) == (i > 0)
        for found, expected in zip(module.parameters(), alone[i].parameters()):
            gradient = found.grad.full_tensor()
            torch.testing.assert_close(gradient, expected.grad)


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


@distributed("model=2", "data=2")
def test_gradients_of_arguments_are_computed_apart(mesh):
    block = Block().double()
    alone = copy.deepcopy(block)
    if "model" in mesh.names:
        gspmd.annotate(block, mesh, {"up.weight": "model _", "down.weight": "_ model"})
    module = gspmd.parallelize(block, mesh, in_specs="data _" if "data" in mesh.names else None)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    cotangent, other = torch.randn(2, 4, 6, dtype=torch.float64)
    calls = []

    def gradients(model, retain, *wanted, of=cotangent):
        return torch.autograd.grad(result[model], wanted, of, retain_graph=retain)

    result = {each: each(x) for each in (module, alone)}
    expected = gradients(alone, True, x, *alone.parameters())
    torch.testing.assert_close(gradients(module, True, x)[0], expected[0])
    (program,) = [p for programs in module._programs.values() for p in programs]
    run, program.backward = program.backward, lambda boxed: calls.append(1) or run(boxed)
    for found, right in zip(gradients(module, True, *module.parameters()), expected[1:]):
        torch.testing.assert_close(found.full_tensor(), right)
    assert not calls  # the second piece, with what the first has left
    expected = gradients(alone, True, *alone.parameters(), of=other)
    torch.testing.assert_close(gradients(module, True, x)[0], gradients(alone, True, x)[0])
    for found, right in zip(gradients(module, True, *module.parameters(), of=other), expected):
        torch.testing.assert_close(found.full_tensor(), right)
    assert len(calls) == 1  # another cotangent: all of it
    result[module].backward(cotangent)
    result[alone].backward(cotangent)
    for found, right in zip(module.parameters(), alone.parameters()):
        torch.testing.assert_close(found.grad.full_tensor(), right.grad)
    assert len(calls) == 2
