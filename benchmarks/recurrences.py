"""Bytes of recurrences along a sharded sequence, beside the states that devices need.

    python benchmarks/recurrences.py

h[t] = a[t] h[t-1] + b[t] with a state of [2, 16, 16], as associative_scan, as scan, and as a Python
loop over parts of 64 tokens (gated linear attention). A device needs scale and shift of each other
device: 2 (n - 1) states, once in the forward and once in the backward.
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


class Layer(nn.Module):
    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.run, self.decay = run, nn.Parameter(torch.rand(WIDTH))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return self.run(q, k, v, -g * self.decay).square().mean()


def main() -> None:
    needed = 2 * 2 * (SHARDS - 1) * STATE / 2**10
    print(f"seq={SHARDS}: KiB in forward and backward; devices need {needed:.0f}")
    for run in (by_associative_scan, by_scan, by_parts):
        for length in (512, 1024):
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
