"""Recurrences whose state is multiplied by a matrix: right, and a few states are sent."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import recurrent
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgspmd import Mesh

DOUBLE = torch.float64
BATCH, HEADS, KEYS, VALUES, ROWS = 2, 1, 3, 5, 4  # a state is [batch, heads, keys, values]
NEEDED = 2 * BATCH * HEADS * KEYS * (KEYS + VALUES) * 8  # a device's map, in each direction

State = Any
Step = Callable[[dict[str, Tensor], State], tuple[Tensor, State]]


def gated_delta(x: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Qwen3-Next, Kimi Linear: all steps of a part by a triangular system (Yang et al., 2024)."""
    q, k, v, g, beta = (x[name] for name in "q k v g b".split())
    decay = g.cumsum(-1)
    pairs = decay[..., :, None] - decay[..., None, :]
    pairs = pairs.masked_fill(torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1), -torch.inf).exp()
    system = (beta[..., None] * k @ k.mT) * pairs
    u, w = (
        torch.linalg.solve_triangular(system, beta[..., None] * y, upper=False, unitriangular=True)
        for y in (v, k * decay.exp()[..., None])
    )
    new = u - w @ state
    y = (q * decay.exp()[..., None]) @ state + ((q @ k.mT) * pairs) @ new
    last = decay[..., -1:]
    k = k * (last - decay).exp()[..., None]
    return y, state * last.exp()[..., None] + k.mT @ new


def delta_token(x: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """DeltaNet, token by token: sums in place of products of matrices."""
    q, k, v, g, beta = (x[name].squeeze(2) for name in "q k v g b".split())
    state = state * g.exp()[..., None, None]
    read = (state * k[..., None]).sum(-2)
    state = state + k[..., None] * (beta[..., None] * (v - read))[..., None, :]
    return (state * q[..., None]).sum(-2)[:, :, None], state


def rwkv7(x: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """RWKV-7: a decay for each key, and a product of two vectors, with the state transposed."""
    q, k, v, g, beta = (x[name].squeeze(2) for name in "q k v g b".split())
    h = state.mT
    decay = (g[..., None] - k.square()).exp()
    removed = h @ k[..., None] @ (beta[..., None] * k)[..., None, :]
    h = h * decay[..., None, :] - removed + v[..., None] @ k[..., None, :]
    return (h @ q[..., None]).mT, h.mT


def right_product(x: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix stands on the right, and is the same for all steps."""
    k, v = x["k"], x["v"]
    rotation = torch.eye(VALUES, dtype=DOUBLE).roll(1, 0) * 0.9
    return k @ state, state @ rotation + k.mT @ v


def two_states(x: dict[str, Tensor], state: State) -> tuple[Tensor, State]:
    """A normalizer with a decay beside the state."""
    state, norm = state if isinstance(state, tuple) else (state, state[..., 0] * 0)
    y, after = gated_delta(x, state)
    last = x["g"].sum(-1)[..., None].exp()
    y = y / (1 + (x["q"] * norm[..., None, :]).sum(-1, keepdim=True).square())
    return y, (after, norm * last + x["k"].sum(-2))


KINDS: dict[str, Step] = {
    f.__name__: f for f in (gated_delta, delta_token, rwkv7, right_product, two_states)
}
READS = {
    "split": lambda x, n, rows: x.split(rows, 2),
    "slice": lambda x, n, rows: [x[:, :, i * rows : (i + 1) * rows] for i in range(n)],
    "chunks": lambda x, n, rows: x.unflatten(2, (n, rows)).unbind(2),
    "index": lambda x, n, rows: [*map(x.unflatten(2, (n, rows)).select, [2] * n, range(n))],
}
WRITES = ("cat", "write", "stack", "write slices")


class Layer(nn.Module):
    def __init__(
        self, step: Step, reads: str, writes: str, first: bool, last: bool, backwards: bool
    ) -> None:
        super().__init__()
        self.step, self.reads, self.writes = step, reads, writes
        self.last, self.backwards = last, backwards
        self.rows = 1 if step in (delta_token, rwkv7) else ROWS
        self.w = nn.Parameter(torch.eye(KEYS, dtype=DOUBLE) + torch.rand(KEYS, KEYS).double() / 9)
        self.first = nn.Parameter(torch.rand(BATCH, HEADS, KEYS, VALUES).double())
        self.given = first

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Tensor:
        x = {"q": q @ self.w, "k": F.normalize(k @ self.w, dim=-1), "v": v, "g": -g, "b": b}
        n = q.shape[2] // self.rows
        parts = {name: READS[self.reads](y, n, self.rows) for name, y in x.items()}
        state: State = self.first if self.given else torch.zeros_like(self.first)
        out, results = torch.zeros_like(v), []
        for i in reversed(range(n)) if self.backwards else range(n):
            y, state = self.step({name: each[i] for name, each in parts.items()}, state)
            results.append(y)
            if self.writes == "write slices":
                out[:, :, i * self.rows : (i + 1) * self.rows] = y
        if self.writes == "write":
            out = out.unflatten(2, (n, self.rows)).clone()
            for i, y in enumerate(results):
                out[:, :, i] = y
            out = out.flatten(2, 3)
        elif self.writes == "cat":
            out = torch.cat(results[::-1] if self.backwards else results, 2)
        elif self.writes == "stack":
            out = torch.stack(results[::-1] if self.backwards else results, 2).flatten(2, 3)
        state = state[0] if isinstance(state, tuple) else state
        loss = out.square().mean() + (0 if self.given else self.first.sum())
        return loss + state.square().mean() if self.last else loss


def sent(model: nn.Module, tokens: int, mesh: Mesh, certify: bool = False) -> float:
    lead = BATCH, HEADS, tokens
    args = [torch.rand(*lead, n).double() for n in (KEYS, KEYS, VALUES)]
    args += [torch.rand(lead).double() / 4 for _ in range(2)]
    return recurrent.sent(model, args, ("_ _ seq _",) * 3 + ("_ _ seq",) * 2, mesh, certify)


def most(shards: int) -> float:
    """Return the bytes of a step: maps and states of all devices, there and back, and sums."""
    states = 2 * (shards - 1) * NEEDED
    own = BATCH * HEADS * KEYS * VALUES * 8
    return states + 2 * (3 * own + KEYS * KEYS * 8 + 8)


def drawn() -> list[tuple]:
    chance, flags = random.Random(1), (False, True)
    return [
        (name, *map(chance.choice, ([*READS], WRITES, flags, flags, flags)))
        for name in KINDS
        for _ in range(2 if name == "gated_delta" else 1)
    ]


@pytest.mark.parametrize("kind, reads, writes, first, last, backwards", drawn())
def test_states_are_sent(
    kind: str, reads: str, writes: str, first: bool, last: bool, backwards: bool
):
    torch.manual_seed(0)
    model = Layer(KINDS[kind], reads, writes, first, last, backwards)
    assert sent(model, 8 * model.rows, Mesh(seq=4)) <= most(4)


def test_the_bytes_do_not_grow_with_the_length_and_the_plan_is_certified():
    torch.manual_seed(0)
    model = Layer(gated_delta, "chunks", "write", False, True, False)
    at_once = sent(model, 8 * ROWS, Mesh(seq=2), certify=True)
    assert at_once == sent(model, 14 * ROWS, Mesh(seq=2)) <= most(2)


@pytest.mark.parametrize("tokens", (6 * ROWS, 7 * ROWS))
def test_parts_that_shards_do_not_divide(tokens: int):
    torch.manual_seed(0)
    sent(Layer(gated_delta, "index", "stack", True, True, False), tokens, Mesh(seq=4))
