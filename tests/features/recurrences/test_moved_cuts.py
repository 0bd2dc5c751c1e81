"""Loops whose backward carries several values of one state: one is sent, whatever the length."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import recurrent
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan

from torchgspmd import Mesh

DOUBLE = torch.float64
BATCH, WIDTH = 2, 3
STATE = BATCH * WIDTH * 8  # bytes

Step = Callable[[Tensor, Tensor, Tensor], Tensor]  # state, row, gate -> the next state


def toward(state: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    return state + (x - state) * gate


def away(state: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    return x - (x - state) / (1 + gate)


def gated_sum(state: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    return (state + x) * gate - state * 0.5


def twice(state: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    state = state - (state - x) * gate
    return state + (x * gate - state) * (gate * x)


def shared_gate(state: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    return state + (x - state) * gate.mean(-1, keepdim=True)


def removed(state: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """A delta rule on a vector: all elements are mixed."""
    read = (state * gate).sum(-1, keepdim=True)
    return state * 0.9 + gate * (x[:, :1] - read)


STEPS: dict[str, Step] = {
    f.__name__: f for f in (toward, away, gated_sum, twice, shared_gate, removed)
}


class Loop(nn.Module):
    """A loop over tokens, or `scan`. given: its first state is; last: its last one is read."""

    def __init__(self, step: Step, given: bool, last: bool, backwards: bool, scanned: bool) -> None:
        super().__init__()
        self.step, self.given, self.last = step, given, last
        self.backwards, self.scanned = backwards, scanned
        self.rate = nn.Parameter(torch.rand(WIDTH).double())
        self.first = nn.Parameter(torch.rand(BATCH, WIDTH).double())

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x, gate = x * self.rate, torch.sigmoid(gate * self.rate)
        state = self.first if self.given else torch.zeros_like(self.first)
        if self.scanned:
            states, last = self.scan(state, x, gate)
        else:
            states, last = self.loop(state, x, gate)
        loss = states.square().mean() + self.first.sum() * (not self.given)
        return loss + last.square().mean() if self.last else loss

    def loop(self, state: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        rows, states = [*zip(x.unbind(1), gate.unbind(1))], []
        for row, g in rows[::-1] if self.backwards else rows:
            state = self.step(state, row, g)
            states.append(state)
        return torch.stack(states[::-1] if self.backwards else states, 1), state

    def scan(self, state: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        def step(state: Tensor, row: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            state = self.step(state, *row)
            return state, state * 1

        last, states = scan(step, state, (x, gate), dim=1, reverse=self.backwards)
        return states, last


def sent(model: Loop, tokens: int, mesh: Mesh, certify: bool = False) -> float:
    args = [torch.rand(BATCH, tokens, WIDTH).double() for _ in range(2)]
    return recurrent.sent(model, args, ("_ seq _",) * 2, mesh, certify)


def most(shards: int, mixed: bool) -> float:
    """Return the bytes of a step: maps and states of all devices, there and back, and sums."""
    maps = WIDTH if mixed else 1  # A matrix for each state.
    states = 2 * (shards - 1) * (maps + 1) * STATE
    # Rows of a neighbor, the last state, the gradients of the first one, the rate and the loss.
    return states + 4 * STATE + 2 * (2 * STATE + WIDTH * 8 + 8)


def drawn() -> list[tuple]:
    chance = random.Random(3)
    return [(name, *(chance.random() < 0.5 for _ in range(3))) for name in STEPS]


@pytest.mark.parametrize("name, given, last, backwards", drawn())
def test_one_state_is_sent(name: str, given: bool, last: bool, backwards: bool):
    torch.manual_seed(0)
    model = Loop(STEPS[name], given, last, backwards, scanned=False)
    assert sent(model, 32, Mesh(seq=4), certify=name == "twice") <= most(4, name == "removed")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backwards", [False, True])
def test_one_state_of_a_scan_is_sent(backwards: bool):
    torch.manual_seed(0)
    model = Loop(toward, given=True, last=True, backwards=backwards, scanned=True)
    assert sent(model, 32, Mesh(seq=4)) <= most(4, mixed=False)


def test_the_bytes_do_not_grow_with_the_length():
    torch.manual_seed(0)
    model = Loop(toward, given=False, last=False, backwards=False, scanned=False)
    assert sent(model, 16, Mesh(seq=2)) == sent(model, 34, Mesh(seq=2)) <= most(2, mixed=False)


@pytest.mark.parametrize("name, tokens", [("toward", 18), ("removed", 21)])
def test_tokens_that_shards_do_not_divide(name: str, tokens: int):
    torch.manual_seed(0)
    sent(Loop(STEPS[name], True, True, False, scanned=False), tokens, Mesh(seq=4))
