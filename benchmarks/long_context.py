"""What attention of long sequences sends and computes, for shapes of real models. Nothing is run.

    python benchmarks/long_context.py [--only llama] [--layers 2] [--show]
    python benchmarks/long_context.py --xla 8        rows of 8 devices, in the environment of XLA

Each row is the forward of a few layers, from tokens (or patches) to a loss, whose sequence lies
along one axis. Three numbers of a device stand beside it:

    sent     bytes, over the least of two formulas: ring or gather (n-1)/n * 2 S Hk d b; all_to_all
             (n-1)/n^2 * S (2 Hq + 2 Hk) d b, if n divides Hk
    work     scores that the last device to finish computes, over an even split of those that the
             program needs
    peak     memory, over that of one device

--xla has XLA partition the same programs for virtual devices, with 1/32 of the tokens and 1/16 of
all widths, and compares both with the formulas at these sizes. Windows are masks there.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import torchgspmd as gspmd
from torchgspmd.features.attention.op import runs_of_rows


@dataclass(frozen=True)
class Shape:
    """One row. window: tokens that a query sees; 0: all before it. causal: else all, both ways.

    documents: the mean length of packed documents; 0: one document.
    """

    name: str
    heads: int
    kv_heads: int
    head: int  # d
    width: int  # m
    tokens: int
    devices: int
    causal: bool = True
    window: int = 0
    documents: int = 0

    @property
    def positions(self) -> Tensor:
        """Return each token's position in its document [s]; the lengths are drawn."""
        draw, lengths = random.Random(0), [self.tokens]
        while self.documents and lengths[-1] > 1:
            length = min(max(1, round(draw.expovariate(1 / self.documents))), lengths[-1])
            lengths[-1:] = length, lengths[-1] - length
        places = [torch.arange(length, device="cpu") for length in lengths]
        return torch.cat(places)

    @property
    def seen(self) -> Tensor:
        """Return how many keys each query sees [s]."""
        if not self.causal:
            return torch.full((self.tokens,), self.tokens)
        seen = self.positions + 1
        return seen.clamp_max(self.window) if self.window else seen

    @property
    def least(self) -> float:
        """Bytes that the cheapest formula sends for one layer, in bfloat16."""
        n, row = self.devices, self.tokens * self.head * 2
        ways = [(n - 1) / n * 2 * self.kv_heads * row]
        if self.kv_heads % n == 0:
            ways.append((n - 1) / n**2 * (2 * self.heads + 2 * self.kv_heads) * row)
        return min(ways)


K, M = 1 << 10, 1 << 20
LLAMA8, LLAMA70 = ("Llama 3 8B", 32, 8, 128, 4096), ("Llama 3 70B", 64, 8, 128, 8192)
GEMMA = "Gemma 3 4B", 8, 4, 256, 2560
SHAPES = (
    Shape(*LLAMA8, 32 * K, 8),
    Shape(*LLAMA8, 128 * K, 16),
    Shape(*LLAMA8, 256 * K, 32),
    Shape(*LLAMA8, M, 64),
    Shape(*LLAMA70, 32 * K, 8),
    Shape(*LLAMA70, 128 * K, 16),
    Shape(*LLAMA70, M, 64),
    Shape("Mistral 7B", 32, 8, 128, 4096, 32 * K, 8, window=4 * K),
    Shape("Mistral 7B", 32, 8, 128, 4096, 64 * K, 16, window=4 * K),
    Shape(*LLAMA8, 32 * K, 8, documents=2 * K),
    Shape(*LLAMA8, 128 * K, 16, documents=8 * K),
    Shape(*LLAMA70, 128 * K, 16, documents=8 * K),
    Shape("Mistral 7B", 32, 8, 128, 4096, 64 * K, 16, window=4 * K, documents=8 * K),
    Shape(*GEMMA, 128 * K, 8),
    Shape(*GEMMA, 32 * K, 8, window=K),
    Shape("Gemma 2B", 8, 1, 256, 2048, 128 * K, 8),
    Shape("Gemma 2B", 8, 1, 256, 2048, 512 * K, 32),
    Shape("ViT-L", 16, 16, 64, 1024, 32 * K, 8, causal=False),
    Shape("ViT-22B", 48, 48, 128, 6144, 256 * K, 32, causal=False),
    Shape("Whisper large", 20, 20, 64, 1280, 48 * K, 16, causal=False),
)


# ------------------------------------------------------------------------------------- the program


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """x [n, s, d], angles [s, d/2]."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def layers_of(shape: Shape, mesh: gspmd.Mesh, dense: bool = False) -> Any:
    """Return the program: tokens [s] or patches [s, m], and weights, to a loss.

    dense: a window is a mask of all queries and keys; else it is flex_attention's.
    """

    document = (shape.positions == 0).cumsum(0)

    def window(b: Any, h: Any, query: Any, key: Any) -> Any:
        seen = query >= key
        if shape.documents:
            seen = seen & (document[query] == document[key])
        return seen & (query - key < shape.window) if shape.window else seen

    def attend(q: Tensor, k: Tensor, v: Tensor, places: Tensor) -> Tensor:
        if not shape.window and not shape.documents:
            grouped = shape.heads > shape.kv_heads
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=shape.causal, enable_gqa=grouped
            )
        if dense:
            seen = window(0, 0, places.unsqueeze(1), places)
            return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        sizes = None, None, shape.tokens, shape.tokens
        blocks = create_block_mask(window, *sizes, device=q.device)
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        return flex_attention(q, k, v, block_mask=blocks, enable_gqa=True).squeeze(0)

    def run(x: Tensor, targets: Tensor, table: Tensor, layers: list[list[Tensor]]) -> Tensor:
        x = gspmd.mark_sharding(x, mesh, ("seq", *[None] * (x.dim() - 1)))
        x = F.embedding(x, table) if x.dim() == 1 else x @ table
        places = torch.arange(shape.tokens, device=x.device)
        rates = 1e4 ** (-torch.arange(shape.head // 2, device=x.device) / (shape.head // 2))
        angles = places.unsqueeze(1) * rates
        for q, k, v, out, up, down in layers:
            y = F.layer_norm(x, x.shape[-1:])
            queries, keys, values = (torch.einsum("sm,mnd->nsd", y, w) for w in (q, k, v))
            queries, keys = rotated(queries, angles), rotated(keys, angles)
            y = attend(queries, keys, values, places)
            x = x + torch.einsum("nsd,ndm->sm", y, out)
            x = x + F.gelu(F.layer_norm(x, x.shape[-1:]) @ up) @ down
        return F.cross_entropy((x @ table.T).float(), targets)

    return run


def inputs_of(shape: Shape, layers: int) -> tuple[Any, ...]:
    """Return the arguments of the program, on the device at hand."""
    m, heads = shape.width, (shape.heads, shape.kv_heads, shape.kv_heads)
    table = torch.empty(m if not shape.causal else 32000, m, dtype=torch.bfloat16)
    sizes = [*((m, n, shape.head) for n in heads), (shape.heads, shape.head, m), (m, 4 * m)]
    weights = [
        [torch.empty(size, dtype=torch.bfloat16) for size in (*sizes, (4 * m, m))]
        for _ in range(layers)
    ]
    tokens = torch.zeros(shape.tokens, dtype=torch.long)
    patches = torch.empty(shape.tokens, m, dtype=torch.bfloat16)
    return tokens if shape.causal else patches, tokens, table, weights


# ---------------------------------------------------------------------------------- what is counted


def pairs(node: Any, plan: gspmd.Plan, shape: Shape) -> Iterator[float]:
    """Yield the scores that devices compute for one head, one number for each shard of queries."""
    tokens, n = shape.tokens, plan.mesh.count(node.meta["assignment"].get("s", ()))
    rows, seen = math.ceil(tokens / n), shape.seen
    buffers = node.args[3] if "flex" in str(node.target) else []
    for starts in (
        getattr(plan.captured.constants, x.target) for x in buffers if "token_" in x.name
    ):
        width = tokens // len(starts)  # blocks of tokens in another order
        seen = seen[(starts.unsqueeze(1) + torch.arange(width, device="cpu")).flatten()]
    for i in range(n):
        first, count = i * rows, min(rows, tokens - i * rows)
        if "zigzag" in str(node.target):
            runs = [
                (r.stop - r.start, at) for r, at in runs_of_rows(first, rows, node.args[4], tokens)
            ]
            yield sum(count * (at + (count + 1) / 2) for count, at in runs)
        else:
            yield float(seen[first : first + count].sum())


def work(plan: gspmd.Plan, shape: Shape) -> float:
    """Return the scores of the device that has most, over an even split of all."""
    most, even, mesh = 0.0, 0.0, mesh_of(shape)
    for node in plan.sharded.nodes:
        if "attention.default" not in str(node.target):
            continue
        q = node.args[0].meta["val"]
        each, heads = [*pairs(node, plan, shape)], q.shape[:-2].numel()
        factors = [f for f in node.meta["assignment"] if f != "s"]
        share = math.prod(
            math.ceil(node.meta["rule"].sizes[f] / mesh.count(node.meta["assignment"][f]))
            / node.meta["rule"].sizes[f]
            for f in factors
        )
        most += max(each) * heads * share
        even += sum(each) * heads / mesh.size
    return most / even


def mesh_of(shape: Shape) -> gspmd.Mesh:
    return gspmd.Mesh(seq=shape.devices)


def planned(shape: Shape, layers: int) -> gspmd.Plan:
    mesh = mesh_of(shape)
    with torch.device("meta"):
        return gspmd.plan(layers_of(shape, mesh), *inputs_of(shape, layers), mesh=mesh)


def mask_of(shape: Shape) -> str:
    if not shape.causal:
        return "all"
    words = [f"window {shape.window}"] * bool(shape.window)
    words += [f"documents of {shape.documents // K}k"] * bool(shape.documents)
    return ", ".join(words) or "causal"


def row(shape: Shape, layers: int, show: bool) -> list[str]:
    begin = time.process_time()
    plan = planned(shape, layers)
    if show:
        print(plan)
    alone = planned(replace(shape, devices=1), layers).memory.peak
    tokens = f"{shape.tokens // K}k" if shape.tokens < M else f"{shape.tokens // M}M"
    kinds = dict.fromkeys(c.kind for c in plan.collectives if c.sent_bytes > shape.least / 100)
    return [
        shape.name,
        f"{shape.heads}/{shape.kv_heads} x {shape.head}",
        mask_of(shape),
        tokens,
        str(shape.devices),
        f"{plan.sent_bytes / (1 << 20):,.1f} MiB",
        f"{plan.sent_bytes / layers / shape.least:.3f}",
        f"{work(plan, shape):.3f}",
        f"{plan.memory.peak / (1 << 30):.2f} GiB",
        f"{plan.memory.peak / alone:.3f}",
        " ".join(kinds),
        f"{time.process_time() - begin:.1f}",
    ]


def beside_xla(shape: Shape, layers: int) -> list[str]:
    """Return what both send of a smaller program, over the least."""
    small = replace(
        shape,
        head=shape.head // 16,
        width=shape.width // 16,
        tokens=shape.tokens // 32,
        window=shape.window // 32,
    )
    mesh = mesh_of(small)
    plan = gspmd.plan(layers_of(small, mesh, dense=True), *inputs_of(small, layers), mesh=mesh)
    sent = gspmd.compare_with_xla(plan).bytes
    return [shape.name, str(shape.devices), *(f"{x / layers / small.least:.3f}" for x in sent)]


HEAD = [
    "model",
    "heads",
    "mask",
    "tokens",
    "devices",
    "sent",
    "over the least",
    "work over even",
    "peak",
    "over one device's",
    "by",
    "seconds",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="a part of the model's name")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--show", action="store_true", help="print the plans")
    parser.add_argument("--xla", type=int, metavar="DEVICES", help="compare with XLA's bytes")
    args = parser.parse_args()
    if args.xla:
        os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(args.xla)}
    rows = [s for s in SHAPES if args.only.lower() in s.name.lower()]
    for shape in rows if args.xla else ():
        if shape.devices == args.xla:
            print(f"| {' | '.join(beside_xla(shape, args.layers))} |", flush=True)
    if args.xla:
        return
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for shape in rows:
        print(f"| {' | '.join(row(shape, args.layers, args.show))} |", flush=True)


if __name__ == "__main__":
    main()
