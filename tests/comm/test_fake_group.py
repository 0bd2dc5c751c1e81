"""One rank of many: torch's fake process group has no other processes to wait for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchgspmd as gspmd
from torchgspmd.comm import process_groups


@pytest.fixture
def many() -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1024)
    yield 1024
    dist.destroy_process_group()


def test_a_rank_of_a_thousand_runs_its_program(many: int) -> None:
    mesh, model = gspmd.Mesh(data=128, model=8), nn.Linear(64, 32)
    gspmd.mark_sharding(model.weight, mesh, "model _")
    module = gspmd.parallelize(model, mesh, in_specs="data _", out_specs="data model")
    y = module(torch.ones(256, 64))
    y.to_local().sum().backward()
    assert y.shape == (256, 32) and y.to_local().shape == (2, 4)
    assert module.weight.grad.to_local().shape == (4, 64)


@pytest.mark.parametrize("splits", (False, True))
def test_groups_of_a_mesh_are_created_by_one_call(
    splits: bool, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by one for each of 128 groups; an NCCL communicator is split."""
    mesh = gspmd.Mesh(data=16, model=8, stage=8)
    groups = process_groups.ProcessGroups(mesh, "cpu")
    calls: list[list] = []
    new_group = dist.new_group

    def counted(ranks: list[int], **options: object) -> object:
        calls.append(ranks)
        return new_group(ranks, **options)

    def split(split_ranks: list[list[int]], **options: object) -> object:
        calls.append(split_ranks)
        return new_group(
            split_ranks[0], use_local_synchronization=True, group_desc=options["group_desc"]
        )

    monkeypatch.setattr(dist, "new_group", counted)
    monkeypatch.setattr(dist, "split_group", split)
    monkeypatch.setattr(process_groups, "_can_split", lambda world: splits)
    name, positions = groups.group(("data", "model"))
    assert name and len(positions) == 128 and len(calls) == 1
    expected = [list(ranks) for ranks in mesh.groups(("data", "model"))]
    assert calls == ([expected] if splits else [expected[0]])
    # As the flight recorder shows it.
    assert groups.created[-1].group_desc == "data+model"


def test_a_group_without_a_device_cannot_be_split(many: int) -> None:
    assert not process_groups._can_split(dist.group.WORLD)
