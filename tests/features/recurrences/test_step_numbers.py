"""Loops that compute with another number of Python in each iteration, and gates of other states."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
import recurrent
import torch
from torch import Tensor, nn

from torchgspmd import Mesh

DOUBLE = torch.float64
BATCH, WIDTH, TOKENS = 2, 4, 16
STATE = BATCH * WIDTH * 8  # bytes

NUMBERS: dict[str, Callable[[int], float]] = {
    "power": lambda t: 0.9**t,
    "corrected": lambda t: 1 / (2 - 0.9 ** (t + 1)),
    "one of": lambda t: 1 / (t + 1),
    "warm": lambda t: min(0.99, (1 + t) / (10 + t)),
    "list": [0.5 + math.sin(t) / 3 for t in range(TOKENS)].__getitem__,
    "integer": lambda t: 1 + t % 3,
    "same": lambda t: 0.5,
}
Step = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # state, row, gate, number
STEPS: dict[str, Step] = {
    "scaled": lambda h, x, g, n: h * g + n * x,
    "decayed": lambda h, x, g, n: h * (n / 4) + x,
    "average": lambda h, x, g, n: h + (x - h) * (n / 3),
    "shifted": lambda h, x, g, n: (n - h) * g + x,
    "lerp": lambda h, x, g, n: torch.lerp(h, x, n / 3) + x,
    "power of x": lambda h, x, g, n: h * g + x**n,
    "chosen": lambda h, x, g, n: torch.where((x > n / 4) & (g.abs() < n), h * g, h) + x,
    "two numbers": lambda h, x, g, n: (h + x / (n + 1)) * n / 4 + x.clamp(n / 9, n / 3),
}
READS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "state": lambda h, n: h,
    "over": lambda h, n: h / (1 + n),
    "square": lambda h, n: n - h * h,
}


class Loop(nn.Module):
    def __init__(self, step: str, number: str, read: str, backwards: bool) -> None:
        super().__init__()
        self.step, self.number, self.read = STEPS[step], NUMBERS[number], READS[read]
        self.backwards = backwards
        self.rate = nn.Parameter(torch.rand(WIDTH).double() + 0.5)

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        x, g = x * self.rate, torch.sigmoid(g * self.rate)
        state, results = torch.zeros(BATCH, WIDTH, dtype=DOUBLE), []
        for t in reversed(range(TOKENS)) if self.backwards else range(TOKENS):
            number = self.number(t)
            state = self.step(state, x[:, t], g[:, t], number)
            results.append(self.read(state, number))
        return torch.stack(results[::-1] if self.backwards else results, 1).square().mean()


def drawn() -> list[tuple[str, str, str, bool]]:
    cases = [*itertools.product(STEPS, NUMBERS, READS, (False, True))]
    random.Random(1).shuffle(cases)
    return [("decayed", "list", "over", False), ("shifted", "power", "state", True), *cases[:10]]


@pytest.mark.parametrize("step, number, read, backwards", drawn())
def test_a_few_states_are_sent(step: str, number: str, read: str, backwards: bool):
    torch.manual_seed(0)
    args = [torch.rand(BATCH, TOKENS, WIDTH).double() + 0.1 for _ in range(2)]
    model = Loop(step, number, read, backwards)
    # A map and a state, there and back; rows of a neighbor, two sums for the rate, and the loss.
    most = 2 * 2 * STATE + 2 * STATE + 2 * (2 * WIDTH + 1) * 8
    assert recurrent.sent(model, args, ("_ seq _",) * 2, Mesh(seq=2)) <= most


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": lambda h: torch.exp(-h.square()),
}
INPUTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "state": lambda h, x: h,
    "sum": lambda h, x: h + x,
    "product": lambda h, x: h * x,
}


class Gated(nn.Module):
    """Two states: the first one is the other one's gate, and its input."""

    def __init__(self, gate: str, input_: str, backwards: bool) -> None:
        super().__init__()
        self.gate, self.input, self.backwards = GATES[gate], INPUTS[input_], backwards
        self.rate = nn.Parameter(torch.rand(WIDTH).double() + 0.5)

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        x, g = x * self.rate, torch.sigmoid(g * self.rate)
        rows, results = [*zip(x.unbind(1), g.unbind(1))], []
        first = second = torch.zeros(BATCH, WIDTH, dtype=DOUBLE)
        for x, g in rows[::-1] if self.backwards else rows:
            first = g * first + x
            second = self.gate(first) * second + self.input(first, x)
            results.append(second)
        return torch.stack(results[::-1] if self.backwards else results, 1).square().mean()


@pytest.mark.parametrize(
    "gate, input_, backwards",
    [("sigmoid", "state", False), ("tanh", "sum", True), ("exp", "product", False)],
)
def test_a_state_is_the_gate_of_another_one(gate: str, input_: str, backwards: bool):
    torch.manual_seed(0)
    args = [torch.rand(BATCH, TOKENS, WIDTH).double() for _ in range(2)]
    recurrent.sent(Gated(gate, input_, backwards), args, ("_ seq _",) * 2, Mesh(seq=2))
