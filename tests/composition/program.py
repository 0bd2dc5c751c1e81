"""One small decoder Transformer that a Setup changes: the program of every set of features.

Letters: b batch, s sequence, m width, n heads, d width of a head, h hidden units, e experts.
Marks name dimensions; `Setup.layout` says which axes shard a name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import scan
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torchgspmd as gspmd
from torchgspmd import Mesh, moe

SIZES = {"batch": 8, "length": 8, "heads": 4, "head": 2, "width": 8, "hidden": 8, "words": 12}
UNEVEN = {"batch": 12, "length": 7, "heads": 3, "head": 3, "width": 9, "hidden": 7, "words": 11}
EXPERTS, CHOICES, WINDOW, RANK = 4, 2, 5, 2


@dataclass
class Setup:
    """What a set of features makes of the program. A field is set by one row of the table."""

    mesh: dict[str, int] = field(default_factory=dict)  # devices of each axis
    layout: dict[str, str] = field(default_factory=dict)  # axes of a name of a dimension
    options: dict[str, Any] = field(default_factory=dict)  # of plan()
    pipeline: dict[str, Any] = field(default_factory=dict)  # options of pipeline()
    dynamic: dict[str, int] = field(default_factory=dict)  # dimensions of tokens, by their names
    frozen: tuple[str, ...] = ()  # ends of names of weights without a gradient
    sizes: dict[str, int] = field(default_factory=lambda: SIZES)
    blocks: str = "loop"  # or stack, pipeline
    layers: int = 2
    window: bool = False  # of flex_attention
    keys: int = 0  # heads of keys and values; 0: as many as of queries
    feed_forward: str = "dense"  # or dropless, capacity
    by_hand: bool = False  # the dense layer as a manual region
    recompute: bool = False  # blocks
    inner_checkpoint: bool = False  # of the feed-forward layer, in each block
    selective: bool = False  # checkpoint of a block that keeps products
    accumulate: int = 1  # microbatches of a scan in forward
    tied: bool = False
    adapters: bool = False
    tracked: bool = False  # a buffer that forward changes
    hooked: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    step: bool = False  # train_step
    states: str = ""  # axis of the optimizer's states
    rounding: torch.dtype = torch.float64  # of the sums

    @property
    def random(self) -> bool:
        """Return whether forward draws numbers."""
        return self.dropout + self.attention_dropout > 0

    def spec(self, names: str) -> str:
        """Return the layout of a tensor whose dimensions have these names."""
        return " ".join(self.layout.get(name, "_") for name in names.split())

    def plain(self) -> Setup:
        """Return the same model without what changes how it is computed."""
        shape = ("sizes", "layers", "window", "keys", "feed_forward", "tied", "adapters")
        rest = ("tracked", "hooked", "frozen", "step")
        return Setup(**{name: getattr(self, name) for name in (*shape, *rest)})


def marked(setup: Setup, x: Tensor, names: str) -> Tensor:
    """Mark a value or a weight, if there is a mesh."""
    if not setup.mesh:
        return x
    return gspmd.mark_sharding(x, Mesh(**setup.mesh), setup.spec(names))


def weight(setup: Setup, names: str, **sizes: int) -> nn.Parameter:
    """Return a marked weight; a name's size is that of the setup, or in `sizes`."""
    known = {"embed": setup.sizes["width"], "expert": EXPERTS, "rank": RANK, **setup.sizes}
    shape = [{**known, **sizes}[name] for name in names.split()]
    parameter = nn.Parameter(torch.randn(shape, dtype=torch.float64) / max(shape) ** 0.5)
    marked(setup, parameter, names)
    return parameter


class Attention(nn.Module):
    def __init__(self, setup: Setup):
        super().__init__()
        self.setup = setup
        heads = setup.keys or setup.sizes["heads"]
        self.q = weight(setup, "embed heads head")
        self.k, self.v = (weight(setup, "embed heads head", heads=heads) for _ in range(2))
        self.out = weight(setup, "heads head embed")
        if setup.adapters:
            self.a, self.b = weight(setup, "embed rank"), weight(setup, "rank heads head")

    def forward(self, x: Tensor) -> Tensor:
        setup = self.setup
        q, k, v = (torch.einsum("bsm,mnd->bnsd", x, w) for w in (self.q, self.k, self.v))
        if setup.adapters:
            q = q + torch.einsum("bsm,mr,rnd->bnsd", x, self.a, self.b)
        grouped, rate = setup.keys > 0, setup.attention_dropout
        if setup.window and setup.mesh:
            y = flex_attention(q, k, v, block_mask=_window(x.shape[1]), enable_gqa=grouped)
        elif setup.window:  # on CPUs torch's own flex_attention has no backward
            places = torch.arange(x.shape[1])
            seen = _seen(0, 0, places[:, None], places)
            y = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=grouped)
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=rate, enable_gqa=grouped
            )
        return torch.einsum("bnsd,ndm->bsm", y, self.out)


def _seen(b: Any, h: Any, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < WINDOW)


def _window(length: int) -> Any:
    return create_block_mask(_seen, None, None, length, length, device="cpu")


class Dense(nn.Module):
    def __init__(self, setup: Setup):
        super().__init__()
        self.setup = setup
        self.up, self.down = weight(setup, "embed hidden"), weight(setup, "hidden embed")
        self.bias = weight(setup, "hidden")

    def forward(self, x: Tensor) -> Tensor:
        if self.setup.by_hand and self.setup.mesh:
            product = gspmd.manual(
                _by_hand,
                Mesh(**self.setup.mesh),
                ("_ _ _", "_ model", "model", "model _"),
                "_ _ _",
                axes=("model",),
            )
            return product(x, self.up, self.bias, self.down)
        return _dense(x, self.up, self.bias, self.down)


def _dense(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    return torch.tanh(x @ up + bias) @ down


def _by_hand(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    return gspmd.collectives.all_reduce(_dense(x, up, bias, down), "model")


class Experts(nn.Module):
    """Each token at its best two experts; none is left out."""

    def __init__(self, setup: Setup):
        super().__init__()
        self.setup = setup
        self.router = weight(setup, "embed experts", experts=EXPERTS)
        self.up = weight(setup, "expert embed hidden")
        self.down = weight(setup, "expert hidden embed")

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = (x @ self.router).softmax(-1).topk(CHOICES)
        if self.setup.feed_forward == "dropless":
            routed = moe.dispatch(x, chosen, EXPERTS)
            h = torch.tanh(moe.grouped_mm(routed.rows, self.up, routed.ends))
            y = moe.grouped_mm(h, self.down, routed.ends)
            return moe.combine(y, routed, weights)
        room = CHOICES * x.shape[1]
        taken = F.one_hot(chosen.transpose(1, 2), EXPERTS)  # [b, k, s, e]
        before = taken.flatten(1, 2).cumsum(1).view_as(taken) - taken
        places = (before[..., None] == torch.arange(room)) & (taken[..., None] > 0)
        places = places.transpose(1, 2).to(x.dtype)  # [b, s, k, e, c]
        y = torch.einsum("bsec,bsm->ebcm", places.sum(2), x)
        h = torch.tanh(torch.einsum("ebcm,emh->ebch", y, self.up))
        y = torch.einsum("ebch,ehm->ebcm", h, self.down)
        return torch.einsum("bskec,bsk,ebcm->bsm", places, weights, y)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class Block(nn.Module):
    def __init__(self, setup: Setup):
        super().__init__()
        self.setup = setup
        self.norm1 = nn.LayerNorm(setup.sizes["width"], dtype=torch.float64)
        self.norm2 = nn.LayerNorm(setup.sizes["width"], dtype=torch.float64)
        self.attention = Attention(setup)
        self.feed_forward = (Dense if setup.feed_forward == "dense" else Experts)(setup)

    def forward(self, x: Tensor) -> Tensor:
        if not self.setup.selective:
            return self.compute(x)
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(self.compute, x, use_reentrant=False, context_fn=contexts)

    def compute(self, x: Tensor) -> Tensor:
        x = self.along(x + self.dropped(self.attention(self.norm1(x))))
        y = self.norm2(x)
        if self.setup.inner_checkpoint:
            y = checkpoint(self.feed_forward, y, use_reentrant=False)
        else:
            y = self.feed_forward(y)
        return self.along(x + self.dropped(y))

    def along(self, x: Tensor) -> Tensor:
        return marked(self.setup, x, "batch stream _")

    def dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.setup.dropout) if self.setup.dropout else x


def _halved(module: nn.Module, args: Any, result: Tensor) -> Tensor:
    return result * 0.5


class Model(nn.Module):
    def __init__(self, setup: Setup):
        super().__init__()
        self.setup = setup
        self.embed = weight(setup, "words embed")
        self.place = weight(setup, "length embed", length=2 * setup.sizes["length"])
        if setup.tracked:
            self.register_buffer("mean", torch.zeros(setup.sizes["width"], dtype=torch.float64))
        self.blocks = nn.ModuleList(Block(setup) for _ in range(setup.layers))
        self.head = None if setup.tied else weight(setup, "words embed")
        for name, parameter in self.named_parameters():
            if name.endswith(setup.frozen):
                parameter.requires_grad_(False)
        for block in self.blocks if setup.hooked else ():
            block.register_forward_hook(_halved)

    def assemble(self) -> None:
        """Let the blocks be a stack or a pipeline, of the weights that they have."""
        setup = self.setup
        if setup.blocks == "stack":
            self.blocks = gspmd.stack(self.blocks, recompute=setup.recompute)
        elif setup.blocks == "pipeline":
            options = {"microbatches": 2, "recompute": setup.recompute, **setup.pipeline}
            if options.get("schedule", "circular") != "circular":
                options["loss"] = self.loss
            self.blocks = gspmd.pipeline(self.blocks, Mesh(**setup.mesh), **options)

    def loss(self, y: Tensor, targets: Tensor) -> Tensor:
        head = self.embed if self.head is None else self.head
        logits = marked(self.setup, y @ head.T, "batch length words")
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.setup.accumulate == 1:
            return self.of_part(tokens, targets)

        def part(total: Tensor, part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return total + self.of_part(*part), total.new_zeros(())

        # Rows of a device stay on it: each part has some of all.
        parts = tuple(
            t.unflatten(0, (-1, self.setup.accumulate)).transpose(0, 1) for t in (tokens, targets)
        )
        total, _ = scan(part, self.embed.new_zeros(()), parts)
        return total / self.setup.accumulate

    def of_part(self, tokens: Tensor, targets: Tensor) -> Tensor:
        tokens = marked(self.setup, tokens, "batch length")
        x = self.embed[tokens] + self.place[: tokens.shape[1]]
        x = marked(self.setup, x, "batch length _")
        if self.setup.tracked:
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 1)), 0.1)
        if self.setup.blocks == "pipeline" and self.blocks.loss is not None:
            return self.blocks(x, targets=targets)
        if self.setup.blocks != "loop":
            return self.loss(self.blocks(x), targets)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.setup.recompute else block(x)
        return self.loss(x, targets)


def build(setup: Setup) -> nn.Module:
    """Return the model with weights that only its sizes decide; its training step with `step`."""
    torch.manual_seed(0)
    model = Model(setup)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    model.assemble()
    if not setup.step:
        return model
    trained = [p for p in model.parameters() if p.requires_grad]
    # A step without momentum is the gradient, by which a random program is judged.
    if setup.random:
        return gspmd.train_step(model, torch.optim.SGD(trained, lr=1.0), clip=1e9)
    # lr / eps: how much a rounding of a gradient near 0 is in a weight.
    step = gspmd.train_step(model, torch.optim.AdamW(trained, lr=0.1, eps=0.1), clip=0.5)
    if setup.states:
        for name, state in step.named_buffers():
            if name.startswith("exp_avg"):
                spec = " ".join(setup.states if i == 0 else "_" for i in range(state.dim()))
                gspmd.mark_sharding(state, Mesh(**setup.mesh), spec)
    return step


def batch(setup: Setup, seed: int = 0, **sizes: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets."""
    known = {**setup.sizes, **sizes}
    draw = torch.Generator().manual_seed(seed)
    shape = known["batch"], known["length"]
    return tuple(torch.randint(known["words"], shape, generator=draw) for _ in range(2))
