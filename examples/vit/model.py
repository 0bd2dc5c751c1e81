"""A vision transformer written for one device. Its marks name dimensions; a layout says how these
lie on a mesh.

Letters in the comments: b batch, c channels, y x rows and columns of the image, s tokens (the class
token and the patches), m model width, n heads, d width of a head, h hidden width, k classes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgspmd import Layout, Mesh, annotate, mark_sharding

sys.path.append(str(Path(__file__).resolve().parent.parent))
from common.layers import join, split

# ------------------------------------------------------------------------------------------ layouts

# Marks name the dimensions of a tensor; a layout says by which axes these are sharded. Where two
# names want one axis, the first one of the table has it.

# Data parallel: the batch is sharded, every device has all weights.
DP = Layout(
    {
        "batch": "data",
        "rows": None,  # of images and of patches
        "heads": None,
        "hidden": None,  # of the feed-forward layer
        "tokens": None,  # of the residual stream, patches and the class token
    }
)

# Tensor parallel (Megatron): each device has some heads and some hidden units, and computes them
# for all images.
TP = DP | Layout({"batch": None, "heads": "model", "hidden": "model"})

# Both: some images, and some heads and hidden units.
DP_TP = TP | Layout({"batch": "data"})

# Spatial: each device has some rows of every image, and so some of the patches and tokens; images
# may be sharded as well.
SPATIAL = DP | Layout({"rows": "model", "tokens": "model"})

LAYOUTS = {"dp": DP, "tp": TP, "dp_tp": DP_TP, "spatial": SPATIAL}


# -------------------------------------------------------------------------------------------- model


@dataclass(frozen=True)
class Config:
    size: int = 28  # rows and columns of an image
    patch: int = 4  # rows and columns of a patch
    channels: int = 1
    classes: int = 10
    layers: int = 4
    heads: int = 4
    width: int = 64
    hidden: int = 0  # of the feed-forward layer; 0: 4 x width


class Attention(nn.Module):
    """Self-attention of all tokens."""

    def __init__(self, config: Config):
        super().__init__()
        self.heads = config.heads
        self.query, self.key, self.value = (
            split(config.width, config.width, "heads") for _ in range(3)
        )
        self.out = join(config.width, config.width, "heads")

    def forward(self, x: Tensor) -> Tensor:  # x [b, s, m]
        q, k, v = (
            self.by_head(linear(x)) for linear in (self.query, self.key, self.value)
        )  # [b, n, s, d] each
        y = F.scaled_dot_product_attention(q, k, v)  # [b, n, s, d]
        return self.out(y.transpose(1, 2).flatten(2))  # [b, s, m]

    def by_head(self, x: Tensor) -> Tensor:  # [b, s, m]
        x = x.unflatten(-1, (self.heads, -1))  # [b, s, n, d]
        return mark_sharding(x, "batch tokens heads _").transpose(1, 2)  # [b, n, s, d]


class FeedForward(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        hidden = config.hidden or 4 * config.width
        self.up = split(config.width, hidden, "hidden")
        self.down = join(hidden, config.width, "hidden")

    def forward(self, x: Tensor) -> Tensor:  # x [b, s, m]
        y = mark_sharding(self.up(x), "batch tokens hidden")  # [b, s, h]
        return self.down(F.gelu(y))  # [b, s, m]


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:  # x [b, s, m]
        x = mark_sharding(x + self.attention(self.norm1(x)), "batch tokens _")
        x = mark_sharding(x + self.feed_forward(self.norm2(x)), "batch tokens _")
        return x


class ViT(nn.Module):
    """images [b, c, y, x] -> logits [b, k], or with labels [b] the mean loss."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        tokens = 1 + (config.size // config.patch) ** 2
        self.patches = nn.Conv2d(config.channels, config.width, config.patch, stride=config.patch)
        self.class_token = nn.Parameter(torch.zeros(config.width))  # [m]
        self.position = nn.Parameter(torch.randn(tokens, config.width) * 0.5)  # [s, m]
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.classes)
        mark_sharding(self.position, "tokens _")

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:  # [b, c, y, x], [b]
        images = mark_sharding(images, "batch _ rows _")
        x = mark_sharding(self.patches(images), "batch _ rows _")  # [b, m, y/patch, x/patch]
        x = x.flatten(2).transpose(1, 2)  # [b, s - 1, m]
        x = (
            torch.cat([self.class_token.expand(len(x), 1, -1), x], dim=1) + self.position
        )  # [b, s, m]
        x = mark_sharding(x, "batch tokens _")
        for block in self.blocks:
            x = block(x)  # [b, s, m]
        logits = mark_sharding(self.head(self.norm(x[:, 0])), "batch _")  # [b, k]
        if labels is None:
            return logits
        return F.cross_entropy(logits, mark_sharding(labels, "batch"))  # a scalar


def example(
    mesh: Mesh,
    layout: str = "dp_tp",
    batch: int = 64,
    size: int = 224,
    patch: int = 16,
    layers: int = 12,
    heads: int = 12,
    width: int = 768,
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and a batch for `python -m torchgspmd plan`, in bfloat16."""
    config = Config(size, patch, 3, 1000, layers, heads, width)
    images = torch.zeros(batch, 3, size, size, dtype=torch.bfloat16)
    model = annotate(ViT(config).bfloat16(), LAYOUTS[layout].on(mesh))
    return model, (images, torch.zeros(batch, dtype=torch.long))
