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


class GShardLayer(nn.Module):
    """Experts as in GShard: the best two, with room for so many tokens of a group each. Returns a
    loss.

    mark, mark_tokens: functions of the masks and of the tokens at their experts.
    """

    def __init__(self, experts: int, width: int, hidden: int, capacity: int):
        super().__init__()
        self.experts, self.capacity = experts, capacity
        self.router = nn.Parameter(torch.randn(width, experts) / width**0.5)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)
        self.mark = self.mark_tokens = lambda t: t

    def forward(self, x: Tensor) -> Tensor:  # [group, sequence, width]
        gates, total, masks = (x @ self.router).softmax(-1), 1e-9, []
        before = both = 0
        for _ in range(2):
            rest = gates * (1 - sum(masks)) if masks else gates
            chosen = F.one_hot(rest.argmax(-1), self.experts).to(x.dtype)  # [g, s, e]
            place = chosen.cumsum(1) - chosen + before
            before = before + chosen.sum(1, keepdim=True)
            masks.append(chosen * (place < self.capacity))
            slot = F.one_hot((place * masks[-1]).sum(-1).long(), self.capacity).to(x.dtype)
            gate = (gates * masks[-1]).sum(-1)
            total = total + gate
            mask = gate[..., None, None] * masks[-1][..., None] * slot[:, :, None]
            both = both + mask
        combine = self.mark(both / total[..., None, None])  # [g, s, e, c]
        dispatch = self.mark((combine > 0).to(x.dtype))
        sent = self.mark_tokens(torch.einsum("gsec,gsm->egcm", dispatch, x))
        h = F.relu(torch.einsum("egcm,emh->egch", sent, self.up))
        out = self.mark_tokens(torch.einsum("egch,ehm->egcm", h, self.down))
        return torch.einsum("gsec,egcm->gsm", combine, out).square().sum()
