"""Time of one rank of N on a card, against eager, torch.compile, FSDP2 and DTensor.

    python benchmarks/gpu.py [--tiny] [--only step attention dropout] [--models 1b] [--json FILE]

The process group is torch's "fake" one: collectives return at once, so a step's time is that of the
kernels and of Python of one rank. Each step is forward and backward in bfloat16. Printed for each
variant: median ms of a step, ms that the host needs to start it, kernels, peak memory in GiB, and
the share of the card's peak rate (MFU) that the products of the model's shard reach.

    step        a Llama of some layers: dp=8, tp=8, fsdp=8, and the hand-cut shard in eager mode
                and by torch.compile; FSDP2; DTensor's tensor parallelism
    attention   torchgspmd::attention against each kernel of F.scaled_dot_product_attention
    dropout     advanced={"rng": "global"} and advanced={"rng": "native"} against F.dropout

--tiny: sizes that a CPU runs in seconds; all branches are the same.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchgspmd as gspmd
from torchgspmd.features.attention.op import attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PEAK = 989e12  # FLOP/s of an H100 or H200 in bfloat16, dense; NVIDIA's data sheet
RANKS = 8


@dataclass(frozen=True)
class Size:
    """A Llama. kv: heads of keys; batch: of one data-parallel rank."""

    layers: int
    width: int
    heads: int
    kv: int
    hidden: int
    words: int
    sequence: int
    batch: int
    head: int = 128


SIZES = {
    "tiny": Size(2, 64, 8, 8, 128, 128, 32, 8, 8),
    "1b": Size(16, 2048, 16, 8, 8192, 32768, 4096, 1),
    "8b-layer": Size(1, 4096, 32, 8, 14336, 2048, 8192, 1),
    "70b-layer": Size(1, 8192, 64, 8, 28672, 2048, 8192, 1),
}

LAYOUTS = {
    "dp": gspmd.Layout({"batch": "data", "heads": None, "hidden": None, "words": None, "w": None}),
    "tp": gspmd.Layout(
        {"batch": None, "heads": "model", "hidden": "model", "words": "model", "w": None}
    ),
    "fsdp": gspmd.Layout(
        {"batch": "data", "heads": None, "hidden": None, "words": None, "w": "data"}
    ),
}
AXES = {"dp": "data", "tp": "model", "fsdp": "data"}


class Attention(nn.Module):
    def __init__(self, size: Size, shards: int = 1):
        super().__init__()
        q, kv = size.heads // shards, max(size.kv // shards, 1)
        self.head = size.head
        self.q, self.k, self.v = (
            nn.Linear(size.width, n * size.head, bias=False) for n in (q, kv, kv)
        )
        self.o = nn.Linear(q * size.head, size.width, bias=False)
        for each in (self.q, self.k, self.v):
            gspmd.mark_sharding(each.weight, "heads w")
        gspmd.mark_sharding(self.o.weight, "w heads")

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, -1, self.head).transpose(1, 2) for f in (self.q, self.k, self.v))
        gqa = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


class Block(nn.Module):
    def __init__(self, size: Size, shards: int = 1):
        super().__init__()
        hidden = size.hidden // shards
        self.norm1, self.norm2 = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.attention = Attention(size, shards)
        self.gate, self.up = (nn.Linear(size.width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, size.width, bias=False)
        for each in (self.gate, self.up):
            gspmd.mark_sharding(each.weight, "hidden w")
        gspmd.mark_sharding(self.down.weight, "w hidden")

    def forward(self, x: Tensor) -> Tensor:
        x = gspmd.mark_sharding(x + self.attention(self.norm1(x)), "batch _ _")
        h = self.norm2(x)
        return gspmd.mark_sharding(x + self.down(F.silu(self.gate(h)) * self.up(h)), "batch _ _")


class Llama(nn.Module):
    """shards: of the heads, the hidden units and the words, as tensor parallelism cuts them."""

    def __init__(self, size: Size, shards: int = 1):
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(size.words, size.width) * 0.02)
        self.blocks = nn.ModuleList(Block(size, shards) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.lm_head = nn.Linear(size.width, size.words // shards, bias=False)
        gspmd.mark_sharding(self.embedding, "_ w")
        gspmd.mark_sharding(self.lm_head.weight, "words w")

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = gspmd.mark_sharding(F.embedding(tokens, self.embedding), "batch _ _")
        for block in self.blocks:
            x = block(x)
        logits = gspmd.mark_sharding(self.lm_head(self.norm(x)), "batch _ words")
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def flops(size: Size, rows: int, shards: int = 1) -> float:
    """Return those of the products of a step: forward, and twice as many backward."""
    attention = size.width * size.head * (2 * size.heads + 2 * size.kv)
    weights = size.layers * (attention + 3 * size.width * size.hidden) + size.width * size.words
    scores = size.layers * size.heads * size.head * size.sequence  # causal: half of 2 products
    return 6.0 * rows * size.sequence * (weights + scores) / shards


# ---------------------------------------------------------------------------------------- measuring


@dataclass
class Row:
    """One line of the table."""

    group: str
    case: str
    variant: str
    ms: float = math.nan
    host_ms: float = math.nan
    kernels: int = 0
    peak_gib: float = math.nan
    mfu: float = math.nan
    note: str = ""
    ms_all: list[float] = field(default_factory=list)


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def measure(row: Row, step: Callable[[], Any], work: float, rounds: int) -> Row:
    """Time a step: its first calls compile. Median of `rounds`."""
    for _ in range(3):
        step()
    synchronize()
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(rounds):
        begin = time.perf_counter()
        step()
        synchronize()
        row.ms_all.append((time.perf_counter() - begin) * 1e3)
    begin = time.perf_counter()
    for _ in range(rounds):
        step()
    host = time.perf_counter() - begin
    synchronize()
    row.ms = min(statistics.median(row.ms_all), (time.perf_counter() - begin) / rounds * 1e3)
    row.host_ms = host / rounds * 1e3
    if DEVICE.type == "cuda":
        row.peak_gib = torch.cuda.max_memory_allocated() / 2**30
        activity = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activity) as profile:
            step()
            synchronize()
        events = [
            e for e in profile.events() or () if e.device_type == torch.autograd.DeviceType.CUDA
        ]
        row.kernels = len(events)
    row.mfu = work / (row.ms / 1e3) / PEAK
    return row


def attempt(row: Row, run: Callable[[Row], Any]) -> Row:
    """Run a variant; one that fails is a row with its error."""
    try:
        run(row)
    except Exception as error:  # the other variants are measured all the same
        row.note = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        traceback.print_exc()
    finally:
        free_memory()
    mfu = "" if math.isnan(row.mfu) else f"{100 * row.mfu:6.1f} %"
    print(
        f"{row.group:9} {row.case:24} {row.variant:26} {row.ms:9.3f} ms {row.host_ms:8.3f} host "
        f"{row.kernels:6} kernels {row.peak_gib:7.2f} GiB {mfu} {row.note}",
        flush=True,
    )
    return row


def free_memory() -> None:
    torch._dynamo.reset()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


# -------------------------------------------------------------------------------------------- steps


def batch_of(size: Size, rows: int) -> list[Tensor]:
    shape = rows, size.sequence
    words = size.words // RANKS  # the targets of a shard of the words are among its own
    return [torch.randint(words, shape, device=DEVICE) for _ in range(2)]


def made(size: Size, shards: int = 1) -> Llama:
    torch.manual_seed(0)
    with DEVICE:
        return Llama(size, shards).to(torch.bfloat16)


def stepper(model: nn.Module, batch: list[Tensor]) -> Callable[[], None]:
    def step() -> None:
        for p in model.parameters():
            p.grad = None
        model(*batch).backward()

    return step


def steps(names: list[str], rounds: int, backends: list[str]) -> list[Row]:
    rows: list[Row] = []
    for name in names:
        size = SIZES[name]
        for layout in LAYOUTS:
            shards = RANKS if layout == "tp" else 1
            if size.kv % shards:
                continue
            work = flops(size, size.batch, shards)
            for variant in variants(layout, backends):
                row = Row("step", f"{name} {layout}", variant)
                rows.append(attempt(row, partial(one_step, size, layout, variant, work, rounds)))
    return rows


def variants(layout: str, backends: list[str]) -> list[str]:
    theirs = {"dp": [], "tp": ["DTensor"], "fsdp": ["FSDP2"]}[layout]
    compiled = ["compiled shard"] if "inductor" in backends else []
    return ["eager shard", *compiled, *theirs, *(f"torchgspmd {b}" for b in backends)]


def one_step(size: Size, layout: str, variant: str, work: float, rounds: int, row: Row) -> None:
    shards = RANKS if layout == "tp" else 1
    whole = size.batch * (1 if layout == "tp" else RANKS)
    mine = batch_of(size, size.batch)
    if variant in ("eager shard", "compiled shard"):
        model: Any = made(size, shards)
        if variant == "compiled shard":
            model = torch.compile(model)
        measure(row, stepper(model, mine), work, rounds)
    elif variant == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(DEVICE.type, (RANKS,))
        model = made(size)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        measure(row, stepper(model, mine), work, rounds)
    elif variant == "DTensor":
        measure(row, stepper(by_dtensor(made(size), size), mine), work, rounds)
    else:
        axis = AXES[layout]
        mesh = gspmd.Mesh(**{axis: RANKS})
        model = gspmd.annotate(made(size), LAYOUTS[layout].on(mesh))
        specs = ("data _", "data _") if axis == "data" else ("_ _", "_ _")
        backend = "inductor" if variant.endswith("inductor") else "torch"
        begin = time.perf_counter()
        model = gspmd.parallelize(model, mesh, in_specs=specs, backend=backend, check="never")
        batch = batch_of(size, whole)
        step = stepper(model, batch)
        step()
        row.note = f"first step {time.perf_counter() - begin:.1f} s"
        measure(row, step, work, rounds)


def by_dtensor(model: Llama, size: Size) -> nn.Module:
    """Return the model with Megatron's layout by DTensor's tensor parallelism."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(DEVICE.type, (RANKS,))
    columns = ("attention.q", "attention.k", "attention.v", "gate", "up")
    table: dict[str, Any] = {}
    for i in range(size.layers):
        table |= {f"blocks.{i}.{name}": ColwiseParallel() for name in columns}
        table |= {f"blocks.{i}.{name}": RowwiseParallel() for name in ("attention.o", "down")}
    table["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(model, mesh, table)


# ---------------------------------------------------------------------------------------- attention


KERNELS: dict[str, list[SDPBackend]] = {
    "flash": [SDPBackend.FLASH_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
}


def attentions(tiny: bool, rounds: int) -> list[Row]:
    heads = [(4, 4), (8, 2)] if tiny else [(32, 32), (32, 8)]
    lengths = [64] if tiny else [4096, 16384]
    width, rows = 16 if tiny else 128, []
    kernels = KERNELS if DEVICE.type == "cuda" else {}
    for case in (Attended(*h, s, width) for h in heads for s in lengths):
        for name in (*kernels, "default", "torchgspmd::attention"):
            row = Row("attention", str(case), name)
            rows.append(attempt(row, partial(case.measure, kernels, rounds)))
    return rows


class Attended:
    """Causal attention of one sequence, forward and backward."""

    def __init__(self, heads: int, kv: int, s: int, width: int) -> None:
        sizes = (heads, kv, kv)
        self.q, self.k, self.v = (
            torch.randn(1, n, s, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
            for n in sizes
        )
        self.grad, self.scale = torch.randn_like(self.q), 1 / math.sqrt(width)
        self.work = 7.0 * heads * s * s * width  # half of two products, and of the backward's five
        self.text = f"{heads}/{kv} heads, {s}"

    def __str__(self) -> str:
        return self.text

    def theirs(self) -> Tensor:
        gqa = self.q.shape[1] != self.k.shape[1]
        return F.scaled_dot_product_attention(
            self.q, self.k, self.v, is_causal=True, scale=self.scale, enable_gqa=gqa
        )

    def ours(self) -> Tensor:
        return attention(self.q, self.k, self.v, True, self.scale)[0]

    def measure(self, kernels: dict[str, list[SDPBackend]], rounds: int, row: Row) -> None:
        call = self.ours if row.variant.startswith("torchgspmd") else self.theirs
        inputs = (self.q, self.k, self.v)
        chosen = kernels.get(row.variant)
        with sdpa_kernel(chosen) if chosen else nullcontext():
            measure(row, lambda: torch.autograd.grad(call(), inputs, self.grad), self.work, rounds)


# ------------------------------------------------------------------------------------------ dropout


class Dropped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.1, True)


def dropouts(tiny: bool, rounds: int) -> list[Row]:
    shape = (8, 64, 64) if tiny else (8, 1024, 4096)
    x = torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    grad, rows = torch.randn_like(x), []
    for name in ("torch", "global", "native"):
        model: nn.Module = Dropped()
        if name != "torch":
            mesh = gspmd.Mesh(data=RANKS)  # shards nothing: this rank draws the whole tensor
            model = gspmd.parallelize(
                model, mesh, in_specs="_ _ _", advanced={"rng": name}, check="never"
            )
        row = Row("dropout", str(list(shape)), name)
        rows.append(
            attempt(
                row,
                lambda row, model=model: measure(
                    row, lambda: torch.autograd.grad(model(x), x, grad), 0.0, rounds
                ),
            )
        )
    return rows


# --------------------------------------------------------------------------------------------- main

GROUPS = ("step", "attention", "dropout")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="*", choices=GROUPS, default=GROUPS)
    parser.add_argument("--models", nargs="*", choices=list(SIZES), default=None)
    parser.add_argument("--backends", nargs="*", default=["torch", "inductor"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    card = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print(f"{card}, torch {torch.__version__}, one rank of {RANKS} on the fake process group")
    models = args.models or (["tiny"] if args.tiny else ["1b", "8b-layer", "70b-layer"])
    rows: list[Row] = []
    if "attention" in args.only:
        rows += attentions(args.tiny, args.rounds)
    if "dropout" in args.only:
        rows += dropouts(args.tiny, args.rounds)
    if "step" in args.only:
        rows += steps(models, args.rounds, args.backends)
    if args.json:
        table = {"card": card, "torch": torch.__version__, "rows": [asdict(r) for r in rows]}
        args.json.write_text(json.dumps(table, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
