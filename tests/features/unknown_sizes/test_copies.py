"""Functions that give new memory give it for sizes of a run, too: no write to a result changes
the argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same
from torch.nn.utils.rnn import pad_sequence

import torchgspmd as gspmd

MESH = gspmd.Mesh(a=2, m=2)
COPIES: dict[str, Any] = {
    "repeat": lambda x, n: x[:1].repeat(n, 1),
    "repeat of one row each": lambda x, n: x.repeat(1, n - n + 1),
    "tile": lambda x, n: x[:1].tile(n, 1),
    "a number": lambda x, n: torch.as_tensor(0.0, dtype=x.dtype).repeat([n, 6]),
    "repeat_interleave": lambda x, n: x[:1].repeat_interleave(n, 0),
    "expand, clone": lambda x, n: x[:1].expand(n, 6).clone(),
    "expand, reshape": lambda x, n: x[:1].expand(n, 6).reshape(-1),
    "a transposed copy": lambda x, n: x[:n].t().contiguous(),
    "a flat transposed copy": lambda x, n: x[:n].t().reshape(-1),
    "nothing padded": lambda x, n: F.pad(x[:n], (0, 0)),
    "padded": lambda x, n: F.pad(x[:n], (0, 0, 1, 0)),
    "cut": lambda x, n: F.pad(x[:n], (-1, 0)),
    "reflected by nothing": lambda x, n: F.pad(x[:n][None], (0, 0), mode="reflect"),
    "no difference": lambda x, n: torch.diff(x[:n], n=0),
    "rolled": lambda x, n: torch.roll(x[:n], 0, 0),
    "a padded sequence": lambda x, n: pad_sequence([x[:n]]),
}
OLD = torch.__version__ < "2.10"  # cannot trace x[:n]


@pytest.mark.parametrize("dynamic", [True, False], ids=["argument", "values"])
@pytest.mark.parametrize("name", COPIES)
def test_a_write_to_a_copy_is_none_to_its_argument(name, dynamic):
    if OLD and not dynamic:
        pytest.skip("torch 2.9 cannot trace x[:n]")

    def program(x):
        n = x.shape[0] if dynamic else (x[:, 0] > 0).sum().item() + 1
        y = COPIES[name](x, n)
        y[0] = 7.0
        return y, x * 2

    first = torch.randn(7, 6, dtype=torch.float64)
    sizes = {"x": [0]} if dynamic else {}
    plan = gspmd.plan(program, first, mesh=MESH, in_specs="_ a", dynamic=sizes)
    for rows in (7, 5) if dynamic else (7, 7):
        x = torch.randn(rows, 6, dtype=torch.float64)
        here = x.clone()
        got, want = plan.simulate(here, _poison=True), program(x)
        assert_same(got, want)
        assert_same(here, x)
