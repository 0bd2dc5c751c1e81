"""Certificates: right programs have one, and a fault that changes a number is found."""

import re
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchgspmd as gspmd
from certificate.faults import KINDS, narrow_dtype, with_program
from certificate.judge import CAUGHT, CRASHED, MISSED, Judge
from certificate.models import MODELS
from torchgspmd import Mesh, ShardingError, mark_sharding, parallelize, plan
from torchgspmd.compiler.options import settings_for
from torchgspmd.fx_passes.loop_call import copy_of

GUARDS = ("zero3+uneven", "ring+half", "dropless+stack", "zero_bubble+tied", "spatial+dropout")
PENDING = {"zero_bubble+tied": 3}  # parts of the loss, which one stage alone computes
FAULTS = 3  # of each model here; `python -m certificate` puts more


def perceptron(mesh: Mesh) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))
    mark_sharding(model[0].weight, mesh, "model _")
    return model


def test_a_right_program_has_one():
    mesh = Mesh(data=2, model=4)
    result = plan(perceptron(mesh), torch.randn(5, 6), mesh=mesh, in_specs=("data _",), grad=True)
    certificate = result.verify()
    assert certificate.complete and certificate.results == 5
    assert str(certificate) == (
        "certified 25 of 25 values and 5 results, in 2 trials, on 8 ranks, and by eager PyTorch"
    )


@pytest.mark.parametrize("name", GUARDS)
def test_faults_that_change_a_number_are_found(name):
    judge = Judge(name)
    assert len(judge.plan.verify().uncertified) == PENDING.get(name, 0)
    verdicts = [v for seed in range(FAULTS) if (v := judge.judge(seed)) is not None]
    assert [v for v in verdicts if v.kind in (CRASHED, MISSED)] == []
    assert [v for v in verdicts if not v.near] == []
    assert any(v.kind == CAUGHT for v in verdicts)


def test_kinds_and_models_are_many():
    assert len(KINDS) >= 30 and len(MODELS) >= 25


def test_an_error_names_value_device_line_and_both_numbers():
    judge = Judge("tensor")
    seeds = range(100)
    verdicts = (judge.judge(seed) for seed in seeds)
    # A lookup with an index that nobody put right fails by itself.
    verdict = next(
        v for v in verdicts if v and v.fault.kind == "leave_out" and "fails on" not in v.text
    )
    pattern = (
        r"'%\S+' is not the value of one device: device \S+=\d.* has \S+ at \[.*\] of its shard"
    )
    assert re.match(pattern, verdict.text)
    assert "the plan says that it is" in verdict.text and "plan.save(path)" in verdict.text


def test_values_that_are_too_large_are_listed():
    x = torch.empty(1 << 14, 1 << 14, device="meta")
    certificate = plan(torch.tanh, x, mesh=Mesh(data=2), in_specs=("data _",)).verify()
    assert not certificate.complete
    assert "not %arg0, %tanh: 1e+09 elements on all devices are too many" in str(certificate)


def test_it_is_an_option_of_plan_and_parallelize(monkeypatch):
    from torchgspmd.tools.report import plan_views

    seen = []
    monkeypatch.setattr(plan_views, "certify", lambda p: seen.append(p) or _complete())
    mesh = Mesh(data=2)
    plan(torch.tanh, torch.ones(4), mesh=mesh, in_specs=("data",), check={"verify": True})
    assert len(seen) == 1
    assert ("check", "verify") in {(g, row.name) for g, row in settings_for("parallelize")}


def _complete() -> gspmd.tools.certificate.Certificate:
    return gspmd.tools.certificate.Certificate(frozenset(), (), 2, 1)


def test_a_plan_of_a_file_has_one(tmp_path):
    mesh = Mesh(data=2, model=4)
    model, x = perceptron(mesh), torch.randn(5, 6)
    plan(model, x, mesh=mesh, in_specs=("data _",)).save(tmp_path / "plan.json")
    loaded = gspmd.Plan.load(tmp_path / "plan.json")
    assert loaded.verify().complete


def test_a_value_that_is_rounded_is_found():
    judge = Judge("data")
    graph = copy_of(judge.plan.program_graph)
    node = next(n for n in graph.nodes if n.name == "einsum_default")
    assert narrow_dtype(node, Random(0))
    with pytest.raises(ShardingError, match="is torch.bfloat16, its value is torch.float64"):
        with_program(judge.plan, graph).verify()


def test_a_program_that_random_numbers_do_not_fit_is_listed():
    x = torch.rand(1000)
    certificate = plan(F.binary_cross_entropy, x, x, mesh=Mesh(data=2), in_specs="auto").verify()
    assert not certificate.complete and "random numbers" in str(certificate)
    with pytest.raises(ShardingError, match="no option 'verifies'"):
        parallelize(nn.Linear(2, 2), Mesh(data=1), verifies=True)


def test_padding_of_bools_is_of_bools():
    x = torch.ones(5, 3, dtype=torch.bool)
    result = plan(lambda x: x.any(0), x, mesh=Mesh(data=2), in_specs=("data _",))
    assert "mask_padding" in str(result.program.graph) and result.verify().complete
