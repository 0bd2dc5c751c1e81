"""Losses of volumes keep their dimensions: along sharded ones nothing is gathered, and PyTorch's
numbers come out.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import MESHES, assert_same
from torch import Tensor

import torchgspmd as gspmd

WEIGHT = torch.tensor([0.5, 2.0, 1.5])


def logits_and_labels(*space: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (2, *space), generator=random)
    labels[:, 1:3] = 1
    return torch.randn(2, 3, *space, generator=random), labels


def loss_and_gradient(logits: Tensor, labels: Tensor, options: dict, loss) -> tuple[Tensor, Tensor]:
    logits = logits.detach().requires_grad_() if logits.is_leaf else logits
    value = loss(logits, labels, **options)
    return value, torch.autograd.grad(value.sum(), logits)[0]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight": WEIGHT},
        {"ignore_index": 1},
        {"ignore_index": 1, "weight": WEIGHT, "reduction": "sum"},
        {"reduction": "none", "ignore_index": 2},
    ],
    ids=lambda o: "-".join(o) or "mean",
)
def test_volume(mesh: gspmd.Mesh, loss, options: dict) -> None:
    logits, labels = logits_and_labels(5, 4, 7)
    wanted = loss_and_gradient(logits.clone(), labels, options, loss)
    spec = "_ _ m _ a" if "a" in mesh.names else "_ _ m _ _"

    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return loss_and_gradient(x.requires_grad_(), y, options, loss)

    plan = gspmd.plan(
        program,
        logits,
        labels,
        mesh=mesh,
        in_specs=(spec, spec.replace("_ _", "_", 1)),
        strict=True,
    )
    assert_same(plan.simulate(logits, labels, _poison=True), wanted)
    if options.get("reduction") != "none":
        assert {c.kind for c in plan.collectives} <= {"all_reduce"} and all(
            c.payload_bytes <= 8 for c in plan.collectives
        )


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"size_average": False}])
def test_what_is_left_to_pytorch(options: dict) -> None:
    logits, labels = logits_and_labels(5, 4, 7)
    mesh = gspmd.Mesh(m=2)
    plan = gspmd.plan(
        lambda x, y: F.cross_entropy(x, y, **options),
        logits,
        labels,
        mesh=mesh,
        in_specs=("_ _ m _ _", None),
    )
    assert_same(
        plan.simulate(logits, labels, _poison=True), F.cross_entropy(logits, labels, **options)
    )
    odds = logits.softmax(1)
    plan = gspmd.plan(F.cross_entropy, logits, odds, mesh=mesh, in_specs=("_ _ m _ _", None))
    assert_same(plan.simulate(logits, odds, _poison=True), F.cross_entropy(logits, odds))
