"""x[mask], nonzero, unique and the like of values that are known when a program is made: results
with a shape, which stay sharded.
"""

from __future__ import annotations

import itertools

import numpy
import pytest
import torch
from helpers import assert_same
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardingError

ROWS = torch.tensor([True, False, True, True, False, True])


class Selecting(nn.Module):
    """f of the module and x @ w [6, 6]; a mask and ids in buffers, another mask in an attribute."""

    def __init__(self, f):
        super().__init__()
        self.f, self.w = (
            f,
            nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(0))),
        )
        self.register_buffer("mask", ROWS.clone())
        self.register_buffer(
            "grid", torch.rand(6, 6, generator=torch.Generator().manual_seed(1)) > 0.5
        )
        self.register_buffer("ids", torch.tensor([0, 3, 3, 1]))
        self.kept = ROWS.flip(0)

    def forward(self, x: Tensor):
        return self.f(self, x @ self.w)


SELECTED = {
    "a constant": lambda m, x: x[torch.tensor([True, False, True, True, False, True])],
    "an array of NumPy": lambda m, x: x[:, numpy.array([True, False, True, True, False, True])],
    "a buffer": lambda m, x: x[:, m.mask],
    "an attribute": lambda m, x: x[m.kept],
    "a global variable": lambda m, x: x[ROWS],
    "a comparison": lambda m, x: x[torch.arange(6) > 2],
    "both dimensions": lambda m, x: x[m.grid],
    "off the diagonal": lambda m, x: x[~torch.eye(6, dtype=torch.bool)].view(6, 5),
    "beside indices": lambda m, x: x[m.mask, torch.tensor([0, 1, 2, 3])],
    "in the middle": lambda m, x: x.view(2, 3, 6)[:, m.mask[:3], None, 1:3],
    "nonzero": lambda m, x: x[torch.nonzero(m.mask).squeeze(1)],
    "where": lambda m, x: x[torch.where(m.grid)],
    "argwhere": lambda m, x: x[torch.argwhere(m.mask)[:, 0]],
    "repeat_interleave": lambda m, x: torch.repeat_interleave(
        x, torch.tensor([1, 2, 0, 1, 1, 2]), 0
    ),
    "rows by count": lambda m, x: x[torch.repeat_interleave(torch.tensor([1, 2, 3]))],
    "unique": lambda m, x: (
        x[torch.unique(m.ids)] * torch.unique(m.ids, return_counts=True)[1][:, None]
    ),
    "unique_consecutive": lambda m, x: x[torch.unique_consecutive(m.ids)],
    "masked_select": lambda m, x: torch.masked_select(x, m.mask),
    "masked_select of a matrix": lambda m, x: x.masked_select(m.grid),
    "combinations": lambda m, x: x[torch.combinations(torch.arange(6), 2)[:, 0]],
    "tensor_split": lambda m, x: torch.tensor_split(x, torch.tensor([2, 5]), dim=1)[1],
    "parts": lambda m, x: torch.cat([x[m.mask].exp(), x[~m.mask]]),
}


@pytest.mark.parametrize("spec", ["a _", "_ a"])
@pytest.mark.parametrize("name", SELECTED)
def test_what_known_values_select(name: str, spec: str) -> None:
    module, x = Selecting(SELECTED[name]), torch.randn(6, 6)
    want = module(x)
    (gradient,) = torch.autograd.grad(want.sum(), [module.w])
    mesh = Mesh(a=2)
    gspmd.mark_sharding(module.w, mesh, spec)
    plan = gspmd.plan(module, x, mesh=mesh, in_specs="a _", grad=True)
    got, gradients = plan.simulate(x, _poison=True)
    assert_same(got, want, name)
    assert_same(gradients["w"], gradient, name)
    assert not any("values" in r.why for r in plan.replicated_ops)


def test_other_dimensions_stay_sharded() -> None:
    """Where the rows of a batch are sharded, and features are selected, nothing is sent."""
    module, x = (
        Selecting(lambda m, x: x[:, m.mask][:, torch.arange(4) > 0].unbind(1)[0]),
        torch.randn(6, 6),
    )
    plan = gspmd.plan(module, x, mesh=Mesh(a=2), in_specs="a _", out_specs="a")
    assert not plan.collectives and not plan.replicated_ops


def test_a_plan_is_for_the_mask_that_it_was_made_for() -> None:
    module, x = Selecting(lambda m, x: x[:, m.mask]), torch.randn(6, 6)
    plan = gspmd.plan(module, x, mesh=Mesh(a=2), in_specs="a _")
    module.mask[1] = True
    with pytest.raises(ShardingError, match="a buffer has another value"):
        plan.simulate(x)


def test_a_mask_of_another_size_is_the_error_that_it_is_on_one_device() -> None:
    with pytest.raises(IndexError, match="shape of the mask"):
        gspmd.plan(lambda x: x[:, ROWS], torch.randn(6, 7), mesh=Mesh(a=2))


def test_masks_inside_of_torch_func() -> None:
    def squares(x):
        return torch.func.grad(
            lambda y: y[:, ROWS].square().sum() + y.masked_select(ROWS).square().sum()
        )(x)

    x = torch.randn(6, 6)
    plan = gspmd.plan(squares, x, mesh=Mesh(a=2), in_specs="a _")
    assert_same(plan.simulate(x), squares(x))


def test_values_that_are_not_known_select_when_the_program_runs() -> None:
    module, x = Selecting(lambda m, x: x[x > 0].sum() + x[m.mask].sum()), torch.randn(6, 6)
    plan = gspmd.plan(module, x, mesh=Mesh(a=2), in_specs="a _", grad=True)
    assert_same(plan.simulate(x)[0], module(x))
    # The rows of a result, and of its gradient, are those of the values of each run.
    module.f = lambda m, x: (x * m.scale)[x[:, 0] > 0].square()
    module.scale = torch.nn.Parameter(torch.randn(6))
    plan = gspmd.plan(module, x, mesh=Mesh(a=2), in_specs="a _", grad=True)
    for values in (x, -x):
        rows, gradients = plan.simulate(values, _poison=True)
        want = module(values)
        assert_same(rows, want)
        assert_same(gradients["scale"], torch.autograd.grad(want.sum(), module.scale)[0])


def test_a_loop_on_rows_that_values_number():
    class Groups(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 4)

        def forward(self, x, index):
            rows = int(index.max()) + 1
            sums = x.new_zeros(rows, 4).index_add(0, index, x)
            return self.lstm(sums[None])[0][0]

    torch.manual_seed(0)
    module, x = Groups().double(), torch.randn(8, 4).double()
    index = torch.tensor([0, 2, 1, 2, 0, 1, 1, 0])
    # One plan for all; torch 2.9 makes a program for each greatest index.
    plans = [
        gspmd.plan(module, x, values, mesh=Mesh(a=2), in_specs=("a _", "a"), grad=True)
        for values in ((index, index * 2) if torch.__version__ < "2.10" else (index,))
    ]
    for values, plan in zip((index, index * 2), itertools.cycle(plans)):
        rows, gradients = plan.simulate(x, values, _poison=True)
        want = module(x, values)
        assert_same(rows, want)
        wanted = torch.autograd.grad(want.sum(), [*module.parameters()])
        for (name, _), gradient in zip(module.named_parameters(), wanted):
            assert_same(gradients[name], gradient, name)


def _set(x: Tensor, rows: slice, value: Tensor) -> Tensor:
    x = x.clone()
    x[rows] = value
    return x


# Of as many rows as values say, as many as other values say, which are fewer.
PARTS = {
    "write": lambda x, y: _set(x, slice(len(y)), y),
    "write_last": lambda x, y: _set(x, slice(len(x) - len(y), None), y),
    "read": lambda x, y: x[: len(y)] * y,
    "read_last": lambda x, y: x[len(x) - len(y) :] * y,
    "rest": lambda x, y: x[len(y) :] * y.sum(),
    "narrow": lambda x, y: x.narrow(0, 0, len(y)) + y,
    "pad": lambda x, y: nn.functional.pad(y, (0, 0, 0, len(x) - len(y))) + x,
}


@pytest.mark.skipif(torch.__version__ < "2.10", reason="torch 2.9 cannot trace slices by numbers")
@pytest.mark.parametrize("part", PARTS)
def test_sizes_that_values_decide(part: str) -> None:
    class Lengths(nn.Module):
        """Four sizes. The numbers that stand for them in a plan are in another order."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            counts, y = (x[..., 0] > 0).long() + 1, self.inner(x)
            most = counts.sum(1).max()
            padded = y.new_zeros(3, most, 4) + 1
            rows = [torch.repeat_interleave(y[i], counts[i], dim=0) for i in range(3)]
            return sum(PARTS[part](padded[i], rows[i]).sum(0) for i in range(3))

    torch.manual_seed(0)
    module, x = Lengths().double(), torch.randn(3, 5, 4).double()
    x[0] = x[0].abs()
    plan = gspmd.plan(module, x, mesh=Mesh(data=2), in_specs="auto", grad=True)
    for values in (x, x * x.new_tensor([1, -1, 1])[:, None, None]):
        got, gradients = plan.simulate(values, _poison=True)
        want = module(values)
        assert_same(got, want)
        for (name, _), wanted in zip(
            module.named_parameters(), torch.autograd.grad(want.sum(), [*module.parameters()])
        ):
            assert_same(gradients[name], wanted, name)
