"""The certificate of loops that a value ends, drawn at random, and of their gradients."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import while_loop

import torchgspmd as gspmd
from torchgspmd import Mesh

STEPS = (
    lambda a, b, i: (a * 0.5 + b).sin(),
    lambda a, b, i: a * (b * 0.3).cos() + i,
    lambda a, b, i: (a @ b.mT @ a).tanh(),
    lambda a, b, i: a.exp() * 0.1 - a * i,
    lambda a, b, i: a.roll(1, 0) * b,
)


def python_loop(goes_on, body, carries):
    while goes_on(*carries):
        carries = body(*carries)
    return carries


def drawn_loop(seed: int):
    """A loop with an integer counter and several carries, and the gradient through it."""
    draw = random.Random(seed)
    steps = [draw.choice(STEPS) for _ in range(draw.randint(1, 3))]
    first, stride, rounds = draw.randint(-2, 2), draw.choice([-2, 1, 3]), draw.randint(0, 4)
    by_value, last = draw.random() < 0.3, draw.random() < 0.5

    def run(x: Tensor, w: Tensor, loop=while_loop) -> tuple[Tensor, ...]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()

        def goes_on(i: Tensor, *carries: Tensor) -> Tensor:
            more = (i - first) // stride < rounds
            return more & (carries[0].abs().sum() < 30) if by_value else more

        def body(i: Tensor, *carries: Tensor) -> tuple[Tensor, ...]:
            return (i + stride, *(step(a, w, i) for a, step in zip(carries, steps)))

        carries = (torch.tensor(first), *(x + k for k in range(len(steps))))
        i, *ends = loop(goes_on, body, carries)
        loss = sum(end.square().sum() for end in (ends[-1:] if last else ends)) * (i + 1)
        grads = torch.autograd.grad(loss, (x, w), materialize_grads=True)
        return (*ends, i, *grads)

    return run


@pytest.mark.parametrize("seed", range(12))
def test_a_loop_and_its_gradient_are_certified(seed: int) -> None:
    torch.manual_seed(seed)
    x, w = torch.randn(2, 4, 6, dtype=torch.float64)
    run = drawn_loop(seed)
    specs = random.Random(seed).choice([("a _", "_ _"), ("_ a", "a _"), ("a b", "_ b")])
    plan = gspmd.plan(run, x, w, mesh=Mesh(a=2, b=2), in_specs=specs)
    torch.testing.assert_close(plan.simulate(x, w), run(x, w, python_loop))
    plan.verify()
