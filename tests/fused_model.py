"""A block with fused weights, as GPT-2, ViT, Phi-3 and DiT have them, and the same with three."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS = 24, 6
MARKS = {
    "c_attn.weight": "model _",
    "c_attn.bias": "model",
    "gate_up.weight": "model _",
    "c_proj.weight": "_ model",
    "down.weight": "_ model",
}
SEPARATE = {
    "[qkv].weight": "model _",
    "[qkv].bias": "model",
    "gate.weight": "model _",
    "up.weight": "model _",
    "c_proj.weight": "_ model",
    "down.weight": "_ model",
}


class Conv1D(nn.Module):
    """A linear map with the transposed weight, as OpenAI's GPT-2 has it."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, outputs) * 0.2)
        self.bias = nn.Parameter(torch.randn(outputs) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return y.view(*x.shape[:-1], -1)


class Block(nn.Module):
    """cut: how queries, keys and values are cut out of one product; "separate": three weights."""

    def __init__(self, cut: str) -> None:
        super().__init__()
        self.cut, self.norm = cut, nn.LayerNorm(WIDTH)
        if cut == "separate":
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        else:
            self.c_attn = (Conv1D if cut == "conv1d" else nn.Linear)(WIDTH, 3 * WIDTH)
            self.gate_up = nn.Linear(WIDTH, 8 * WIDTH, bias=False)
        self.c_proj, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values, [b, h, t, d]."""
        b, t, c = x.shape
        if self.cut == "separate":
            parts = self.q(x), self.k(x), self.v(x)
        else:
            y = self.c_attn(x)
            if self.cut in ("vit", "index"):
                y = y.reshape(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
                return y.unbind(0) if self.cut == "vit" else (y[0], y[1], y[2])
            if self.cut == "slices":
                parts = y[..., :c], y[..., c : 2 * c], y[..., 2 * c :]
            elif self.cut == "chunk":
                parts = y.chunk(3, -1)
            elif self.cut == "unflatten":
                parts = y.unflatten(-1, (3, c)).unbind(2)
            else:
                parts = y.split(c, dim=2)
        return tuple(p.view(b, t, HEADS, c // HEADS).transpose(1, 2) for p in parts)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        y = F.scaled_dot_product_attention(*self.heads(self.norm(x)), is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        if self.cut == "separate":
            gate, up = self.gate(x), self.up(x)
        else:
            gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)
