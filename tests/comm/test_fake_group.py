"""One rank of many: torch's fake process group has no other processes to wait for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchgspmd as gspmd


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
