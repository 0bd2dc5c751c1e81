"""A GPT written for one device, with marks that say how it lies on a mesh of devices.

Letters in the comments: b batch, s sequence, m model width, n heads, d width of a head, h hidden
width, v vocabulary. The marks of a layout are the only thing that differs between data parallelism,
Megatron, FSDP and so on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgspmd import Mesh, mark_sharding

# ------------------------------------------------------------------------------------------ layouts

# Data parallel: the batch is sharded, every device has all weights.
DP = {
    "tokens": "data _",  # [b, s]
    # [b, s, m]       the residual stream, wherever a sublayer has added to it
    "stream": "data _ _",
    "heads": "data _ _ _ _",  # [b, s, 3, n, d] queries, keys and values
    "hidden": "data _ _",  # [b, s, h]       inside of the feed-forward layer
    "logits": "data _ _",  # [b, s, v]
    "embedding": "_ _",  # [v, m]
    "position": "_ _",  # [s, m]
    "norm": "_",  # [m]
    "qkv": "_ _ _ _",  # [m, 3, n, d]
    "qkv_bias": "_ _ _",  # [3, n, d]
    "out": "_ _ _",  # [n, d, m]
    "out_bias": "_",  # [m]
    "up": "_ _",  # [h, m]
    "up_bias": "_",  # [h]
    "down": "_ _",  # [m, h]
    "down_bias": "_",  # [m]
}

# Tensor parallel (Megatron): each device has some heads, some hidden units and some words of the
# vocabulary.
TP = DP | {
    "heads": "data _ _ model _",
    "hidden": "data _ model",
    "logits": "data _ model",
    "embedding": "model _",
    "qkv": "_ _ model _",
    "qkv_bias": "_ model _",
    "out": "model _ _",
    "up": "model _",
    "up_bias": "model",
    "down": "_ model",
}

# Sequence parallel: as TP; between the sublayers each device has a part of the sequence.
SP = TP | {
    "stream": "data model _",
}

# Context parallel: each device has a part of the sequence from the embedding to the loss.
CP = DP | {
    "tokens": "data seq",
    "stream": "data seq _",
    "heads": "data seq _ _ _",
    "hidden": "data seq _",
    "logits": "data seq _",
    "position": "seq _",
}

# Fully sharded data parallel (ZeRO-3): as DP; a weight is stored in parts, and whole only while it
# is used.
FSDP = DP | {
    "embedding": "data _",
    "position": "data _",
    "norm": "data",
    "qkv": "data _ _ _",
    "qkv_bias": "_ _ data",
    "out": "_ _ data",
    "out_bias": "data",
    "up": "data _",
    "up_bias": "data",
    "down": "data _",
    "down_bias": "data",
}

# Both axes on every weight and on the stream (GSPMD, arXiv 2105.04663, section 5.1, the "2D
# finalized" layout).
TWO_D = DP | {
    "stream": "data _ model",
    "heads": "data _ _ model _",
    "hidden": "data _ model",
    "logits": "data _ model",
    "embedding": "model data",
    "position": "data model",
    "norm": "model",
    "qkv": "data _ model _",
    "qkv_bias": "_ model data",
    "out": "model _ data",
    "out_bias": "model",
    "up": "model data",
    "up_bias": "model",
    "down": "data model",
    "down_bias": "model",
}

LAYOUTS = {"dp": DP, "tp": TP, "sp": SP, "cp": CP, "fsdp": FSDP, "2d": TWO_D}


def layout_on(mesh: Mesh, name: str) -> dict[str, str]:
    """A layout's specs without the axes that the mesh does not have."""
    return {
        what: " ".join(axis if axis in mesh.names else "_" for axis in spec.split())
        for what, spec in LAYOUTS[name].items()
    }


# -------------------------------------------------------------------------------------------- model


@dataclass(frozen=True)
class Config:
    vocabulary: int
    context: int = 128  # longest sequence
    layers: int = 4
    heads: int = 4
    width: int = 128
    hidden: int = 0  # of the feed-forward layer; 0: 4 x width


class Attention(nn.Module):
    """Causal self-attention. Heads are a dimension of the weights, so that they can be sharded,
    evenly or not.
    """

    def __init__(self, config: Config, mesh: Mesh, layout: dict[str, str]):
        super().__init__()
        self.mesh, self.layout = mesh, layout
        width, heads, head = config.width, config.heads, config.width // config.heads
        self.qkv = nn.Parameter(torch.randn(width, 3, heads, head) * 0.02)  # [m, 3, n, d]
        self.qkv_bias = nn.Parameter(torch.zeros(3, heads, head))  # [3, n, d]
        self.out = nn.Parameter(
            torch.randn(heads, head, width) * 0.02 / math.sqrt(2 * config.layers)
        )  # [n, d, m]
        self.out_bias = nn.Parameter(torch.zeros(width))  # [m]
        mark_sharding(self.qkv, mesh, layout["qkv"])
        mark_sharding(self.qkv_bias, mesh, layout["qkv_bias"])
        mark_sharding(self.out, mesh, layout["out"])
        mark_sharding(self.out_bias, mesh, layout["out_bias"])

    def forward(self, x: Tensor) -> Tensor:  # x [b, s, m]
        qkv = torch.einsum("bsm,mcnd->bscnd", x, self.qkv) + self.qkv_bias  # [b, s, 3, n, d]
        qkv = mark_sharding(qkv, self.mesh, self.layout["heads"])
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # [b, n, s, d] each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [b, n, s, d]
        return torch.einsum("bnsd,ndm->bsm", y, self.out) + self.out_bias  # [b, s, m]


class FeedForward(nn.Module):
    def __init__(self, config: Config, mesh: Mesh, layout: dict[str, str]):
        super().__init__()
        self.mesh, self.layout = mesh, layout
        hidden = config.hidden or 4 * config.width
        self.up = nn.Linear(config.width, hidden)
        self.down = nn.Linear(hidden, config.width)
        nn.init.normal_(self.up.weight, std=0.02)
        nn.init.normal_(self.down.weight, std=0.02 / math.sqrt(2 * config.layers))
        nn.init.zeros_(self.up.bias)
        nn.init.zeros_(self.down.bias)
        mark_sharding(self.up.weight, mesh, layout["up"])  # [h, m]
        mark_sharding(self.up.bias, mesh, layout["up_bias"])  # [h]
        mark_sharding(self.down.weight, mesh, layout["down"])  # [m, h]
        mark_sharding(self.down.bias, mesh, layout["down_bias"])  # [m]

    def forward(self, x: Tensor) -> Tensor:  # x [b, s, m]
        y = mark_sharding(self.up(x), self.mesh, self.layout["hidden"])  # [b, s, h]
        return self.down(F.gelu(y))  # [b, s, m]


class Norm(nn.LayerNorm):
    def __init__(self, config: Config, mesh: Mesh, layout: dict[str, str]):
        super().__init__(config.width)
        mark_sharding(self.weight, mesh, layout["norm"])  # [m]
        mark_sharding(self.bias, mesh, layout["norm"])  # [m]


class Block(nn.Module):
    def __init__(self, config: Config, mesh: Mesh, layout: dict[str, str]):
        super().__init__()
        self.mesh, self.layout = mesh, layout
        self.norm1 = Norm(config, mesh, layout)
        self.attention = Attention(config, mesh, layout)
        self.norm2 = Norm(config, mesh, layout)
        self.feed_forward = FeedForward(config, mesh, layout)

    def forward(self, x: Tensor) -> Tensor:  # x [b, s, m]
        x = mark_sharding(x + self.attention(self.norm1(x)), self.mesh, self.layout["stream"])
        x = mark_sharding(x + self.feed_forward(self.norm2(x)), self.mesh, self.layout["stream"])
        return x


class GPT(nn.Module):
    """tokens [b, s] -> logits [b, s, v], or with targets [b, s] the mean loss. The mesh of one
    device is plain PyTorch.
    """

    def __init__(self, config: Config, mesh: Mesh = Mesh(data=1, model=1), layout: str = "dp"):
        super().__init__()
        self.config, self.mesh, self.layout = config, mesh, layout_on(mesh, layout)
        self.embedding = nn.Parameter(
            torch.randn(config.vocabulary, config.width) * 0.02
        )  # [v, m], also the head
        self.position = nn.Parameter(torch.randn(config.context, config.width) * 0.02)  # [s, m]
        self.blocks = nn.ModuleList(Block(config, mesh, self.layout) for _ in range(config.layers))
        self.norm = Norm(config, mesh, self.layout)
        mark_sharding(self.embedding, mesh, self.layout["embedding"])
        mark_sharding(self.position, mesh, self.layout["position"])

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:  # [b, s], [b, s]
        tokens = mark_sharding(tokens, self.mesh, self.layout["tokens"])
        x = F.embedding(tokens, self.embedding) + self.position[: tokens.shape[1]]  # [b, s, m]
        x = mark_sharding(x, self.mesh, self.layout["stream"])
        for block in self.blocks:
            x = block(x)  # [b, s, m]
        logits = F.linear(self.norm(x), self.embedding)  # [b, s, v]
        logits = mark_sharding(logits, self.mesh, self.layout["logits"])
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())  # a scalar

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, count: int, generator: torch.Generator | None = None
    ) -> Tensor:  # [b, s] -> [b, s + count]
        for _ in range(count):
            logits = self(tokens[:, -self.config.context :])[:, -1].float()  # [b, v]
            best = logits.topk(min(20, logits.shape[-1])).values[:, -1:]  # [b, 1]
            odds = logits.masked_fill(logits < best, -math.inf).softmax(-1)  # [b, v]
            tokens = torch.cat(
                [tokens, odds.multinomial(1, generator=generator)], dim=1
            )  # [b, s + 1]
        return tokens


def example(
    mesh: Mesh,
    layout: str = "2d",
    batch: int = 64,
    context: int = 1024,
    layers: int = 4,
    heads: int = 16,
    width: int = 1024,
    vocabulary: int = 32000,
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and a batch for `python -m torchgspmd plan`, in bfloat16."""
    config = Config(vocabulary, context, layers, heads, width)
    tokens = torch.zeros(batch, context, dtype=torch.long)
    return GPT(config, mesh, layout).bfloat16(), (tokens, tokens)
