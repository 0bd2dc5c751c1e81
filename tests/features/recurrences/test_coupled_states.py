"""Loops with their own first iteration, states that read each other, complex states."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import recurrent
import torch
from torch import Tensor, nn

from torchgspmd import Mesh

DOUBLE = torch.float64
BATCH, WIDTH = 2, 4
STATE = BATCH * WIDTH * 8  # bytes

States = tuple[Tensor, ...]


def gated(states: States, x: Tensor, g: Tensor, k: Tensor) -> States:
    return (g * states[0] + (1 - g) * x,)


def momentum(states: States, x: Tensor, g: Tensor, k: Tensor) -> States:
    """The average of an average: the second reads the first."""
    first = states[0] * k + x
    return first, states[1] * g + first


def trend(states: States, x: Tensor, g: Tensor, k: Tensor) -> States:
    """Double exponential smoothing: a level and its trend."""
    level = g * x + (1 - g) * (states[0] + states[1])
    return level, k * (level - states[0]) + (1 - k) * states[1]


def rotated(states: States, x: Tensor, g: Tensor, k: Tensor) -> States:
    """A complex number as two real ones."""
    cos, sin = g * k.cos(), g * k.sin()
    return cos * states[0] - sin * states[1] + x, sin * states[0] + cos * states[1]


def turned(states: States, x: Tensor, g: Tensor, k: Tensor) -> States:
    return (torch.polar(g, k) * states[0] + x,)


Step = Callable[[States, Tensor, Tensor, Tensor], States]
COUNTS: dict[str, tuple[Step, int]] = {
    "gated": (gated, 1),
    "momentum": (momentum, 2),
    "trend": (trend, 2),
    "rotated": (rotated, 2),
    "turned": (turned, 1),
}
FIRST = ("zeros", "row", "none", "given")


class Loop(nn.Module):
    """first: `row` has the first row as the first state, and `given` a parameter."""

    def __init__(self, name: str, first: str, backwards: bool) -> None:
        super().__init__()
        self.step, self.count = COUNTS[name]
        self.first, self.backwards = first, backwards
        self.rate = nn.Parameter(torch.rand(WIDTH).double())
        self.start = nn.Parameter(torch.rand(BATCH, WIDTH).double())

    def run(self, x: Tensor, g: Tensor, k: Tensor) -> list[Tensor]:
        rows = [*zip(x.unbind(1), torch.sigmoid(g * self.rate).unbind(1), (k / 2).unbind(1))]
        rows, results = rows[::-1] if self.backwards else rows, []
        zero = torch.zeros(BATCH, WIDTH, dtype=torch.complex128 if self.step is turned else DOUBLE)
        states = (zero,) * self.count
        if self.first == "given":
            states = tuple(self.start.to(zero.dtype) * (i + 1) for i in range(self.count))
        for i, row in enumerate(rows):
            if i == 0 and self.first in ("row", "none"):
                other = rows[1][0] - row[0] if self.first == "row" else row[0]
                states = (row[0].to(zero.dtype), other)[: self.count]
            else:
                states = self.step(states, *row)
            results.append(states[0].real if self.step is turned else sum(states))
        return results

    def forward(self, x: Tensor, g: Tensor, k: Tensor) -> Tensor:
        results = self.run(x, g, k)
        y = torch.stack(results[::-1] if self.backwards else results, 1)
        return (y * k).square().mean() + self.start.sum()


class Last(Loop):
    """Reads the last state alone, as a classifier of sequences."""

    def forward(self, x: Tensor, g: Tensor, k: Tensor) -> Tensor:
        return self.run(x, g, k)[-1].square().mean() + self.start.sum()


def sent(model: Loop, tokens: int, mesh: Mesh) -> float:
    args = [torch.rand(BATCH, tokens, WIDTH).double() for _ in range(3)]
    return recurrent.sent(model, args, ("_ seq _",) * 3, mesh)


EXCHANGE_ROWS = {("trend", "row"), ("trend", "none"), ("momentum", "given")}  # docs/limits.md


def drawn() -> list[tuple[str, str, bool]]:
    chance = random.Random(5)
    cases = [(name, first, chance.random() < 0.3) for name in COUNTS for first in FIRST]
    chance.shuffle(cases)
    return [case for case in cases[:10] if case[:2] not in EXCHANGE_ROWS]


@pytest.mark.parametrize("name, first, backwards", drawn())
def test_states_are_sent(name: str, first: str, backwards: bool):
    torch.manual_seed(0)
    model = Loop(name, first, backwards)
    bytes_sent = sent(model, 48, Mesh(seq=2))
    # A map and a state, there and back; ends, gradients of the first state, the rate and the loss.
    maps = 2 * model.count * (2 if model.step is turned else model.count) * STATE
    assert bytes_sent <= 2 * (maps + 2 * STATE) + 12 * STATE + 2 * (WIDTH + 1) * 8


LAST = [("gated", "zeros", False), ("gated", "given", True), ("momentum", "zeros", False)]
LAST += [("rotated", "given", True), ("turned", "given", False), ("trend", "zeros", True)]


@pytest.mark.parametrize("name, first, backwards", LAST)
def test_the_last_state_alone_is_read(name: str, first: str, backwards: bool):
    torch.manual_seed(0)
    model = Last(name, first, backwards)
    tokens = 24 if name == "gated" else 48
    bytes_sent = sent(model, tokens, Mesh(seq=2))
    # A map and a state, there and back; the last state, gradients of the first one and the rate.
    maps = 2 * model.count * (2 if model.step is turned else model.count) * STATE
    assert bytes_sent <= 2 * (maps + 2 * model.count * STATE) + 2 * (2 * STATE + WIDTH * 8 + 8)


def test_tokens_that_shards_do_not_divide():
    torch.manual_seed(0)
    sent(Loop("trend", "row", False), 27, Mesh(seq=4))


class BothWays(nn.Module):
    """A loop over tokens and one over `x.flip(1)`, whose results are flipped back."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.rand(WIDTH).double())

    def run(self, x: Tensor, g: Tensor) -> Tensor:
        state, states = torch.zeros_like(x[:, 0]), []
        for row, gate in zip(x.unbind(1), g.unbind(1)):
            state = gate * state + row
            states.append(state)
        return torch.stack(states, 1)

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        x, g = x * self.rate, torch.sigmoid(g * self.rate)
        return (self.run(x, g) * self.run(x.flip(1), g.flip(1)).flip(1)).mean()


def test_loops_in_both_directions():
    torch.manual_seed(0)
    args, longer = ([torch.rand(BATCH, n, WIDTH).double() for _ in range(2)] for n in (16, 32))
    specs, model = ("_ seq _",) * 2, BothWays()
    bytes_sent = recurrent.sent(model, args, specs, Mesh(seq=2))
    assert bytes_sent == recurrent.sent(model, longer, specs, Mesh(seq=2)) <= 16 * STATE
