"""A vision transformer written for one device, with marks that say how it lies on a mesh of
devices.

Letters in the comments: b batch, c channels, y x rows and columns of the image, s tokens (the class
token and the patches), m model width, n heads, d width of a head, h hidden width, k classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgspmd import Mesh, mark_sharding

# ------------------------------------------------------------------------------------------ layouts

# Data parallel: the batch is sharded, every device has all weights.
DP = {
    "images": "data _ _ _",  # [b, c, y, x]
    "labels": "data",  # [b]
    "patches": "data _ _ _",  # [b, m, y/patch, x/patch]
    # [b, s, m]       the residual stream, wherever a sublayer has added to it
    "stream": "data _ _",
    "heads": "data _ _ _",  # [b, s, n, d]    queries, keys and values
    "hidden": "data _ _",  # [b, s, h]       inside of the feed-forward layer
    "logits": "data _",  # [b, k]
    "position": "_ _",  # [s, m]
    "split": "_ _",  # [m, m], [h, m]  weights of queries, keys, values and hidden units
    "split_bias": "_",  # [m], [h]
    "join": "_ _",  # [m, m], [m, h]  weights from heads and hidden units back to the stream
}

# Tensor parallel (Megatron): each device has some heads and some hidden units, and computes them
# for all images.
TP = {name: spec.replace("data", "_") for name, spec in DP.items()} | {
    "heads": "_ _ model _",
    "hidden": "_ _ model",
    "split": "model _",
    "split_bias": "model",
    "join": "_ model",
}

# Both: some images, and some heads and hidden units.
DP_TP = (
    TP
    | {name: DP[name] for name in ("images", "labels", "patches", "stream", "logits")}
    | {
        "heads": "data _ model _",
        "hidden": "data _ model",
    }
)

# Spatial: each device has some rows of every image, and so some of the patches and tokens; images
# may be sharded as well.
SPATIAL = DP | {
    "images": "data _ model _",
    "patches": "data _ model _",
    "stream": "data model _",
    "heads": "data model _ _",
    "hidden": "data model _",
    "position": "model _",
}

LAYOUTS = {"dp": DP, "tp": TP, "dp_tp": DP_TP, "spatial": SPATIAL}


def layout_on(mesh: Mesh, name: str) -> dict[str, str]:
    """A layout's specs without the axes that the mesh does not have."""
    return {
        what: " ".join(axis if axis in mesh.names else "_" for axis in spec.split())
        for what, spec in LAYOUTS[name].items()
    }


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

    def __init__(self, config: Config, mesh: Mesh, layout: dict[str, str]):
        super().__init__()
        self.mesh, self.layout, self.heads = mesh, layout, config.heads
        self.query, self.key, self.value = (
            split(config.width, config.width, mesh, layout) for _ in range(3)
        )
        self.out = join(config.width, config.width, mesh, layout)

    def forward(self, x: Tensor) -> Tensor:  # x [b, s, m]
        q, k, v = (
            self.by_head(linear(x)) for linear in (self.query, self.key, self.value)
        )  # [b, n, s, d] each
        y = F.scaled_dot_product_attention(q, k, v)  # [b, n, s, d]
        return self.out(y.transpose(1, 2).flatten(2))  # [b, s, m]

    def by_head(self, x: Tensor) -> Tensor:  # [b, s, m]
        x = x.unflatten(-1, (self.heads, -1))  # [b, s, n, d]
        return mark_sharding(x, self.mesh, self.layout["heads"]).transpose(1, 2)  # [b, n, s, d]


class FeedForward(nn.Module):
    def __init__(self, config: Config, mesh: Mesh, layout: dict[str, str]):
        super().__init__()
        self.mesh, self.layout = mesh, layout
        hidden = config.hidden or 4 * config.width
        self.up = split(config.width, hidden, mesh, layout)
        self.down = join(hidden, config.width, mesh, layout)

    def forward(self, x: Tensor) -> Tensor:  # x [b, s, m]
        y = mark_sharding(self.up(x), self.mesh, self.layout["hidden"])  # [b, s, h]
        return self.down(F.gelu(y))  # [b, s, m]


class Block(nn.Module):
    def __init__(self, config: Config, mesh: Mesh, layout: dict[str, str]):
        super().__init__()
        self.mesh, self.layout = mesh, layout
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = Attention(config, mesh, layout)
        self.feed_forward = FeedForward(config, mesh, layout)

    def forward(self, x: Tensor) -> Tensor:  # x [b, s, m]
        x = mark_sharding(x + self.attention(self.norm1(x)), self.mesh, self.layout["stream"])
        x = mark_sharding(x + self.feed_forward(self.norm2(x)), self.mesh, self.layout["stream"])
        return x


class ViT(nn.Module):
    """images [b, c, y, x] -> logits [b, k], or with labels [b] the mean loss. The mesh of one
    device is plain PyTorch.
    """

    def __init__(self, config: Config, mesh: Mesh = Mesh(data=1, model=1), layout: str = "dp"):
        super().__init__()
        self.config, self.mesh, self.layout = config, mesh, layout_on(mesh, layout)
        tokens = 1 + (config.size // config.patch) ** 2
        self.patches = nn.Conv2d(config.channels, config.width, config.patch, stride=config.patch)
        self.class_token = nn.Parameter(torch.zeros(config.width))  # [m]
        self.position = nn.Parameter(torch.randn(tokens, config.width) * 0.5)  # [s, m]
        self.blocks = nn.ModuleList(Block(config, mesh, self.layout) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.classes)
        mark_sharding(self.position, mesh, self.layout["position"])

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:  # [b, c, y, x], [b]
        images = mark_sharding(images, self.mesh, self.layout["images"])
        x = mark_sharding(
            self.patches(images), self.mesh, self.layout["patches"]
        )  # [b, m, y/patch, x/patch]
        x = x.flatten(2).transpose(1, 2)  # [b, s - 1, m]
        x = (
            torch.cat([self.class_token.expand(len(x), 1, -1), x], dim=1) + self.position
        )  # [b, s, m]
        x = mark_sharding(x, self.mesh, self.layout["stream"])
        for block in self.blocks:
            x = block(x)  # [b, s, m]
        logits = mark_sharding(
            self.head(self.norm(x[:, 0])), self.mesh, self.layout["logits"]
        )  # [b, k]
        if labels is None:
            return logits
        return F.cross_entropy(
            logits, mark_sharding(labels, self.mesh, self.layout["labels"])
        )  # a scalar


def split(width: int, units: int, mesh: Mesh, layout: dict[str, str]) -> nn.Linear:
    """From the stream to units that may be divided."""
    linear = nn.Linear(width, units)
    mark_sharding(linear.weight, mesh, layout["split"])  # [units, m]
    mark_sharding(linear.bias, mesh, layout["split_bias"])  # [units]
    return linear


def join(units: int, width: int, mesh: Mesh, layout: dict[str, str]) -> nn.Linear:
    """And back."""
    linear = nn.Linear(units, width)
    mark_sharding(linear.weight, mesh, layout["join"])  # [m, units]
    return linear


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
    return ViT(config, mesh, layout).bfloat16(), (images, torch.zeros(batch, dtype=torch.long))
