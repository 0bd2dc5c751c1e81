"""Counters of the work that the searches of partition do."""

from __future__ import annotations

import os
import tempfile

import torch

from torchgspmd import Mesh, Plan, plan
from torchgspmd.fx_passes.partition.search_counts import ALWAYS


def _planned() -> Plan:
    x, w = torch.ones(8, 8), torch.ones(8, 8)
    mesh = Mesh(data=2, model=2)
    return plan(torch.matmul, x, w, mesh=mesh, in_specs=("data model", "model data"))


def test_a_plan_has_the_counts_of_its_searches_and_they_are_equal_every_time() -> None:
    first, second = _planned(), _planned()
    assert set(ALWAYS) <= first.counts.keys()
    assert first.counts["reshard_searches"] > 0
    assert first.counts == second.counts


def test_a_saved_plan_keeps_its_counts() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "plan.json")
        _planned().save(path)
        assert Plan.load(path).counts == _planned().counts
