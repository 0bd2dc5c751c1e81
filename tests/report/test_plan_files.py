"""Plans as files: what is read says what was written, and computes the same."""

import json

import pytest
import torch
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Mesh, Plan


class Net(nn.Module):
    def __init__(self, mesh: Mesh):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        gspmd.mark_sharding(self.up.weight, mesh, "model _")

    def forward(self, x, scale=1.0):
        return self.down(self.up(x).relu() * scale)


class Cached(nn.Module):
    def forward(self, x):
        self.last = x * 2
        return self.last.sum()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "plan.json"


def test_a_plan_that_was_saved_says_and_computes_the_same(path):
    mesh, x = Mesh(data=2, model=2), torch.randn(3, 6)
    model = Net(mesh)
    plan = gspmd.plan(model, x, mesh=mesh, in_specs=("data _",), grad=True)
    plan.save(path)
    again = Plan.load(path, model)
    assert str(again) == str(plan) and again.program.code == plan.program.code
    assert str(again.report()) == str(plan.report()) and again.trace() == plan.trace()
    assert [again.explain(v.name) for v in again.layouts.spec] == [
        plan.explain(v.name) for v in plan.layouts.spec
    ]
    assert not again.diff(plan).changes and "no costs" in again.explain("up.weight", costs=True)
    (one, gradients), (other, others) = plan.simulate(x), again.simulate(x)
    assert one.equal(other) and all(gradients[k].equal(others[k]) for k in gradients)
    again.html(path.with_suffix(".html"))


def test_without_its_model_a_plan_is_looked_at_alone(path):
    mesh, x = Mesh(model=2), torch.randn(3, 6)
    plan = gspmd.plan(Net(mesh), x, mesh=mesh)
    plan.save(path)
    again = Plan.load(path)
    assert str(again.report()) == str(plan.report())
    with pytest.raises(gspmd.ShardingError, match=r"no parameters: Plan.load\(path, model\)"):
        again.simulate(x)
    again.save(path)
    assert str(Plan.load(path)) == str(plan)


def test_a_program_that_keeps_values_can_be_looked_at(path):
    plan = gspmd.plan(Cached(), torch.ones(4), mesh=Mesh(data=2), in_specs=("data",))
    plan.save(path)
    again = Plan.load(path, Cached())
    assert str(again) == str(plan)
    with pytest.raises(gspmd.ShardingError, match="it has a Write"):
        again.simulate(torch.ones(4))


def test_what_is_no_plan(path):
    plan = gspmd.plan(torch.matmul, torch.ones(2, 4), torch.ones(4, 2), mesh=Mesh(data=2))
    plan.save(path)
    text = json.loads(path.read_text())
    for wrong in ({**text, "format": 0}, {**text, "sharded": [["no"]]}, [], {}):
        path.write_text(json.dumps(wrong))
        with pytest.raises(gspmd.ShardingError, match=r"plan.json is no plan for this program"):
            Plan.load(path)
    plan.save(path)
    with pytest.raises(gspmd.ShardingError, match="other parameters or buffers"):
        Plan.load(path, nn.Linear(2, 2))


def test_large_constants_are_refused(path):
    table = torch.ones(1 << 21)
    plan = gspmd.plan(lambda x: x * table, torch.ones(1 << 21), mesh=Mesh(data=2))
    with pytest.raises(gspmd.ShardingError, match="(?s)is large.*buffers"):
        plan.save(path)
