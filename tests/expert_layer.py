"""A layer of experts by torchgspmd.moe, the same by a loop over all experts, and routings."""

from __future__ import annotations

import torch
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
