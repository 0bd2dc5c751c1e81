"""Values of the elements that a mask selects are computed for all elements, in their layout."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same

import torchgspmd as gspmd

MESH = gspmd.Mesh(a=2, m=2)
UNARY = [
    *(torch.sin, torch.log, F.gelu),
    *(lambda s: s * 2, lambda s: s.clamp(-0.5), lambda s: 1 / (s + 1)),
]


def drawn(seed: int):
    """Return a program that computes on x[mask], and whether nothing else reads the selection."""
    draw = random.Random(seed)
    count = draw.randint(1, 3)
    steps = [draw.choice(UNARY) for _ in range(draw.randint(0, 2))]
    joined = draw.choice(["no", "with v", "with a row", "with itself"])
    end = draw.choice(["put", "add", "sum", "mean", "some dims", "returned", "in place"])

    def program(x, v):
        y = x * 1
        mask = (y if count == 3 else y[(..., *[0] * (3 - count))]) > 0
        chosen = y[mask]
        for step in steps:
            chosen = step(chosen)
        if joined == "with v":
            chosen = chosen * v[mask]
        elif joined == "with a row":
            chosen = chosen + v[(0,) * count]
        elif joined == "with itself":
            chosen = chosen - y[mask].square()
        if end == "put":
            y[mask] = chosen
        elif end == "add":
            y = y.index_put((mask,), chosen, accumulate=True)
        elif end == "in place":
            y[mask] *= 3
            y[mask] += chosen
        elif end == "some dims":
            y = chosen.sum(0)
        else:
            y = {"sum": chosen.sum, "mean": chosen.mean, "returned": chosen.sin}[end]()
        return y

    return program, end != "returned"


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_selected(seed):
    program, everywhere = drawn(seed)
    torch.manual_seed(seed)
    x, v = (torch.randn(5, 6, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def both(x, v):
        y = program(x, v)
        return y, *torch.autograd.grad((y * y).sum(), [x, v], allow_unused=True)

    spec = random.Random(seed).choice(["a m _", "_ a m", "m a _", "_ m+a _"])
    plan = gspmd.plan(both, x, v, mesh=MESH, in_specs=(spec, spec))
    got, want = plan.simulate(x, v, _poison=True), both(x, v)
    assert_same([*filter(lambda t: t is not None, got)], [t for t in want if t is not None])
    selections = [r for r in plan.replicated_ops if "sizes depend on values" in r.why]
    assert not everywhere or not selections, selections


@pytest.mark.parametrize(
    "divided",
    [
        lambda x, y: x // y,
        lambda x, y: x % y,
        lambda x, y: 100 % y,
        lambda x, y: torch.fmod(x, y),
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
        lambda x, y: x ** (y - 1),
    ],
)
def test_what_a_mask_does_not_select_cannot_fail(divided):
    def program(x, y):
        mask = y != 0
        x = x.clone()
        x[mask] = divided(x[mask], y[mask])
        return x, divided(x[mask], y[mask]).sum()

    x, y = torch.randint(9, (5, 6)), torch.randint(2, (5, 6))
    plan = gspmd.plan(program, x, y, mesh=MESH, in_specs=("a m", "a m"))
    assert_same(plan.simulate(x, y, _poison=True), program(x, y))


def test_another_mask_selects_other_elements():
    """Two masks that select as many elements: the first of one goes where the other's is."""
    x = torch.tensor([[1.0, -2.0, 3.0], [-8.0, -1.0, -2.0]])
    y = torch.tensor([[-1.0, 5.0, -3.0], [-8.0, 7.0, -2.0]])

    def program(x, y):
        return x.index_put((x > 0,), y[y > 0])

    plan = gspmd.plan(program, x, y, mesh=MESH, in_specs=("a m", "a m"))
    assert_same(plan.simulate(x, y, _poison=True), program(x, y))


SIZES = {
    "one more": lambda s: torch.ones(s.shape[0] + 1).sum(),
    "twice": lambda s: torch.ones(2 * s.shape[0], 3).sum(),
    "squared": lambda s: torch.zeros(s.shape[0], s.shape[0]).add(1).sum(),
    "pairs": lambda s: (s[:, :1] * torch.ones(s.shape[0], s.shape[0]).to(s)).sum(),
    "outer": lambda s: (s[:, None, :1] * s[None, :, :1]).sum(),
    "a factor": lambda s: (s * s.shape[0]).sum(),
    "no dims": lambda s: torch.sum(s, dim=None),
    "kept dims": lambda s: torch.sum(s, dim=(0, 1), keepdim=True),
    "rows": lambda s: s.amax(1).sum() + s.mean(1).sum() + s.var(1).sum() + s.softmax(1)[:, 0].sum(),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_computed_of_a_selection(name):
    """A size that is computed of the selection's is another size, and no stand-in remains."""
    torch.manual_seed(0)
    x = torch.randn(8, 4, dtype=torch.float64)

    def program(x):
        return SIZES[name](x[x[:, 0] > 0])

    plan = gspmd.plan(program, x, mesh=MESH, in_specs="a m")
    assert_same(plan.simulate(x, _poison=True), program(x))


@pytest.mark.parametrize("name", ["cross_entropy", "smooth_l1_loss", "l1_loss"])
def test_a_loss_of_selected_tokens_gathers_nothing(name):
    torch.manual_seed(0)
    x = torch.randn(8, 6, 16, dtype=torch.float64, requires_grad=True)
    classes = torch.randint(-4, 16, (8, 6))

    def loss(x, classes):
        mask = classes >= 0
        wanted = classes[mask] if name == "cross_entropy" else x.detach().sin()[mask]
        value = getattr(F, name)(x[mask], wanted, reduction="sum") / mask.sum()
        return value, torch.autograd.grad(value, x)[0]

    plan = gspmd.plan(loss, x, classes, mesh=MESH, in_specs=("a m _", "a m"))
    assert_same(plan.simulate(x, classes, _poison=True), loss(x, classes))
    # Two numbers, where the logits are 6 KiB. torch 2.9 records other operations.
    assert plan.sent_bytes < 100 or torch.__version__ < "2.10"
