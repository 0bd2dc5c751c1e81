"""Programs one operation away from attention written by hand are right, recognized or not."""

from __future__ import annotations

import math
import random

import pytest
import torch
from helpers import assert_same
from torch import Tensor

import torchgspmd as gspmd
from torchgspmd import Mesh

DIMS = ["a _ _ _", "_ a _ _", "_ _ a _", "_ _ _ a"]


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 0.3


def kept_weights(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    weights = scores(q, k).softmax(-1)
    return weights @ v + weights.sum(-1, keepdim=True)


def kept_scores(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    s = scores(q, k)
    return s.softmax(-1) @ v + s.sum(-1, keepdim=True)


def changed_scores(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    s = scores(q, k)
    s.mul_(2)
    return s.softmax(-1) @ v


def doubled_scores(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    s = scores(q, k)
    return (s + s).softmax(-1) @ v


MUTANTS = {
    "none": lambda q, k, v, m: scores(q, k).softmax(-1) @ v,
    "softmax over queries": lambda q, k, v, m: scores(q, k).softmax(-2) @ v,
    "softmax over the batch": lambda q, k, v, m: scores(q, k).softmax(0) @ v,
    "negative scale": lambda q, k, v, m: (q @ k.mT * -0.3).softmax(-1) @ v,
    "transposed weights": lambda q, k, v, m: scores(q, k).softmax(-1).mT @ v,
    "weights on the right": lambda q, k, v, m: (v.mT @ scores(q, k).softmax(-1)).mT,
    "number added": lambda q, k, v, m: (scores(q, k) + 1).softmax(-1) @ v,
    "mask": lambda q, k, v, m: (scores(q, k) + m).softmax(-1) @ v,
    "mask scaled": lambda q, k, v, m: ((q @ k.mT + m) * 0.3).softmax(-1) @ v,
    "mask with alpha": lambda q, k, v, m: torch.add(scores(q, k), m, alpha=2).softmax(-1) @ v,
    "mask of a column": lambda q, k, v, m: (scores(q, k) + m[:, :1]).softmax(-1) @ v,
    "mask of a row": lambda q, k, v, m: (scores(q, k) + m[0]).softmax(-1) @ v,
    "filled": lambda q, k, v, m: scores(q, k).masked_fill(m > 0.9, -math.inf).softmax(-1) @ v,
    "filled transposed": lambda q, k, v, m: (
        scores(q, k).masked_fill(m.mT > 0.9, -math.inf).softmax(-1) @ v
    ),
    "filled, finite": lambda q, k, v, m: scores(q, k).masked_fill(m > 0.5, -1e9).softmax(-1) @ v,
    "where": lambda q, k, v, m: torch.where(m < 0.9, scores(q, k), -math.inf).softmax(-1) @ v,
    "where exchanged": lambda q, k, v, m: torch.where(m < 0.9, -9.0, scores(q, k)).softmax(-1) @ v,
    "subtracted": lambda q, k, v, m: (1 - scores(q, k)).softmax(-1) @ v,
    "divided": lambda q, k, v, m: (scores(q, k) / 2).softmax(-1) @ v,
    "divisor": lambda q, k, v, m: (2 / (scores(q, k) ** 2 + 1)).softmax(-1) @ v,
    "operands exchanged": lambda q, k, v, m: scores(k, q).softmax(-1) @ v,
    "logarithms": lambda q, k, v, m: scores(q, k).log_softmax(-1) @ v,
    "another user of the weights": kept_weights,
    "another user of the scores": kept_scores,
    "scores changed in place": changed_scores,
    "scores added to themselves": doubled_scores,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_attention(name):
    rng = random.Random(name)
    torch.manual_seed(0)
    tensors = [torch.randn(2, 3, 34, 4, dtype=torch.float64) for _ in range(3)]
    mask = torch.rand(34, 34, dtype=torch.float64)

    def step(q, k, v, m):
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        y = MUTANTS[name](*inputs, m)
        return y, *torch.autograd.grad(y.sin().sum(), inputs)

    specs = (*(rng.choice(DIMS) for _ in range(3)), rng.choice(["_ _", "a _", "_ a"]))
    plan = gspmd.plan(step, *tensors, mask, mesh=Mesh(a=2), in_specs=specs)
    got = plan.simulate(*tensors, mask, _poison=True)
    assert_same(list(got), list(step(*tensors, mask)), terms=4096)
