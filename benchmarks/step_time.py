"""Time of a training step against the same parallelism written by hand, on gloo processes of this
machine.

    torchrun --nproc-per-node 2 benchmarks/step_time.py [--sizes 64 256 512] [--steps 30] [--loop]

All variants live in one run and take turns step by step, in an order drawn anew for each step:
after one that does much in Python the caches are cold (5 % of a small model's step). Printed:
median CPU time of a step summed over the processes, and its ratio to that of another library or of
code by hand.

The first table, and the only one with --loop, is the ordinary loop: forward and backward,
clip_grad_norm_, an optimizer as it comes (AdamW, AdamW with foreach=True, SGD with momentum),
zero_grad. dp and fsdp beside DDP, tp beside Megatron-LM's functions by hand. The second one has
fused AdamW, and beside each kind of parallelism the same by hand:

    data     hand: bucketed all_reduce of gradients; DDP; torchgspmd dp
    tensor   hand: Megatron-LM's autograd functions (arXiv 1909.08053, section 3);
             DTensor tensor parallel; torchgspmd tp
    sharded  hand: one flat parameter per block, gathered where it is used, its gradient
             reduce-scattered, AdamW on the shards (ZeRO-3, arXiv 1910.02054, section 5.3, which
             keeps gathered weights until the backward); FSDP2; torchgspmd fsdp
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torchgspmd as gspmd

HEADS, LAYERS, VOCABULARY, SEQUENCE, BATCH = 4, 4, 512, 128, 8


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head_width = width // HEADS

    def forward(self, x: Tensor) -> Tensor:  # [b, s, m]
        b, s, _ = x.shape
        h = self.ln1(x)
        q, k, v = (
            f(h).view(b, s, -1, self.head_width).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, s, -1))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(SEQUENCE, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.ln(x)).flatten(0, 1), targets.flatten())


# ------------------------------------------------------------------------------------------ by hand


class _Copy(torch.autograd.Function):
    """Identity; the backward sums the gradient over the group."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Reduce(torch.autograd.Function):
    """Sums over the group; the backward is the identity."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class MegatronBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        h = _Copy.apply(self.ln1(x))
        q, k, v = (
            f(h).view(b, s, -1, self.head_width).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + (
            _Reduce.apply(F.linear(y.transpose(1, 2).reshape(b, s, -1), self.o.weight))
            + self.o.bias
        )
        h = F.gelu(self.up(_Copy.apply(self.ln2(x))))
        return x + (_Reduce.apply(F.linear(h, self.down.weight)) + self.down.bias)


def by_hand_tensor(model: GPT) -> nn.Module:
    rank, world = dist.get_rank(), dist.get_world_size()
    for block in model.blocks:
        block.__class__ = MegatronBlock
        for name in ("q", "k", "v", "up", "o", "down"):
            layer, dim = getattr(block, name), int(name in ("o", "down"))
            layer.weight = nn.Parameter(layer.weight.detach().chunk(world, dim)[rank].clone())
            if not dim:
                layer.bias = nn.Parameter(layer.bias.detach().chunk(world)[rank].clone())
    return model


def all_reduce_gradients(model: nn.Module) -> None:
    grads = [p.grad for p in model.parameters()]
    bucket = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(bucket)
    bucket /= dist.get_world_size()
    for grad, part in zip(grads, bucket.split([g.numel() for g in grads])):
        grad.copy_(part.view_as(grad))


class _Gather(torch.autograd.Function):
    """The whole of a flat parameter from the parts of all processes; the backward averages its
    gradient into the parts.
    """

    @staticmethod
    def forward(ctx, part):
        whole = part.new_empty(part.numel() * dist.get_world_size())
        dist.all_gather_into_tensor(whole, part)
        return whole

    @staticmethod
    def backward(ctx, grad):
        part = grad.new_empty(grad.numel() // dist.get_world_size())
        dist.reduce_scatter_tensor(part, grad)
        return part.div_(dist.get_world_size())


class FlatParameter:
    """The parameters of a module that no block inside of it has, as one: a forward pre-hook puts
    views of the gathered whole in their place.
    """

    def __init__(self, module: nn.Module, inside: list[nn.Module]):
        world, rank = dist.get_world_size(), dist.get_rank()
        others = {m for block in inside for m in block.modules()}
        self.places = [
            (m, name)
            for m in module.modules()
            if m not in others
            for name, _ in m.named_parameters(recurse=False)
        ]
        parameters = [m._parameters.pop(name) for m, name in self.places]
        self.shapes, self.sizes = [p.shape for p in parameters], [p.numel() for p in parameters]
        self.padding = -sum(self.sizes) % world
        flat = torch.cat([p.detach().flatten() for p in parameters] + [torch.zeros(self.padding)])
        self.part = nn.Parameter(flat.chunk(world)[rank].clone())
        module.register_parameter("flat", self.part)
        module.register_forward_pre_hook(self.gather)

    def gather(self, *_) -> None:
        whole = _Gather.apply(self.part)
        for (module, name), shape, part in zip(
            self.places, self.shapes, whole.split([*self.sizes, self.padding])
        ):
            setattr(module, name, part.view(shape))


def by_hand_sharded(model: GPT) -> nn.Module:
    for module, inside in (*((block, []) for block in model.blocks), (model, list(model.blocks))):
        FlatParameter(module, inside)
    return model


# ------------------------------------------------------------------------------------- the variants


def mark(model: GPT, mesh: gspmd.Mesh, layout: str) -> None:
    if layout == "fsdp":
        for p in model.parameters():
            gspmd.mark_sharding(p, mesh, " ".join(["data"] + ["_"] * (p.dim() - 1)))
    for block in model.blocks if layout == "tp" else ():
        for layer in (block.q, block.k, block.v, block.up):
            gspmd.mark_sharding(layer.weight, mesh, "model _")
            gspmd.mark_sharding(layer.bias, mesh, "model")
        for layer in (block.o, block.down):
            gspmd.mark_sharding(layer.weight, mesh, "_ model")


def ours(model: GPT, layout: str) -> nn.Module:
    mesh = gspmd.Mesh(**{"model" if layout == "tp" else "data": dist.get_world_size()})
    mark(model, mesh, layout)
    return gspmd.parallelize(model, mesh, in_specs=None if layout == "tp" else ("data _", "data _"))


def dtensor_tensor(model: GPT) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {n: ColwiseParallel() for n in ("q", "k", "v", "up")} | {
        n: RowwiseParallel() for n in ("o", "down")
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def fsdp2(model: GPT) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# name -> (group, how the model is made, whether it takes the local batch, what follows the
# backward)
VARIANTS = {
    "data: hand": (lambda m: m, True, all_reduce_gradients),
    "data: DDP": (DistributedDataParallel, True, None),
    "data: torchgspmd dp": (lambda m: ours(m, "dp"), False, None),
    "tensor: hand": (by_hand_tensor, False, None),
    "tensor: DTensor": (dtensor_tensor, False, None),
    "tensor: torchgspmd tp": (lambda m: ours(m, "tp"), False, None),
    "sharded: hand": (by_hand_sharded, True, None),
    "sharded: FSDP2": (fsdp2, True, None),
    "sharded: torchgspmd fsdp": (lambda m: ours(m, "fsdp"), False, None),
}


OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, 1e-3),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, 1e-3, foreach=True),
    "SGD momentum": lambda ps: torch.optim.SGD(ps, 1e-2, momentum=0.9),
}
# name -> what it is compared with
LOOP = {
    "data: DDP": "data: DDP",
    "sharded: FSDP2": "data: DDP",
    "data: torchgspmd dp": "data: DDP",
    "sharded: torchgspmd fsdp": "data: DDP",
    "tensor: hand": "tensor: hand",
    "tensor: torchgspmd tp": "tensor: hand",
}


def fused(ps: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(ps, 1e-3, fused=True)


class Trainer:
    def __init__(self, model: GPT, make, local: bool, after, optimizer=fused, clips: bool = False):
        self.model, self.local, self.after = make(copy.deepcopy(model)), local, after
        grouped: dict[bool, list] = {}
        for p in self.model.parameters():
            grouped.setdefault(hasattr(p, "placements"), []).append(p)  # AdamW takes no mixture
        self.clipped = [*grouped.values()] if clips else []
        self.optimizers = [optimizer(ps) for ps in grouped.values()]
        self.seconds: list[float] = []
        self.parts: list[tuple[float, ...]] = []  # forward and backward, clip, optimizer

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        if self.local:
            tokens, targets = (
                t.chunk(dist.get_world_size())[dist.get_rank()] for t in (tokens, targets)
            )
        dist.barrier()
        start = time.process_time()
        loss = self.model(tokens, targets)
        loss.backward()
        if self.after:
            self.after(self.model)
        backward = time.process_time()
        for group in self.clipped:
            nn.utils.clip_grad_norm_(group, 1.0)
        clipped = time.process_time()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        end = time.process_time()
        self.seconds.append(end - start)
        self.parts.append((backward - start, clipped - backward, end - clipped))
        return loss.item()


def take_turns(trainers: dict[str, Trainer], steps: int) -> tuple[dict[str, list], dict]:
    """Return the median seconds of a step and its parts, summed over the processes, and losses."""
    losses: dict[str, float] = {}
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(VOCABULARY, (2, BATCH, SEQUENCE), generator=generator)
        for name in random.Random(step).sample(list(trainers), len(trainers)):
            losses[name] = trainers[name].step(*batch)
    rows = torch.tensor(
        [
            [statistics.median(column) for column in (t.seconds[3:], *zip(*t.parts[3:]))]
            for t in trainers.values()
        ]
    )
    dist.all_reduce(rows)
    return dict(zip(trainers, rows.tolist())), losses


def run_loop(width: int, steps: int) -> None:
    """Print the ordinary loop's table."""
    torch.manual_seed(0)
    model = GPT(width)
    for optimizer, make in OPTIMIZERS.items():
        trainers = {name: Trainer(model, *VARIANTS[name], make, True) for name in LOOP}
        seconds, _ = take_turns(trainers, steps)
        for name, other in LOOP.items() if dist.get_rank() == 0 else ():
            total, backward, clip, update = (1e3 * s for s in seconds[name])
            print(
                f"  {width} {optimizer:14} {name:24} forward, backward {backward:6.1f} clip "
                f"{clip:5.1f} optimizer {update:6.1f} ms   {total / seconds[other][0] / 1e3:5.2f} "
                f"of {other}",
                flush=True,
            )


def run(width: int, steps: int) -> None:
    torch.manual_seed(0)
    model = GPT(width)
    seconds, losses = take_turns({n: Trainer(model, *v) for n, v in VARIANTS.items()}, steps)
    if dist.get_rank() == 0:
        print(
            f"width {width}: {sum(p.numel() for p in model.parameters()):,} parameters, "
            f"{BATCH * SEQUENCE} tokens"
        )
        for name, (total, *_) in seconds.items():
            hand = seconds[name.split(":")[0] + ": hand"][0]
            print(
                f"  {name:24} {total * 1e3:8.1f} ms   {total / hand:5.2f} of hand   loss "
                f"{losses[name]:.4f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[64, 256, 512], help="widths of the model"
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--loop", action="store_true", help="the ordinary loop alone")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for width in options.sizes:
        run_loop(width, options.steps)
    for width in options.sizes if not options.loop else ():
        run(width, options.steps)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
