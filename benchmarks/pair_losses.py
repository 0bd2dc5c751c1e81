"""Bytes and memory of losses over all pairs of a batch, as users write them for one device.

    python benchmarks/pair_losses.py [--devices 2 8] [--rows 512] [--width 32]

Each device has `rows` rows of two views. Printed are the bytes that a device sends in a
step, over those of one gather and one reduce_scatter of one view, and its peak memory in MiB.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchgspmd as gspmd

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def siglip(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
    labels = 2 * torch.eye(len(a)) - 1
    return -F.logsigmoid(labels * (a @ b.T * 10 - 10)).sum() / len(a)


def clip(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
    logits, labels = 10 * a @ b.T, torch.arange(len(a))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def nt_xent(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
    z, n = torch.cat([a, b]), len(a)
    scores = (z @ z.T / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
    return F.cross_entropy(scores, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))


def barlow_twins(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
    a, b = ((x - x.mean(0)) / x.std(0) for x in (a, b))
    c = a.T @ b / len(a)
    return (c - torch.eye(len(c))).square().sum()


def vicreg(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
    total = F.mse_loss(a, b)
    for x in (a - a.mean(0), b - b.mean(0)):
        covariance = x.T @ x / (len(x) - 1)
        total = total + F.relu(1 - (x.var(0) + 1e-4).sqrt()).mean()
        total = total + covariance.square().sum() - covariance.diagonal().square().sum()
    return total


def supervised(a: Tensor, _: Tensor, labels: Tensor) -> Tensor:
    own = torch.eye(len(a), dtype=torch.bool)
    log_p = (a @ a.T / 0.1).masked_fill(own, float("-inf")).log_softmax(1)
    alike = (labels[:, None] == labels) & ~own
    return -(torch.where(alike, log_p, 0).sum(1) / alike.sum(1).clamp(min=1)).mean()


def hardest_triplet(a: Tensor, _: Tensor, labels: Tensor) -> Tensor:
    distances, same = torch.cdist(a, a), labels[:, None] == labels
    far = distances.masked_fill(~same, 0).max(1).values
    near = distances.masked_fill(same, float("inf")).min(1).values
    return F.relu(far - near + 0.3).mean()


def discrepancy(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
    pairs = (a, a, 1), (b, b, 1), (a, b, -2)
    return sum(s * torch.exp(-torch.cdist(x, y).square()).mean() for x, y, s in pairs)


def differences(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
    return torch.exp(-(a[:, None] - b).square().sum(-1)).mean()


def ranking(a: Tensor, _: Tensor, labels: Tensor) -> Tensor:
    scores = a.sum(1)
    above = labels[:, None] > labels
    return (F.softplus(scores - scores[:, None]) * above).sum() / above.sum().clamp(min=1)


def nearest(a: Tensor, _: Tensor, __: Tensor) -> Tensor:
    scores = a @ a.T - 2 * torch.eye(len(a))
    return -torch.log((2 - 2 * scores.max(1).values).clamp(min=1e-8)).mean()


LOSSES = (
    *(siglip, clip, nt_xent, barlow_twins, vicreg, supervised, hardest_triplet, discrepancy),
    *(differences, ranking, nearest),
)


class Views(nn.Module):
    def __init__(self, width: int, loss: Loss) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
        a, b = (F.normalize(z, dim=-1) for z in (self.left(x), self.right(y)))
        return self.loss(a, b, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--width", type=int, default=32)
    options = parser.parse_args()
    for loss in LOSSES:
        cells = []
        for n in options.devices:
            rows, mesh = n * options.rows, gspmd.Mesh(data=n)
            args = *(torch.randn(rows, options.width) for _ in "ab"), torch.randint(64, (rows,))
            plan = gspmd.plan(
                Views(options.width, loss),
                *args,
                mesh=mesh,
                in_specs=("data _", "data _", "data"),
                grad=True,
            )
            moved = 2 * (n - 1) / n * args[0].nbytes
            cells.append(f"{plan.sent_bytes / moved:.2f}, {plan.memory.peak / 2**20:.1f} MiB")
        print(f"| {loss.__name__} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
