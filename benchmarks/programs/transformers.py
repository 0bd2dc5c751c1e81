"""Transformer blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .draw import Draw

BLOCKS = {
    "dp": ("b", ""),
    "fsdp": ("b", "m"),
    "tp": ("b|n k f v h q", "|n k f v h q"),
    "sp": ("b|s", "|n k f v h q"),
    "cp": ("b|s", ""),
    "2d": ("b|n k f v m q", "m|n k f v h q"),
    "fsdp+tp": ("b|n k f v q", "m|n k f v h q"),
    "fsdp+sp": ("b|s", "m|n k f v h q"),
    "dp+cp+tp": ("b|s|n k f v q", "||n k f v h q"),
    "fsdp+cp+tp": ("b|s|n k f v q", "m||n k f v h q"),
    "dp+fsdp+tp": ("b|b|n k f v q", "|m|n k f v h q"),
}


def norm(kind: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) if kind == "ln" else F.rms_norm(x, x.shape[-1:])


def rotated(x: Tensor) -> Tensor:
    """Rotary positions of x[b, n, s, d]."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * torch.arange(1, half + 1)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


@dataclass
class Block:
    """One layer as it was drawn. heads: of queries, and of keys and values."""

    draw: Draw
    heads: tuple[int, int]
    flat: bool  # weights [m, n d], as in nn.Linear; else [m, n, d]
    fused: bool  # F.scaled_dot_product_attention; else its parts
    rope: bool
    gated: bool
    post: bool  # norms behind the sums
    causal: bool
    norm: str

    @property
    def weights(self) -> list[str]:
        """Dimensions of the parameters, in order."""
        return (
            (["m q", "m h", "m h", "q m"] if self.flat else ["m n d", "m k d", "m k d", "n d m"])
            + ["m f", "f m"]
            + ["m f"] * self.gated
        )

    def __call__(
        self, x: Tensor, memory: Tensor | None, wq, wk, wv, wo, up, down, gate=None
    ) -> Tensor:
        h = self.before(x)
        o = self.attention(h, h if memory is None else memory, wq, wk, wv)
        x = self.after(
            x
            + (
                o.transpose(1, 2).flatten(2) @ wo
                if self.flat
                else torch.einsum("bnsd,ndm->bsm", o, wo)
            )
        )
        h = self.draw.mark(self.before(x) @ up, "b s f")
        h = F.silu(self.before(x) @ gate) * h if self.gated else F.gelu(h)
        return self.after(x + h @ down)

    def before(self, x: Tensor) -> Tensor:
        return x if self.post else norm(self.norm, x)

    def after(self, x: Tensor) -> Tensor:
        return self.draw.mark(norm(self.norm, x) if self.post else x, "b s m")

    def attention(self, h: Tensor, source: Tensor, *weights: Tensor) -> Tensor:
        n, k = self.heads
        q, k, v = (
            self.projected(t, w, heads)
            for t, w, heads in zip((h, source, source), weights, (n, k, k))
        )
        if self.rope and q.shape[-1] % 2 == 0:
            q, k = rotated(q), rotated(k)
        return self.draw.mark(self.mixed(q, k, v), "b n s d")

    def projected(self, t: Tensor, w: Tensor, heads: int) -> Tensor:
        return (
            (t @ w).unflatten(-1, (heads, -1)).transpose(1, 2)
            if self.flat
            else torch.einsum("bsm,mnd->bnsd", t, w)
        )

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q[b, n, s, d], k and v[b, k, t, d]."""
        if self.fused:
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=self.causal, enable_gqa=q.shape[1] != k.shape[1]
            )
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if self.causal:
            scores = scores.masked_fill(
                torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf
            )
        return scores.softmax(-1) @ v


def transformer(draw: Draw):
    """One or two layers, with embedding and loss or without."""
    draw.size(b=(8, 16), s=(16, 32, 64), m=(32, 64, 128), n=(8, 4, 16), d=(4, 8, 16), v=(64, 256))
    n = draw.sizes["n"]
    k = draw.random.choice([n, n, 2, 1])
    k = n if n % k else k
    draw.sizes |= {
        "k": k,
        "f": 4 * draw.sizes["m"],
        "t": draw.sizes["s"],
        "q": n * draw.sizes["d"],
        "h": k * draw.sizes["d"],
    }
    draw.layout("b s m", "m n f v q k", BLOCKS)
    cross = draw.flip(0.2, "cross")
    block = Block(
        draw,
        (n, k),
        draw.flip(word="flat"),
        draw.flip(word="fused"),
        draw.flip(0.4, "rope"),
        draw.flip(word="gated"),
        draw.flip(0.2, "post"),
        draw.flip() and not cross,
        draw.pick("ln", "rms"),
    )
    layers, language, tied = (
        draw.random.choice([1, 1, 2]),
        draw.flip(0.35, "loss"),
        draw.flip(word="tied"),
    )
    first = (
        [draw.value("b s", high=draw.sizes["v"])] if language else [draw.value("b s m", scale=1)]
    )
    tables = [draw.weight("v m") for _ in range(2 - tied if language else 0)]
    memories = [draw.value("b t m", scale=1)] if cross else []
    for dims in block.weights * layers:
        draw.weight(dims, scale=draw.sizes["m"] ** -0.5)

    def run(*args):
        x = F.embedding(args[0], args[tables[0]]) if language else args[0]
        rest = args[len(first) + len(tables) + len(memories) :]
        for i in range(layers):
            count = len(block.weights)
            x = block(x, args[memories[0]] if cross else None, *rest[i * count : (i + 1) * count])
        if not language:
            return x
        logits = draw.mark(x @ args[tables[-1]].T, "b s v")
        return F.cross_entropy(logits.flatten(0, 1), args[0].roll(-1, 1).flatten())

    return run, "" if language else "b s m"
