"""NumPy and SciPy in forward: numbers of each run, and gradients around them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import assert_same, message
from scipy import optimize
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

import torchgspmd as gspmd

MESH = gspmd.Mesh(data=2, model=3)


def floors(x):
    return x * torch.from_numpy(np.floor(x.detach().numpy() * 3) + np.arange(x.shape[1])[None])


def indices(x):
    array = np.asarray(x.detach())
    rows = np.argsort(array, axis=0)[:2]
    return x * torch.as_tensor(np.take_along_axis(array, rows, 0)).sum(), torch.tensor(rows.T)


def dtypes(x):
    array = x.detach().cpu().numpy()
    big = np.where(np.abs(array) > 1, array, np.float64(0.5)).astype(np.float32)
    return torch.as_tensor(big.max(axis=1, keepdims=True), dtype=torch.float64) + x, big.shape[
        0
    ] * x


def in_place(x):
    array = x.detach().clone().numpy()
    array[1:3] = np.sqrt(np.abs(array[1:3]))
    array += np.float64(1)
    np.exp(array[2:], array[2:])
    return x * torch.from_numpy(array)


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.tensor(np.power(x.cpu().numpy(), 3), device=x.device)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.from_numpy(3 * np.square(x.detach().numpy()) * grad.detach().numpy())


def in_a_function(x):
    return Cubed.apply(x)


def matched(x):
    """The loss of a detector: predictions are matched with boxes by their costs."""
    boxes = [x.detach()[:2] + 1, x.detach()[1:4] * 2]
    cost = torch.cdist(x, torch.cat(boxes), p=1).detach().cpu()
    pairs = [linear_sum_assignment(part) for part in cost.split([2, 3], -1)]
    rows = [torch.as_tensor(i, dtype=torch.int64) for i, _ in pairs]
    found = [box[torch.from_numpy(j)] for box, (_, j) in zip(boxes, pairs)]
    return sum((x[i] - b).abs().sum() for i, b in zip(rows, found)) * len(pairs[0][0])


def maximized(x):
    i, j = optimize.linear_sum_assignment(x.detach().numpy(), maximize=True)
    return (
        x[i.tolist(), j] if isinstance(i, np.ndarray) else x[torch.as_tensor(i), torch.as_tensor(j)]
    )


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.up, self.function = nn.Linear(4, 6, dtype=torch.float64), function

    def forward(self, x: Tensor):
        return self.function(self.up(x))


PROGRAMS = [matched, in_a_function, floors, indices, dtypes, in_place, maximized]


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda function: function.__name__)
def test_arrays(function):
    """One plan runs for all values."""
    torch.manual_seed(1)
    model = Model(function)
    gspmd.annotate(model, MESH, {"up.weight": "model _"})
    calls = [torch.randn(5, 4, dtype=torch.float64) * s for s in (1, -3)]
    plan = gspmd.plan(model, calls[0], mesh=MESH, in_specs="data _", grad=True)
    for x in calls:
        got, grads = plan.simulate(x, _poison=True)
        want = model(x)
        assert_same(got, want, terms=1 << 10)
        outs = [t for t in (want if isinstance(want, tuple) else (want,)) if t.requires_grad]
        if outs:
            exact = torch.autograd.grad(sum(t.sum() for t in outs), [*model.parameters()])
            for (name, _), grad in zip(model.named_parameters(), exact):
                assert_same(grads[name], grad, name, terms=1 << 10)


def test_a_kept_array_is_an_error():
    def keeps(x):
        model.last = x.detach().numpy()
        return x

    model = Model(lambda x: keeps(x))
    text = message(lambda: gspmd.plan(model, torch.randn(5, 4).double(), mesh=MESH))
    assert "a NumPy array of values that only a run knows" in text and "torch.from_numpy" in text
