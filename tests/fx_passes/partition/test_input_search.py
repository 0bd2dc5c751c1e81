"""Open inputs are laid out with all that their dimensions run through, if nothing is gathered."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

import models
import pytest
import torch
from helpers import assert_same
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import Mesh, mark_sharding

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
import expert_layouts  # noqa: E402

MESH = Mesh(expert=4)


def kinds(plan: gspmd.Plan) -> dict[str, int]:
    count: Counter[str] = Counter()
    for c in plan.collectives:
        count[c.kind] += c.count
    return dict(count)


def layer() -> models.GShardLayer:
    torch.manual_seed(0)
    model = models.GShardLayer(experts=8, width=32, hidden=64, capacity=8).double()
    return gspmd.annotate(model, MESH, {"up": "expert _ _", "down": "expert _ _"})


@pytest.mark.parametrize("tokens, masks", [(None, False), (None, True), ("expert _ _", False)])
def test_tokens_move_to_experts_and_back(tokens, masks):
    model = layer()
    if masks:
        model.mark = lambda t: mark_sharding(t, MESH, "expert _ _ _")
    x = torch.randn(8, 16, 32, dtype=torch.float64, requires_grad=True)
    plan = gspmd.plan(model, x, mesh=MESH, in_specs=tokens, grad=True)
    assert kinds(plan) == {
        "all_to_all": 4,
        "all_reduce": 2,
    }  # of the loss and the router's gradient
    assert str(plan.in_specs[3]) == "expert _ _"
    got, grads = plan.simulate(x, _poison=True)
    want = model(x)
    want.backward()
    assert_same(got, want, "loss", terms=4096)
    gradients = {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}
    assert_same(grads, gradients, "gradients", terms=4096)


@pytest.mark.parametrize("size", [(8, 8, 4), (64, 64, 16)])
def test_no_random_layout_sends_less(size):
    plan, rng = expert_layouts.planned(*size, None), random.Random(0)
    assert kinds(plan) == {"all_to_all": 4, "all_reduce": 2}
    best = min(expert_layouts.planned(*size, rng).sent_bytes for _ in range(2))
    assert plan.sent_bytes <= best


def test_a_few_experts_with_many_tokens_are_not_gathered():
    """Tokens that are whole on all devices cost more than the weights; those of a device do not."""
    plan = expert_layouts.planned(64, 8, 4, None)
    assert kinds(plan) == {"all_to_all": 4, "all_reduce": 2}


class Summed(nn.Module):
    """A loss behind a block: nothing that the search leaves scattered is a result."""

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.block = models.block(mesh, "tp")

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).square().sum()


@pytest.mark.parametrize("shape", [models.TOKENS, models.MANY])
def test_megatron_keeps_its_tokens_whole(shape):
    mesh, x = Mesh(model=2), torch.randn(*shape, models.WIDTH)
    plan = gspmd.plan(Summed(mesh), x, mesh=mesh, grad=True)
    assert kinds(plan) == {"all_reduce": 4}
    assert all(spec.is_replicated for spec in plan.in_specs[-1:])
