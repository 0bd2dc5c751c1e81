"""Programs whose sizes, or numbers, depend on values: they run, or one sentence says where and why
they cannot.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from helpers import MESHES, assert_same, message
from torch import nn

import torchgspmd as gspmd

BIG = gspmd.Mesh(a=2, m=2)
OLD = (
    torch.__version__ < "2.10"
)  # cannot trace some of them; what differs there is the capture, not the layouts
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def assigned(x):
    y = x.clone()
    y[x > 0] = 0.0
    return y * 2


def assigned_at_number(x):
    i, y = (x > 9).sum() + 1, x.clone()
    y[i] = 1.0
    y[:, i] = torch.arange(6.0)
    y[i, 1:3] += 2
    y[i - 3].mul_(2)
    return y


PROGRAMS = {
    "row at a number": lambda x: (
        x[(x > 9).sum()],
        x[..., x[0].argmax(), None],
        x[x.shape[0] - x[:, 0].argmax().item() - 1, 1:],
    ),
    "assigned at a number": assigned_at_number,
    "slice up to a tensor": lambda x: x[:, : (x > 0).sum().clamp(1, 3)].sum(),
    "boolean index": lambda x: x[x > 0],
    "mean of a boolean index": lambda x: (x * 2)[x > 0].mean(),
    "boolean assignment": assigned,
    "masked_select": lambda x: torch.masked_select(x.sin(), x[0] > 0) * 2,
    "nonzero": lambda x: torch.nonzero(x > 0),
    "where of a condition": lambda x: x[torch.where(x > 0)].sum(),
    "rows": lambda x: x[torch.nonzero(x[:, 0] > 0).squeeze(1)] @ x.mT,
    "unique": lambda x: torch.unique((x * 2).long(), return_counts=True),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, (x[:, 0] > 0).long() + 1, 0).cos(),
    "item": lambda x: x * x.sum().item(),
    "tolist": lambda x: x * x.sum().tolist(),
    "slice up to a number": lambda x: x[:, : (x > 0).sum().clamp(1, 3).item()].sum(),
    "narrow from a number": lambda x: x.narrow(0, (x[:, 0] > 9).sum().item(), 2) + 1,
    "split": lambda x: [t * 2 for t in x[x > 0].reshape(-1, 1).unbind(1)],
    "cov": lambda x: (
        torch.cov(x),
        torch.corrcoef(x),
        torch.cov(x, fweights=torch.tensor([1, 2, 0, 3]), aweights=x[0].abs()),
    ),
    "equal": lambda x: x.mul(torch.equal(x, x.clone())),
}


# what to write instead
NOT_ON_OLD = {
    "slice up to a number": "x.index_select(0, torch.arange(n))",
    "narrow from a number": "x.index_select(0, torch.arange(n))",
    "slice up to a tensor": "x.index_select(0, torch.arange(n))",
    "equal": "(x == y).all() instead of torch.equal(x, y)",
}

CURED = {
    "slice up to a number": lambda x: x.index_select(
        1, torch.arange((x > 0).sum().clamp(1, 3).item())
    ).sum(),
    "slice up to a tensor": lambda x: x.index_select(
        1, torch.arange((x > 0).sum().clamp(1, 3).item())
    ).sum(),
    "narrow from a number": lambda x: (
        x.index_select(0, torch.arange(2) + (x[:, 0] > 9).sum().item()) + 1
    ),
    "equal": lambda x: x.mul((x == x.clone()).all()),
}


@pytest.mark.parametrize("name", [name for name in PROGRAMS if not (OLD and name in NOT_ON_OLD)])
@pytest.mark.parametrize("spec", ["a m"] if OLD else ["a m", "_ m+a", "m _"])
def test_sizes_that_depend_on_values(name, spec):
    plan = gspmd.plan(PROGRAMS[name], X, mesh=BIG, in_specs=spec)
    assert_same(plan.simulate(X, _poison=True), PROGRAMS[name](X), name)


@pytest.mark.parametrize("seed", range(12))
def test_rows_are_written_where_values_say(seed):
    """A place is no constant, also where its stand-ins are alike modulo the size."""
    draw = random.Random(seed)
    rows, columns = draw.sample(range(3, 9), 2)
    x = torch.randn(rows, columns, dtype=torch.float64, requires_grad=True)
    write = draw.choice(
        [
            lambda y, i: y.__setitem__(i, 1.0),
            lambda y, i: y.__setitem__((slice(None), i), y[:, 0] * 2),
            lambda y, i: y[i].mul_(3),
            lambda y, i: y[i - 3].add_(y[i]),
            lambda y, i: y.select(-1, i).copy_(y[:, i - 1] + 1),
        ]
    )
    later = draw.randint(0, 2)

    def program(x):
        y = x * 1
        write(y, (x > 99).sum() + later)
        return y, torch.autograd.grad(y.square().sum(), x)[0]

    spec = draw.choice(["a m", "m a", "_ m+a", "m+a _"])
    plan = gspmd.plan(program, x, mesh=BIG, in_specs=spec)
    assert_same(plan.simulate(x, _poison=True), program(x))


@pytest.mark.parametrize("name", NOT_ON_OLD)
def test_what_old_versions_cannot_trace_has_a_cure(name):
    if OLD:
        assert NOT_ON_OLD[name] in message(lambda: gspmd.plan(PROGRAMS[name], X, mesh=BIG))
    assert_same(
        gspmd.plan(CURED[name], X, mesh=BIG, in_specs="a m").simulate(X, _poison=True),
        PROGRAMS[name](X),
        name,
    )


@pytest.mark.parametrize("mesh", MESHES, ids=repr)
def test_gradient_of_a_boolean_index(mesh):
    def f(x):
        return torch.autograd.grad((x * 3)[x > 0].square().mean(), x)

    x = X.clone().requires_grad_()
    assert_same(gspmd.plan(f, x, mesh=mesh, in_specs="m _").simulate(x, _poison=True), f(x))


def test_other_values_have_other_sizes():
    plan = gspmd.plan(PROGRAMS["boolean index"], X, mesh=BIG, in_specs="a m")
    for other in (X + 1, X - 9):
        assert_same(plan.simulate(other, _poison=True), other[other > 0])


def test_what_depends_on_values_is_listed():
    found = gspmd.plan(PROGRAMS["boolean index"], X, mesh=BIG, in_specs="a m").replicated_ops
    assert ("aten.index.Tensor", "its sizes depend on values") in [(r.op, r.why) for r in found]


def test_ctc_loss():
    probs = torch.randn(7, 4, 5).log_softmax(-1).requires_grad_()
    targets, lengths = (
        torch.randint(1, 5, (4, 3)),
        (torch.tensor([7, 6, 7, 5]), torch.tensor([3, 2, 1, 3])),
    )
    for how in ("mean", "sum", "none"):

        def f(probs, how=how):
            loss = F.ctc_loss(probs, targets, *lengths, reduction=how, zero_infinity=True)
            return loss, torch.autograd.grad(loss.sum(), probs)

        plan = gspmd.plan(f, probs, mesh=BIG, in_specs="_ a _")
        assert_same(plan.simulate(probs, _poison=True), f(probs))
        assert plan.replicated_ops == ()


BRANCH = f"""\
the program depends on values: an `if`{", a loop or a slice" if OLD else " or a loop"} \
needs numbers that are known only when it runs
  where test_value_free.py:N
  why   one program is made for all values, before any device computes
  fix   use torch.where or a mask instead of a branch, \
or compute it outside and pass it as an argument\
{"; on torch 2.9, for x[:n]: x.index_select(0, torch.arange(n))" if OLD else ""}"""


def test_a_branch_on_values_is_one_sentence():
    assert message(lambda: gspmd.plan(lambda x: x if x.sum() > 0 else -x, X, mesh=BIG)) == BRANCH
    assert "tensor_split" in message(
        lambda: gspmd.plan(
            lambda x, at: torch.tensor_split(x, at), X, torch.tensor([1, 3]), mesh=BIG
        )
    )
    assert "linalg_lstsq" in message(
        lambda: gspmd.plan(lambda x: torch.linalg.lstsq(x, x).solution, X, mesh=BIG)
    )


class Chosen(nn.Module):
    """Experts in a loop over those that tokens chose, which fills a list."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x):
        parts, chosen = [torch.zeros_like(x)], x[:, :4].argmax(-1)
        hit = (F.one_hot(chosen, 4).sum(0) > 0).nonzero()
        for expert in hit:
            rows = torch.where(chosen == expert[0])[0]
            parts.append(parts[0].index_add(0, rows, x[rows] @ self.experts[expert[0]]))
        return sum(parts)


def test_a_loop_over_chosen_rows_is_named_with_its_module():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.mlp = nn.Linear(8, 8), Chosen()

        def forward(self, x):
            return self.head(self.mlp(x))

    assert message(lambda: gspmd.plan(Model(), torch.randn(6, 8), mesh=BIG)) == (
        "the program depends on values: a loop over 'hit', whose rows are known only when it runs\n"
        "  where test_value_free.py:N, in 'mlp'\n"
        "  why   one program is made for all values, before any device computes\n"
        "  fix   loop over all that could be chosen (what was not computes 0 rows), or sort the "
        "rows by what they chose and multiply all at once by torch.nn.functional.grouped_mm; "
        'models of transformers do so after set_experts_implementation("grouped_mm"); or wrap its '
        "submodules, each alone: 'head'"
    )


def test_a_number_as_result_is_one_sentence():
    assert "return the tensor" in message(lambda: gspmd.plan(lambda x: x.sum().item(), X, mesh=BIG))


BY_NAME = {  # functions whose arguments have several names
    "tensor_split": lambda x: (
        torch.tensor_split(x, indices=(1, 3), dim=0)[1] * x.tensor_split(sections=3, dim=1)[1].sum()
    ),
    "matmul": lambda x: (
        torch.matmul(input=x, other=x.mT) + torch.mm(x, mat2=x.mT) + torch.linalg.vecdot(x=x, y=x)
    ),
    "linear": lambda x: (
        torch.nn.functional.linear(input=x, weight=x) + torch.inner(input=x, other=x)
    ),
    "masked_select": lambda x: (
        torch.masked_select(x, mask=torch.eye(4, 6, dtype=torch.bool)).sum() + x
    ),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_arguments_by_name(name):
    x = torch.randn(4, 6)
    plan = gspmd.plan(BY_NAME[name], x, mesh=gspmd.Mesh(a=2), in_specs="a _")
    assert_same(plan.simulate(x, _poison=True), BY_NAME[name](x), name, terms=64)
