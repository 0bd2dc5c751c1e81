"""The dense Transformers of GSPMD (arXiv 2105.04663, section 5.1), with its finalized 2-D layout.

Letters in the comments: b batch, s sequence, m model width, n heads, d width of a head, h hidden
width, v vocabulary. Only the shapes are those of the published configurations; nothing is trained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgspmd import Layout, Mesh, mark_sharding
from torchgspmd.layout.layout_rules import MeshLayout

# Every weight is on both axes, and so is the residual stream between the layers.
LAYOUT = Layout(
    {"batch": "x", "embed": "x", "heads": "y", "hidden": "y", "words": "y", "width": "y"}
)


@dataclass(frozen=True)
class Config:
    layers: int
    width: int
    hidden: int
    heads: int
    head: int  # width of one
    sequence: int
    vocabulary: int = 32000


CONFIGS = {
    "69.0B": Config(32, 8192, 65536, 128, 256, 1024),
    "137.7B": Config(64, 8192, 65536, 128, 256, 1024),
    "275.1B": Config(128, 8192, 65536, 128, 256, 1024),
    "174.4B": Config(96, 12288, 49152, 96, 128, 2048),
    "550.3B": Config(64, 16384, 131072, 256, 256, 512),
    "1.10T": Config(128, 16384, 131072, 256, 256, 512),
}


class Weight(nn.Module):
    """A weight with its mark."""

    def __init__(self, layout: MeshLayout, names: str, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))
        mark_sharding(self.weight, layout, names)


class Block(nn.Module):
    def __init__(self, c: Config, layout: MeshLayout):
        super().__init__()
        self.layout = layout
        self.norm1, self.norm2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.qkv = Weight(layout, "_ embed heads _", 3, c.width, c.heads, c.head)  # [3, m, n, d]
        self.out = Weight(layout, "heads _ embed", c.heads, c.head, c.width)  # [n, d, m]
        self.up = Weight(layout, "embed hidden", c.width, c.hidden)  # [m, h]
        self.down = Weight(layout, "hidden embed", c.hidden, c.width)  # [h, m]

    def forward(self, x: Tensor) -> Tensor:  # x [b, s, m]
        q, k, v = (
            mark_sharding(
                torch.einsum("bsm,mnd->bnsd", self.norm1(x), w), self.layout, "batch heads _ _"
            )
            for w in self.qkv.weight.unbind()
        )  # [b, n, s, d] each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [b, n, s, d]
        y = torch.einsum("bnsd,ndm->bsm", y, self.out.weight)  # [b, s, m]
        x = mark_sharding(x + y, self.layout, "batch _ width")
        y = mark_sharding(self.norm2(x) @ self.up.weight, self.layout, "batch _ hidden")
        return mark_sharding(x + F.gelu(y) @ self.down.weight, self.layout, "batch _ width")


class Dense(nn.Module):
    """tokens [b, s], targets [b, s] -> the mean loss."""

    def __init__(self, c: Config, mesh: Mesh):
        super().__init__()
        self.layout = layout = LAYOUT.on(mesh)
        self.embedding = Weight(layout, "words embed", c.vocabulary, c.width)  # [v, m]
        self.blocks = nn.ModuleList(Block(c, layout) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = F.embedding(mark_sharding(tokens, self.layout, "batch _"), self.embedding.weight)
        x = mark_sharding(x, self.layout, "batch _ width")  # [b, s, m]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)  # [b, s, v]
        logits = mark_sharding(logits, self.layout, "batch _ words")
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def example(
    mesh: Mesh, size: str = "137.7B", batch: int = 0, layers: int = 0
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model in bfloat16 and a batch; by default a sequence for every device along x."""
    config = CONFIGS[size]
    config = replace(config, layers=layers or config.layers)
    tokens = torch.zeros(batch or mesh.count(("x",)), config.sequence, dtype=torch.long)
    return Dense(config, mesh).bfloat16(), (tokens, tokens)
