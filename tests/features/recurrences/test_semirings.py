"""States by maxima, minima and sums of exponentials; filters; states of unequal shapes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import recurrent
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan

from torchgspmd import Mesh

BATCH, WIDTH = 3, 4
STATE = BATCH * WIDTH * 8  # bytes

States = tuple[Tensor, ...]
Step = Callable[[States, Tensor, Tensor, Tensor], States]


def largest(states: States, x: Tensor, g: Tensor, w: Tensor) -> States:
    return (torch.maximum(states[0] - g, x),)


def waiting_time(states: States, x: Tensor, g: Tensor, w: Tensor) -> States:
    return (torch.relu(states[0] + x - 2 * g),)


def smallest(states: States, x: Tensor, g: Tensor, w: Tensor) -> States:
    return (torch.minimum(states[0] + g, x).clamp(max=0.9),)


def log_space(states: States, x: Tensor, g: Tensor, w: Tensor) -> States:
    """minGRU and minLSTM in log space, token by token."""
    return (torch.logaddexp(states[0] - g, x),)


def forward_algorithm(states: States, x: Tensor, g: Tensor, w: Tensor) -> States:
    """Of a hidden Markov model; a CRF's partition function."""
    return (torch.logsumexp(states[0][:, :, None] + w, 1) + x,)


def by_hand(states: States, x: Tensor, g: Tensor, w: Tensor) -> States:
    """The same less its maximum, with tokens that change nothing."""
    terms = states[0].unsqueeze(2) + w
    top = terms.amax(1, keepdim=True)
    after = ((terms - top).exp().sum(1, keepdim=True).log() + top).squeeze(1) + x
    return (torch.where(g[:, :1] > 0.2, after, states[0]),)


def viterbi(states: States, x: Tensor, g: Tensor, w: Tensor) -> States:
    return ((states[0][:, :, None] + w).max(1).values + x,)


def second_order(states: States, x: Tensor, g: Tensor, w: Tensor) -> States:
    return x * g + 0.5 * states[0] - 0.2 * states[1], states[0]


def weight_and_bias(states: States, x: Tensor, g: Tensor, w: Tensor) -> States:
    """TTT's linear model, one token a step: its states differ in shape."""
    weight, bias = states[0].diag_embed() if states[0].dim() == 2 else states[0], states[1]
    error = (g[:, None] @ weight)[:, 0] + bias - x
    return weight - 0.1 * g[:, :, None] * error[:, None], bias - 0.1 * error


# How many rows a map has for a state, and how many states there are.
KINDS: dict[str, tuple[Step, int, int]] = {
    "largest": (largest, 1, 1),
    "forward_algorithm": (forward_algorithm, WIDTH, 1),
    "waiting_time": (waiting_time, 1, 1),
    "smallest": (smallest, 1, 1),
    "log_space": (log_space, 1, 1),
    "by_hand": (by_hand, WIDTH, 1),
    "viterbi": (viterbi, WIDTH, 1),
    "second_order": (second_order, 2, 2),
    "weight_and_bias": (weight_and_bias, WIDTH + 1, WIDTH + 1),
}


class Loop(nn.Module):
    def __init__(self, name: str, given: bool, last: bool, backwards: bool) -> None:
        super().__init__()
        self.step, *_ = KINDS[name]
        self.given, self.last, self.backwards = given, last, backwards
        self.w = nn.Parameter(torch.rand(WIDTH, WIDTH).double())
        self.first = nn.Parameter(torch.rand(BATCH, WIDTH).double())

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        first = self.first if self.given else torch.zeros_like(self.first)
        states, results = (first, first), []
        if self.step is weight_and_bias:
            states = first.diag_embed(), first
        rows = [*zip((x @ self.w).unbind(1), g.unbind(1))]
        for row in rows[::-1] if self.backwards else rows:
            states = self.step(states, *row, self.w)
            results.append(states[-1 if self.step is weight_and_bias else 0])
        y = torch.stack(results[::-1] if self.backwards else results, 1)
        loss = y.sin().mean() + self.first.sum()
        return loss + states[0].square().mean() if self.last else loss


def sent(model: nn.Module, tokens: int, mesh: Mesh) -> float:
    args = [torch.rand(BATCH, tokens, WIDTH).double() for _ in range(2)]
    return recurrent.sent(model, args, ("_ seq _",) * 2, mesh)


def drawn() -> list[tuple]:
    chance = random.Random(8)
    return [(name, *(chance.random() < 0.5 for _ in range(3))) for name in KINDS]


@pytest.mark.parametrize("name, given, last, backwards", drawn())
def test_states_are_sent(name: str, given: bool, last: bool, backwards: bool):
    torch.manual_seed(0)
    _, rows, states = KINDS[name]
    # A map and a state, there and back; then ends, and gradients of parameters and the loss.
    maps = 2 * (rows * states + states) * STATE
    ends = (4 + 4 * states) * STATE + 2 * (WIDTH * WIDTH + WIDTH + 1) * 8
    assert sent(Loop(name, given, last, backwards), 48, Mesh(seq=2)) <= maps + ends


@pytest.mark.parametrize("name", ["viterbi", "log_space"])
def test_tokens_that_shards_do_not_divide(name: str):
    torch.manual_seed(0)
    sent(Loop(name, True, True, False), 18, Mesh(seq=4))


class Scanned(nn.Module):
    """A scan whose carry is a dict, and whose rows are a list."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.rand(WIDTH).double())

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        def step(state: dict[str, Tensor], row: list[Tensor]) -> tuple[dict[str, Tensor], dict]:
            first = state["first"] * row[1] + row[0] * self.rate
            state = {"first": first, "second": state["second"] * 0.5 + first}
            return state, {"y": state["second"] * 1}

        zeros = torch.zeros_like(x[:, 0])
        last, results = scan(step, {"first": zeros, "second": zeros}, [x, g], dim=1)
        return results["y"].square().mean() + last["first"].mean()


@pytest.mark.filterwarnings("ignore")
def test_a_scan_of_dicts():
    torch.manual_seed(0)
    assert sent(Scanned(), 32, Mesh(seq=2)) <= 12 * STATE


class Advantages(nn.Module):
    """Generalized advantage estimation: from behind, with the value of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.rand(WIDTH).double())

    def forward(self, reward: Tensor, value: Tensor) -> Tensor:
        reward, value, after = reward * self.rate, value * self.rate, torch.zeros_like(value[:, 0])
        tokens, y = value.shape[1], torch.zeros_like(value)
        for i in reversed(range(tokens)):
            following = value[:, i + 1] if i < tokens - 1 else torch.zeros_like(value[:, 0])
            y[:, i] = after = reward[:, i] + 0.99 * following - value[:, i] + 0.9 * after
        return y.square().mean()


def test_advantages():
    torch.manual_seed(0)
    assert sent(Advantages(), 32, Mesh(seq=2)) <= 12 * STATE
