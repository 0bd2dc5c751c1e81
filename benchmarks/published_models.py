"""Models that suggest_published.py plans beside those of published_runs.py.

Vision and text encoders, an encoder with a decoder, and experts, with their authors' sizes and
layouts. No positions are added to queries and keys: these are elementwise. Sources: Dehghani et
al., arXiv 2302.05442 (ViT-22B); Roberts et al., arXiv 2203.17189, and t5x's partitioning rules
(T5); Megatron-LM's examples/mixtral; DeepSeek-AI, arXiv 2412.19437.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import Hardware, moe


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape))


@dataclass(frozen=True)
class Model:
    """A published model and its layout.

    make: returns it with so many layers, marked if there is a mesh; a pipeline if that has an axis
    `stage`. arguments: shapes and dtypes. meshes: the published one, or several, of which the
    fastest counts, where none is published. recomputed: whether all layers are computed twice.
    """

    make: Callable[[int, gspmd.Mesh | None], nn.Module]
    layers: int
    arguments: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    meshes: tuple[str, ...]
    in_specs: tuple[str, ...]
    hardware: Hardware
    recomputed: bool = False

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(torch.empty(shape, dtype=dtype) for shape, dtype in self.arguments)


# ------------------------------------------------------------------------------------- attention


class Attention(nn.Module):
    """Attention over heads with one norm before it; across to other values if it is given them."""

    def __init__(self, width: int, heads: int, keys: int, head: int, causal: bool) -> None:
        super().__init__()
        self.causal, self.norm = causal, nn.RMSNorm(width)
        self.q, self.o = weight(width, heads, head), weight(heads, head, width)
        self.k, self.v = weight(width, keys, head), weight(width, keys, head)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:  # [b, s, d], [b, t, d]
        y = self.norm(x)
        source = y if other is None else other
        q = torch.einsum("bsd,dhk->bhsk", y, self.q)
        k, v = (torch.einsum("btd,dhk->bhtk", source, w) for w in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return torch.einsum("bhsk,hkd->bsd", y, self.o)


class LatentAttention(nn.Module):
    """Attention whose queries, keys and values come from short vectors (DeepSeek's MLA)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.RMSNorm(width), heads
        self.down_q, self.norm_q, self.q = (
            weight(width, 1536),
            nn.RMSNorm(1536),
            weight(1536, heads, 192),
        )
        self.down_kv, self.norm_kv = weight(width, 512), nn.RMSNorm(512)
        self.k, self.v, self.place = (
            weight(512, heads, 128),
            weight(512, heads, 128),
            weight(width, 64),
        )
        self.o = weight(heads, 128, width)

    def forward(self, x: Tensor) -> Tensor:  # [b, s, d]
        y = self.norm(x)
        q = torch.einsum("bsl,lhk->bhsk", self.norm_q(y @ self.down_q), self.q)
        short = self.norm_kv(y @ self.down_kv)
        k, v = (torch.einsum("bsl,lhk->bhsk", short, w) for w in (self.k, self.v))
        place = (y @ self.place).unsqueeze(1).expand(-1, self.heads, -1, -1)
        y = F.scaled_dot_product_attention(q, torch.cat([k, place], -1), v, is_causal=True)
        return torch.einsum("bhsk,hkd->bsd", y, self.o)


# ------------------------------------------------------------------------------------------ feeds


class Feed(nn.Module):
    """Two products, or three if one is a gate."""

    def __init__(self, width: int, hidden: int, gated: bool = True) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.RMSNorm(width),
            weight(width, hidden),
            weight(hidden, width),
        )
        self.gate = weight(width, hidden) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        up = y @ self.up
        return (F.gelu(up) if self.gate is None else F.silu(y @ self.gate) * up) @ self.down


class Experts(nn.Module):
    """The best `k` of so many experts for each token, and a shared one if `shared` is its width.

    cut: groups of tokens, and shards of the experts: as many as the mesh has devices for each.
    """

    def __init__(
        self, width: int, hidden: int, experts: int, k: int, cut: tuple[int, int], shared: int = 0
    ) -> None:
        super().__init__()
        self.norm, self.experts, self.chosen, self.cut = nn.RMSNorm(width), experts, k, cut
        self.router = weight(width, experts)
        self.gate, self.up = weight(experts, width, hidden), weight(experts, width, hidden)
        self.down = weight(experts, hidden, width)
        self.shared = Feed(width, shared) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights, chosen = (y @ self.router).softmax(-1).topk(self.chosen)
        groups, shards = self.cut
        # Room for a quarter more than an even share.
        r = moe.dispatch(y, chosen, self.experts, shards, groups, capacity=1.25)
        gate, up = (moe.grouped_mm(r.rows, w, r.ends) for w in (self.gate, self.up))
        mixed = moe.combine(moe.grouped_mm(F.silu(gate) * up, self.down, r.ends), r, weights)
        return mixed if self.shared is None else mixed + self.shared(x)


# ----------------------------------------------------------------------------------------- layers


class Block(nn.Module):
    """Attention, then a feed, each added to its argument."""

    def __init__(self, attention: nn.Module, feed: nn.Module) -> None:
        super().__init__()
        self.attention, self.feed = attention, feed

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.feed(x)


class ParallelBlock(Block):
    """Attention and a feed of the same argument."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x) + self.feed(x)


class Crossing(Block):
    """Attention, attention to the encoder's values, and a feed."""

    def __init__(self, attention: nn.Module, cross: nn.Module, feed: nn.Module) -> None:
        super().__init__(attention, feed)
        self.cross = cross

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        x = x + self.attention(x)
        x = x + self.cross(x, other)
        return x + self.feed(x)


# ----------------------------------------------------------------------------------------- models


class Decoder(nn.Module):
    """From tokens to the loss of the next ones; blocks in a pipeline if the mesh has stages."""

    def __init__(
        self, blocks: Sequence[Block], width: int, words: int, mesh: gspmd.Mesh | None, parts: int
    ) -> None:
        super().__init__()
        self.words, self.head = weight(words, width), weight(width, words)
        self.norm = nn.RMSNorm(width)
        self.is_pipeline = mesh is not None and "stage" in mesh.names
        self.layers = nn.ModuleList(blocks)
        if mesh is not None and self.is_pipeline:
            pipe = gspmd.pipeline(blocks, mesh, microbatches=parts, schedule="1f1b", loss=self.loss)
            self.layers = nn.ModuleList([pipe])

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # [b, s], [b, s]
        x = F.embedding(tokens, self.words)
        if self.is_pipeline:
            return self.layers[0](x, targets=targets)
        for layer in self.layers:
            x = layer(x)
        return self.loss(x, targets)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = (self.norm(x) @ self.head).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten())


class Vision(nn.Module):
    """From patches to classes."""

    def __init__(self, blocks: Sequence[Block], width: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patches, self.head = weight(patch, width), weight(width, classes)
        self.layers, self.norm = nn.ModuleList(blocks), nn.LayerNorm(width)

    def forward(self, patches: Tensor, labels: Tensor) -> Tensor:  # [b, s, p], [b]
        x = patches @ self.patches
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy((self.norm(x).mean(1) @ self.head).float(), labels)


class EncoderDecoder(nn.Module):
    """From tokens and targets to the loss of the next targets."""

    def __init__(
        self, encoder: list[Block], decoder: list[Crossing], width: int, words: int
    ) -> None:
        super().__init__()
        self.words, self.head = weight(words, width), weight(width, words)
        self.encoder, self.decoder = nn.ModuleList(encoder), nn.ModuleList(decoder)
        self.first, self.norm = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # [b, s], [b, t]
        x, y = F.embedding(tokens, self.words), F.embedding(targets, self.words)
        for layer in self.encoder:
            x = layer(x)
        x = self.first(x)
        for layer in self.decoder:
            y = layer(y, x)
        logits = (self.norm(y) @ self.head).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten())


# ---------------------------------------------------------------------------------------- layouts

TOKENS = "data _"
TENSOR = {
    **dict.fromkeys(("**.q", "**.k", "**.v"), "data model _"),
    "**.o": "model _ data",
    **dict.fromkeys(("**.gate", "**.up"), "data model"),
    "**.down": "model data",
}
ENDS = {"words": "model data", "head": "data model"}


def marked(model: nn.Module, mesh: gspmd.Mesh | None, layout: Mapping[str, str]) -> nn.Module:
    return model if mesh is None else gspmd.annotate(model, mesh, layout)


def vit_22b(layers: int, mesh: gspmd.Mesh | None) -> nn.Module:
    """Weights on both axes, values between layers too (its section 3.2)."""
    blocks = [
        ParallelBlock(Attention(6144, 48, 48, 128, causal=False), Feed(6144, 24576, gated=False))
        for _ in range(layers)
    ]
    model = Vision(blocks, 6144, 3 * 14 * 14, 29593)
    ends = {"patches": "_ data", "head": "data model", "layers.*": "data _ model"}
    tensor = {name: spec for name, spec in TENSOR.items() if name != "**.gate"}
    return marked(model, mesh, {**tensor, **ends})


def t5_xxl(layers: int, mesh: gspmd.Mesh | None) -> nn.Module:
    """t5x's standard rules with weights on both axes: values between layers are on data alone."""

    def attention(causal: bool = False) -> Attention:
        return Attention(4096, 64, 64, 64, causal)

    encoder = [Block(attention(), Feed(4096, 10240)) for _ in range(layers)]
    decoder = [
        Crossing(attention(causal=True), attention(), Feed(4096, 10240)) for _ in range(layers)
    ]
    values = dict.fromkeys(("encoder.*", "decoder.*"), "data _ _")
    return marked(EncoderDecoder(encoder, decoder, 4096, 32128), mesh, {**TENSOR, **ENDS, **values})


# Other weights are whole in a stage: ZeRO-1, whose states alone are divided.
EXPERTS: dict[str, str] = dict.fromkeys(
    ("**.feed.gate", "**.feed.up", "**.feed.down"), "expert _ _"
)


def cut_for(mesh: gspmd.Mesh | None, devices: int, experts: int) -> tuple[int, int]:
    """Return groups and shards: those of the mesh, else for an expert on each device."""
    if mesh is None:
        return devices // experts, experts
    return mesh.count(("data",)), mesh.count(("expert",))


def mixtral(layers: int, mesh: gspmd.Mesh | None) -> nn.Module:
    """Stages, and experts on devices that have other tokens."""
    cut = cut_for(mesh, 64, 8)
    blocks = [
        Block(Attention(4096, 32, 8, 128, causal=True), Experts(4096, 14336, 8, 2, cut))
        for _ in range(layers)
    ]
    model = Decoder(blocks, 4096, 32000, mesh, parts=16)
    return marked(model, mesh, EXPERTS)


def deepseek_v3(layers: int, mesh: gspmd.Mesh | None) -> nn.Module:
    """As Mixtral's, in 16 stages. 64 layers with experts, for 58 of 61."""
    cut = cut_for(mesh, 2048, 256)
    blocks = [
        Block(LatentAttention(7168, 128), Experts(7168, 2048, 256, 8, cut, shared=2048))
        for _ in range(layers)
    ]
    model = Decoder(blocks, 7168, 129280, mesh, parts=120)
    return marked(model, mesh, EXPERTS)


H100, V4, V5P = (Hardware.of(name) for name in ("h100", "tpu_v4", "tpu_v5p"))
INTS = torch.long


def texts(batch: int, *lengths: int) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    return tuple(((batch, length), INTS) for length in lengths)


MODELS = {
    "ViT-22B, 1024 v4": Model(
        vit_22b,
        48,
        (((65536, 256, 588), torch.bfloat16), ((65536,), INTS)),
        ("data=128,model=8", "data=64,model=16", "data=32,model=32"),
        ("data _ _", "data"),
        V4,
        recomputed=True,
    ),
    "T5-XXL, 256 v5p": Model(
        t5_xxl,
        24,
        texts(2048, 512, 114),
        ("data=32,model=8", "data=64,model=4"),
        (TOKENS,) * 2,
        V5P,
    ),
    "Mixtral 8x7B, 64 H100": Model(
        mixtral,
        32,
        texts(256, 4096, 4096),
        ("data=2,stage=4,expert=8",),
        ("data+expert _",) * 2,
        H100,
    ),
    "DeepSeek-V3, 2048 H100": Model(
        deepseek_v3,
        64,
        texts(15360, 4096, 4096),
        ("data=2,stage=16,expert=64",),
        ("data+expert _",) * 2,
        H100,
    ),
}
