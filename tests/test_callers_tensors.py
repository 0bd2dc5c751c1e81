"""plan, simulate, suggest and reports leave tensors as they were, to the last bit."""

import math

import torch
from callers_tensors import DTYPES, drawn, tensors, unchanged, values
from torch import nn

import torchgspmd as gspmd

MESH = gspmd.Mesh(data=2, model=2)


class Copies(nn.Module):
    def forward(self, xs):
        return [x.clone() for x in xs]


def test_plan_and_simulate_of_all_dtypes_and_layouts():
    named = tensors(*DTYPES)
    xs = [*named.values()]
    specs = ([" ".join(["data", *"_" * (x.dim() - 1)]) if x.dim() else "" for x in xs],)
    with unchanged(named):
        plan = gspmd.plan(Copies(), xs, mesh=MESH, in_specs=specs)
        for _ in range(2):
            results = plan.simulate(xs)
        plan.report()
    wrong = [
        name
        for (name, x), y in zip(named.items(), results)
        if (x.shape, x.dtype) != (y.shape, y.dtype) or not torch.equal(values(x), values(y))
    ]
    assert not wrong, wrong


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))
        self.mask = nn.Buffer(torch.tensor([0.0, -math.inf] * 4, dtype=torch.float64))
        self.table = drawn(torch.float64, 8)

    def forward(self, x):
        return (self.down(self.up(x).relu()) + self.mask).softmax(-1) * self.table


def test_state_is_left_alone_by_plan_suggest_and_reports(tmp_path):
    net, x = Net(), drawn(torch.float64, 8, 8)
    state = {"x": x, "table": net.table, **net.state_dict(keep_vars=True)}
    with unchanged(state):
        plan = gspmd.plan(net, x, mesh=MESH, grad=True, in_specs=("data _",))
        plan.simulate(x)
        plan.report()
        plan.html(tmp_path / "plan.html")
        plan.trace()
        plan.estimate("h100")
        gspmd.suggest(net, x, devices=4)
        gspmd.plan(net, x, mesh=MESH, in_specs=("data _",)).diff(plan)
