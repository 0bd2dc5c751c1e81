"""A Conformer written for one device. Its marks name dimensions; a layout says how these lie on a
mesh.

Letters in the comments: b batch, t frames, f frequency bands, c channels, m model width, n heads, d
width of a head, h hidden width, k blocks of w frames, u letters of a sentence, v letters of the
alphabet. A frame attends to those at most w frames away: all that frames want of others lies near,
so that a long recording can be divided in time.
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

# Data parallel: the batch is sharded, every device has all weights.
DP = Layout(
    {
        "batch": "data",
        "time": None,
        "heads": None,
        "hidden": None,  # of the feed-forward layers
        "channels": None,  # of the convolutions between them
    }
)

# Tensor parallel: each device has some heads, hidden units and channels.
TP = DP | Layout({"heads": "model", "hidden": "model", "channels": "model"})

# Each device has a part of every recording, and some frames of its neighbours.
TIME = DP | Layout({"time": "time"})

LAYOUTS = {"dp": DP, "tp": TP, "time": TIME, "time_tp": TP | Layout({"time": "time"})}


# -------------------------------------------------------------------------------------------- model


@dataclass(frozen=True)
class Config:
    bands: int = 40
    alphabet: int = 28
    layers: int = 2
    heads: int = 4
    width: int = 96
    hidden: int = 0  # of the feed-forward layers; 0: 4 x width
    kernel: int = 15  # frames of the depthwise convolution
    window: int = 16  # frames to each side that are attended to


class FeedForward(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        hidden = config.hidden or 4 * config.width
        self.norm = nn.LayerNorm(config.width)
        self.up, self.down = (
            split(config.width, hidden, "hidden"),
            join(hidden, config.width, "hidden"),
        )

    def forward(self, x: Tensor) -> Tensor:  # x [b, t, m]
        y = mark_sharding(self.up(self.norm(x)), "batch time hidden")  # [b, t, h]
        return self.down(F.silu(y))  # [b, t, m]


class Attention(nn.Module):
    """Of frames that are near, by what they are and by how far away (Transformer-XL's four terms).

    Blocks of w frames attend to themselves and to the blocks before and behind.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.heads, self.window, m = config.heads, config.window, config.width
        self.norm = nn.LayerNorm(m)
        self.query, self.key, self.value = (split(m, m, "heads") for _ in range(3))
        self.out = join(m, config.width, "heads")
        head = m // config.heads
        self.distance = nn.Parameter(torch.randn(2 * config.window + 1, self.heads, head) * 0.1)
        self.content_bias = nn.Parameter(torch.zeros(self.heads, head))  # [n, d]
        self.distance_bias = nn.Parameter(torch.zeros(self.heads, head))  # [n, d]
        mark_sharding(self.distance, "_ heads _")
        mark_sharding(self.content_bias, "heads _")
        mark_sharding(self.distance_bias, "heads _")

    def forward(self, x: Tensor, there: Tensor) -> Tensor:  # x [b, t, m], there [b, t]
        w, x = self.window, self.norm(x)
        q, k, v = (self.blocks(linear(x)) for linear in (self.query, self.key, self.value))
        k, v = near(k), near(v)  # [b, k, 3w, n, d]
        away = torch.arange(3 * w, device=x.device) - w - torch.arange(w, device=x.device)[:, None]
        far = away.abs() > w  # [w, 3w]
        distance = self.distance[away.clamp(-w, w) + w]  # [w, 3w, n, d]
        scores = torch.einsum("bkind,bkjnd->bknij", q + self.content_bias, k)  # [b, k, n, w, 3w]
        scores = scores + torch.einsum("bkind,ijnd->bknij", q + self.distance_bias, distance)
        keys = near(there.unflatten(1, (-1, w)))  # [b, k, 3w]
        allowed = (keys[:, :, None, None] > 0) & ~far  # [b, k, 1, w, 3w]
        scores = (scores * q.shape[-1] ** -0.5).masked_fill(~allowed, -1e9)
        y = torch.einsum("bknij,bkjnd->bkind", scores.softmax(-1), v)  # [b, k, w, n, d]
        return self.out(y.flatten(3).flatten(1, 2))  # [b, t, m]

    def blocks(self, x: Tensor) -> Tensor:  # [b, t, m] -> [b, k, w, n, d]
        x = x.unflatten(2, (self.heads, -1)).unflatten(1, (-1, self.window))
        return mark_sharding(x, "batch time _ heads _")


def near(x: Tensor) -> Tensor:
    """Each block between its neighbours, zeros at the ends, [b, k, w, ...] -> [b, k, 3w, ...]."""
    padded = F.pad(x, [0, 0] * (x.dim() - 2) + [1, 1])  # [b, k + 2, w, ...]
    return torch.cat([padded[:, :-2], x, padded[:, 2:]], dim=2)


class Convolution(nn.Module):
    """Of every channel along time, between two layers across channels."""

    def __init__(self, config: Config):
        super().__init__()
        m, kernel = config.width, config.kernel
        self.norm = nn.LayerNorm(m)
        self.inner, self.gate = split(m, m, "channels"), split(m, m, "channels")
        self.along = nn.Conv1d(m, m, kernel, padding=kernel // 2, groups=m, bias=False)  # depthwise
        self.scale = nn.Parameter(torch.ones(m))  # in the place of a batch norm
        self.shift = nn.Parameter(torch.zeros(m))
        self.out = join(m, config.width, "channels")
        mark_sharding(self.along.weight, "channels _ _")
        mark_sharding(self.scale, "channels")
        mark_sharding(self.shift, "channels")

    def forward(self, x: Tensor, there: Tensor) -> Tensor:  # x [b, t, m], there [b, t]
        x = self.norm(x)
        x = self.inner(x) * self.gate(x).sigmoid() * there[:, :, None]  # [b, t, m]
        x = mark_sharding(self.along(x.transpose(1, 2)), "batch channels time")  # [b, m, t]
        return self.out(F.silu(x.transpose(1, 2) * self.scale + self.shift))  # [b, t, m]


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.before, self.behind = FeedForward(config), FeedForward(config)
        self.attention, self.convolution = Attention(config), Convolution(config)
        self.norm = nn.LayerNorm(config.width)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:  # x [b, t, m], there [b, t]
        x = mark_sharding(x + 0.5 * self.before(x), "batch time _")
        x = mark_sharding(x + self.attention(x, there), "batch time _")
        x = mark_sharding(x + self.convolution(x, there), "batch time _")
        x = mark_sharding(x + 0.5 * self.behind(x), "batch time _")
        return self.norm(x)


class Conformer(nn.Module):
    """features [b, t, f], frames [b] -> logarithms of probabilities [t/4, b, v], or with letters
    [b, u] and lengths [b] the mean loss (CTC).
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config, m = config, config.width
        channels = m // 4
        self.strided = nn.ModuleList(  # each leaves every second frame and band
            nn.Conv2d(c, channels, 3, stride=2, padding=1) for c in (1, channels)
        )
        self.project = nn.Linear(channels * -(-config.bands // 4), m)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = nn.Linear(m, config.alphabet)

    def forward(
        self,
        features: Tensor,
        frames: Tensor,
        letters: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        x = mark_sharding(features, "batch time _").unsqueeze(1)  # [b, 1, t, f]
        for convolution in self.strided:
            x = mark_sharding(F.relu(convolution(x)), "batch _ time _")  # [b, c, t/2, f/2]
            frames = (frames + 1) // 2
        x = self.project(x.transpose(1, 2).flatten(2))  # [b, t/4, m]
        x = F.pad(x, (0, 0, 0, -x.shape[1] % self.config.window))  # whole blocks
        x = mark_sharding(x, "batch time _")
        there = (torch.arange(x.shape[1], device=x.device) < frames[:, None]).to(x.dtype)
        for block in self.blocks:
            x = block(x, there)  # [b, t/4, m]
        logits = mark_sharding(self.head(x), "batch time _").transpose(0, 1)  # [t/4, b, v]
        odds = logits.log_softmax(-1)
        if letters is None or lengths is None:
            return odds
        return F.ctc_loss(odds, letters, frames, lengths, zero_infinity=True)


def example(
    mesh: Mesh,
    layout: str = "time",
    batch: int = 16,
    frames: int = 30000,
    layers: int = 24,
    heads: int = 8,
    width: int = 1024,
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and a batch for `python -m torchgspmd plan`, in bfloat16: 0.6 billion parameters,
    as BigSSL has, and five minutes of speech.
    """
    config = Config(80, 1024, layers, heads, width, window=128)
    features = torch.zeros(batch, frames, 80, dtype=torch.bfloat16)
    ones = torch.ones(batch, dtype=torch.long)
    letters = torch.ones(batch, 800, dtype=torch.long)
    model = annotate(Conformer(config).bfloat16(), LAYOUTS[layout].on(mesh))
    return model, (features, ones * frames, letters, ones * 800)
