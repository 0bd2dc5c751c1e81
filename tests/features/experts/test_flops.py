"""Estimates count the products of experts, on all devices and on one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchgspmd as gspmd
from torchgspmd import moe

TOKENS, WIDTH, EXPERTS, CHOICES = 256, 32, 8, 2
HALF, WHOLE = 64, 128  # hidden units


class Experts(nn.Module):
    """Two products of each token's experts."""

    def __init__(self, hidden: int, **cut: float):
        super().__init__()
        self.cut, self.router = cut, nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, hidden))
        self.down = nn.Parameter(torch.empty(EXPERTS, hidden, WIDTH))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(CHOICES)
        rows = moe.dispatch(x, chosen, EXPERTS, **self.cut)
        y = F.silu(moe.grouped_mm(rows.rows, self.up, rows.ends))
        return moe.combine(moe.grouped_mm(y, self.down, rows.ends), rows, weights).sum()


def products(mesh: gspmd.Mesh, spec: str, hidden: int, cut: dict[str, float]) -> tuple[int, int]:
    """Return operations of all devices together, and of the model."""
    model = Experts(hidden, **cut)
    if "expert" in mesh.names:
        gspmd.annotate(model, mesh, {"up": "expert _ _", "down": "expert _ _"})
    plan = gspmd.plan(model, torch.empty(TOKENS, WIDTH), mesh=mesh, in_specs=spec, grad=True)
    estimate = plan.estimate("h100")
    return estimate.flops * mesh.size, estimate.model_flops


@pytest.mark.parametrize(
    "mesh, spec, cut",
    [
        (gspmd.Mesh(data=4), "data _", {}),
        (gspmd.Mesh(expert=4), "_ _", {}),
        (gspmd.Mesh(expert=4), "expert _", {}),
        (
            gspmd.Mesh(data=2, expert=4),
            "data+expert _",
            {"shards": 4, "groups": 2, "capacity": 1.0},
        ),
    ],
    ids=["rows", "blocks of the same rows", "rows gathered", "rows sent"],
)
def test_products_of_experts_are_counted_once(mesh, spec, cut):
    """The argument has no gradient: of the six products for two matrices, five are computed."""
    rows = TOKENS * CHOICES
    added = 5 * 2 * rows * WIDTH * (WHOLE - HALF)
    half, whole = (products(mesh, spec, hidden, cut) for hidden in (HALF, WHOLE))
    assert [more - few for few, more in zip(half, whole)] == [added, added]
