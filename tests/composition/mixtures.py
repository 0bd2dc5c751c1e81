"""Real models with five and more features at once: what trains on one process and on a mesh.

A mixture is a function of a mesh, or of None for one process of plain PyTorch, that returns a
Training. Both see the same batches and the same first weights.

Letters: b batch, s sequence, m width, n heads, d width of a head, l latent width, h hidden units.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import torchgspmd as gspmd
from torchgspmd import Mesh, moe

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> Any:
    """Return the model.py of an example."""
    sys.path.insert(0, str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(f"{name}_model", EXAMPLES / name / "model.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GPT, VIT, UNET = map(example, ("gpt", "vit", "unet3d"))
STEPS = 20
EXACT = 1e-6  # of float64, after 20 steps of Adam
Batch = Callable[[int], tuple[Tensor, ...]]


@dataclass
class Training:
    """A loop of training. run: does a step with a batch, returns the loss."""

    model: nn.Module
    batch: Batch
    run: Callable[..., Any]
    optimizer: torch.optim.Optimizer

    def step(self, number: int) -> float:
        """Do a step, whose random numbers are those of its number; return the loss."""
        torch.manual_seed(number)
        return float(self.run(*self.batch(number)))

    def weights(self) -> dict[str, Tensor]:
        """Return the whole weights by the names that a loop's blocks have."""
        state = self.model.state_dict()
        return {name: whole(value) for name, value in state.items()}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x.detach().clone()


def compare(mesh: Mesh, make: Callable[[Mesh | None], Any], tolerance: float) -> None:
    """Train on all processes, and on rank 0 alone; compare losses and weights. On every rank."""
    losses, weights = _trained(make(mesh))
    expected = [_trained(make(None)) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(expected)
    for other, plain in filter(None, expected):
        torch.testing.assert_close(losses, other, rtol=tolerance, atol=0)
        assert losses[-1] < losses[0]
        assert weights.keys() == plain.keys()
        for key, weight in weights.items():
            scale = plain[key].double().norm().clamp(min=1)
            assert (weight - plain[key]).double().norm() <= tolerance * scale, key


def _trained(training: Any) -> tuple[list[float], dict[str, Tensor]]:
    return [training.step(number) for number in range(STEPS)], training.weights()


def by_loop(model: nn.Module, batch: Batch, lr: float = 1e-3, clip: float = 1.0) -> Training:
    """Return the loop that a user writes, with clipping."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr)

    def run(*args: Tensor) -> Tensor:
        loss = model(*args)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(model, batch, run, optimizer)


def words(count: int, rows: int, length: int, second: int = 0) -> Batch:
    """Return batches of tokens and their successors. second: the length of every second batch."""

    def batch(number: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(number % 2)
        size = second if second and number % 2 else length
        tokens = torch.randint(count, (rows, size + 1), generator=draw)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return batch


# ----------------------------------------------------------------------------------- (a) GPT


def gpt(mesh: Mesh | None, dtype: torch.dtype | None = None, backend: str = "torch") -> Training:
    """Megatron with sequence parallel, ZeRO-1, accumulation, recomputation, clipping.

    dtype: that the model computes in; its gradients are reduced in float32 then.
    """
    torch.manual_seed(0)
    model = GPT.GPT(GPT.Config(31, context=16, layers=2, heads=4, width=16)).double()
    batch = words(31, rows=8, length=16)
    if mesh is None and dtype is None:
        return by_loop(model, batch)
    if mesh is not None:
        model.blocks = gspmd.stack(model.blocks.children(), recompute=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    parts = 1 if mesh is None else 2
    step = gspmd.train_step(model, optimizer, clip=1.0, param_dtype=dtype, microbatches=parts)
    if mesh is not None:
        reduced = {"reduce_dtype": torch.float32} if dtype else {}
        options = {"shard_updates": "data", "backend": backend, **reduced}
        step = gspmd.parallelize(step, GPT.SP.on(mesh), **options)
    return Training(step.model, batch, step, optimizer)


def gpt_half(mesh: Mesh | None) -> Training:
    return gpt(mesh, torch.bfloat16)


def gpt_compiled(mesh: Mesh | None) -> Training:
    return gpt(mesh, backend="inductor")


# ------------------------------------------------------------------- (b) experts in a pipeline


@dataclass(frozen=True)
class Sizes:
    width: int = 8
    heads: int = 2
    head: int = 4
    turned: int = 2  # the part of a head that positions turn
    latent: int = 4
    hidden: int = 8
    experts: int = 4
    words: int = 13
    length: int = 8


def turned(x: Tensor) -> Tensor:
    """Rotate pairs of the last dimension by the position, [..., s, d]."""
    s, d = x.shape[-2:]
    angles = torch.arange(s)[:, None] / 10.0 ** (torch.arange(d // 2) / (d // 2))
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class LatentAttention(nn.Module):
    """DeepSeek's: keys and values from one small latent vector, positions in a part beside."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        m, n, d, r = sizes.width, sizes.heads, sizes.head, sizes.turned
        self.q, self.q_turned = parameter(m, n, d), parameter(m, n, r)
        self.latent, self.k_turned = parameter(m, sizes.latent), parameter(m, r)
        self.k, self.v = (parameter(sizes.latent, n, d) for _ in range(2))
        self.out = parameter(n, d, m)

    def forward(self, x: Tensor) -> Tensor:
        c = x @ self.latent  # [b, s, l]
        q, k, v = (
            torch.einsum("bsm,mnd->bnsd", y, w) for y, w in ((x, self.q), (c, self.k), (c, self.v))
        )
        q_turned = turned(torch.einsum("bsm,mnd->bnsd", x, self.q_turned))
        k_turned = turned(x @ self.k_turned)[:, None].expand(-1, q.shape[1], -1, -1)
        q, k = torch.cat([q, q_turned], -1), torch.cat([k, k_turned], -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.einsum("bnsd,ndm->bsm", y, self.out)


class Experts(nn.Module):
    """Two of four experts for each token, without a capacity, beside one that all have."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        e, m, h = sizes.experts, sizes.width, sizes.hidden
        self.router = parameter(m, e)
        self.up, self.down = parameter(e, m, h), parameter(e, h, m)
        self.shared_up, self.shared_down = parameter(m, h), parameter(h, m)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = (x @ self.router).softmax(-1).topk(2)
        routed = moe.dispatch(x, chosen, len(self.up))
        h = F.silu(moe.grouped_mm(routed.rows, self.up, routed.ends))
        y = moe.combine(moe.grouped_mm(h, self.down, routed.ends), routed, weights)
        return y + F.silu(x @ self.shared_up) @ self.shared_down


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=torch.float64) / shape[0] ** 0.5)


class ExpertBlock(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.norms = nn.ModuleList(
            nn.RMSNorm(sizes.width, dtype=torch.float64, eps=1e-6) for _ in range(2)
        )
        self.attention, self.experts = LatentAttention(sizes), Experts(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.experts(self.norms[1](x))


class LanguageModel(nn.Module):
    """Blocks between a table of words and a head."""

    def __init__(self, sizes: Sizes, blocks: list[nn.Module]):
        super().__init__()
        self.embed = parameter(sizes.words, sizes.width)
        self.head = parameter(sizes.width, sizes.words)
        self.blocks: Any = nn.ModuleList(blocks)
        self.ends_in_blocks = False

    def loss(self, y: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy((y @ self.head).flatten(0, 1), targets.flatten())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed[tokens]
        if self.ends_in_blocks:
            return self.blocks(x, targets=targets)
        for block in self.blocks if isinstance(self.blocks, nn.ModuleList) else (self.blocks,):
            x = block(x)
        return self.loss(x, targets)


def deepseek(mesh: Mesh | None) -> Training:
    """Experts without a capacity, latent attention, 1F1B, data."""
    torch.manual_seed(0)
    sizes = Sizes()
    model = LanguageModel(sizes, [ExpertBlock(sizes) for _ in range(2)])
    batch = words(sizes.words, rows=8, length=sizes.length)
    if mesh is not None:
        of_experts = {"**.experts.up": "expert _ _", "**.experts.down": "expert _ _"}
        gspmd.annotate(model, mesh, of_experts)
        options = {"microbatches": 2, "schedule": "1f1b", "loss": model.loss}
        model.blocks = gspmd.pipeline(model.blocks, mesh, **options)
        model.ends_in_blocks = True
        model = gspmd.parallelize(model, mesh, in_specs=("data+expert _",) * 2)
    return by_loop(model, batch)


# ---------------------------------------------------------------------------- (c) long context


class LongBlock(nn.Module):
    """Four heads of queries, one of keys and values, dropout of each term that is added."""

    def __init__(self, width: int):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, dtype=torch.float64) for _ in range(2))
        self.q, self.out = parameter(width, 4, 2), parameter(4, 2, width)
        self.k, self.v = parameter(width, 1, 2), parameter(width, 1, 2)
        self.up, self.down = parameter(width, 16), parameter(16, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (torch.einsum("bsm,mnd->bnsd", y, w) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + F.dropout(torch.einsum("bnsd,ndm->bsm", y, self.out), 0.2)
        return x + F.dropout(F.gelu(self.norms[1](x) @ self.up) @ self.down, 0.2)


def long_context(mesh: Mesh | None) -> Training:
    """A ring of keys and values, a stack of recomputed blocks, dropout, and lengths of which
    devices have unequal parts: one program has all.
    """
    model, batch = long_model()
    if mesh is None:  # random numbers are those of a mesh of one device
        return on_one_device(model, batch, dynamic=LONG["dynamic"])
    return by_loop(gspmd.parallelize(model, mesh, **LONG), batch)


def long_model() -> tuple[nn.Module, Batch]:
    """Return the model, and batches of fewer rows than devices: the sequence has to be divided."""
    torch.manual_seed(0)
    sizes = Sizes()
    model = LanguageModel(sizes, [LongBlock(sizes.width) for _ in range(2)])
    model.blocks = gspmd.stack(model.blocks, recompute=True)
    return model, words(sizes.words, rows=2, length=16, second=11)


LONG: dict[str, Any] = {
    "in_specs": ("data seq", "data seq"),
    "advanced": {"regather": "all"},
    "dynamic": {"tokens": {1: "length"}, "targets": {1: "length"}},
}


def on_one_device(
    model: nn.Module, batch: Batch, mesh: Mesh = Mesh(data=1), dynamic: Any = None
) -> Training:
    """Return the loop of a program that is run for a mesh in this process."""
    options = {"in_specs": "auto", "grad": True, "dynamic": dynamic}
    plan = gspmd.plan(model, *batch(0), mesh=mesh, **options)

    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def run(*args: Tensor) -> Tensor:
        loss, gradients = plan.simulate(*args)
        for name, p in model.named_parameters():
            p.grad = gradients[name].clone()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return Training(model, batch, run, optimizer)


# -------------------------------------------------------------------- (d) images in a pipeline


class DroppingBlock(VIT.Block):
    """A block of examples/vit with dropout of each term that is added."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm1(x)), 0.2)
        return x + F.dropout(self.feed_forward(self.norm2(x)), 0.2)


class Images(VIT.ViT):
    """examples/vit with its blocks and its loss in a pipeline."""

    def divide(self, mesh: Mesh) -> None:
        options = {"microbatches": 2, "schedule": "zero_bubble", "loss": self.loss}
        self.pipeline = gspmd.pipeline(self.blocks, mesh, **options)
        del self.blocks

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x[:, 0])), labels)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        images = gspmd.mark_sharding(images, "batch _ rows _")
        x = self.patches(images).flatten(2).transpose(1, 2)  # [b, s - 1, m]
        first = self.class_token.expand(len(x), 1, -1)
        return self.pipeline(torch.cat([first, x], dim=1) + self.position, labels=labels)


def vit(mesh: Mesh | None) -> Training:
    """Stages, dropout, and microbatches of five images on two devices."""
    torch.manual_seed(0)
    layout = VIT.DP | gspmd.Layout({"stage": "stage"})
    config = VIT.Config(size=8, patch=4, classes=3, layers=2, heads=2, width=8)
    model = Images(config)
    model.blocks = nn.ModuleList(DroppingBlock(config) for _ in range(config.layers))
    here = mesh or Mesh(data=1, stage=2)
    model.double().divide(here)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(number % 2)
        images = torch.randn(10, 1, 8, 8, dtype=torch.float64, generator=draw)
        return images, torch.randint(3, (10,), generator=draw)

    if mesh is None:  # stages draw other numbers than a loop: those of the stages, in one process
        return on_one_device(model, batch, layout.on(here))
    return by_loop(gspmd.parallelize(model, layout.on(here)), batch)


# ----------------------------------------------------------------------------- (e) volumes


class Recomputed(nn.Module):
    """A block whose values are not kept for the backward."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def unet(mesh: Mesh | None) -> Training:
    """Slabs of volumes whose rows do not divide, rows of the batch, recomputed blocks; after half
    of the steps it goes on from a checkpoint, on another mesh.
    """

    def batch(number: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(number % 2)
        image = torch.randn(4, 1, 9, 4, 4, dtype=torch.float64, generator=draw)
        return image, torch.randint(2, (4, 9, 4, 4), generator=draw)

    def started(layout: Any) -> Training:
        torch.manual_seed(0)
        model = UNET.UNet(UNET.Config(tissues=2, levels=2, width=2)).double()
        model.down, model.merge = (
            nn.ModuleList(map(Recomputed, blocks)) for blocks in (model.down, model.merge)
        )
        return by_loop(model if layout is None else gspmd.parallelize(model, layout), batch)

    if mesh is None:
        return started(None)
    training = started(UNET.LAYOUTS["spatial"].on(mesh))
    later = started(UNET.LAYOUTS["dp"].on(Mesh(data=mesh.size)))
    return Resumed(training, later)


class Resumed:
    """A Training, and another one that goes on from its checkpoint."""

    def __init__(self, first: Training, second: Training) -> None:
        self.now, self.later = first, second

    def step(self, number: int) -> float:
        if number == STEPS // 2:
            place = [tempfile.mkdtemp()]
            dist.broadcast_object_list(place)
            gspmd.save(f"{place[0]}/step", self.now.model, self.now.optimizer, step=number)
            self.now = self.later
            assert gspmd.load(place[0], self.now.model, self.now.optimizer) == number
        return self.now.step(number)

    def weights(self) -> dict[str, Tensor]:
        return self.now.weights()


MIXTURES = {  # the mesh of each, and what trains
    "gpt": ("data=2,model=2", gpt),
    "gpt_half": ("data=2,model=2", gpt_half),
    "gpt_compiled": ("data=2,model=2", gpt_compiled),
    "deepseek": ("data=2,stage=2,expert=2", deepseek),
    "long_context": ("data=2,seq=2", long_context),
    "vit": ("data=2,stage=2", vit),
    "unet": ("data=2,space=2", unet),
}
