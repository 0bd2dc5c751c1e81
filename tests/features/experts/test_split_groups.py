"""Groups of rows by experts: numbers of one device, no weight gathered, few bytes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import Mesh

WIDTH, HIDDEN, CHOICES = 16, 64, 2


class Experts(nn.Module):
    """A router and gated experts, which multiply sorted rows by torch._grouped_mm."""

    def __init__(self, experts: int, skew: float):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Parameter(torch.randn(WIDTH, experts, dtype=torch.float64))
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * HIDDEN, dtype=torch.float64) / 4)
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, WIDTH, dtype=torch.float64) / 8)
        self.skew = skew * torch.arange(experts, dtype=torch.float64)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ self.router + self.skew).softmax(-1).topk(CHOICES, -1)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(x)  # [t, 2]
        experts, order = chosen.flatten().sort(stable=True)
        counts = torch.histc(experts.float(), len(self.up), 0, len(self.up) - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = torch._grouped_mm(x[order // CHOICES], self.up, offs=ends).chunk(2, -1)
        y = torch._grouped_mm(F.silu(gate) * up, self.down, offs=ends)
        y = y * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // CHOICES, y).square().sum()

    def whole(self, x: Tensor) -> Tensor:
        """Every expert on every token."""
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        for e, (up, down) in enumerate(zip(self.up, self.down)):
            gate, hidden = (x @ up).chunk(2, -1)
            share = (weights * (chosen == e)).sum(-1, keepdim=True)
            out = out + (F.silu(gate) * hidden) @ down * share
        return out.square().sum()


@pytest.mark.parametrize(
    "experts, tokens, skew, mesh, tokens_spec",
    [
        (8, 32, 0.0, Mesh(expert=4), "expert _"),
        (8, 32, 50.0, Mesh(expert=2), "_ _"),  # all to two experts, six are empty
        (5, 30, 1.0, Mesh(expert=2), "expert _"),
        (8, 32, 1.0, Mesh(data=2, expert=2), "data+expert _"),
    ],
)
def test_experts_stay_where_they_are(experts, tokens, skew, mesh, tokens_spec):
    model = Experts(experts, skew)
    x = torch.randn(tokens, WIDTH, dtype=torch.float64)
    gspmd.annotate(model, mesh, {"up": "expert _ _", "down": "expert _ _"})
    plan = gspmd.plan(model, x, mesh=mesh, in_specs=tokens_spec, grad=True)
    out, grads = plan.simulate(x)
    loss = model.whole(x)
    loss.backward()
    torch.testing.assert_close(out, loss.detach(), rtol=1e-10, atol=1e-10)
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-10, atol=1e-10)
    smallest = experts * WIDTH * HIDDEN * 8  # bytes of `down`
    assert all(c.payload_bytes < smallest for c in plan.collectives)
