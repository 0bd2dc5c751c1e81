"""Published models, two layers of each, whose plans lie in tests/golden_plans.

    torchgspmd check tests/golden_models.py model=Llama-8B tests/golden_plans/Llama-8B,data=64.txt

Widths, heads and experts are those of the models; rotary positions, which are elementwise, are left
out. Weights are sharded over `data` as they are stored (FSDP), over `model` in tensor parallelism,
and experts over `expert`. An axis that a mesh lacks is left out of its layout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchgspmd as gspmd

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]
from published_models import (  # noqa: E402
    Attention,
    Block,
    Crossing,
    Decoder,
    Experts,
    Feed,
    LatentAttention,
    ParallelBlock,
    Vision,
    weight,
)

from examples.unet3d.model import DP, Config, UNet  # noqa: E402

LAYERS, LENGTH = 2, 4096
DENSE = ("data=64", "data=8,model=8", "data=4,seq=2,model=8")
SPARSE = ("data=8,expert=8", "data=4,expert=8,model=2", "data=32,expert=8")
SPATIAL = ("data=8", "data=2,space=4", "data=2,space=2,rows=2")
Made = tuple[nn.Module, tuple[Tensor, ...]]


class NormedAttention(Attention):
    """Queries and keys have a norm of their own (Qwen3)."""

    def __init__(self, width: int, heads: int, keys: int, head: int) -> None:
        super().__init__(width, heads, keys, head, causal=True)
        self.norm_q, self.norm_k = nn.RMSNorm(head), nn.RMSNorm(head)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        q, k, v = (torch.einsum("bsd,dhk->bhsk", y, w) for w in (self.q, self.k, self.v))
        q, k = self.norm_q(q), self.norm_k(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return torch.einsum("bhsk,hkd->bsd", y, self.o)


class SinkAttention(Attention):
    """A score that takes part in the softmax and mixes nothing, for each head (gpt-oss)."""

    def __init__(self, width: int, heads: int, keys: int, head: int) -> None:
        super().__init__(width, heads, keys, head, causal=True)
        self.sinks = weight(heads)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        q, k, v = (torch.einsum("bsd,dhk->bhsk", y, w) for w in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = torch.einsum("bhsk,bhtk->bhst", q, k) / q.shape[-1] ** 0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        sinks = self.sinks[:, None, None].expand(*scores.shape[:3], 1)
        shares = torch.cat([scores.masked_fill(later, -1e4), sinks], -1).softmax(-1)[..., :-1]
        return torch.einsum("bhsk,hkd->bsd", torch.einsum("bhst,bhtk->bhsk", shares, v), self.o)


class Speech(nn.Module):
    """Whisper: convolutions over frames, an encoder, and a decoder of the text."""

    def __init__(self, width: int, heads: int, words: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(128, width, 3, padding=1)
        self.second = nn.Conv1d(width, width, 3, stride=2, padding=1)
        attention = partial(Attention, width, heads, heads, width // heads)
        feed = partial(Feed, width, 4 * width, gated=False)
        self.encoder = nn.ModuleList(Block(attention(False), feed()) for _ in range(LAYERS))
        self.decoder = nn.ModuleList(
            Crossing(attention(True), attention(False), feed()) for _ in range(LAYERS)
        )
        self.words, self.norm = weight(words, width), nn.LayerNorm(width)

    def forward(self, frames: Tensor, tokens: Tensor) -> Tensor:  # [b, c, t], [b, s]
        x = F.gelu(self.second(F.gelu(self.first(frames)))).transpose(1, 2)
        for layer in self.encoder:
            x = layer(x)
        y = F.embedding(tokens, self.words)
        for layer in self.decoder:
            y = layer(y, x)
        logits = (self.norm(y) @ self.words.t()).flatten(0, 1)
        return F.cross_entropy(logits.float(), tokens.flatten())


class Modulated(nn.Module):
    """A DiT block: shifts, scales and gates come from the condition (adaLN-Zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.condition = nn.Linear(width, 6 * width)
        self.attention = Attention(width, heads, heads, width // heads, causal=False)
        self.feed = Feed(width, 4 * width, gated=False)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:  # [b, s, d], [b, d]
        parts = self.condition(F.silu(condition))[:, None].chunk(6, -1)
        x = x + parts[2] * self.attention(x * (1 + parts[1]) + parts[0])
        return x + parts[5] * self.feed(x * (1 + parts[4]) + parts[3])


class Diffusion(nn.Module):
    """DiT: patches with noise, and their classes and times, to the noise."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.patches, self.classes = weight(16, width), weight(1001, width)
        self.times, self.head = nn.Linear(256, width), weight(width, 16)
        self.layers = nn.ModuleList(Modulated(width, heads) for _ in range(LAYERS))

    def forward(self, x: Tensor, times: Tensor, classes: Tensor, noise: Tensor) -> Tensor:
        condition = self.times(times) + F.embedding(classes, self.classes)
        x = x @ self.patches
        for layer in self.layers:
            x = layer(x, condition)
        return F.mse_loss(x @ self.head, noise)


# ---------------------------------------------------------------------------------------- layouts

WEIGHTS = {
    **dict.fromkeys(("**.q", "**.k", "**.v"), "data model _"),
    "**.o": "model _ data",
    **dict.fromkeys(("**.gate", "**.up"), "data model"),
    "**.down": "model data",
}
ENDS = {"words": "model data", "head": "data model"}
EXPERTS = {
    **dict.fromkeys(("**.feed.gate", "**.feed.up"), "expert _ model"),
    "**.feed.down": "expert model _",
}


def marked(model: nn.Module, mesh: gspmd.Mesh, layouts: Mapping[str, str]) -> nn.Module:
    """Mark a model with those layouts whose names it has, on the axes that the mesh has."""
    for pattern, spec in layouts.items():
        words = (
            "+".join(axis for axis in word.split("+") if axis in mesh.names) or "_"
            for word in spec.split()
        )
        try:
            gspmd.annotate(model, mesh, {pattern: " ".join(words)})
        except gspmd.ShardingError as error:
            if "matches no" not in error.what:
                raise
    return model


def with_batch(model: nn.Module, mesh: gspmd.Mesh) -> nn.Module:
    """Divide the arguments: the batch over the axes of data, sequences over seq."""
    batch = "+".join(axis for axis in ("data", "expert") if axis in mesh.names)
    rows = "seq" if "seq" in mesh.names else "_"

    def marked(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        specs = ((batch, rows, "_")[: x.dim()] for x in arguments)
        return tuple(
            gspmd.mark_sharding(x, mesh, " ".join(spec)) for x, spec in zip(arguments, specs)
        )

    model.register_forward_pre_hook(marked)
    return model


def tokens(batch: int = 128, length: int = LENGTH) -> Tensor:
    return torch.empty(batch, length, dtype=torch.long)


def dense(
    attention: Callable[[], nn.Module], width: int, hidden: int, words: int, mesh: gspmd.Mesh
) -> Made:
    blocks = [Block(attention(), Feed(width, hidden)) for _ in range(LAYERS)]
    model = Decoder(blocks, width, words, mesh, parts=1).bfloat16()
    layouts = {**WEIGHTS, **ENDS, "layers.*": "data seq _"}
    return marked(model, mesh, layouts), (tokens(), tokens())


def sparse(
    attention: Callable[[], nn.Module],
    width: int,
    hidden: int,
    words: int,
    mesh: gspmd.Mesh,
    experts: int,
    chosen: int,
    shared: int = 0,
) -> Made:
    cut = mesh.count(("data",)), mesh.count(("expert",))
    feeds = (Experts(width, hidden, experts, chosen, cut, shared) for _ in range(LAYERS))
    model = Decoder([Block(attention(), feed) for feed in feeds], width, words, mesh, parts=1)
    kept = {name: spec for name, spec in WEIGHTS.items() if name.strip("*.") in "qkvo"}
    layouts = {**kept, **EXPERTS, **ENDS, "layers.*": "data+expert seq _"}
    return marked(model.bfloat16(), mesh, layouts), (tokens(), tokens())


def vit_22b(mesh: gspmd.Mesh) -> Made:
    blocks = [
        ParallelBlock(Attention(6144, 48, 48, 128, causal=False), Feed(6144, 24576, gated=False))
        for _ in range(LAYERS)
    ]
    model = Vision(blocks, 6144, 3 * 14 * 14, 29593).bfloat16()
    layouts = {**WEIGHTS, "patches": "_ data", "head": "data model", "layers.*": "data seq model"}
    patches = torch.empty(512, 256, 588, dtype=torch.bfloat16)
    return marked(model, mesh, layouts), (patches, torch.empty(512, dtype=torch.long))


def whisper(mesh: gspmd.Mesh) -> Made:
    layouts = {**WEIGHTS, "words": "model data"}
    values = dict.fromkeys(("encoder.*", "decoder.*"), "data seq _")
    frames = torch.empty(128, 128, 3000, dtype=torch.bfloat16)
    model = marked(Speech(1280, 20, 51866).bfloat16(), mesh, {**layouts, **values})
    return model, (frames, tokens(length=448))


def dit(mesh: gspmd.Mesh) -> Made:
    model = Diffusion(1152, 16).bfloat16()
    layouts = {**WEIGHTS, "**.condition.weight": "model data", "layers.*": "data seq _"}
    patches, numbers = (torch.empty(256, *n, dtype=torch.bfloat16) for n in ((256, 16), (256,)))
    classes = torch.empty(256, dtype=torch.long)
    return marked(model, mesh, layouts), (patches, numbers, classes, patches.clone())


def unet3d(mesh: gspmd.Mesh) -> Made:
    axes = {"x": "space", "y": "rows"}
    kept = {name: axis for name, axis in axes.items() if axis in mesh.names}
    model = UNet(Config(3, 3, 32)).bfloat16()
    gspmd.annotate(model, (DP | gspmd.Layout(kept)).on(mesh), {})
    image = torch.empty(8, 1, 128, 128, 128, dtype=torch.bfloat16)
    return model, (image, torch.empty(8, 128, 128, 128, dtype=torch.long))


def llama(width: int, heads: int, hidden: int) -> Callable[[gspmd.Mesh], Made]:
    attention = partial(Attention, width, heads, 8, 128, causal=True)
    return partial(dense, attention, width, hidden, 128256)


QWEN, MISTRAL = (
    partial(NormedAttention, 4096, 32, 8, 128),
    partial(Attention, 4096, 32, 8, 128, True),
)
GPT, LATENT, KIMI = (
    partial(SinkAttention, 2880, 64, 8, 64),
    partial(LatentAttention, 7168, 128),
    partial(LatentAttention, 7168, 64),
)
MODELS: dict[str, tuple[Callable[[gspmd.Mesh], Made], tuple[str, ...]]] = {
    "Llama-8B": (llama(4096, 32, 14336), DENSE),
    "Llama-70B": (llama(8192, 64, 28672), DENSE),
    "Llama-405B": (llama(16384, 128, 53248), DENSE),
    "Qwen3-8B": (partial(dense, QWEN, 4096, 12288, 151936), DENSE),
    "ViT-22B": (vit_22b, DENSE),
    "Whisper": (whisper, DENSE),
    "DiT-XL": (dit, DENSE),
    "U-Net-3D": (unet3d, SPATIAL),
    "Mixtral-8x7B": (partial(sparse, MISTRAL, 4096, 14336, 32000, experts=8, chosen=2), SPARSE),
    "gpt-oss-120B": (partial(sparse, GPT, 2880, 2880, 201088, experts=128, chosen=4), SPARSE),
    "DeepSeek-V3": (
        partial(sparse, LATENT, 7168, 2048, 129280, experts=256, chosen=8, shared=2048),
        SPARSE,
    ),
    "Kimi-K2": (
        partial(sparse, KIMI, 7168, 2048, 163840, experts=384, chosen=8, shared=2048),
        SPARSE,
    ),
}


def example(mesh: gspmd.Mesh, model: str) -> Made:
    """Return a model, marked for the mesh, and its arguments."""
    made, arguments = MODELS[model][0](mesh)
    return with_batch(made, mesh) if made.__class__ is not UNet else made, arguments
