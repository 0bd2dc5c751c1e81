"""Rank 0 plans, and the other ranks receive the plan; a second start does not plan."""

import os
import tempfile
from unittest import mock

import torch
import torch.distributed as dist
from language_model import error_of
from ranks import distributed
from torch import nn

import torchgspmd as gspmd
from torchgspmd.compiler.plan_cache.files import Identity
from torchgspmd.compiler.plan_cache.values import Stale
from torchgspmd.runtime.sharded_module import ShardedModule


class Net(nn.Module):
    def __init__(self, mesh: gspmd.Mesh, scale: float = 1.0):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.scale = nn.Linear(6, 10), nn.Linear(10, 6), scale
        gspmd.mark_sharding(self.up.weight, mesh, "model _")
        gspmd.mark_sharding(self.down.weight, mesh, "_ model")

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).square().mean() * self.scale


class Ranked(Net):
    def forward(self, x):
        return super().forward(x) * (1 + dist.get_rank())


def planning_ranks(model, mesh, x) -> tuple[list[bool], torch.Tensor, list[torch.Tensor]]:
    """Which ranks plan at the first step of a model; its loss and gradients."""
    plan_here, ranks = ShardedModule._plan_here, [False] * mesh.size
    mine = []

    def counted(self, call, before_talk):
        mine.append(call)
        return plan_here(self, call, before_talk)

    with mock.patch.object(ShardedModule, "_plan_here", counted):
        sharded = gspmd.parallelize(model, mesh, in_specs="data _")
        loss = sharded(x)
    loss.backward()
    dist.all_gather_object(ranks, bool(mine))
    return ranks, loss.detach(), [p.grad.full_tensor() for p in sharded.parameters()]


def accept(*_):
    """Take the plan of rank 0."""


def refuse(*_):
    raise Stale("module settings is another")


@distributed("data=2,model=2")
def test_one_process_plans(mesh):
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    plain = Net(mesh)
    plain(x).backward()
    with mock.patch.dict(os.environ, TORCHGSPMD_CACHE=folder[0]):
        cold = planning_ranks(Net(mesh), mesh, x)
        warm = planning_ranks(Net(mesh), mesh, x)
        # A rank that does not take the plan, and plans the same.
        with mock.patch.object(Identity, "check_code", refuse if dist.get_rank() == 3 else accept):
            mixed = planning_ranks(Net(mesh), mesh, x)
        # A rank whose model is another finds out, and all ranks say so.
        differs = error_of(lambda: planning_ranks(Net(mesh, 1.0 + dist.get_rank() // 3), mesh, x))
        ranked = error_of(lambda: planning_ranks(Ranked(mesh), mesh, x))
    assert cold[0] == [True, False, False, False] and warm[0] == [False] * 4
    assert mixed[0] == [False, False, False, True]
    for _, loss, gradients in (cold, warm, mixed):
        torch.testing.assert_close(loss, plain(x).detach())
        for mine, theirs in zip(gradients, plain.parameters()):
            torch.testing.assert_close(mine, theirs.grad)
    assert "the ranks have made different programs" in differs and "'scale'" in differs
    assert "the ranks have made different programs" in ranked
