"""A BERT written for one device. Its marks name dimensions; a layout says how these lie on a mesh.

Letters in the comments: b batch, s sequence, p words to be told, m model width, n heads, d width of
a head, h hidden width, v vocabulary. As in RoBERTa, nothing asks which sentence follows which; as
in T5, a place is a distance from another one, and norms stand before what they are for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgspmd import Layout, Mesh, annotate, mark_sharding

# ------------------------------------------------------------------------------------------ layouts

# Marks name the dimensions of a tensor; a layout says by which axes these are sharded.

# Data parallel: the batch is sharded, every device has all weights.
DP = Layout(
    {
        "batch": "data",
        "heads": None,
        "hidden": None,  # of the feed-forward layer
        "words": None,  # of the vocabulary
        "embed": None,  # m of matrices
        "width": None,  # m of vectors
    }
)

# Tensor parallel (Megatron): each device has some heads, hidden units and words of the vocabulary.
TP = DP | Layout({"heads": "model", "hidden": "model", "words": "model"})

# Weight-update sharding: what is not divided yet is stored, and updated, in parts along the batch.
ZERO = Layout({"embed": "data", "width": "data"})

LAYOUTS = {"dp": DP, "tp": TP, "zero": TP | ZERO, "dp_zero": DP | ZERO}


# -------------------------------------------------------------------------------------------- model


@dataclass(frozen=True)
class Config:
    vocabulary: int
    context: int = 32  # longest sequence
    layers: int = 2
    heads: int = 4
    width: int = 96
    hidden: int = 0  # of the feed-forward layer; 0: 4 x width


class Linear(nn.Linear):
    """rows, columns: names of the dimensions of its weight."""

    def __init__(self, inner: int, outer: int, rows: str, columns: str):
        super().__init__(inner, outer)
        mark_sharding(self.weight, f"{rows} {columns}")
        mark_sharding(self.bias, "width" if rows == "embed" else rows)


class Norm(nn.LayerNorm):
    def __init__(self, config: Config):
        super().__init__(config.width)
        mark_sharding(self.weight, "width")  # [m]
        mark_sharding(self.bias, "width")  # [m]


class Attention(nn.Module):
    """Self-attention in both directions, by what words are and by how far away."""

    def __init__(self, config: Config):
        super().__init__()
        self.heads, m = config.heads, config.width
        self.distance = nn.Parameter(torch.zeros(self.heads, 2 * config.context - 1))
        mark_sharding(self.distance, "heads _")
        self.query, self.key, self.value = (Linear(m, m, "heads", "embed") for _ in range(3))
        self.out = Linear(m, m, "embed", "heads")

    def forward(self, x: Tensor) -> Tensor:  # x [b, s, m]
        q, k, v = (self.by_head(linear(x)) for linear in (self.query, self.key, self.value))
        place, last = torch.arange(x.shape[1], device=x.device), self.distance.shape[1] // 2
        bias = self.distance[:, place[:, None] - place + last]  # [n, s, s]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])  # [b, n, s, d]
        return self.out(y.transpose(1, 2).flatten(2))  # [b, s, m]

    def by_head(self, x: Tensor) -> Tensor:  # [b, s, m] -> [b, n, s, d]
        x = x.unflatten(-1, (self.heads, -1))  # [b, s, n, d]
        return mark_sharding(x, "batch _ heads _").transpose(1, 2)


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        hidden = config.hidden or 4 * config.width
        self.attention, self.norm1 = Attention(config), Norm(config)
        self.up = Linear(config.width, hidden, "hidden", "embed")
        self.down = Linear(hidden, config.width, "embed", "hidden")
        self.norm2 = Norm(config)

    def forward(self, x: Tensor) -> Tensor:  # x [b, s, m]
        x = mark_sharding(x + self.attention(self.norm1(x)), "batch _ _")
        y = mark_sharding(F.gelu(self.up(self.norm2(x))), "batch _ hidden")  # [b, s, h]
        return mark_sharding(x + self.down(y), "batch _ _")


class Bert(nn.Module):
    """tokens [b, s], places [b, p] -> logits [b, p, v], or with targets [b, p] the mean loss."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        v, m = config.vocabulary, config.width
        self.embedding = nn.Parameter(torch.randn(v, m) * 0.02)  # [v, m], also the head
        self.norm = Norm(config)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.transform, self.transform_norm = Linear(m, m, "embed", "_"), Norm(config)
        self.bias = nn.Parameter(torch.zeros(v))  # [v]
        mark_sharding(self.embedding, "words embed")
        mark_sharding(self.bias, "words")

    def forward(self, tokens: Tensor, places: Tensor, targets: Tensor | None = None) -> Tensor:
        tokens, places = (mark_sharding(t, "batch _") for t in (tokens, places))
        x = F.embedding(tokens, self.embedding)  # [b, s, m]
        x = self.norm(self.blocks(mark_sharding(x, "batch _ _")))  # [b, s, m]
        x = x.gather(1, places[:, :, None].expand(-1, -1, x.shape[2]))  # [b, p, m]
        x = self.transform_norm(F.gelu(self.transform(mark_sharding(x, "batch _ _"))))
        logits = mark_sharding(F.linear(x, self.embedding, self.bias), "batch _ words")
        if targets is None:
            return logits
        return F.cross_entropy(logits.transpose(1, 2), mark_sharding(targets, "batch _"))


def example(
    mesh: Mesh,
    layout: str = "zero",
    batch: int = 256,
    context: int = 512,
    layers: int = 24,
    heads: int = 16,
    width: int = 1024,
    vocabulary: int = 30522,
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and a batch for `python -m torchgspmd plan`, in bfloat16: BERT large."""
    model = Bert(Config(vocabulary, context, layers, heads, width)).bfloat16()
    tokens = torch.zeros(batch, context, dtype=torch.long)
    places = tokens[:, : round(0.15 * context)]
    return annotate(model, LAYOUTS[layout].on(mesh)), (tokens, places, places)
