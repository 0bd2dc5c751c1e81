"""train_step: the numbers of a training loop, as one program whose updates are sharded."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Layout, Mesh, ShardingError

OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, 1e-2, foreach=False),
    "adam": lambda ps: torch.optim.Adam(ps, 1e-2, weight_decay=0.1, maximize=True, foreach=False),
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "nesterov": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64).double(), nn.Linear(64, 16).double()
        gspmd.annotate(self, {"up.weight": "hidden embed", "down.weight": "embed hidden"})

    def forward(self, x):
        return (self.down(F.gelu(self.up(x))) - x).square().mean()


def loop(model, optimizer, x, clip=0.1):
    loss = model(x)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def pair(name):
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model)
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (model, reference)]
    return model, reference, *optimizers, torch.randn(12, 16, dtype=torch.float64)


def check(model, reference):
    for (name, got), want in zip(model.named_parameters(), reference.parameters()):
        got = got.full_tensor() if hasattr(got, "full_tensor") else got
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7, msg=name)  # clip is in 1e-6


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_on_one_device_is_that_of_a_loop(name):
    model, reference, optimizer, other, x = pair(name)
    step = gspmd.train_step(model, optimizer, clip=0.1)
    for i in range(3):
        for each in (optimizer, other):
            each.param_groups[0]["lr"] = 0.01 * (i + 1)
        torch.testing.assert_close(step(x), loop(reference, other, x))
    check(model, reference)


@pytest.mark.parametrize("name", ["adamw", "nesterov"])
def test_a_simulated_step(name):
    model, reference, optimizer, other, x = pair(name)
    step = gspmd.train_step(model, optimizer, clip=0.1)
    table = Layout({"batch": "data", "hidden": "model", "embed": "data"})
    layout = table.on(Mesh(data=2, model=2))
    plan = gspmd.plan(step, x, mesh=layout, in_specs="batch _")
    for _ in range(2):
        torch.testing.assert_close(plan.simulate(x), loop(reference, other, x))
    check(model, reference)


def test_bytes_of_zero():
    """Gathered once and reduce-scattered once, or gathered twice: ZeRO-2 and ZeRO-3."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
    gspmd.annotate(model, {"*.weight": "embed _"})
    layout = Layout({"batch": "data", "embed": "data"}).on(Mesh(data=4))
    step = gspmd.train_step(
        model, torch.optim.AdamW(model.parameters()), lambda m, x: m(x).square().mean()
    )
    x, weights = torch.ones(4096, 64), 2 * 64 * 64 * 4
    plan = gspmd.plan(step, x, mesh=layout, in_specs="batch _", regather="never")
    assert abs(plan.sent_bytes - 3 / 4 * 2 * weights) < 64
    states = [s for s in plan.in_specs if str(s) == "data _"]
    assert len(states) == 2 * 3 + 1  # weights, both states of each, and the batch


def test_errors():
    model = Net()
    with pytest.raises(ShardingError, match="no rule for Adagrad"):
        gspmd.train_step(model, torch.optim.Adagrad(model.parameters()))
    with pytest.raises(ShardingError, match="no rule for amsgrad=True"):
        gspmd.train_step(model, torch.optim.AdamW(model.parameters(), amsgrad=True))
    with pytest.raises(ShardingError, match="that is not the model's"):
        gspmd.train_step(model, torch.optim.AdamW(Net().parameters()))


def test_on_processes():
    """One process: the learning rate may change, and states stay the optimizer's."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, reference, optimizer, other, x = pair("adamw")
        layout = Layout({"hidden": "model", "embed": None}).on(Mesh(data=1, model=1))
        step = gspmd.parallelize(gspmd.train_step(model, optimizer, clip=0.1), layout)
        for i in range(4):
            for each in (optimizer, other):
                each.param_groups[0]["lr"] = 0.01 * (i + 1)
            torch.testing.assert_close(step(x), loop(reference, other, x))
        check(step.model, reference)
        state = optimizer.state_dict()["state"][0]
        torch.testing.assert_close(
            state["exp_avg"].full_tensor(),
            other.state_dict()["state"][0]["exp_avg"],
            rtol=1e-5,
            atol=1e-9,
        )
    finally:
        dist.destroy_process_group()
