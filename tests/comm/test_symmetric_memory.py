"""Which products PyTorch's symmetric memory takes, and on which GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchgspmd as gspmd
from torchgspmd.comm.carriers import is_connected, is_turned


@pytest.mark.parametrize(
    "equation, side, turned",
    [
        ("bsk,nk->bsn", 0, True),
        ("bsk,kn->bsn", 0, False),
        ("nk,bsk->bsn", 1, True),
        ("mk,kn->mn", 0, False),
        ("bsk,bkn->bsn", 0, None),  # a matrix for each batch row
        ("bks,kn->bsn", 0, None),  # the summed letter is not the last
        ("bsk,nk->nbs", 0, None),
        ("bsk,bsn->kn", 0, None),  # a gradient of a weight
        ("k,kn->n", 0, None),
    ],
)
def test_products(equation: str, side: int, turned: bool | None) -> None:
    assert is_turned(equation, side) is turned
    if turned is None:
        return
    x, w = (torch.randn(shape) for shape in _operands(equation))
    rows, matrix = (x, w) if side == 0 else (w, x)
    expected = rows @ (matrix.t() if turned else matrix)
    torch.testing.assert_close(torch.einsum(equation, x, w), expected)


def _operands(equation: str) -> list[list[int]]:
    letters = equation.partition("->")[0].split(",")
    return [[2 + "bskmn".index(letter) for letter in operand] for operand in letters]


@pytest.mark.parametrize(
    "axes, changes, connected",
    [
        (("model",), {}, True),
        (("data", "model"), {}, False),  # on two hosts
        (("model",), {"capability": (8, 0)}, False),
        (("model",), {"device_type": "cpu"}, False),
        (("model",), {"is_assumed": True}, False),
        (("model",), {"is_fake": True}, False),
    ],
)
def test_gpus_of_a_host(
    axes: tuple[str, ...],
    changes: dict[str, Any],
    connected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two hosts with four GPUs each."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    capability = changes.get("capability", (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    state = {"device_type": "cuda", "is_assumed": False, "is_fake": False, **changes}
    mesh = gspmd.Mesh(data=2, model=4)
    for rank in range(8):
        groups: Any = SimpleNamespace(mesh=mesh, rank=rank, processes=[*range(8)], **state)
        assert is_connected(groups, axes) is connected
