"""Indices outside of a sharded dimension: refused on every device, with index, rows and module."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardingError

WIDTH = 6


def rows(index: Tensor) -> Tensor:
    return torch.arange(1.0, 1 + index.numel() * WIDTH).view(-1, WIDTH)


def spread(index: Tensor) -> Tensor:
    return index[:, None].expand(-1, WIDTH)


# Name: a function of a table and indices, and whether negative indices count from the end.
CASES = {
    "embedding": (lambda t, i: F.embedding(i, t), False),
    "index": (lambda t, i: t[i], True),
    "index_select": (lambda t, i: t.index_select(0, i), False),
    "gather": (lambda t, i: t.gather(0, spread(i)), False),
    "classes": (lambda t, i: F.cross_entropy(t.t(), i.clamp(-1)[:WIDTH]), False),
    "index_add": (lambda t, i: t.index_add(0, i, rows(i)), False),
    "index_copy": (lambda t, i: t.index_copy(0, i, rows(i)), False),
    "index_put": (lambda t, i: t.index_put((i,), rows(i)), True),
    "accumulated": (lambda t, i: t.index_put((i,), rows(i), True), True),
    "scatter": (lambda t, i: t.scatter(0, spread(i), 2.0), False),
    "scatter_add": (lambda t, i: t.scatter_add(0, spread(i), rows(i)), False),
}


@pytest.mark.parametrize("count", (10, 12))  # rows that do not divide, and rows that do
@pytest.mark.parametrize("name", CASES)
def test_an_index_outside_of_a_sharded_table(name: str, count: int) -> None:
    fn, wraps = CASES[name]
    draw = random.Random(f"{name} {count}")

    class Program(nn.Module):
        def forward(self, table: Tensor, index: Tensor) -> Any:
            return fn(table, index)

    mesh, table = Mesh(a=3, d=2), torch.arange(1.0, 1 + count * WIDTH).view(count, WIDTH).cos()
    good = torch.tensor(draw.sample(range(count), WIDTH))
    spec = draw.choice(["_", "d"])
    plan = gspmd.plan(Program(), table, good, mesh=mesh, in_specs=("a _", spec))
    assert_same(plan.simulate(table, good, _poison=True), fn(table, good))
    for bad in (count, count + 1, -count - 1 if wraps else -1, draw.randrange(count, 10**6)):
        index = good.clone()
        index[draw.randrange(WIDTH)] = bad
        with pytest.raises((IndexError, RuntimeError)):
            fn(table, index)
        with pytest.raises(ShardingError) as raised:
            plan.simulate(table, index)
        assert f"index {bad} is outside of {count} rows" in str(raised.value)
        assert raised.value.why == f"a class, a token or a position is 0 to {count - 1} there"
