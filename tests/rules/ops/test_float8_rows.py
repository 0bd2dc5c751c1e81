"""Rows of float8 tables that are sharded along the rows that a program chooses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torchgspmd as gspmd
from torchgspmd import Mesh

CHOICES = {
    "index": lambda w, i: w[i],
    "two indices": lambda w, i: w[i, i % 3],
    "embedding": lambda w, i: F.embedding(i, w),
    "index_select": lambda w, i: w.index_select(0, i),
    "select": lambda w, i: w[3],
    "take": lambda w, i: w.flatten()[i],
    "product": lambda w, i: w[i].float() @ w.float().T,
}
DTYPES = [getattr(torch, n) for n in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, n)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [16, 5])
@pytest.mark.parametrize("choice", CHOICES)
def test_rows_of_float8(choice: str, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    w, i = torch.randn(rows, 8).to(dtype), torch.randint(0, rows, (6,))
    choose = CHOICES[choice]
    plan = gspmd.plan(choose, w, i, mesh=Mesh(a=2, b=2), in_specs=("a+b _", "_"))
    torch.testing.assert_close(plan.simulate(w, i).float(), choose(w, i).float())
    plan.verify()
