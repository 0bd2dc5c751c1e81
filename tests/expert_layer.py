"""Layers of experts: by torchgspmd.moe, by a loop over all, and by a matrix for each choice.

And routings.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgspmd import moe

CHOICES = 2


class Experts(nn.Module):
    """x [t, m], experts and weights of each token [t, k] -> y [t, m], and how many choices
    were dropped. dispatch: further arguments of moe.dispatch.
    """

    def __init__(self, experts: int, width: int, hidden: int, **dispatch):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, hidden, dtype=torch.float64) / 4)
        self.down = nn.Parameter(torch.randn(experts, hidden, width, dtype=torch.float64) / 4)
        self.dispatch = dispatch

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        routed = moe.dispatch(x, chosen, len(self.up), **self.dispatch)
        h = torch.tanh(moe.grouped_mm(routed.rows, self.up, routed.ends))
        y = moe.grouped_mm(h, self.down, routed.ends)
        return moe.combine(y, routed, weights), routed.dropped

    def whole(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Every expert on every token."""
        experts = [torch.tanh(x @ up) @ down for up, down in zip(self.up, self.down)]
        shares = [(weights * (chosen == e)).sum(-1, keepdim=True) for e in range(len(self.up))]
        return torch.stack([y * share for y, share in zip(experts, shares)]).sum(0)


def routing(kind: str, tokens: int, experts: int) -> Tensor:
    """Return the experts of each token, [t, k]: `uniform` ones are the same number for each."""
    all_of_them = torch.arange(tokens * CHOICES).view(tokens, CHOICES) % experts
    torch.manual_seed(1)
    return {
        "uniform": all_of_them,
        "skewed": (torch.rand(tokens, experts) + torch.arange(experts) / experts)
        .topk(CHOICES)
        .indices,
        "to one": torch.full((tokens, CHOICES), experts - 1),
        "empty experts": all_of_them // 2 * 2,
    }[kind]


def batch(kind: str, tokens: int, width: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return arguments of Experts."""
    torch.manual_seed(0)
    x = torch.randn(tokens, width, dtype=torch.float64)
    weights = torch.rand(tokens, CHOICES, dtype=torch.float64)
    return x.requires_grad_(), routing(kind, tokens, experts), weights.requires_grad_()


def by_bmm(x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    return torch.bmm(w[chosen], x.unsqueeze(2)).squeeze(2)


def by_matmul(x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    return (x.unsqueeze(1) @ w[chosen].mT).squeeze(1)


def by_einsum(x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    return torch.einsum("tm,thm->th", x, w.index_select(0, chosen))


class ChosenExperts(nn.Module):
    """Gated experts with biases: a matrix for each row, by an index."""

    def __init__(self, experts: int, width: int, hidden: int, multiply: Callable = by_bmm):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Parameter(torch.randn(width, experts))
        self.up = nn.Parameter(torch.randn(experts, 2 * hidden, width) / 4)
        self.up_bias = nn.Parameter(torch.randn(experts, 2 * hidden))
        self.down = nn.Parameter(torch.randn(experts, width, hidden) / 8)
        self.down_bias = nn.Parameter(torch.randn(experts, width))
        self.multiply = multiply
        self.double()

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """x [t, m], chosen [t, 2], a negative one counts from the last expert."""
        weights = (x @ self.router).softmax(-1).gather(1, chosen % len(self.up))
        rows, chosen = x.repeat_interleave(2, 0), chosen.flatten()
        gate, h = (self.multiply(rows, self.up, chosen) + self.up_bias[chosen]).chunk(2, -1)
        y = self.multiply(F.silu(gate) * (h + 1), self.down, chosen) + self.down_bias[chosen]
        return (y * weights.flatten().unsqueeze(1)).unflatten(0, (-1, 2)).sum(1)
