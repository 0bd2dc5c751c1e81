"""Programs in groups whose collectives end as late as they may (late_group.py): no wait is missing.

`make nightly` runs all tests on processes in such groups. Here are layouts, rings, experts,
pipelines between stages and a training step, on two processes. Programs are those for CUDA, whose
messages go beside computation, while values are on the CPU (TORCHGSPMD_ASSUME_CUDA=1).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import test_moe
import test_rings
import test_scheduled_pipelines
import torch
import torch.distributed as dist
from ranks import distributed
from torch import fx, nn

import torchgspmd as gspmd
from torchgspmd.comm import process_groups
from torchgspmd.comm.kinds import WIRE_OPS
from torchgspmd.compat.operators import aten, c10d
from torchgspmd.fx_passes.pipeline import Pass, with_pass
from torchgspmd.fx_passes.program import Program
from torchgspmd.fx_passes.stages import Stage

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt.model import GPT, LAYOUTS, Config  # noqa: E402

# The first and the last, which guard, have all kinds of collectives.
AXES = {"sp": "model", "dp": "data", "tp": "model", "cp": "seq", "fsdp": "data"}
SIZE = Config(11, context=8, layers=1, heads=2, width=8)
late = {"group": "late"}
for_cuda = patch.dict(os.environ, TORCHGSPMD_ASSUME_CUDA="1")


def losses(model: nn.Module, batch: list[torch.Tensor]) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found


@distributed("all=2", **late)
@pytest.mark.parametrize("layout", AXES)
@for_cuda
def test_layouts(mesh, layout):
    torch.manual_seed(0)
    plain, batch = GPT(SIZE), [torch.randint(11, (4, 8)) for _ in range(2)]
    mesh, model = gspmd.Mesh(**{AXES[layout]: 2}), GPT(SIZE)
    model.load_state_dict(plain.state_dict())
    gspmd.annotate(model, LAYOUTS[layout].on(mesh))
    model = gspmd.parallelize(model, mesh, in_specs=(gspmd.UNCONSTRAINED,) * 2)
    torch.testing.assert_close(losses(model, batch), losses(plain, batch))
    programs = [half for p in model._all_programs() for half in (p.forward, p.backward_graph)]
    graphs = [getattr(half, "__self__", half) for half in programs]
    called = {n.target for g in graphs for n in getattr(g, "graph", g).nodes}
    assert model._groups.checks is not None, "ranks are compared on the CPU"
    if layout in ("sp", "fsdp"):
        assert {c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default} <= called


@distributed("model=2", **late)
@for_cuda
def test_rings_of_products(mesh):
    test_rings.test_rings.check(mesh, backend="torch")


@distributed("expert=2", **late)
@for_cuda
def test_experts(mesh):
    test_moe.test_experts_compute_what_one_device_does.check(mesh)


@distributed("stage=2", **late)
@for_cuda
def test_pipelines(mesh):
    """1f1b, and zero bubble in two rounds; each direction has a group."""
    test_scheduled_pipelines.test_schedules.check(mesh)
    groups = process_groups.groups_of(mesh, "cpu")
    assert len(set(map(id, groups.directions.values()))) == len(groups.directions) > 2


class Pair(nn.Module):
    """A block between whose stages two values travel."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        x, y = pair
        return x @ self.weight, y + x


def product(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (pair[0] * pair[1]).sum()


class Pairs(nn.Module):
    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks((x, x.sin()))


@distributed("stage=2", **late)
@for_cuda
def test_a_piece_sends_its_values_at_once(mesh):
    """A group's first call is one of all its ranks, not a message."""
    model = Pairs(
        gspmd.pipeline([Pair(), Pair()], mesh, microbatches=4, schedule="1f1b", loss=product)
    )
    model = gspmd.parallelize(model, mesh, in_specs="_ _")
    calls: list[tuple[int, Any]] = []  # the messages of a call, 0 for an all_reduce; its group

    def noted(function: Callable, count: Callable[..., tuple[int, Any]]) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(count(*args, **options))
            return function(*args, **options)

        return patch.object(dist, function.__name__, call)

    with (
        noted(dist.batch_isend_irecv, lambda ops: (len(ops), ops[0].group)),
        noted(dist.all_reduce, lambda x, group: (0, group)),
    ):
        model(torch.rand(8, 4)).backward()
    assert {count for count, _ in calls} == {0, 2}
    for group in {id(group) for _, group in calls}:
        assert next(count for count, other in calls if id(other) == group) == 0


@distributed("data=2", **late)
@for_cuda
def test_a_train_step(mesh):
    """Each process updates its half of the weight and of what AdamW holds."""
    plain, model, x = Loss(), Loss(), torch.rand(8, 64)
    other = torch.optim.AdamW(plain.parameters(), lr=0.1)
    gspmd.mark_sharding(model.weight, mesh, "data _")
    step = gspmd.train_step(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    step = gspmd.parallelize(step, mesh, in_specs="data _")
    for _ in range(2):
        loss = plain(x)
        other.zero_grad()
        loss.backward()
        other.step()
        torch.testing.assert_close(step(x), loss.detach())
    torch.testing.assert_close(model.weight.full_tensor(), plain.weight)


# ----------------------------------------------------------------------- what the groups find


class Sum(nn.Module):
    """A program with one sum over its axis, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).square().mean(0)


class Loss(Sum):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean()


def without_a_wait(graph: fx.Graph) -> None:
    """Read the result of each collective at once."""
    for node in graph.find_nodes(op="call_function", target=c10d.wait_tensor.default):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def with_a_write(graph: fx.Graph) -> None:
    """Write over the operand of each collective before its wait."""
    for node in [n for n in graph.nodes if n.target in WIRE_OPS]:
        with graph.inserting_after(node):
            graph.call_function(aten.mul_.Scalar, (node.args[0], 2.0))


def broken(damage: Callable[[fx.Graph], None]) -> Any:
    """Return a context in which programs are damaged behind all that verifies them."""

    def run(program: Program) -> fx.Graph:
        damage(program.graph)
        return program.graph

    stage = Stage.RUNNABLE
    return with_pass(Pass("damage", run, stage, stage), after="verify_owned")


@distributed("data=2", **late)
@pytest.mark.parametrize("damage", ("without_a_wait", "with_a_write"))
def test_a_program_that_counts_on_time_fails(mesh, damage):
    x = torch.ones(8, 64)
    with broken(globals()[damage]):
        model = gspmd.parallelize(Sum(), mesh, in_specs="data _", check="never")
        try:
            found = model(x)
        except AssertionError as error:
            assert damage == "with_a_write" and "written in flight" in str(error), error
        else:
            assert damage == "without_a_wait" and found.isnan().all(), found
    model = gspmd.parallelize(Sum(), mesh, in_specs="data _", check="never")
    torch.testing.assert_close(model(x), Sum()(x))


@distributed("data=2", **late)
def test_what_arrives_is_gloos(mesh):
    """All collectives of torch.distributed that the package calls."""
    rank, two = dist.get_rank(), torch.arange(2.0)
    dist.barrier()
    work = dist.all_reduce(two, async_op=True)
    assert two.isnan().all()
    work.wait()
    assert two.tolist() == [0.0, 2.0]
    rows = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(rows, torch.tensor([float(rank)]))
    assert torch.cat(rows).tolist() == [0.0, 1.0]
    given = [None, None]
    dist.all_gather_object(given, rank)
    assert given == [0, 1]
    number = torch.tensor([rank])
    dist.broadcast(number, 1)
    assert number.item() == 1
    other = torch.tensor([-1])
    works = dist.isend(torch.tensor([rank]), 1 - rank), dist.irecv(other, 1 - rank)
    assert other.item() == torch.iinfo(torch.int64).max
    for work in works:
        work.wait()
    assert other.item() == 1 - rank
