"""Small Transformer parts that the golden texts are of, with the usual layouts as marks. Letters: b
s batch and sequence, m width, n d heads and their width, h hidden width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import Mesh

TOKENS, WIDTH, HEADS = (
    (2, 32),
    64,
    4,
)  # few tokens: sending activations is cheaper than gathering weights
MANY = (8, 128)  # many tokens: the other way round


class MLP(nn.Module):
    def __init__(self, bias: bool = True):
        super().__init__()
        self.up, self.down = (
            nn.Linear(WIDTH, 4 * WIDTH, bias=bias),
            nn.Linear(4 * WIDTH, WIDTH, bias=bias),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )  # [b, n, s, d]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """stream: the layout of what runs between the sublayers, if it is to be marked."""

    def __init__(self, mesh: Mesh, stream: str | None = None):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), MLP(bias=False)
        self.mesh, self.stream = mesh, stream

    def mark(self, x: Tensor) -> Tensor:
        return x if self.stream is None else gspmd.mark_sharding(x, self.mesh, self.stream)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mark(x)
        x = self.mark(x + self.attention(self.norm1(x)))
        return self.mark(x + self.mlp(self.norm2(x)))


MEGATRON = {
    "attention.q.weight": "model _",
    "attention.k.weight": "model _",
    "attention.v.weight": "model _",
    "attention.out.weight": "_ model",
    "mlp.up.weight": "model _",
    "mlp.down.weight": "_ model",
}


def mlp(mesh: Mesh) -> nn.Module:
    torch.manual_seed(0)
    return gspmd.annotate(
        MLP(), mesh, {"up.weight": "model _", "up.bias": "model", "down.weight": "_ model"}
    )


def attention(mesh: Mesh) -> nn.Module:
    torch.manual_seed(0)
    return gspmd.annotate(
        Attention(),
        mesh,
        {f"{name}.weight": "model _" for name in "qkv"} | {"out.weight": "_ model"},
    )


def block(mesh: Mesh, layout: str) -> nn.Module:
    """layout: tp (weights), sp (weights and the stream along the sequence), dp, fsdp."""
    torch.manual_seed(0)
    module = Block(
        mesh, {"tp": None, "sp": "_ model _", "dp": "data _ _", "fsdp": "data _ _"}[layout]
    )
    if layout == "fsdp":
        for parameter in module.parameters():
            gspmd.mark_sharding(parameter, mesh, " ".join(["data", *"_" * (parameter.dim() - 1)]))
    elif layout == "dp":
        for parameter in module.parameters():
            gspmd.mark_sharding(parameter, mesh, " ".join("_" * parameter.dim()))
    else:
        gspmd.annotate(module, mesh, MEGATRON)
    return module
