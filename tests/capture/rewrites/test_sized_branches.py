"""Branches of Python whose sides have results of other unknown sizes, or no program."""

import pytest
import torch
from helpers import assert_same, message
from torch import nn

import torchgspmd as gspmd

MESH = gspmd.Mesh(data=2, model=3)
LAYERS = 5  # more sizes than an assumption has
pytestmark = pytest.mark.filterwarnings("ignore")


def chosen(x, masks):
    """Rows of several levels, of which each may have none."""
    return torch.cat([x[mask] for mask in masks])


def kept(rows):
    if rows.numel() == 0:
        return torch.empty((0,), dtype=torch.int64)
    scores = (rows / rows.abs().max()).sum(1)
    return torch.where(scores > 0.1)[0]


def suppressed(x, masks, weight):
    rows = chosen(x, masks) @ weight
    return rows[kept(rows)]


def scaled(x, masks, weight):
    rows = chosen(x, masks)
    if len(rows) > 0:
        rows = rows / rows.abs().max()
    return rows @ weight


def a_row(x, masks, weight):
    rows = chosen(x, masks)
    return rows @ weight if rows.shape[0] != 0 else weight[:1] + x.sum()


def by_value(x, masks, weight):
    if x.sum() > 0:
        rows, label = x[masks[0]] @ weight, 2.0
    else:
        rows, label = 3 * x[masks[1]], 1.0
    return rows * label


def columns(x, masks, weight):
    if x.sum() > 0:
        return (weight @ x.T)[:, masks[0]]
    return 3 * x.T[:, masks[1]]


def nested(x, masks, weight):
    rows = chosen(x, masks) @ weight
    if x.sum() > 0:
        if rows.numel() == 0:
            return x[masks[0]] * 2
        return rows.amax(0, keepdim=True) + rows[kept(rows)]
    return rows


OLD = torch.__version__ < "2.10"  # cannot trace x[:n]
PROGRAMS = suppressed, by_value, scaled, a_row, columns, *(() if OLD else (nested,))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_sides_of_other_sizes(program):
    """Each way that a run can go, rows in all levels, in one or in none, with all gradients."""

    def f(x, masks, weight):
        y = program(x, masks, weight)
        return y, torch.autograd.grad(y.square().sum(), (x, weight), allow_unused=True)

    torch.manual_seed(0)
    x, weight = torch.randn(7, 4).double().requires_grad_(), torch.randn(4, 4).double()
    weight.requires_grad_()
    masks = torch.rand(LAYERS, 7) > 0.5
    plan = gspmd.plan(f, x, masks, weight, mesh=MESH, in_specs=("data _", None, "_ model"))
    one = masks & (torch.arange(LAYERS) == 3)[:, None]
    for level in (masks, one, masks & False):
        for rows in (x, -x, x.abs(), x - 3):
            x_now = rows.detach().requires_grad_()
            expected = f(x_now, level, weight)
            found = plan.simulate(x_now, level, weight, _poison=True)
            gradients = [
                torch.zeros_like(t) if g is None else g
                for g, t in zip(expected[1], (x_now, weight))
            ]
            assert_same(found[0], expected[0], program.__name__)
            pairs = [(g, e) for g, e in zip(found[1], gradients) if g is not None]
            assert_same([g for g, _ in pairs], [e for _, e in pairs], program.__name__)


def by_loop(x, labels):
    total = torch.zeros_like(x)
    for label in labels.unique():
        rows = torch.where(labels == label)[0]
        total = total.index_add(0, rows, x[rows].cumsum(0))
    return total


def counted(x, labels, again=True):
    if len(x) < 0 and again:
        return counted(x, labels, False)  # the function's own name is a global
    if labels.sum() > 30:
        return by_loop(x, labels)
    return x.cumsum(0)


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.double)

    def forward(self, x, labels):
        return counted(self.layer(x), labels * 1)


def test_a_side_that_no_trace_can_pass():
    """The other side is the program; a run that takes this one raises, and says why."""
    torch.manual_seed(0)
    model, x = Counted(), torch.randn(6, 4).double()
    gspmd.annotate(model, MESH, {"layer.weight": "model _"})
    labels = torch.tensor([0.5, 1, 1, 2, 0.5, 4])
    plan = gspmd.plan(model, x, labels, mesh=MESH, in_specs=("data _", None), grad=False)
    for k in (1, 2):
        assert_same(plan.simulate(x, labels * k, _poison=True), model(x, labels * k))
    error = message(lambda: plan.simulate(x, labels * 9))
    assert error.startswith(
        "a run takes a side of a branch that needs numbers which are known only when it runs\n"
        "  where test_sized_branches.py"
    )
