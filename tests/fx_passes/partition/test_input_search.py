"""Open inputs are laid out with all that their dimensions run through."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from helpers import assert_same
from models import GShardLayer

import torchgspmd as gspmd
from torchgspmd import Mesh, mark_sharding

MESH = Mesh(expert=4)


def layer(experts: int = 8, width: int = 32, hidden: int = 64, capacity: int = 8) -> GShardLayer:
    torch.manual_seed(0)
    return GShardLayer(experts, width, hidden, capacity).double()


def marked(model: GShardLayer, mesh: Mesh) -> GShardLayer:
    gspmd.annotate(model, mesh, {"up": "expert _ _", "down": "expert _ _"})
    return model


def kinds(plan: gspmd.Plan) -> dict[str, int]:
    count: Counter[str] = Counter()
    for c in plan.collectives:
        count[c.kind] += c.count
    return dict(count)


def has_two_each_way(plan: gspmd.Plan) -> bool:
    """Two exchanges of tokens forward and two backward; else the router's gradient, the loss."""
    rest = {(c.kind, c.payload_bytes) for c in plan.collectives if c.kind != "all_to_all"}
    router = max(bytes for _, bytes in rest)
    return kinds(plan) == {"all_to_all": 4, "all_reduce": 2} and router <= 128 * 64 * 8


@pytest.mark.parametrize("tokens", [None, "expert _ _"])
@pytest.mark.parametrize("masks", [False, True])
def test_tokens_move_to_experts_and_back(tokens, masks):
    model = marked(layer(), MESH)
    if masks:
        model.mark = lambda t: mark_sharding(t, MESH, "expert _ _ _")
    x = torch.randn(8, 16, 32, dtype=torch.float64, requires_grad=True)
    plan = gspmd.plan(model, x, mesh=MESH, in_specs=tokens, grad=True)
    assert has_two_each_way(plan)
    assert str(plan.in_specs[3]) == "expert _ _"
    got, grads = plan.simulate(x)
    want = model(x)
    want.backward()
    assert_same(got, want, "loss", terms=4096)
    gradients = {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}
    assert_same(grads, gradients, "gradients", terms=4096)


@pytest.mark.parametrize("groups, experts, devices", [(8, 8, 8), (16, 64, 4), (64, 16, 16)])
def test_no_random_layout_sends_less(groups, experts, devices):
    mesh, rng = Mesh(expert=devices), random.Random(0)
    with torch.device("meta"):
        x = torch.empty(groups, 64, 128, requires_grad=True)
        model = marked(GShardLayer(experts, 128, 512, max(128 // experts, 4)), mesh)
    plan = gspmd.plan(model, x, mesh=mesh, grad=True)
    assert has_two_each_way(plan)

    def anywhere(t: torch.Tensor) -> torch.Tensor:
        words = ["_"] * t.dim()
        if (d := rng.randrange(-1, t.dim())) >= 0 and t.shape[d] % devices == 0:
            words[d] = "expert"
        return mark_sharding(t, mesh, " ".join(words))

    model.mark = model.mark_tokens = anywhere
    for _ in range(6):
        assert gspmd.plan(model, x, mesh=mesh, grad=True).sent_bytes >= plan.sent_bytes
