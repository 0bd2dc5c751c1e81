"""Decoders by their configuration, without marks, for one call.

Weights are those of Megatron's layers: one for queries, keys and values of all heads, and one for
both inputs of a gate. Windows are blocks of twice their size, whose causal halves have as many
pairs. A `Layout` marks the values of a known run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ShardingError
from ...model_api import moe
from .config import Config, Latent, config

RANK = 16  # of adapters


class Layout:
    """Marks of a decoder's values; these are none. devices: how many share the experts."""

    def __init__(self, devices: int = 1) -> None:
        self.devices = devices

    def between(self, x: Tensor) -> Tensor:
        """Mark values between layers [b, s, d]."""
        return x

    def along_model(self, x: Tensor, dim: int, sequence: int) -> Tensor:
        """Mark values [b, ...] whose dimension `dim` is sharded along model."""
        return x

    def cut(self, experts: int) -> tuple[int, int]:
        """Return the groups of tokens, and the shards of the experts."""
        shards = math.gcd(self.devices, experts)
        return self.devices // shards, shards


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=torch.bfloat16))


class Norm(nn.RMSNorm):
    def __init__(self, width: int) -> None:
        super().__init__(width, dtype=torch.bfloat16)


class Product(nn.Module):
    """x [b, s, i] times a weight [i, ...]; with adapters the weight is frozen."""

    def __init__(self, out: str, shape: tuple[int, ...], rank: int) -> None:
        super().__init__()
        self.equation, self.weight = out, weight(*shape)
        self.down = self.up = None
        if rank:
            self.weight.requires_grad_(False)
            lead = len(out.split(",")[0]) - 2  # dimensions that are summed
            self.down, self.up = weight(*shape[:lead], rank), weight(rank, *shape[lead:])
        inputs, rest = out.split(",")
        dims, result = rest.split("->")
        summed = "".join(c for c in dims if c in inputs)
        kept = "".join(c for c in dims if c not in inputs)
        self.first = f"{inputs},{summed}r->bsr"
        self.second = f"bsr,r{kept}->{result}"

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum(self.equation, x, self.weight)
        if self.down is None or self.up is None:
            return y
        return y + torch.einsum(self.second, torch.einsum(self.first, x, self.down), self.up)


class Attention(nn.Module):
    """Causal attention with rotary positions; queries in as many groups as keys have heads."""

    def __init__(self, config: Config, layout: Layout, rank: int, window: int) -> None:
        super().__init__()
        c, groups = config, config.key_heads
        self.window, self.mark = window, layout.along_model
        self.qkv = Product(
            "bsd,dgnk->bgnsk", (c.width, groups, c.heads // groups + 2, c.head), rank
        )
        self.o = Product("bgnsk,gnkd->bsd", (groups, c.heads // groups, c.head, c.width), rank)
        self.norm_q, self.norm_k = (Norm(c.head) if c.norms else None for _ in range(2))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        qkv = self.mark(self.qkv(x), 1, 3)
        q, k, v = qkv.split([self.o.weight.shape[1], 1, 1], 2)
        if self.norm_q is not None and self.norm_k is not None:
            q, k = self.norm_q(q), self.norm_k(k)
        q, k = rotated(q, angles), rotated(k, angles)
        q, k, v = (x.flatten(1, 2) for x in (q, k, v))
        y = self.mark(attended(q, k, v, self.window), 1, 2)
        return self.o(y.unflatten(1, (-1, self.o.weight.shape[1])))


def attended(q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
    """Return causal attention [b, h, s, k]; within blocks if there is a window."""
    length = q.shape[2]
    if window and length > 2 * window:
        q, k, v = (
            x.unflatten(2, (-1, 2 * window)).transpose(1, 2).flatten(0, 1) for x in (q, k, v)
        )
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    blocks = length // y.shape[2]
    return y.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3) if blocks > 1 else y


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class LatentAttention(nn.Module):
    """Attention whose queries, keys and values come from short vectors (MLA)."""

    def __init__(self, config: Config, latent: Latent, layout: Layout, rank: int) -> None:
        super().__init__()
        d, h, m = config.width, config.heads, latent
        self.latent, self.mark = m, layout.along_model
        self.down_q = Product("bsd,dl->bsl", (d, m.queries), rank)
        self.down_kv = Product("bsd,dl->bsl", (d, m.keys + m.places), rank)
        self.norm_q, self.norm_kv = Norm(m.queries), Norm(m.keys)
        self.q = Product("bsl,lhk->bhsk", (m.queries, h, m.head + m.places), rank)
        self.kv = Product("bsl,lhk->bhsk", (m.keys, h, m.head + m.value), rank)
        self.o = Product("bhsk,hkd->bsd", (h, m.value, d), rank)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        m = self.latent
        q = self.mark(self.q(self.norm_q(self.down_q(x))), 1, 2)
        short, place = self.down_kv(x).split([m.keys, m.places], -1)
        k, v = self.kv(self.norm_kv(short)).split([m.head, m.value], -1)
        q, turned = q.split([m.head, m.places], -1)
        q = torch.cat([q, rotated(turned, angles)], -1)
        place = rotated(place.unsqueeze(1), angles).expand(-1, k.shape[1], -1, -1)
        y = F.scaled_dot_product_attention(q, torch.cat([k, place], -1), v, is_causal=True)
        return self.o(self.mark(y, 1, 2))


class Feed(nn.Module):
    """A gated feed-forward."""

    def __init__(self, width: int, hidden: int, layout: Layout, rank: int) -> None:
        super().__init__()
        self.mark = layout.along_model
        self.up = Product("bsd,dnh->nbsh", (width, 2, hidden), rank)
        self.down = Product("bsh,hd->bsd", (hidden, width), rank)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).unbind(0)
        return self.down(self.mark(F.silu(gate) * up, 2, 1))


class Experts(nn.Module):
    """The chosen experts of each token, each with as many tokens, and a shared one."""

    def __init__(self, config: Config, layout: Layout) -> None:
        super().__init__()
        c, h = config, config.expert_hidden
        self.count, self.chosen, self.cut = c.experts, c.chosen, layout.cut(c.experts)
        self.router = Product("bsd,de->bse", (c.width, c.experts), 0)
        self.wide = weight(c.experts, c.width, 2 * h)
        self.narrow = weight(c.experts, h, c.width)
        self.shared = Feed(c.width, c.shared_hidden, layout, 0) if c.shared_hidden else None
        self.wide_bias = weight(c.experts, 2 * h) if c.biases else None
        self.narrow_bias = weight(c.experts, c.width) if c.biases else None

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.chosen)
        groups, shards = self.cut
        capacity = None if shards == 1 else 1.0
        routed = moe.dispatch(x, chosen, self.count, shards, groups, capacity=capacity)
        hidden = moe.grouped_mm(routed.rows, self.wide, routed.ends, self.wide_bias)
        gate, up = hidden.chunk(2, -1)
        rows = moe.grouped_mm(F.silu(gate) * up, self.narrow, routed.ends, self.narrow_bias)
        mixed = moe.combine(rows, routed, weights)
        return mixed if self.shared is None else mixed + self.shared(x)


class Layer(nn.Module):
    """Attention, then a feed-forward. kind: of Config.kinds."""

    def __init__(self, config: Config, kind: str, layout: Layout, rank: int) -> None:
        super().__init__()
        c = config
        self.first, self.second = Norm(c.width), Norm(c.width)
        window = c.window if "window" in kind else 0
        self.attention = (
            Attention(c, layout, rank, window)
            if c.latent is None
            else LatentAttention(c, c.latent, layout, rank)
        )
        if "experts" in kind:
            self.feed: nn.Module = Experts(c, layout)
        else:
            self.feed = Feed(c.width, c.hidden, layout, rank)
        self.marked = layout.between

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:  # [b, s, d], [s, k/2]
        x = self.marked(x + self.attention(self.first(x), angles))
        return self.marked(x + self.feed(self.second(x)))


class Decoder(nn.Module):
    """From tokens to the loss of the next ones. angles: [s, k/2]; if it is None, a buffer's."""

    angles: Tensor

    def __init__(self, config: Config, kinds: Sequence[str], layout: Layout, rank: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, kind, layout, rank) for kind in kinds)
        self.words, self.norm = weight(config.words, config.width), Norm(config.width)
        self.head = Product("bsd,dw->bsw", (config.width, config.words), 0)
        if rank:
            self.requires_grad_(False)
            for name, each in self.named_parameters():
                each.requires_grad_(name.endswith((".down", ".up")) and "experts" not in name)

    def forward(self, tokens: Tensor, targets: Tensor, angles: Tensor | None = None) -> Tensor:
        angles = self.angles if angles is None else angles
        x = F.embedding(tokens, self.words)
        for layer in self.layers:
            x = layer(x, angles)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten())


class NamedDecoder(Decoder):
    """A published decoder. name: of models/. devices: that share the experts. sequence: tokens.

    adapters: it trains adapters of low rank (LoRA) alone. automodel: estimates take the recipe of
    NeMo Automodel in place of Megatron's.

    Example:
        >>> with torch.device("meta"):
        ...     model = NamedDecoder("llama3-8b", devices=8, sequence=4096)
        >>> sum(p.numel() for p in model.parameters())
        8030261248
    """

    def __init__(
        self,
        name: str,
        devices: int,
        sequence: int,
        adapters: bool = False,
        automodel: bool = False,
    ) -> None:
        chosen = config(name)
        if chosen.window and sequence > 2 * chosen.window and sequence % (2 * chosen.window):
            raise ShardingError.here(
                f"{sequence} tokens are no multiple of two windows of {chosen.window}",
                fix=f"take a multiple of {2 * chosen.window}",
            )
        kinds = [kind for kind, count in chosen.kinds().items() for _ in range(count)]
        super().__init__(chosen, kinds, Layout(devices), RANK if adapters else 0)
        self.name, self.devices, self.sequence = name, devices, sequence
        self.adapters, self.automodel = adapters, automodel
        self.register_buffer("angles", torch.empty(sequence, chosen.turned // 2))
