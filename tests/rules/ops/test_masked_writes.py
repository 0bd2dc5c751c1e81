"""`x[mask] = value` is a choice for each element: nothing is selected, so nothing is gathered."""

from __future__ import annotations

import random

import pytest
import torch
from helpers import assert_same

import torchgspmd as gspmd

MESH = gspmd.Mesh(a=2, m=2)


def drawn(seed: int):
    """Return a program with a masked write to [5, 6, 3], and whether its mask is elementwise."""
    draw = random.Random(seed)
    first = draw.randrange(3)
    count = draw.randint(1, 3 - first)
    rest = 3 - first - count
    value = draw.choice(["number", "rest", "one", "leading"])
    accumulate = draw.random() < 0.3

    def program(x, v):
        y = x * 1
        mask = (y if count == 3 else y[(0,) * first + (...,) + (0,) * rest]) < 0
        given = torch.tensor(0.5, dtype=x.dtype)
        if value == "rest" and rest:
            given = v[(0,) * (3 - rest)]
        elif value == "one":
            given = v[(0,) * (3 - rest)][None]
        elif value == "leading" and first:
            shape = [*x.shape[:first], 1, *[1] * rest]
            given = v[(..., *[0] * (3 - first))].reshape(shape)
        indices = (*[slice(None)] * first, mask)
        if accumulate:
            where = (*[None] * first, mask)
            y = torch.ops.aten.index_put(y, [*where], given, True)
        else:
            y[indices] = given
        return y

    return program, count == 3 and value == "number"


@pytest.mark.parametrize("seed", range(16))
def test_a_masked_write_is_a_choice(seed):
    program, elementwise = drawn(seed)
    torch.manual_seed(seed)
    x, v = (torch.randn(5, 6, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def both(x, v):
        y = program(x, v)
        return y, torch.autograd.grad((y * y.cos()).sum(), x)[0]

    spec = random.Random(seed).choice(["a m _", "_ a m", "m a _", "_ m+a _"])
    plan = gspmd.plan(both, x, v, mesh=MESH, in_specs=(spec, "_ _ _"))
    assert_same(plan.simulate(x, v, _poison=True), both(x, v))
    assert not [r for r in plan.replicated_ops if "no rule" in r.why]
    if elementwise:
        assert plan.sent_bytes == 0


def test_values_for_each_selected_element_are_written_in_order():
    def program(x, v):
        y = x * 1
        y[y > 0] = v
        return y

    x = torch.randn(5, 6)
    v = torch.arange(float((x > 0).sum()))
    plan = gspmd.plan(program, x, v, mesh=MESH, in_specs=("a m", "_"))
    assert_same(plan.simulate(x, v, _poison=True), program(x, v))
