"""Loops whose backward carries several values of one state: one is sent, whatever the length."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan

import torchgspmd as gspmd
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
    """A loop over tokens, or `scan`. how: "given", "zeros" or "none" is the first state."""

    def __init__(self, step: Step, first: str, last: bool, backwards: bool, scanned: bool) -> None:
        super().__init__()
        self.step, self.how, self.last = step, first, last
        self.backwards, self.scanned = backwards, scanned
        self.rate = nn.Parameter(torch.rand(WIDTH).double())
        self.first = nn.Parameter(torch.rand(BATCH, WIDTH).double())

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x, gate = x * self.rate, torch.sigmoid(gate * self.rate)
        state = self.first if self.how == "given" else torch.zeros_like(self.first)
        if self.scanned:
            states, last = self.scan(state, x, gate)
        else:
            states, last = self.loop(state, x, gate)
        loss = states.square().mean() + self.first.sum() * (self.how != "given")
        return loss + last.square().mean() if self.last else loss

    def loop(self, state: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        rows = [*zip(x.unbind(1), gate.unbind(1))]
        states = []
        for i, (row, g) in enumerate(rows[::-1] if self.backwards else rows):
            state = row if self.how == "none" and i == 0 else self.step(state, row, g)
            states.append(state)
        return torch.stack(states[::-1] if self.backwards else states, 1), state

    def scan(self, state: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        def step(state: Tensor, row: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            state = self.step(state, *row)
            return state, state * 1

        last, states = scan(step, state, (x, gate), dim=1, reverse=self.backwards)
        return states, last


def sent(model: Loop, tokens: int, mesh: Mesh, certify: bool = False) -> float:
    """Compare loss and gradients with one device; return the bytes that a device sends."""
    args = torch.rand(BATCH, tokens, WIDTH).double(), torch.rand(BATCH, tokens, WIDTH).double()
    plan = gspmd.plan(model, *args, mesh=mesh, in_specs=("_ seq _",) * 2, grad=True)
    loss, gradients = plan.simulate(*args, _poison=True)
    model.zero_grad()
    expected = model(*args)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-11, atol=1e-11 * scale)
    if certify:
        plan.verify()
    return plan.sent_bytes


def most(shards: int, mixed: bool) -> float:
    """Return the bytes of a step: maps and states of all devices, there and back, and sums."""
    maps = WIDTH if mixed else 1  # A matrix for each state.
    states = 2 * (shards - 1) * (maps + 1) * STATE
    # Rows of a neighbor, the last state, the gradients of the first one, the rate and the loss.
    return states + 4 * STATE + 2 * (2 * STATE + WIDTH * 8 + 8)


def drawn() -> list[tuple]:
    chance, flags = random.Random(3), (False, True)
    firsts = ("zeros", "given", "none")
    return [
        (name, firsts[i % 3], chance.choice(flags), chance.choice(flags), False)
        for i, name in enumerate(STEPS)
    ]


@pytest.mark.parametrize("name, first, last, backwards, scanned", drawn())
def test_one_state_is_sent(name: str, first: str, last: bool, backwards: bool, scanned: bool):
    torch.manual_seed(0)
    model = Loop(STEPS[name], first, last, backwards, scanned)
    assert sent(model, 32, Mesh(seq=4)) <= most(4, name == "removed")
