"""Bytes of recurrences along a sharded sequence, beside the states that devices need.

    python benchmarks/recurrences.py

h[t] = a[t] h[t-1] + b[t] with a state of [2, 16, 16], as associative_scan, as scan, and as a Python
loop over parts of 64 tokens (gated linear attention). A device needs scale and shift of each other
device: 2 (n - 1) states, once in the forward and once in the backward. In a gated delta net a[t] is
a matrix, of the state's size here. The loop over its parts writes into a tensor. RWKV-7 and Mamba-2
are written token by token, and the moving average's state is [2, 16]. So are the states of minGRU
in log space and of a Markov model's forward algorithm, whose map is a matrix.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, scan

import torchgspmd as gspmd

WIDTH, PART, SHARDS = 16, 64, 4
STATE = 2 * WIDTH * WIDTH * 4  # bytes


def by_parts(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    state, results = torch.zeros(2, WIDTH, WIDTH), []
    parts = [x.split(PART, 1) for x in (q, k, v, g)]
    for q, k, v, g in zip(*parts):
        decay = g.cumsum(1)
        last = decay[:, -1:]
        y = ((q * decay.exp()) @ (k * (-decay).exp()).mT).tril() @ v
        results.append(y + (q * decay.exp()) @ state)
        state = state * last.exp().mT + (k * (last - decay).exp()).mT @ v
    return torch.cat(results, 1)


def delta_net(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """A gated delta net by parts, as transformers' Qwen3-Next has it."""
    q, k, v, g = (x.unflatten(1, (-1, PART)) for x in (q, k, v, g.mean(-1)))
    decay, beta = g.cumsum(2), torch.sigmoid(v.mean(-1, keepdim=True))
    above = torch.ones(PART, PART, dtype=torch.bool).triu(1)
    pairs = (decay.unsqueeze(3) - decay.unsqueeze(2)).masked_fill(above, -torch.inf).exp()
    system, attention = (beta * k) @ k.mT * pairs, q @ k.mT * pairs
    values, reads = (
        torch.linalg.solve_triangular(system, beta * x, upper=False, unitriangular=True)
        for x in (v, k * decay.exp().unsqueeze(3))
    )
    q, k = q * decay.exp().unsqueeze(3), k * (decay[..., -1:] - decay).exp().unsqueeze(3)
    state, y = torch.zeros(2, WIDTH, WIDTH), torch.zeros_like(v)
    for i in range(v.shape[1]):
        new = values[:, i] - reads[:, i] @ state
        y[:, i] = q[:, i] @ state + attention[:, i] @ new
        state = state * decay[:, i, -1].exp()[:, None, None] + k[:, i].mT @ new
    return y.flatten(1, 2)


def rwkv7(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    state, results = torch.zeros(2, WIDTH, WIDTH), []
    rows = [x.unbind(1) for x in (q, k, v, g)]
    for q, k, v, g in zip(*rows):
        read = (state * k[:, :, None]).sum(1)
        state = state * g.exp()[:, :, None] + k[:, :, None] * (v - read)[:, None]
        results.append((q[:, :, None] * state).sum(1))
    return torch.stack(results, 1)


def mamba2(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    state, results = torch.zeros(2, WIDTH, WIDTH), []
    rows = [x.unbind(1) for x in (q, k, v, g)]
    for q, k, v, g in zip(*rows):
        state = state * g.mean(1).exp()[:, None, None] + k[:, :, None] * v[:, None]
        results.append((q[:, :, None] * state).sum(1))
    return torch.stack(results, 1)


def moving_average(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    state, y = torch.zeros(2, WIDTH), torch.zeros_like(v)
    for i in range(v.shape[1]):
        state = state + (v[:, i] - state) * g[:, i].exp()
        y[:, i] = state
    return y * q * k


def forward_algorithm(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    steps = torch.arange(WIDTH * WIDTH).reshape(WIDTH, WIDTH).sin().log_softmax(-1)
    state, results = torch.zeros(2, WIDTH), []
    for row in k.unbind(1):
        state = torch.logsumexp(state[:, :, None] + steps, 1) + row
        results.append(state)
    return torch.stack(results, 1) * q


def log_space(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    state, results = torch.zeros(2, WIDTH), []
    for row, decay in zip(k.unbind(1), g.unbind(1)):
        state = torch.logaddexp(decay + state, row)
        results.append(state)
    return torch.stack(results, 1) * q * v


def by_scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    def step(state: Tensor, row: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        q, k, v, g = row
        state = state * g.exp()[:, :, None] + k[:, :, None] * v[:, None]
        return state, (q[:, :, None] * state).sum(1)

    return scan(step, torch.zeros(2, WIDTH, WIDTH), (q, k, v, g), dim=1)[1].transpose(0, 1)


def by_associative_scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    maps = g.exp()[..., None].expand(-1, -1, -1, WIDTH), k[..., None] * v[:, :, None]
    join = lambda p, q: (p[0] * q[0], p[1] * q[0] + q[1])  # noqa: E731
    states = associative_scan(join, maps, 1, combine_mode="generic")[1]
    return (q[..., None] * states).sum(2)


RUNS = (by_associative_scan, by_scan, by_parts, delta_net)
RUNS += (rwkv7, mamba2, moving_average, forward_algorithm, log_space)


class Layer(nn.Module):
    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.run, self.decay = run, nn.Parameter(torch.rand(WIDTH))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return self.run(q, k, v, -g * self.decay).square().mean()


def main() -> None:
    needed = 2 * 2 * (SHARDS - 1) * STATE / 2**10
    print(f"seq={SHARDS}: KiB in forward and backward; devices need {needed:.0f}")
    for run in RUNS:
        # Token by token, the program has operations for each.
        for length in (512, 1024) if run in RUNS[:4] else (32, 64):
            args = [torch.rand(2, length, WIDTH) / 8 for _ in range(4)]
            plan = gspmd.plan(
                Layer(run),
                *args,
                mesh=gspmd.Mesh(seq=SHARDS),
                in_specs=("_ seq _",) * 4,
                grad=True,
            )
            print(f"{run.__name__:20} {length:5} tokens {plan.sent_bytes / 2**10:8.1f}", flush=True)


if __name__ == "__main__":
    main()
