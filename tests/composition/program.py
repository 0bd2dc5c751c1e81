"""One small decoder Transformer that a Setup changes: the program of every set of features.

Letters: b batch, s sequence, m width, n heads, d width of a head, h hidden units, e experts.
Marks name dimensions; `Setup.layout` says which axes shard a name.
"""

from __future__ import annotations

from collections.abc import Callable
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
from torchgspmd import Layout, Mesh, moe
from torchgspmd.layout.layout_rules import MeshLayout

SIZES = {"batch": 8, "length": 8, "heads": 4, "head": 2, "width": 8, "hidden": 8, "words": 12}
UNEVEN = {"batch": 12, "length": 7, "heads": 3, "head": 3, "width": 9, "hidden": 7, "words": 11}
EXPERTS, CHOICES, WINDOW, RANK = 4, 2, 5, 2


@torch.library.custom_op("composition::squash", mutates_args=())
def squash(x: Tensor) -> Tensor:
    """An operation that torchgspmd knows by a rule alone: x / (1 + |x|)."""
    return x / (1 + x.abs())


@torch.library.custom_op("composition::squash_backward", mutates_args=())
def squash_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of squash."""
    return grad / (1 + x.abs()).square()


squash.register_fake(torch.empty_like)
squash_backward.register_fake(lambda grad, x: torch.empty_like(x))
squash.register_autograd(
    lambda ctx, grad: squash_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
squash.register_vmap(lambda info, dims, x: (squash(x), dims[0]))
squash_backward.register_vmap(
    lambda info, dims, *x: (
        squash_backward(*(t.movedim(d, 0) for t, d in zip(x, dims))),
        0,
    )
)
_RANKS = ("a b", "a b c", "a b c d", "a b c d e")
gspmd.rule(squash, [f"{dims} -> {dims}" for dims in _RANKS])
gspmd.rule(squash_backward, [f"{dims}, {dims} -> {dims}" for dims in _RANKS])


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
    normed: bool = False  # BatchNorm of the embedding
    stem: bool = False  # a convolution along positions and width
    custom: bool = False  # an operation of the user's in the feed-forward layer
    alternate: bool = False  # experts in every second layer
    shared: bool = False  # a dense layer beside the experts of each layer
    by_name: bool = False  # marks name dimensions, and a Layout has the axes
    evaluate: bool = False  # on another mesh, from a checkpoint
    decode: bool = False  # token by token, from a checkpoint
    hooked: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    step: bool = False  # train_step
    rounding: torch.dtype = torch.float64  # of the sums

    @property
    def random(self) -> bool:
        """Return whether forward draws numbers."""
        return self.dropout + self.attention_dropout > 0

    def spec(self, names: str) -> str:
        """Return the layout of a tensor whose dimensions have these names."""
        axes = {name: name for name in self.layout} if self.by_name else self.layout
        return " ".join(axes.get(name, "_") for name in names.split())

    def on_mesh(self) -> Mesh | MeshLayout:
        """Return the mesh, with the table of names if marks are names."""
        mesh = Mesh(**self.mesh)
        return Layout(self.layout).on(mesh) if self.by_name else mesh

    def plain(self) -> Setup:
        """Return the same model without what changes how it is computed."""
        shape = ("sizes", "layers", "window", "keys", "feed_forward", "tied", "adapters")
        layers = ("alternate", "shared", "normed", "stem", "custom")
        rest = (*layers, "tracked", "hooked", "frozen", "step")
        return Setup(**{name: getattr(self, name) for name in (*shape, *rest)})


def marked(setup: Setup, x: Tensor, names: str) -> Tensor:
    """Mark a value or a weight, if there is a mesh."""
    if not setup.mesh:
        return x
    if setup.by_name:
        return gspmd.mark_sharding(x, setup.spec(names))
    return gspmd.mark_sharding(x, Mesh(**setup.mesh), setup.spec(names))


def weight(setup: Setup, names: str, **sizes: int) -> nn.Parameter:
    """Return a marked weight; a name's size is that of the setup, or in `sizes`."""
    known = {"embed": setup.sizes["width"], "expert": EXPERTS, "rank": RANK, **setup.sizes}
    shape = [{**known, **sizes}[name] for name in names.split()]
    parameter = nn.Parameter(torch.randn(shape, dtype=torch.float64) / max(shape) ** 0.5)
    marked(setup, parameter, names)
    return parameter


@dataclass
class Cache:
    """Keys and values of the tokens so far, of one layer; `place` is the first new one's."""

    tables: dict[str, Tensor]  # [b, n, all places, d]
    place: Tensor

    def written(self, k: Tensor, v: Tensor, is_window: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Write the rows of new tokens; return all rows, and which a new token sees."""
        rows = self.place + torch.arange(k.shape[2])
        self.tables["k"].index_copy_(2, rows, k)
        self.tables["v"].index_copy_(2, rows, v)
        places = torch.arange(self.tables["k"].shape[2])
        seen = _seen(0, 0, rows[:, None], places) if is_window else places <= rows[:, None]
        return self.tables["k"], self.tables["v"], seen


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

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        setup = self.setup
        q, k, v = (torch.einsum("bsm,mnd->bnsd", x, w) for w in (self.q, self.k, self.v))
        if setup.adapters:
            q = q + torch.einsum("bsm,mr,rnd->bnsd", x, self.a, self.b)
        grouped, rate = setup.keys > 0, setup.attention_dropout * self.training
        if cache is not None:
            k, v, seen = cache.written(k, v, setup.window)
            y = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=grouped)
        elif setup.window and setup.mesh:
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
    return create_block_mask(_seen, None, None, length, length, device=torch.get_default_device())


class Dense(nn.Module):
    def __init__(self, setup: Setup):
        super().__init__()
        self.setup = setup
        self.up, self.down = weight(setup, "embed hidden"), weight(setup, "hidden embed")
        self.bias = weight(setup, "hidden")

    def forward(self, x: Tensor) -> Tensor:
        if self.setup.by_hand and self.setup.mesh:
            product = gspmd.manual(
                partial(_by_hand, bend=_bend(self.setup)),
                Mesh(**self.setup.mesh),
                ("_ _ _", "_ model", "model", "model _"),
                "_ _ _",
                axes=("model",),
            )
            return product(x, self.up, self.bias, self.down)
        return _dense(x, self.up, self.bias, self.down, _bend(self.setup))


def _bend(setup: Setup) -> Callable[[Tensor], Tensor]:
    return squash if setup.custom else torch.tanh


def _dense(
    x: Tensor, up: Tensor, bias: Tensor, down: Tensor, bend: Callable[[Tensor], Tensor]
) -> Tensor:
    return bend(x @ up + bias) @ down


def _by_hand(x: Tensor, *weights: Tensor, bend: Callable[[Tensor], Tensor]) -> Tensor:
    return gspmd.collectives.all_reduce(_dense(x, *weights, bend), "model")


class Experts(nn.Module):
    """Each token at its best two experts; none is left out."""

    def __init__(self, setup: Setup):
        super().__init__()
        self.setup = setup
        self.router = weight(setup, "embed experts", experts=EXPERTS)
        self.up = weight(setup, "expert embed hidden")
        self.down = weight(setup, "expert hidden embed")

    def forward(self, x: Tensor) -> Tensor:
        bend = _bend(self.setup)
        weights, chosen = (x @ self.router).softmax(-1).topk(CHOICES)
        if self.setup.feed_forward == "dropless":
            routed = moe.dispatch(x, chosen, EXPERTS)
            h = bend(moe.grouped_mm(routed.rows, self.up, routed.ends))
            y = moe.grouped_mm(h, self.down, routed.ends)
            return moe.combine(y, routed, weights)
        room = CHOICES * x.shape[1]
        taken = F.one_hot(chosen.transpose(1, 2), EXPERTS)  # [b, k, s, e]
        before = taken.flatten(1, 2).cumsum(1).view_as(taken) - taken
        places = (before[..., None] == torch.arange(room)) & (taken[..., None] > 0)
        places = places.transpose(1, 2).to(x.dtype)  # [b, s, k, e, c]
        y = torch.einsum("bsec,bsm->ebcm", places.sum(2), x)
        h = bend(torch.einsum("ebcm,emh->ebch", y, self.up))
        y = torch.einsum("ebch,ehm->ebcm", h, self.down)
        return torch.einsum("bskec,bsk,ebcm->bsm", places, weights, y)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class Block(nn.Module):
    def __init__(self, setup: Setup, layer: int):
        super().__init__()
        self.setup = setup
        self.norm1 = nn.LayerNorm(setup.sizes["width"], dtype=torch.float64)
        self.norm2 = nn.LayerNorm(setup.sizes["width"], dtype=torch.float64)
        self.attention = Attention(setup)
        is_dense = setup.feed_forward == "dense" or setup.alternate and layer % 2 == 0
        self.feed_forward = (Dense if is_dense else Experts)(setup)
        self.beside = Dense(setup) if setup.shared and not is_dense else None

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        if not self.setup.selective:
            return self.compute(x, cache)
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(self.compute, x, cache, use_reentrant=False, context_fn=contexts)

    def compute(self, x: Tensor, cache: Cache | None) -> Tensor:
        x = self.along(x + self.dropped(self.attention(self.norm1(x), cache)))
        y = self.norm2(x)
        if self.beside is not None:
            x = x + self.beside(y)
        if self.setup.inner_checkpoint:
            y = checkpoint(self.feed_forward, y, use_reentrant=False)
        else:
            y = self.feed_forward(y)
        return self.along(x + self.dropped(y))

    def along(self, x: Tensor) -> Tensor:
        return marked(self.setup, x, "batch stream _")

    def dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.setup.dropout, self.training) if self.setup.dropout else x


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
        if setup.normed:
            self.norm = nn.BatchNorm1d(setup.sizes["width"], dtype=torch.float64)
        if setup.stem:
            self.stem = nn.Conv2d(1, 1, 3, padding=1, dtype=torch.float64)
        self.blocks = nn.ModuleList(Block(setup, i) for i in range(setup.layers))
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
            if options.pop("by_model", False):
                gspmd.pipeline_model(self, "blocks", Mesh(**setup.mesh), **options)
                return
            if options.pop("ends", True) and options.get("schedule", "circular") != "circular":
                options["loss"] = self.loss
            self.blocks = gspmd.pipeline(self.blocks, Mesh(**setup.mesh), **options)

    def loss(self, y: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.words(y).flatten(0, 1), targets.flatten())

    def words(self, y: Tensor) -> Tensor:
        head = self.embed if self.head is None else self.head
        return marked(self.setup, y @ head.T, "batch length words")

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
        x = self.entered(tokens)
        by_model = self.setup.pipeline.get("by_model")
        if self.setup.blocks == "pipeline" and self.blocks.loss is not None and not by_model:
            return self.blocks(x, targets=targets)
        return self.loss(self.through(x), targets)

    def entered(self, tokens: Tensor, place: Tensor | None = None) -> Tensor:
        tokens = marked(self.setup, tokens, "batch length")
        count = tokens.shape[1]
        at = self.place[:count] if place is None else self.place[place + torch.arange(count)]
        x = marked(self.setup, self.embed[tokens] + at, "batch length _")
        if self.setup.tracked and self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 1)).to(self.mean.dtype), 0.1)
        if self.setup.normed:
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        if self.setup.stem:  # an image of one channel
            image = marked(self.setup, x[:, None], "batch _ rows _")
            x = x + marked(self.setup, self.stem(image), "batch _ rows _")[:, 0]
        return x

    def through(self, x: Tensor) -> Tensor:
        if self.setup.blocks != "loop":
            return self.blocks(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.setup.recompute else block(x)
        return x


class Words(nn.Module):
    """The model's prediction of the next word at each place."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        x, blocks = self.model.entered(tokens), self.model.blocks
        has_loss = self.model.setup.blocks == "pipeline" and blocks.loss is not None
        return self.model.words(blocks.outputs(x) if has_loss else self.model.through(x))


class NextWords(nn.Module):
    """The same of new tokens, with a cache of those before."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, place: Tensor, tables: list[dict[str, Tensor]]) -> Tensor:
        x = self.model.entered(tokens, place)
        for block, table in zip(self.model.blocks, tables):
            x = block(x, Cache(table, place))
        return self.model.words(x)


def caches(setup: Setup) -> list[dict[str, Tensor]]:
    """Return empty tables of keys and values, for each layer, in the dtype of the computation."""
    sizes, dtype = setup.sizes, setup.options.get("param_dtype", torch.float64)
    shape = sizes["batch"], setup.keys or sizes["heads"], sizes["length"], sizes["head"]
    return [
        {
            name: marked(setup, torch.zeros(shape, dtype=dtype), "batch heads cached _")
            for name in "kv"
        }
        for _ in range(setup.layers)
    ]


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
    parts = setup.options.get("microbatches", 1)
    # A step without momentum is the gradient, by which a random program is judged.
    if setup.random:
        sgd = torch.optim.SGD(trained, lr=1.0)
        return gspmd.train_step(model, sgd, clip=1e9, microbatches=parts)
    dtype = setup.options.get("param_dtype")
    # lr / eps: how much a rounding of a gradient near 0 is in a weight.
    optimizer = torch.optim.AdamW(trained, lr=0.1, eps=0.1)
    step = gspmd.train_step(model, optimizer, clip=0.5, param_dtype=dtype, microbatches=parts)
    if "states" in setup.layout:
        for name, state in step.named_buffers():
            if name.startswith("exp_avg"):
                marked(setup, state, " ".join(["states"] + ["_"] * (state.dim() - 1)))
    return step


def batch(setup: Setup, seed: int = 0, **sizes: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets."""
    known = {**setup.sizes, **sizes}
    draw = torch.Generator().manual_seed(seed)
    shape = known["batch"], known["length"]
    drawn = (torch.randint(known["words"], shape, generator=draw, device="cpu") for _ in range(2))
    return tuple(tokens.to(torch.get_default_device()) for tokens in drawn)  # a card's, if it is
