"""Lanes: the numbers of one device, and the bytes of owners who divide the matrices."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from matrix_optimizers import Cubic, NewtonSchulz, Parts, Shampoo, Soap
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardingError
from torchgspmd.fx_passes.pass_types import FEATURE_PASSES
from torchgspmd.fx_passes.schedule.arithmetic import graph_flops

DATA = Mesh(data=4)
GRID = Mesh(data=2, model=2)
DTYPE = torch.float64


class Layers(nn.Module):
    """Products of residual matrices, [n, n], or [n, m] with [m, n]."""

    def __init__(self, count: int, rows: int, columns: int, dtype: torch.dtype = DTYPE):
        super().__init__()
        torch.manual_seed(0)
        shapes = [(rows, columns), (columns, rows)] if rows != columns else [(rows, rows)]
        self.weights = nn.ParameterList(
            torch.randn(shapes[i % len(shapes)], dtype=dtype) / rows for i in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for w in self.weights:
            y = y @ w
            if y.shape == x.shape:
                x = y = x + y
        return x.square().mean()


def stacks(plan: gspmd.Plan) -> list[str]:
    """Return the layouts of the lanes' stacks, once they are exchanged."""
    lines = plan.text(full=True).splitlines()
    names = [line.split()[0] for line in lines if "= stack(" in line]
    return [line for line in lines if any(f"({name}," in line for name in names)]


def step_of(
    model, optimizer, mesh, marks, x, spec="data _", advanced=None, **options
) -> gspmd.Plan:
    if marks:
        gspmd.annotate(model, mesh, {"weights.*": marks})
    step = gspmd.train_step(model, optimizer, **options)
    return gspmd.plan(step, x, mesh=mesh, in_specs=spec, advanced=advanced or {})


def compare_steps(kind, model, mesh, marks, x, clip=None) -> gspmd.Plan:
    """Compare two steps on simulated devices with a loop on one."""
    reference = copy.deepcopy(model)
    other = kind(reference.parameters())
    plan = step_of(model, kind(model.parameters()), mesh, marks, x, clip=clip, advanced=FAST_LINKS)
    for _ in range(2):
        loss = plan.simulate(x)
        other.zero_grad()
        want = reference(x)
        want.backward()
        if clip:
            nn.utils.clip_grad_norm_(reference.parameters(), clip)
        other.step()
        torch.testing.assert_close(loss, want.detach(), rtol=1e-9, atol=1e-9)
    for got, wanted in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)
    return plan


@pytest.mark.parametrize(
    "kind, count, rows, columns, mesh, marks",
    [
        (NewtonSchulz, 8, 16, 16, DATA, "data _"),
        (NewtonSchulz, 7, 10, 10, DATA, "data _"),  # uneven lanes, uneven rows
        (NewtonSchulz, 10, 12, 20, DATA, "_ data"),  # two groups of 5
        (NewtonSchulz, 5, 12, 12, GRID, "data model"),
        (NewtonSchulz, 3, 12, 12, DATA, "data _"),  # a device without a lane
        (NewtonSchulz, 1, 12, 12, DATA, "data _"),
        (NewtonSchulz, 7, 12, 12, DATA, None),
        (Cubic, 7, 10, 10, DATA, "_ data"),
        (Cubic, 5, 12, 20, GRID, "data model"),
        (Shampoo, 4, 12, 12, DATA, "data _"),
        (Shampoo, 7, 10, 10, DATA, "_ data"),
        (Shampoo, 8, 8, 12, GRID, "model data"),
        (Shampoo, 8, 16, 16, DATA, None),
        (Soap, 4, 12, 12, DATA, "data _"),
        (Soap, 5, 10, 10, DATA, "_ data"),
    ],
)
def test_steps_are_those_of_one_device(kind, count, rows, columns, mesh, marks):
    x = torch.randn(24, rows, dtype=DTYPE)
    plan = compare_steps(kind, Layers(count, rows, columns), mesh, marks, x)
    assert stacks(plan)


@pytest.mark.parametrize("seed", range(24))
def test_drawn_steps(seed):
    """Optimizers, shapes, marks, meshes and two groups: the numbers of one device."""
    draw = random.Random(seed)
    kind = draw.choice([Cubic, NewtonSchulz, Parts, Shampoo, Soap])
    kind = type("Kind", (kind,), {"narrow": DTYPE, "parts": 2})
    mesh = draw.choice([DATA, GRID, Mesh(data=3), Mesh(model=2, data=2)])
    marks = ["data _", "_ data", None] + ["data model", "_ model"] * ("model" in mesh.names)
    rows, columns = draw.choice([(10, 10), (12, 12), (12, 20), (16, 10)])
    count, batch = draw.randint(2, 9), draw.choice([12, 96])

    def two_groups(parameters):
        parameters = list(parameters)
        cut = draw.randint(1, 3)
        groups = [{"params": parameters[:cut], "lr": 0.01}, {"params": parameters[cut:]}]
        return kind([group for group in groups if group["params"]])

    model, x = Layers(count, rows, columns), torch.randn(batch, rows, dtype=DTYPE)
    state = draw.getstate()

    def make(parameters):
        draw.setstate(state)  # the same groups for both models
        return two_groups(parameters)

    clip = draw.choice([None, 0.1])
    compare_steps(make, model, mesh, draw.choice(marks), x, clip=clip)


@pytest.mark.parametrize("count, mesh, marks", [(8, DATA, None), (5, GRID, "_ model")])
def test_states_in_parts_give_the_numbers_of_one_device(count, mesh, marks, tmp_path):
    """Uneven rows, two groups, AdamW for the rest; the plan is as it was after it was saved."""

    def optimizers_of(model):
        kind = type("Kind", (Cubic,), {"narrow": torch.float32})
        matrices, gains = [*model.weights], [model.gain]
        groups = [{"params": matrices[:2], "lr": 0.01}, {"params": matrices[2:]}]
        return [kind(groups), torch.optim.AdamW(gains, foreach=False)]

    model = Layers(count, 18, 18)
    model.gain = nn.Parameter(torch.ones(18, dtype=DTYPE))
    model.forward = lambda x: Layers.forward(model, x * model.gain)
    reference, x = copy.deepcopy(model), torch.randn(300, 18, dtype=DTYPE)
    reference.forward = lambda x: Layers.forward(reference, x * reference.gain)
    others = optimizers_of(reference)
    if marks:
        gspmd.annotate(model, mesh, {"weights.*": marks})
    step = gspmd.train_step(model, optimizers_of(model), clip=0.1)
    plan = gspmd.plan(step, x, mesh=mesh, in_specs="data _", advanced={"unmarked": "replicated"})
    assert "stored in parts over data" in plan.summary()
    plan.save(tmp_path / "plan")
    assert gspmd.Plan.load(tmp_path / "plan").sent_bytes == plan.sent_bytes
    for _ in range(2):
        loss = plan.simulate(x, _poison=True)
        want = reference(x)
        want.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        for other in others:
            other.step()
            other.zero_grad()
        torch.testing.assert_close(loss, want.detach(), rtol=1e-8, atol=1e-8)
    for got, wanted in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-7)


def test_a_norm_of_all_gradients_is_shared_by_lanes():
    x = torch.randn(24, 12, dtype=DTYPE)
    assert stacks(compare_steps(NewtonSchulz, Layers(5, 12, 12), DATA, "data _", x, clip=0.1))


# ------------------------------------------------------------------------------------------- bytes


def sent_above_adamw(width, count, mesh, marks, kind=None) -> tuple[float, gspmd.Plan]:
    plans = []
    for make in (torch.optim.AdamW, kind or torch.optim.Muon):
        model = Layers(count, width, width, torch.float32)
        x = torch.ones(64 * width, width)
        plans.append(step_of(model, make(model.parameters(), lr=1e-3), mesh, marks, x))
    return plans[1].sent_bytes - plans[0].sent_bytes, plans[1]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
@pytest.mark.parametrize("marks", ["data _", "_ data"])
@pytest.mark.parametrize("count, mesh", [(8, DATA), (7, DATA), (16, Mesh(data=8))])
def test_muon_sends_what_owners_of_matrices_would(count, mesh, marks):
    width, n = 64, mesh.count(("data",))
    slots = -(-count // n) * n  # a remainder is padded
    owners = 2 * (n - 1) / n * slots / n * width * width * 2  # bfloat16, there and back
    above, plan = sent_above_adamw(width, count, mesh, marks)
    assert owners <= above <= 1.01 * owners
    assert sum(c.kind == "all_to_all" for c in plan.collectives) == 2


@pytest.mark.parametrize("marks", ["_ data", "data model", "data _"])
def test_an_iteration_of_third_degree_sends_what_owners_would(marks):
    """A sum over sharded columns is no division: each iteration would reduce it."""
    width, count, n = 64, 8, 4
    kind = type("Kind", (Cubic,), {"narrow": torch.bfloat16})
    owners = 2 * (n - 1) / n * count / n * width * width * 2
    above, _ = sent_above_adamw(width, count, GRID if "model" in marks else DATA, marks, kind)
    assert above <= 1.1 * owners


@pytest.mark.parametrize("marks", ["data _", "_ data", None])
@pytest.mark.parametrize("way, parts", [("chunk", 3), ("view", 3), ("view", 4), ("chunk", 4)])
def test_parts_of_a_weight_are_sent_once_in_bfloat16(way, parts, marks):
    """As queries, keys and values in one weight, whose rows no device has whole."""
    rows, columns, count, n = 192, 64, 4, 4
    kind = type("Kind", (Parts,), {"parts": parts, "way": way})
    sent = []
    for make in (torch.optim.AdamW, kind):
        with torch.device("meta"):
            model = Layers(2 * count, rows, columns, torch.float32)
            x = torch.ones(64 * rows, rows)
        optimizers = [make([*model.weights][::2]), torch.optim.AdamW([*model.weights][1::2])]
        sent.append(step_of(model, optimizers, DATA, marks, x).sent_bytes)
    owners = (2 if marks else n) * (n - 1) / n * count * rows * columns / n * 2
    assert sent[1] - sent[0] <= 1.01 * owners


def test_steps_on_parts_are_those_of_one_device():
    for i, way in enumerate(("chunk", "view")):
        kind = type("Kind", (Parts,), {"parts": 2, "way": way, "narrow": DTYPE})
        x = torch.randn(24, 12, dtype=DTYPE)
        compare_steps(kind, Layers(5, 12, 20), DATA, ("data _", "_ data")[i], x)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
def test_unmarked_matrices_are_divided_and_gathered_in_bfloat16():
    """Momentum in parts: gradients are scattered, not reduced on all devices."""
    count, width, n = 8, 128, 4
    above, plan = sent_above_adamw(width, count, DATA, None)
    all_weights = (n - 1) / n * count * width * width  # elements, one way
    scattered = 4 * all_weights  # float32; AdamW's all_reduce sends twice as much
    # There in bfloat16, and to all devices.
    assert above == pytest.approx(2 * all_weights * (1 / n + 1) - scattered, rel=0.01)
    assert "stored in parts over data" in plan.summary()
    assert "stored in parts" in plan.explain("momentum_buffer.weights.0")
    products = 15 * 2 * width**3 * count / n  # five iterations of three products
    model = 3 * count * 2 * 64 * width * width * width / n  # forward, and two in the backward
    assert graph_flops(plan.local_graph(), DATA) <= 1.01 * (products + model)


def test_states_in_another_dtype_and_a_group_of_other_shapes_are_exchanged_apart():
    above, plan = sent_above_adamw(32, 8, DATA, "data _", Soap)
    elements = 8 * 32 * 32 * 3 / 4 / 4
    # Gradient, mean, square and, of two sides, a sum and a basis: seven there, at most six back.
    assert above <= 1.01 * 13 * elements * 4


# ---------------------------------------------------------------------------------- other programs


class Family(nn.Module):
    """Matrices on which a function computes; it returns a loss."""

    def __init__(self, count: int, function, width: int = 12):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(
            torch.randn(width, width, dtype=DTYPE) / width for _ in range(count)
        )
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function([*self.weights], x)


def regularizer(ws, x):
    """Each matrix's distance from an orthogonal one: lanes in forward and backward."""
    one = torch.eye(len(ws[0]), dtype=ws[0].dtype)
    return sum((w @ w.T @ w @ w.T - one).square().sum() for w in ws) + x.sum()


def ensemble(ws, x):
    """Members meet in a mean, whose gradient goes back to each."""
    return (
        (torch.stack([(torch.tanh(x @ w) @ w).tanh() @ w for w in ws]).mean(0) - x).square().sum()
    )


def dependent(ws, x):
    """A matrix is orthogonalized by a result of the one before it."""
    scale = x.mean()
    for w in ws:
        y = w * scale
        for _ in range(2):
            y = 1.5 * y - 0.5 * y @ y.T @ y
        scale = y.norm() / len(y)
    return scale


def model_between(ws, x):
    """The model computes with one lane's result before the next lane begins."""
    for w in ws:
        q = torch.linalg.qr(w @ w.T)[0]
        x = torch.tanh(x @ q)
    return x.square().mean()


def statistics(ws, x):
    """Eigenvalues of each layer's covariance."""
    total = x.new_zeros(())
    for w in ws:
        x = torch.tanh(x @ w)
        total = (
            total
            + torch.linalg.eigvalsh(x.T @ x + 0.1 * torch.eye(len(w), dtype=x.dtype)).log().sum()
        )
    return total


def mixed(ws, x):
    """Lanes that read another lane's value, one of another shape, and shared ones."""
    first = ws[0] @ ws[0].T
    return sum((w @ w.T @ first @ w).square().sum() for w in ws[1:]) + (x @ ws[0]).sum()


def numbers(ws, x):
    """A number of each lane beside its matrix decides no dtype."""
    total = x.new_zeros(())
    for w in ws:
        narrow = w.float()
        norm = (w @ w.T).square().sum().sqrt()
        y = narrow @ narrow.T * norm
        total = total + (y @ torch.where(norm > 1, narrow, narrow * 2)).double().square().sum()
    return total + x.sum() * 0


def strided(ws, x):
    """Indices of elements, which expansion computes behind the products: alike in all lanes."""
    total = x.new_zeros(())
    for w in ws:
        n = len(w)
        y = w @ w.T
        z = (y @ y).as_strided((n // 2, n), (n + 1, 1))
        total = total + (z @ y).square().sum()
    return total + x.sum()


# Small matrices are worth an exchange.
FAST_LINKS = {"costs": {"link_flops_per_byte": 1.0}}
FUNCTIONS = (
    *(regularizer, ensemble, dependent, model_between, statistics, mixed, numbers, strided),
)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "mesh, marks, spec",
    [(DATA, "data _", "data _"), (DATA, "_ data", "_ _"), (GRID, None, "data _")],
)
def test_functions_of_matrices(function, mesh, marks, spec):
    model, x = Family(5, function), torch.randn(24, 12, dtype=DTYPE)
    if marks:
        gspmd.annotate(model, mesh, {"weights.*": marks})
    plan = gspmd.plan(model, x, mesh=mesh, in_specs=spec, grad=True, advanced=FAST_LINKS)
    out, grads = plan.simulate(x)
    want = model(x)
    want.backward()
    tolerance = 1e-4 if function is numbers else 1e-9
    torch.testing.assert_close(out, want.detach(), rtol=tolerance, atol=tolerance)
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=tolerance, atol=tolerance)


def test_a_regularizer_has_its_lanes_exchanged():
    model, x = Family(8, regularizer, 32), torch.randn(24, 32, dtype=DTYPE)
    gspmd.annotate(model, DATA, {"weights.*": "data _"})
    plan = gspmd.plan(model, x, mesh=DATA, in_specs="data _", grad=True)
    assert plan.sent_bytes <= 1.1 * 2 * 3 / 4 * 2 * 32 * 32 * 8 + 64


@pytest.mark.parametrize("spec, sends", [("data _", True), ("_ _", False)])
def test_members_of_an_ensemble_are_divided_over_an_axis_in_use(spec, sends):
    """Nothing is marked: an axis that shards nothing is left alone."""
    model, x = Family(4, regularizer, 64), torch.randn(24, 64, dtype=DTYPE)
    plan = gspmd.plan(model, x, mesh=DATA, in_specs=spec, grad=True, advanced=FAST_LINKS)
    assert bool(stacks(plan)) == (plan.sent_bytes > 0) == sends


def test_small_members_of_an_ensemble_are_computed_everywhere():
    """Their products take less time than the exchange."""
    model, x = Family(4, regularizer, 64), torch.randn(24, 64, dtype=DTYPE)
    assert not stacks(gspmd.plan(model, x, mesh=DATA, in_specs="data _", grad=True))


def test_a_program_without_such_work_runs_no_file_of_lanes(monkeypatch):
    row = FEATURE_PASSES["batch_lanes"]._replace(run=None)  # a call is a TypeError
    monkeypatch.setitem(FEATURE_PASSES, "batch_lanes", row)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    for each in (model, layers):
        gspmd.annotate(each, DATA, {"*.weight": "data _"})
        gspmd.plan(each, torch.ones(32, 16), mesh=DATA, in_specs="data _", grad=True)


# ------------------------------------------------------------------------------- several optimizers


def test_two_optimizers_in_one_step():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.weights = nn.ParameterList(torch.randn(8, 8, dtype=DTYPE) / 8 for _ in range(4))
            self.bias = nn.Parameter(torch.zeros(8, dtype=DTYPE))

        def forward(self, x):
            for w in self.weights:
                x = F.gelu(x @ w + self.bias)
            return x.square().mean()

    def optimizers(model):
        return [NewtonSchulz(model.weights), torch.optim.AdamW([model.bias], 0.01, foreach=False)]

    model, x = Net(), torch.randn(16, 8, dtype=DTYPE)
    reference = copy.deepcopy(model)
    others, mine = optimizers(reference), optimizers(model)
    plan = step_of(model, mine, DATA, "data _", x)
    for _ in range(2):
        plan.simulate(x)
        reference.zero_grad()
        reference(x).backward()
        for each in others:
            each.step()
    for got, wanted in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)
    assert mine[1].state[model.bias]["exp_avg"].abs().sum() > 0
    with pytest.raises(ShardingError, match="two optimizers have the parameter 'bias'"):
        gspmd.train_step(model, [*mine, torch.optim.SGD([model.bias], 0.1)])
