"""Counters of the work that the searches of partition do."""

from __future__ import annotations

import os
import tempfile

import torch

from torchgspmd import Mesh, Plan, plan
from torchgspmd.fx_passes.partition.cost_constants import ALWAYS


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


def test_a_plan_says_that_a_search_ended_at_its_limit() -> None:
    x = torch.arange(5.0 * 9 * 7).reshape(5, 9, 7)
    mesh = Mesh(a=2, b=3, c=2)
    specs = {"in_specs": ("a+b _ c",), "out_specs": "c a _"}
    free = plan(torch.neg, x, mesh=mesh, **specs)
    limited = plan(torch.neg, x, mesh=mesh, advanced={"costs": {"max_layouts": 1}}, **specs)
    said = "ended at the limit, with the best steps up to there; advanced={'costs': {'max_layouts':"
    assert limited.counts["reshard_limited"] > 0
    assert said in str(limited) and said in str(limited.report())
    assert said not in str(free) and said not in str(free.report())
    torch.testing.assert_close(limited.simulate(x), -x)
