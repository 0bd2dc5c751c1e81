"""An encoder of pictures and a decoder of text written for one device. Their marks name dimensions;
a layout says how these lie on a mesh, otherwise in the encoder than in the decoder.

Letters in the comments: b batch, c channels, y x rows and columns of a picture, s its points (y x),
u letters, l layers of the decoder, m model width, n heads, d width of a head, h hidden width, v
letters of the alphabet.
"""

from __future__ import annotations

import math
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

# Data parallel: each device has some pictures and their texts.
DP = Layout({"batch": "data", "rows": None, "heads": None, "hidden": None, "letters": None})

# The decoder is Megatron's along `model`; the encoder is computed by all of these devices alike.
TP = DP | Layout({"heads": "model", "hidden": "model", "letters": "model"})

# The same devices have some rows of a picture each while it is encoded. Then every one sends the
# others what they need for their heads.
SPACE_TP = TP | Layout({"rows": "model"})

LAYOUTS = {"dp": DP, "tp": TP, "space": DP | Layout({"rows": "model"}), "space_tp": SPACE_TP}


# -------------------------------------------------------------------------------------------- model


@dataclass(frozen=True)
class Config:
    rows: int
    columns: int
    alphabet: int = 28
    letters: int = 18  # of the longest text
    channels: int = 16  # of the first convolution; the others have twice as many
    convolutions: int = 2
    layers: int = 2
    heads: int = 4
    width: int = 64
    hidden: int = 0  # of the feed-forward layer; 0: 4 x width


class Encoder(nn.Module):
    """pictures [b, 1, y, x] -> [b, y/4, x/4, m]."""

    def __init__(self, config: Config):
        super().__init__()
        c, m = config.channels, config.width
        self.strided = nn.ModuleList(
            nn.Conv2d(i, o, 3, stride=2, padding=1) for i, o in ((1, c), (c, 2 * c))
        )
        self.others = nn.ModuleList(
            nn.Conv2d(2 * c, 2 * c, 3, padding=1) for _ in range(config.convolutions)
        )
        y, x = (-(-n // 4) for n in (config.rows, config.columns))
        self.place = nn.Parameter(torch.randn(y, x, m) * 0.1)
        self.project, self.norm = nn.Linear(2 * c, m), nn.LayerNorm(m)
        mark_sharding(self.place, "rows _ _")

    def forward(self, x: Tensor) -> Tensor:
        x = mark_sharding(x, "batch _ rows _")
        for convolution in self.strided:
            x = mark_sharding(F.gelu(convolution(x)), "batch _ rows _")  # [b, c, y/2, x/2]
        for convolution in self.others:
            x = mark_sharding(x + F.gelu(convolution(x)), "batch _ rows _")  # [b, 2c, y/4, x/4]
        x = self.project(x.movedim(1, -1)) + self.place  # [b, y/4, x/4, m]
        return self.norm(mark_sharding(x, "batch rows _ _"))


class Bridge(nn.Module):
    """[b, y, x, m] -> keys and values of all layers of the decoder, [2, l, b, n, s, d].

    They are computed where the rows are, and go to where the heads are: one all_to_all.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.parts = (2 * config.layers, config.heads, config.width // config.heads)
        self.linear = nn.Linear(config.width, math.prod(self.parts))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).unflatten(-1, self.parts)  # [b, y, x, 2 l, n, d]
        x = x.transpose(3, 4).flatten(4)  # [b, y, x, n, 2 l d]: XLA has marks of five dimensions
        x = mark_sharding(x, "batch rows _ _ _")
        x = mark_sharding(x, "batch _ _ heads _").flatten(1, 2)  # [b, s, n, 2 l d]
        return x.unflatten(-1, (2, -1, self.parts[-1])).permute(3, 4, 0, 2, 1, 5)


class Attention(nn.Module):
    """Causal attention of letters to letters, and attention to the picture."""

    def __init__(self, config: Config):
        super().__init__()
        self.heads, m = config.heads, config.width
        self.query, self.key, self.value, self.ask = (split(m, m, "heads") for _ in range(4))
        self.out, self.told = join(m, m, "heads"), join(m, m, "heads")
        self.norm1, self.norm2 = nn.LayerNorm(m), nn.LayerNorm(m)

    def forward(self, x: Tensor, picture: Tensor) -> Tensor:  # [b, u, m], [2, b, n, s, d]
        y = self.norm1(x)
        q, k, v = (self.by_head(f(y)) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [b, n, u, d]
        x = mark_sharding(x + self.out(y.transpose(1, 2).flatten(2)), "batch _ _")
        q = self.by_head(self.ask(self.norm2(x)))  # [b, n, u, d]
        y = F.scaled_dot_product_attention(q, picture[0], picture[1])  # [b, n, u, d]
        return mark_sharding(x + self.told(y.transpose(1, 2).flatten(2)), "batch _ _")

    def by_head(self, x: Tensor) -> Tensor:  # [b, u, m] -> [b, n, u, d]
        x = x.unflatten(-1, (self.heads, -1))  # [b, u, n, d]
        return mark_sharding(x, "batch _ heads _").transpose(1, 2)


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        hidden = config.hidden or 4 * config.width
        self.attention, self.norm = Attention(config), nn.LayerNorm(config.width)
        self.up, self.down = (
            split(config.width, hidden, "hidden"),
            join(hidden, config.width, "hidden"),
        )

    def forward(self, x: Tensor, picture: Tensor) -> Tensor:  # [b, u, m], [2, b, n, s, d]
        x = self.attention(x, picture)
        y = mark_sharding(F.gelu(self.up(self.norm(x))), "batch _ hidden")  # [b, u, h]
        return mark_sharding(x + self.down(y), "batch _ _")


class Reader(nn.Module):
    """pictures [b, 1, y, x], letters [b, u] -> logits of the next ones [b, u, v], or with these
    [b, u] the mean loss.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config, m = config, config.width
        self.encoder, self.bridge = Encoder(config), Bridge(config)
        self.embedding = nn.Embedding(config.alphabet, m)
        self.position = nn.Parameter(torch.randn(config.letters, m) * 0.1)  # [u, m]
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm, self.head = nn.LayerNorm(m), split(m, config.alphabet, "letters")

    def forward(self, pictures: Tensor, letters: Tensor, targets: Tensor | None = None) -> Tensor:
        keys, values = self.bridge(self.encoder(pictures))  # [l, b, n, s, d] each
        x = self.embedding(mark_sharding(letters, "batch _")) + self.position  # [b, u, m]
        x = mark_sharding(x, "batch _ _")
        for i, block in enumerate(self.blocks):
            x = block(x, torch.stack([keys[i], values[i]]))  # [b, u, m]
        logits = mark_sharding(self.head(self.norm(x)), "batch _ letters")
        if targets is None:
            return logits
        return F.cross_entropy(logits.transpose(1, 2), mark_sharding(targets, "batch _"))


def example(
    mesh: Mesh,
    layout: str = "space_tp",
    batch: int = 64,
    size: int = 1024,
    letters: int = 512,
    layers: int = 24,
    heads: int = 16,
    width: int = 2048,
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and a batch for `python -m torchgspmd plan`, in bfloat16."""
    config = Config(size, size, 32000, letters, 128, 8, layers, heads, width)
    tokens = torch.zeros(batch, letters, dtype=torch.long)
    pictures = torch.zeros(batch, 1, size, size, dtype=torch.bfloat16)
    model = annotate(Reader(config).bfloat16(), LAYOUTS[layout].on(mesh))
    return model, (pictures, tokens, tokens)
