"""An optimizer's own step in train_step: states of all kinds, numbers, and a first step."""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardingError

MESHES = Mesh(data=4), Mesh(data=2, model=2)
STEPS = 5
DTYPE = torch.float64

# The place of the count, the first state, the container of the factors, and the work of a step.
KINDS = {
    "count": ("group", "state", "attribute", "tensor"),
    "begin": ("zeros", "gradient", "weights"),
    "factors": ("none", "list", "dict", "late"),
    "every": (1, 2, 3),
    "first": ("like others", "skipped"),
    "scalar": (False, True),
    "update": ("in place", "rebound"),
}


class Drawn(Optimizer):
    """An optimizer that is written as `kinds` says."""

    def __init__(self, params, kinds, lr=0.05):
        super().__init__(params, {"lr": lr})
        self.kinds, self.calls = kinds, 0

    def counted(self, group, state) -> int | Tensor:
        if self.kinds["count"] == "attribute":
            self.calls += 1
            return self.calls
        table, name = group if self.kinds["count"] == "group" else state, "calls"
        if name not in table:
            table[name] = torch.zeros((), dtype=DTYPE) if self.kinds["count"] == "tensor" else 0
        table[name] += 1
        return table[name]

    def begin(self, p, state) -> None:
        first = {"zeros": torch.zeros_like, "gradient": lambda p: p.grad.clone()}
        state["mean"] = first.get(self.kinds["begin"], torch.clone)(p)
        sides = [torch.zeros(n, n, dtype=p.dtype) for n in p.shape]
        if self.kinds["factors"] == "list":
            state["sides"], state["bases"] = sides, [torch.eye(n, dtype=p.dtype) for n in p.shape]
        elif self.kinds["factors"] == "dict":
            state["sides"] = dict(enumerate(sides))
            state["bases"] = {i: torch.eye(n, dtype=p.dtype) for i, n in enumerate(p.shape)}
        elif self.kinds["factors"] == "late":
            state["sides"], state["bases"] = sides, None

    def turned(self, p, state, step) -> Tensor:
        u = state["mean"]
        for i in range(p.dim()) if "sides" in state else ():
            others = [[d for d in range(p.dim()) if d != i]] * 2
            state["sides"][i].lerp_(torch.tensordot(p.grad, p.grad, others), 0.2)
        if "sides" in state and (state["bases"] is None or step % self.kinds["every"] == 0):
            one = [0.1 * torch.eye(n, dtype=p.dtype) for n in p.shape]
            bases = [torch.linalg.inv(state["sides"][i] + e) for i, e in enumerate(one)]
            is_dict = self.kinds["factors"] == "dict"
            state["bases"] = dict(enumerate(bases)) if is_dict else bases
        for i in range(p.dim()) if "sides" in state else ():
            u = torch.tensordot(u, state["bases"][i], [[0], [0]])
        return u / 10

    @torch.no_grad()
    def step(self, closure=None):
        scale, count = 1.0, 0
        if self.kinds["scalar"]:  # over all groups
            ps = [p for group in self.param_groups for p in group["params"]]
            scale = 1 / (1 + sum(p.grad.square().sum() for p in ps).sqrt())
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                state = self.state[p]
                fresh = "mean" not in state
                if fresh:
                    self.begin(p, state)
                per_state = self.kinds["count"] in ("state", "tensor")
                count = self.counted(group, state) if per_state or not i else count
                if fresh and self.kinds["first"] == "skipped":
                    continue
                if self.kinds["update"] == "in place":
                    state["mean"].mul_(0.8).add_(p.grad)
                else:
                    state["mean"] = 0.8 * state["mean"] + p.grad
                number = self.calls_of(count)
                u = self.turned(p, state, 1 if isinstance(count, Tensor) else count)
                p.add_(scale * u * number, alpha=-group["lr"])

    def calls_of(self, count) -> float | Tensor:
        if isinstance(count, Tensor):
            return (1 - 0.9**count).sqrt()
        return math.sqrt(1 - 0.9**count) / max(count**0.5, 1.5)


class Layers(nn.Module):
    def __init__(self, count=3, width=10):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(
            torch.randn(width, width, dtype=DTYPE) / width for _ in range(count)
        )
        self.bias = nn.Parameter(torch.zeros(width, dtype=DTYPE))

    def forward(self, x):
        for w in self.weights:
            x = x + torch.tanh(x @ w + self.bias)
        return x.square().mean()


def drawn(seed: int) -> dict:
    draw = random.Random(seed)
    return {name: draw.choice(values) for name, values in KINDS.items()}


def optimizer_of(model, kinds) -> Drawn:
    groups = [{"params": [*model.weights]}, {"params": [model.bias], "lr": 0.01}]
    return Drawn(groups, kinds)


def compare(model, reference) -> None:
    for (name, got), want in zip(model.named_parameters(), reference.parameters()):
        assert (got - want).abs().max() <= 1e-9, name


def test_a_drawn_step_on_one_device():
    for seed in range(24):
        model, kinds = Layers(2, 4), drawn(100 + seed)
        reference, x = copy.deepcopy(model), torch.randn(8, 4, dtype=DTYPE)
        step = gspmd.train_step(model, optimizer_of(model, kinds))
        alone = optimizer_of(reference, kinds)
        for _ in range(3):
            step(x)
            alone.zero_grad()
            reference(x).backward()
            alone.step()
        compare(model, reference)


def test_a_run_goes_on_from_what_it_saved():
    """From the step's state_dict; with the optimizer's before it, if the step's alone raises."""
    alone_was_enough, plain = set(), {"begin": "zeros", "factors": "none", "first": "like others"}
    cases = [{**drawn(i), **plain, "count": count} for i, count in enumerate(KINDS["count"])]
    for kinds in cases + [drawn(200 + seed) for seed in range(12)]:
        model = Layers(2, 4)
        reference, x = copy.deepcopy(model), torch.randn(8, 4, dtype=DTYPE)
        before = optimizer_of(model, kinds)
        step, alone = gspmd.train_step(model, before), optimizer_of(reference, kinds)
        for _ in range(2):
            step(x)
        saved, of_optimizer = (copy.deepcopy(each.state_dict()) for each in (step, before))
        other = Layers(2, 4)
        after = optimizer_of(other, kinds)
        step = gspmd.train_step(other, after)
        try:
            step.load_state_dict(copy.deepcopy(saved))
        except ShardingError as error:
            assert "load the optimizer's state_dict before the step's" in str(error)
            after.load_state_dict(of_optimizer)
            step.load_state_dict(saved)
        else:
            alone_was_enough.add(kinds["count"])
        for _ in range(3):
            step(x)
        for _ in range(5):
            alone.zero_grad()
            reference(x).backward()
            alone.step()
        compare(other, reference)
    assert alone_was_enough == {*KINDS["count"]}


@pytest.mark.parametrize("seed", range(30))
def test_a_drawn_step_on_simulated_devices(seed):
    """One program for each outcome of a condition, and one for a first step that is another."""
    kinds, model = drawn(seed), Layers()
    reference, x = copy.deepcopy(model), torch.randn(8, 10, dtype=DTYPE)
    mesh = MESHES[seed % 2]
    gspmd.annotate(model, mesh, {"weights.*": ("data _", "_ data", "_ _")[seed % 3]})
    mine, alone = optimizer_of(model, kinds), optimizer_of(reference, kinds)
    step, plans = gspmd.train_step(model, mine), []
    for _ in range(STEPS):
        plan = next((p for p in plans if p.captured.reads.hold()), None)
        if plan is None:
            plans.append(plan := gspmd.plan(step, x, mesh=mesh, in_specs="data _"))
        plan.simulate(x)
        alone.zero_grad()
        reference(x).backward()
        alone.step()
    compare(model, reference)
    # The first step, and of the later ones those with `step % every == 0` and the others; a count
    # below 3 takes the other operand of max.
    assert len(plans) <= 5, kinds
    got, want = (each.state_dict() for each in (mine, alone))
    assert got["param_groups"] == want["param_groups"]
    for i, state in want["state"].items():
        torch.testing.assert_close(got["state"][i], state, rtol=1e-9, atol=1e-9, check_dtype=False)


def test_states_that_begin_as_zeros_need_no_program_of_their_own():
    kinds = dict(count="group", begin="zeros", factors="none", every=1, first="like others")
    model, x = Layers(), torch.randn(8, 10, dtype=DTYPE)
    optimizer = optimizer_of(model, {**kinds, "scalar": False, "update": "in place"})
    optimizer.calls_of = lambda count: math.sqrt(1 - 0.9**count)
    step = gspmd.train_step(model, optimizer)
    assert step.get_buffer("mean.weights.0").shape == (10, 10)
    plan = gspmd.plan(step, x, mesh=MESHES[0], in_specs="data _")
    for _ in range(STEPS):
        plan.simulate(x)
    assert [group["calls"] for group in optimizer.param_groups] == [STEPS, STEPS]


class Wrapping(Optimizer):
    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        self.inner.step()


class Growing(Optimizer):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("mean", torch.zeros_like(p))
            state["mean"] = torch.cat([state["mean"], p.grad])


class Holding(Optimizer):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("factors", nn.Linear(2, 2))


def test_errors():
    model = Layers()
    with pytest.raises(ShardingError, match="keeps a Linear in its state"):
        gspmd.train_step(model, Holding(model.parameters(), {}))
    with pytest.raises(ShardingError, match="Wrapping steps another optimizer"):
        gspmd.train_step(model, Wrapping(torch.optim.SGD(model.parameters(), 0.1)))
    step = gspmd.train_step(model, Growing([model.bias], {}))
    with pytest.raises(
        ShardingError, match=r"(?s)'mean' of 'bias' begins as .* \[10\], and Growing"
    ):
        step(torch.ones(8, 10, dtype=DTYPE))
