"""A GPT written for one device. Its marks name dimensions; a layout says how these lie on a mesh.

Letters in the comments: b batch, s sequence, m model width, n heads, d width of a head, h hidden
width, v vocabulary. The table of a layout is the only thing that differs between data parallelism,
Megatron, FSDP and so on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgspmd import Layout, Mesh, annotate, mark_sharding, pipeline, stack

# ------------------------------------------------------------------------------------------ layouts

# Marks name the dimensions of a tensor; a layout says by which axes these are sharded. Where two
# names want one axis, the first one of the table has it.

# Data parallel: the batch is sharded, every device has all weights.
DP = Layout(
    {
        "batch": "data",
        "heads": None,
        "hidden": None,  # of the feed-forward layer
        "words": None,  # of the vocabulary
        "length": None,  # of the sequence
        "stream": None,  # the same in the residual stream, wherever a sublayer has added to it
        "place": None,  # of the table of positions
        "embed": None,  # m of matrices
        "width": None,  # m of the residual stream and of vectors
        "head": None,  # d of biases
    }
)

# Tensor parallel (Megatron): each device has some heads, some hidden units and some words of the
# vocabulary.
TP = DP | Layout({"heads": "model", "hidden": "model", "words": "model"})

# Sequence parallel: as TP; between the sublayers each device has a part of the sequence.
SP = TP | Layout({"stream": "model"})

# Context parallel: each device has a part of the sequence from the embedding to the loss.
CP = DP | Layout({"length": "seq", "stream": "seq", "place": "seq"})

# Fully sharded data parallel (ZeRO-3): as DP; a weight is stored in parts, and whole only while it
# is used.
FSDP = DP | Layout(
    {name: "data" for name in ("hidden", "words", "place", "embed", "width", "head")}
)

# Pipeline parallel: a device has some of the blocks, and microbatches pass from one to the next;
# alone, with rows of every microbatch on a device, and with Megatron inside of the stages.
PP = DP | Layout({"batch": None, "stage": "stage"})
PP_DP = DP | Layout({"stage": "stage"})
PP_TP = TP | Layout({"stage": "stage"})

# Both axes on every weight and on the stream (GSPMD, arXiv 2105.04663, section 5.1, the "2D
# finalized" layout).
TWO_D = TP | Layout({"width": "model", "embed": "data", "place": "data", "head": "data"})

LAYOUTS = {
    "dp": DP,
    "tp": TP,
    "sp": SP,
    "cp": CP,
    "fsdp": FSDP,
    "2d": TWO_D,
    "pp": PP,
    "pp_dp": PP_DP,
    "pp_tp": PP_TP,
}

# Schedules of a pipeline. Where backwards run between forwards the loss is a part of it.
BETWEEN = ("auto", "1f1b", "zero_bubble")
SCHEDULES = (*BETWEEN, "gpipe", "circular")


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

    def __init__(self, config: Config):
        super().__init__()
        width, heads, head = config.width, config.heads, config.width // config.heads
        self.qkv = nn.Parameter(torch.randn(width, 3, heads, head) * 0.02)  # [m, 3, n, d]
        self.qkv_bias = nn.Parameter(torch.zeros(3, heads, head))  # [3, n, d]
        self.out = nn.Parameter(
            torch.randn(heads, head, width) * 0.02 / math.sqrt(2 * config.layers)
        )  # [n, d, m]
        self.out_bias = nn.Parameter(torch.zeros(width))  # [m]
        mark_sharding(self.qkv, "embed _ heads _")
        mark_sharding(self.qkv_bias, "_ heads head")
        mark_sharding(self.out, "heads _ embed")
        mark_sharding(self.out_bias, "width")

    def forward(self, x: Tensor) -> Tensor:  # x [b, s, m]
        qkv = torch.einsum("bsm,mcnd->bscnd", x, self.qkv) + self.qkv_bias  # [b, s, 3, n, d]
        qkv = mark_sharding(qkv, "batch length _ heads _")
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # [b, n, s, d] each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [b, n, s, d]
        return torch.einsum("bnsd,ndm->bsm", y, self.out) + self.out_bias  # [b, s, m]


class FeedForward(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        hidden = config.hidden or 4 * config.width
        self.up = nn.Linear(config.width, hidden)
        self.down = nn.Linear(hidden, config.width)
        nn.init.normal_(self.up.weight, std=0.02)
        nn.init.normal_(self.down.weight, std=0.02 / math.sqrt(2 * config.layers))
        nn.init.zeros_(self.up.bias)
        nn.init.zeros_(self.down.bias)
        mark_sharding(self.up.weight, "hidden embed")  # [h, m]
        mark_sharding(self.up.bias, "hidden")  # [h]
        mark_sharding(self.down.weight, "embed hidden")  # [m, h]
        mark_sharding(self.down.bias, "width")  # [m]

    def forward(self, x: Tensor) -> Tensor:  # x [b, s, m]
        y = mark_sharding(self.up(x), "batch length hidden")  # [b, s, h]
        return self.down(F.gelu(y))  # [b, s, m]


class Norm(nn.LayerNorm):
    def __init__(self, config: Config):
        super().__init__(config.width)
        mark_sharding(self.weight, "width")  # [m]
        mark_sharding(self.bias, "width")  # [m]


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.norm1 = Norm(config)
        self.attention = Attention(config)
        self.norm2 = Norm(config)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:  # x [b, s, m]
        x = mark_sharding(x + self.attention(self.norm1(x)), "batch stream width")
        x = mark_sharding(x + self.feed_forward(self.norm2(x)), "batch stream width")
        return x


class GPT(nn.Module):
    """tokens [b, s] -> logits [b, s, v], or with targets [b, s] the mean loss; in the mode eval the
    loss of every token, [b, s].
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.ends_in_blocks = False  # whether the loss is a part of a pipeline
        self.embedding = nn.Parameter(
            torch.randn(config.vocabulary, config.width) * 0.02
        )  # [v, m], also the head
        self.position = nn.Parameter(torch.randn(config.context, config.width) * 0.02)  # [s, m]
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = Norm(config)
        mark_sharding(self.embedding, "words embed")
        mark_sharding(self.position, "place width")

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:  # [b, s], [b, s]
        x = self.embed(tokens)
        if not self.ends_in_blocks:
            return self.predict(self.blocks(x), targets)
        blocks: Any = self.blocks  # a pipeline
        if targets is None or not self.training:
            return self.predict(blocks.outputs(x), targets)
        return blocks(x, targets=targets)

    def embed(self, tokens: Tensor) -> Tensor:  # [b, s] -> [b, s, m]
        tokens = mark_sharding(tokens, "batch length")
        x = F.embedding(tokens, self.embedding) + self.position[: tokens.shape[1]]  # [b, s, m]
        return mark_sharding(x, "batch stream width")

    def predict(self, x: Tensor, targets: Tensor | None) -> Tensor:  # [b, s, m], [b, s]
        logits = F.linear(self.norm(x), self.embedding)  # [b, s, v]
        logits = mark_sharding(logits, "batch length words")
        if targets is None:
            return logits
        mean = "mean" if self.training else "none"
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction=mean)

    def divide(
        self,
        mesh: Mesh | None,
        microbatches: int,
        repeats: int = 1,
        schedule: str = "auto",
        loop: bool = False,
    ) -> None:
        """Make the blocks a pipeline, if the mesh has an axis for it, or a loop of the program."""
        if mesh is not None and "stage" in mesh.names:
            self.ends_in_blocks = schedule in BETWEEN
            self.blocks = pipeline(
                self.blocks.children(),
                mesh,
                microbatches=microbatches,
                repeats=repeats,
                schedule=schedule,
                loss=self.predict if self.ends_in_blocks else None,
            )
        elif loop:
            self.blocks = stack(self.blocks.children())

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
    microbatches: int = 8,
    schedule: str = "auto",
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and a batch for `python -m torchgspmd plan`, in bfloat16."""
    config = Config(vocabulary, context, layers, heads, width)
    tokens = torch.zeros(batch, context, dtype=torch.long)
    model = GPT(config).bfloat16()
    model.divide(mesh, microbatches, schedule=schedule)
    return annotate(model, LAYOUTS[layout].on(mesh)), (tokens, tokens)
