"""train_step: the numbers of a training loop, as one program whose updates are sharded."""

import pytest
import torch
import torch.distributed as dist
import zero_step
from step_cases import OPTIMIZERS, Net, check, loop, pair

import torchgspmd as gspmd
from torchgspmd import Layout, Mesh, ShardingError

SIMULATED = ("adafactor", "lamb", "amsgrad", "rmsprop", "asgd", "adamw", "nesterov")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_on_one_device_is_that_of_a_loop(name):
    model, reference, optimizer, other, x = pair(name)
    step = gspmd.train_step(model, optimizer, clip=0.1)
    for i in range(3):
        for each in (optimizer, other):
            each.param_groups[0]["lr"] = 0.01 * (i + 1)
        torch.testing.assert_close(step(x), loop(reference, other, x))
    check(model, reference)


@pytest.mark.parametrize("name", SIMULATED)
def test_a_simulated_step(name):
    model, reference, optimizer, other, x = pair(name)
    step = gspmd.train_step(model, optimizer, clip=0.1)
    table = Layout({"batch": "data", "hidden": "model", "embed": "data"})
    layout = table.on(Mesh(data=2, model=2))
    plan = gspmd.plan(step, x, mesh=layout, in_specs="batch _")
    for _ in range(2):
        torch.testing.assert_close(plan.simulate(x), loop(reference, other, x))
    check(model, reference)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("stage", zero_step.STAGES)
def test_bytes_of_zero(stage, dtype):
    """Weights once there and gradients once back, or weights twice: at the formula, in the dtype of
    the computation but for weights that are gathered to be stored.
    """
    layers, n = 3, 4
    step, x, options = zero_step.case(stage, layers, dtype)
    plan = gspmd.plan(step, x, mesh=zero_step.LAYOUT.on(Mesh(data=n)), **options)
    count = {kind: [c.kind for c in plan.collectives].count(kind) for kind in zero_step.KINDS}
    gathers = layers if stage != "3" else 2 * layers - 1  # the first layer's input has no gradient
    assert count == {"all_gather": gathers, "reduce_scatter": layers, "all_reduce": 1}
    expected = zero_step.expected_bytes(stage, layers, n, dtype)
    assert 0 <= plan.sent_bytes - expected <= 8  # the loss
    states = [s for s in plan.in_specs if str(s) == "data _"]
    assert len(states) == layers * (2 if stage == "1" else 3) + 1  # and the batch


class Reading(torch.optim.Optimizer):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad.norm().item() > 0:
                p.data.sub_(p.grad)


def test_errors():
    model = Net()
    with pytest.raises(ShardingError, match="LBFGS steps by a closure"):
        gspmd.train_step(model, torch.optim.LBFGS(model.parameters()))
    step = gspmd.train_step(model, Reading(model.parameters(), {}))
    with pytest.raises(ShardingError, match="depends on values"):
        gspmd.plan(
            step,
            torch.ones(4, 16).double(),
            mesh=Layout({"hidden": "data", "embed": None}).on(Mesh(data=2)),
        )
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
        assert len(step._all_programs()) == 2  # of the first learning rate, and of all others
        state = optimizer.state_dict()["state"][0]
        torch.testing.assert_close(
            state["exp_avg"].full_tensor(),
            other.state_dict()["state"][0]["exp_avg"],
            rtol=1e-5,
            atol=1e-9,
        )
    finally:
        dist.destroy_process_group()
