"""Plan the largest published layouts on the meta device, each in a process of its own.

    python benchmarks/large_plans.py [NAME ...] [--layers 2] [--stack] [--mesh data=2,model=2]

Prints the seconds of one core from the model to the plan, and the peak of memory, beside their
goals; the seconds of each phase, the counts of work, and the summary of each plan. NAME: a row of
PROGRAMS. --layers: fewer of them. --stack: as a loop (gspmd.stack). --mesh: another one, for one
NAME. --profile: the functions that take most of the time.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import moe


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=torch.bfloat16))


class Dense(nn.Module):
    """A layer of the dense Transformers of GSPMD: 16,384 wide, 8.6G parameters."""

    marks = {"qkv": "data _ model _", "o": "model _ data", "up": "data model", "down": "model data"}
    width, heads, head, hidden = 16384, 256, 256, 131072

    def __init__(self) -> None:
        super().__init__()
        d, h, k = self.width, self.heads, self.head
        self.first, self.second = (nn.RMSNorm(d, dtype=torch.bfloat16) for _ in range(2))
        self.qkv, self.o = weight(d, 3, h, k), weight(h, k, d)
        self.up, self.down = weight(d, self.hidden), weight(self.hidden, d)

    def forward(self, x: Tensor) -> Tensor:  # [b, s, d]
        q, k, v = torch.einsum("bsd,dnhk->nbhsk", self.first(x), self.qkv).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + torch.einsum("bhsk,hkd->bsd", y, self.o)
        return x + F.gelu(self.second(x) @ self.up) @ self.down


class Experts(nn.Module):
    """A layer of 64 experts with 68.7G parameters, two experts a token."""

    marks = {"up": "expert data model", "down": "expert model data"}
    experts, width, hidden = 64, 16384, 32768

    def __init__(self) -> None:
        super().__init__()
        e, d, h = self.experts, self.width, self.hidden
        self.router, self.up, self.down = weight(d, e), weight(e, d, h), weight(e, h, d)

    def forward(self, x: Tensor) -> Tensor:  # [b, s, d]
        return x + self.mixed(x)

    def mixed(self, x: Tensor) -> Tensor:
        """Compute the experts of each token."""
        weights, chosen = (x @ self.router).softmax(-1).topk(2)
        r = moe.dispatch(x, chosen, experts=self.experts, shards=self.experts, capacity=2.0)
        y = F.silu(moe.grouped_mm(r.rows, self.up, r.ends))
        return moe.combine(moe.grouped_mm(y, self.down, r.ends), r, weights)


class Sparse(Experts):
    """Attention, then 64 wider experts: 86.3G parameters."""

    marks = {**Experts.marks, **dict.fromkeys("qkv", "data model _"), "o": "model _ data"}
    hidden, heads, keys, head = 40960, 128, 8, 128

    def __init__(self) -> None:
        super().__init__()
        d, k = self.width, self.head
        self.first, self.second = (nn.RMSNorm(d, dtype=torch.bfloat16) for _ in range(2))
        self.q, self.o = weight(d, self.heads, k), weight(self.heads, k, d)
        self.k, self.v = weight(d, self.keys, k), weight(d, self.keys, k)

    def forward(self, x: Tensor) -> Tensor:  # [b, s, d]
        y = self.first(x)
        q, k, v = (torch.einsum("bsd,dhk->bhsk", y, w) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + torch.einsum("bhsk,hkd->bsd", y, self.o)
        return x + self.mixed(self.second(x))


class Llama(nn.Module):
    """A layer of Llama 3.1 405B."""

    marks = {
        **dict.fromkeys(("q", "k", "v"), "_ model _"),
        "o": "model _ _",
        **dict.fromkeys(("gate", "up"), "_ model"),
        "down": "model _",
    }
    width, heads, keys, head, hidden, words = 16384, 128, 8, 128, 53248, 128256

    def __init__(self) -> None:
        super().__init__()
        d, h, k = self.width, self.hidden, self.head
        self.first, self.second = (nn.RMSNorm(d, dtype=torch.bfloat16) for _ in range(2))
        self.q, self.o = weight(d, self.heads, k), weight(self.heads, k, d)
        self.k, self.v = weight(d, self.keys, k), weight(d, self.keys, k)
        self.gate, self.up, self.down = weight(d, h), weight(d, h), weight(h, d)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:  # [b, s, d], [s, k/2]
        y = self.first(x)
        q, k, v = (torch.einsum("bsd,dhk->bhsk", y, w) for w in (self.q, self.k, self.v))
        q, k = rotated(q, angles), rotated(k, angles)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + torch.einsum("bhsk,hkd->bsd", y, self.o)
        y = self.second(x)
        return x + (F.silu(y @ self.gate) * (y @ self.up)) @ self.down


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs of channels by an angle for each position."""
    one, other = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class Layers(nn.Module):
    """Layers one after the other, from activations to a number."""

    def __init__(self, layers: list[nn.Module], stacked: bool) -> None:
        super().__init__()
        self.layers: Any = gspmd.stack(layers) if stacked else nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


class Pipelined(nn.Module):
    """Llama from tokens to the loss, its layers as stages of a pipeline."""

    def __init__(self, layers: list[nn.Module], mesh: gspmd.Mesh, microbatches: int) -> None:
        super().__init__()
        self.words, self.head = weight(Llama.words, Llama.width), weight(Llama.width, Llama.words)
        self.norm = nn.RMSNorm(Llama.width, dtype=torch.bfloat16)
        self.layers = gspmd.pipeline(
            layers, mesh, "stage", microbatches=microbatches, schedule="1f1b", loss=self.loss
        )

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = (self.norm(x) @ self.head).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten())

    def forward(self, tokens: Tensor, targets: Tensor, angles: Tensor) -> Tensor:
        return self.layers(F.embedding(tokens, self.words), angles, targets=targets)


def dense(mesh: gspmd.Mesh, layers: int, stacked: bool) -> gspmd.Plan:
    """Plan the dense layers: 2-D weights, one sequence for each device along data."""
    with torch.device("meta"):
        model = Layers([Dense() for _ in range(layers)], stacked)
        x = torch.empty(mesh.count(("data",)), 512, Dense.width, dtype=torch.bfloat16)
    gspmd.annotate(model, mesh, {f"layers.*.{name}": spec for name, spec in Dense.marks.items()})
    return gspmd.plan(model, x, mesh=mesh, in_specs="data _ _", grad=True)


def experts(
    mesh: gspmd.Mesh, layers: int, stacked: bool, layer: type[Experts] = Experts
) -> gspmd.Plan:
    """Plan layers of experts: tokens lie along data and expert."""
    with torch.device("meta"):
        model = Layers([layer() for _ in range(layers)], stacked)
        batch = mesh.count(("data", "expert"))
        x = torch.empty(batch, 512, Experts.width, dtype=torch.bfloat16)
    gspmd.annotate(model, mesh, {f"layers.*.{name}": spec for name, spec in layer.marks.items()})
    return gspmd.plan(model, x, mesh=mesh, in_specs="data+expert _ _", grad=True)


def llama(mesh: gspmd.Mesh, layers: int, stacked: bool) -> gspmd.Plan:
    """Plan Llama 405B in its published 4-D layout: 131,072 tokens a sequence, 1F1B."""
    with torch.device("meta"):
        microbatches, length = 16, 131072
        model = Pipelined([Llama() for _ in range(layers)], mesh, microbatches)
        tokens = torch.empty(mesh.count(("data",)) * microbatches, length, dtype=torch.long)
        angles = torch.empty(length, Llama.head // 2)
    marks = {f"layers.*.{name}": spec for name, spec in Llama.marks.items()}
    gspmd.annotate(model, mesh, {**marks, "words": "model _", "head": "_ model"})
    specs = ("data seq", "data seq", "seq _")
    return gspmd.plan(model, tokens, tokens, angles, mesh=mesh, in_specs=specs, grad=True)


SECONDS, GIB = 120, 4  # the goals, for a model of 10 trillion parameters


@dataclass(frozen=True)
class Row:
    """A program, its mesh and its layers."""

    plan: Callable[[gspmd.Mesh, int, bool], gspmd.Plan]
    mesh: str
    layers: int


PROGRAMS = {
    "dense-1T": Row(dense, "data=1024,model=16", 128),
    "experts-10T": Row(partial(experts, layer=Sparse), "data=16,expert=64,model=16", 120),
    "experts-6.6T": Row(experts, "data=16,expert=64,model=16", 96),
    "llama-405B": Row(llama, "data=8,stage=16,seq=16,model=8", 126),
}


def run(name: str, mesh: str, layers: int, stacked: bool) -> None:
    """Plan a row of the table, and print what that took."""
    row = PROGRAMS[name]
    mesh, layers = mesh or row.mesh, layers or row.layers
    start = time.process_time()
    plan = row.plan(gspmd.Mesh.parse(mesh), layers, stacked)
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    goal = f"goals {SECONDS} s, {GIB} GiB"
    print(f"{name} on {mesh}, {layers} layers: {seconds:.1f} s, {peak:.2f} GiB ({goal})")
    print("  " + ", ".join(f"{k} {v:.1f}" for k, v in plan.seconds.items() if v > 0.05))
    print("  " + ", ".join(f"{k} {v}" for k, v in plan.counts.items()))
    print(plan.summary(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[[], *PROGRAMS])
    parser.add_argument("--mesh", default="")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--stack", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if len(options.names) == 1:
        call = options.names[0], options.mesh, options.layers, options.stack
        if not options.profile:
            return run(*call)
        profile = cProfile.Profile()
        profile.runcall(run, *call)
        stats = pstats.Stats(profile)
        stats.sort_stats("tottime").print_stats(30)
        stats.sort_stats("cumulative").print_stats("torchgspmd", 60)
        return None
    for name in options.names or PROGRAMS:
        rest = ["--layers", str(options.layers), *(["--stack"] if options.stack else [])]
        subprocess.run([sys.executable, __file__, name, *rest], check=True)


if __name__ == "__main__":
    main()
