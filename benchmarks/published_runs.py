"""Estimated steps of published training runs, in their layouts, beside the measured steps.

    python benchmarks/published_runs.py [NAME ...]
    python benchmarks/published_runs.py --rows FILE.csv

Prints a row for each run: measured and estimated seconds of a step, and their ratio. Nothing runs:
each model is planned on the meta device, its layers as a loop, and estimated for the preset of its
hardware. No number of a preset is chosen by these rows. Not in an estimate: the optimizer, and the
fusion of operations by a compiler.

--rows: the runs of a table, whose columns are the fields of measured_rows.Row. Prints a row for
each: its layout, measured and estimated seconds, estimated tokens a second and GPU, bytes of a
device and whether they fit, CPU seconds of planning, and estimated / measured seconds. Then the
median error, the share of rows within 20 % and the worst ratio. A layout that cannot be planned is
named in place of its numbers. Without tokens a second a row is estimated alone.

Sources of rows: torchtitan's benchmarks/llama3_h100_202412_torchtitan.md, bfloat16 rows; MaxText's
README (TPU v5p) with its configs/v5p; Narayanan et al., arXiv 2104.04473, table 1, rows without a
pipeline; Korthikanti et al., arXiv 2205.05198, table 5, 22B; PaLM, arXiv 2204.02311, tables 1 and
3. The last three are quoted from memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchgspmd as gspmd
from torchgspmd import Hardware
from torchgspmd.compiler.option_groups import Regather
from torchgspmd.tools.decoders.run_steps import step

sys.path.insert(0, str(Path(__file__).resolve().parent))
from large_plans import rotated
from measured_rows import BadRow, read_rows

WITHIN = 0.2


@dataclass(frozen=True)
class Shape:
    """A Transformer. gated: Llama's layers, with rotary positions; else GPT's.

    fused: attention stores no scores, and drops none; Llama's never does.
    """

    layers: int
    width: int
    heads: int
    keys: int
    head: int
    hidden: int
    words: int
    gated: bool = True
    fused: bool = False

    def products(self, length: int) -> float:
        """Return the operations for a token in products, forward, with all pairs of tokens."""
        attention = self.width * self.head * (2 * self.heads + 2 * self.keys)
        mixed = 2 * length * self.heads * self.head
        layer = attention + mixed + self.width * self.hidden * (3 if self.gated else 2)
        return 2.0 * (self.layers * layer + self.width * self.words)


@dataclass(frozen=True)
class Run:
    """A published run. batch: sequences of all devices. recomputed: the share of the layers.

    microbatches: of a pipeline along `stage`, 1F1B; 0 for none. is_list: layers are a list, and
    no loop.
    """

    shape: Shape
    mesh: str
    batch: int
    length: int
    hardware: Hardware
    recomputed: float
    seconds: float
    microbatches: int = 0
    is_list: bool = False


@dataclass(frozen=True)
class Layout:
    """Marks of a layer's weights, of the others, and of the values between layers.

    regather: an option for plan.
    """

    layer: Mapping[str, str]
    ends: Mapping[str, str]
    between: str = ""
    regather: Regather = "auto"

    @classmethod
    def published(cls, shape: Shape, zero: bool) -> Layout:
        """Return the layout of the runs: weights along model, and along data if zero."""
        row = "data" if zero else "_"
        layer = {"q": f"{row} model _", "o": f"model _ {row}"}
        layer |= dict.fromkeys("kv", f"{row} {'model' if shape.keys > 1 else '_'} _")
        layer |= {"gate": f"{row} model"} if shape.gated else {}
        layer |= {"up": f"{row} model", "down": f"model {row}"}
        ends = {"words": f"model {row}", "head": f"{row} model"}
        # Megatron's first runs have whole tokens between layers, later ones parts (2205.05198).
        return cls(layer, ends, "data model _" if shape.gated else "data _ _")


class Layer(nn.Module):
    """A layer."""

    def __init__(self, shape: Shape, mesh: gspmd.Mesh, layout: Layout) -> None:
        super().__init__()
        self.shape, self.mesh, self.between = shape, mesh, layout.between
        d, k, h = shape.width, shape.head, shape.hidden
        norm = nn.RMSNorm if shape.gated else nn.LayerNorm
        self.first, self.second = norm(d), norm(d)
        self.q, self.k, self.v = (weight(d, n, k) for n in (shape.heads, shape.keys, shape.keys))
        self.o, self.up, self.down = weight(shape.heads, k, d), weight(d, h), weight(h, d)
        self.gate = weight(d, h) if shape.gated else None
        gspmd.annotate(self, mesh, layout.layer)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:  # [b, s, d], [s, k/2]
        x = self.marked(x)
        y = self.first(x)
        q, k, v = (torch.einsum("bsd,dhk->bhsk", y, w) for w in (self.q, self.k, self.v))
        if self.shape.gated:
            q, k = rotated(q, angles), rotated(k, angles)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        elif self.shape.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:  # these runs are older than FlashAttention: each score is stored, and dropped
            scores = torch.einsum("bhsk,bhtk->bhst", q, k)
            y = torch.einsum("bhst,bhtk->bhsk", F.dropout(scores.softmax(-1), 0.1), v)
        x = self.marked(x + self.dropped(torch.einsum("bhsk,hkd->bsd", y, self.o)))
        y = self.second(x)
        up = y @ self.up
        if self.gate is not None:
            return self.marked(x + (F.silu(y @ self.gate) * up) @ self.down)
        return self.marked(x + self.dropped(F.gelu(up) @ self.down))

    def marked(self, x: Tensor) -> Tensor:
        return gspmd.mark_sharding(x, self.mesh, self.between) if self.between else x

    def dropped(self, x: Tensor) -> Tensor:
        return x if self.shape.gated else F.dropout(x, 0.1)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape))


class Transformer(nn.Module):
    """From tokens to the loss; a share of the layers is recomputed."""

    def __init__(self, run: Run, mesh: gspmd.Mesh, layout: Layout) -> None:
        super().__init__()
        shape, self.is_pipeline = run.shape, run.microbatches > 0
        again = round(run.recomputed * shape.layers)
        layers = [Layer(shape, mesh, layout) for _ in range(shape.layers)]
        self.parts = nn.ModuleList(
            [
                gspmd.pipeline(
                    layers,
                    mesh,
                    microbatches=run.microbatches,
                    schedule="1f1b",
                    recompute=again == shape.layers,
                    loss=self.loss,
                )
            ]
            if self.is_pipeline
            else layers
            if run.is_list
            else [
                gspmd.stack(part, recompute=recompute)
                for part, recompute in ((layers[again:], False), (layers[:again], True))
                if part
            ]
        )
        for layer in layers[:again] if run.is_list else ():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        self.words, self.head = weight(shape.words, shape.width), weight(shape.width, shape.words)
        self.norm = nn.RMSNorm(shape.width)
        gspmd.annotate(self, mesh, layout.ends)

    def forward(self, tokens: Tensor, targets: Tensor, angles: Tensor) -> Tensor:
        x = F.embedding(tokens, self.words)
        if self.is_pipeline:
            return self.parts[0](x, angles, targets=targets)
        for part in self.parts:
            x = part(x, angles)
        return self.loss(x, targets)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = (self.norm(x) @ self.head).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten())


def planned(run: Run, layout: Layout) -> gspmd.Plan:
    mesh = gspmd.Mesh.parse(run.mesh)
    with torch.device("meta"):
        model = Transformer(run, mesh, layout)
        tokens = torch.empty(run.batch, run.length, dtype=torch.long)
        angles = torch.empty(run.length, run.shape.head // 2)
    return gspmd.plan(
        model,
        tokens,
        tokens,
        angles,
        mesh=mesh,
        in_specs=("data _", "data _", "_ _"),
        grad=True,
        param_dtype=torch.bfloat16,
        hardware=run.hardware,
        advanced={"regather": layout.regather, "rng": "native"},
    )


# ------------------------------------------------------------------------------------------- runs

LLAMA_8B = Shape(32, 4096, 32, 8, 128, 14336, 128256)
H100, V4, V5P, A100 = (Hardware.of(name) for name in ("h100", "tpu_v4", "tpu_v5p", "a100"))
# The hosts of torchtitan's runs: HBM2e with 2.4 TB/s.
TITAN = replace(H100, memory_bandwidth=2.4e12, memory=96e9)


def titan(gpus: int, tokens_a_second: float) -> Run:
    """Two sequences for each GPU; every second product of a layer is recomputed."""
    seconds = 2 * 8192 / tokens_a_second
    return Run(LLAMA_8B, f"data={gpus},model=1", 2 * gpus, 8192, TITAN, 0.5, seconds)


def maxtext(scale: int, chips: int, model: int, rows: int, recomputed: float, tflops: float) -> Run:
    """A decoder of `scale` billion parameters, by MaxText's rule for its sizes."""
    power = scale.bit_length() - 1
    base, rest = divmod(power, 3)
    heads, wide = 2 ** (base + (rest > 0)), 2 ** (base + (rest > 1))
    shape = Shape(16 * 2**base, 2048 * wide, 16 * heads, 16 * heads, 256, 7168 * heads, 32768)
    seconds = 3 * shape.products(2048) * rows * 2048 / (tflops * 1e12)
    mesh = f"data={chips // model},model={model}"
    return Run(shape, mesh, rows * chips, 2048, V5P, recomputed, seconds)


def megatron(layers: int, width: int, heads: int, mesh: str, batch: int, tflops: float) -> Run:
    """Full recomputation, which its operations count."""
    head = width // heads
    shape = Shape(layers, width, heads, heads, head, 4 * width, 51200, gated=False)
    devices = gspmd.Mesh.parse(mesh).size
    head_products = 2.0 * width * shape.words
    counted = 4 * (shape.products(2048) - head_products) + 3 * head_products
    return Run(
        shape, mesh, batch, 2048, A100, 1.0, counted * batch * 2048 / devices / (tflops * 1e12)
    )


MEGATRON_22B = Shape(48, 6144, 64, 64, 96, 24576, 51200, gated=False)
RUNS: dict[str, Run] = {
    "torchtitan 8B, 8 H100": titan(8, 5762),
    "torchtitan 8B, 8 H100, compiled": titan(8, 6667),
    "torchtitan 8B, 128 H100": titan(128, 5605),
    "torchtitan 8B, 128 H100, compiled": titan(128, 6514),
    "MaxText 32B, 64 v5p": maxtext(32, 64, 4, 7, 0.0, 328),
    "MaxText 64B, 64 v5p": maxtext(64, 64, 4, 3, 0.0, 323),
    "MaxText 128B, 128 v5p": maxtext(128, 128, 8, 1, 0.0, 315),
    "MaxText 128B, 256 v5p": maxtext(128, 256, 8, 1, 0.0, 315),
    "MaxText 256B, 512 v5p": maxtext(256, 512, 8, 1, 0.0, 316),
    "MaxText 512B, 512 v5p": maxtext(512, 512, 8, 2, 1.0, 294),
    "Megatron 1.7B, 32 A100": megatron(24, 2304, 24, "data=32,model=1", 512, 137),
    "Megatron 3.6B, 64 A100": megatron(30, 3072, 32, "data=32,model=2", 512, 138),
    "Megatron 7.5B, 128 A100": megatron(36, 4096, 32, "data=32,model=4", 512, 142),
    "Megatron 18.4B, 256 A100": megatron(40, 6144, 48, "data=32,model=8", 1024, 135),
    "Megatron 22B, 8 A100, all recomputed": Run(
        MEGATRON_22B, "data=1,model=8", 4, 2048, A100, 1.0, 1.42
    ),
    # 46.2 % of the peak, 57.8 % with what is recomputed: 0.75 of a forward.
    "PaLM 540B, 6144 v4": Run(
        Shape(118, 18432, 48, 1, 256, 73728, 256000),
        "data=512,model=12",
        2048,
        2048,
        V4,
        0.75,
        2048 * 2048 / 238300,
    ),
}


def estimated(name: str) -> float:
    """Return the estimated seconds of a run's step."""
    run = RUNS[name]
    layout = Layout.published(run.shape, zero=not name.startswith("Megatron"))
    return planned(run, layout).estimate(run.hardware).seconds


def print_rows(path: str) -> None:
    """Print the estimated steps of a table's runs."""
    print(
        "| run | layout | measured, s | estimated, s | tokens/s/GPU | GiB, of | planned, s | ratio "
        "|\n|---|---|--:|--:|--:|--:|--:|--:|"
    )
    ratios = []
    for row in read_rows(path):
        measured = f"{row.seconds:.2f}" if row.seconds else ""
        begin = f"| {row.source} {row.name} | {row.run.layout} | {measured} "
        try:
            found = step(row.run)
        except Exception as error:  # the rows behind it are estimated
            kind = "" if isinstance(error, gspmd.ShardingError) else type(error).__name__
            text = " ".join(f"{kind} {error}".split())
            print(f"{begin}| not planned: {text} | | | | |", flush=True)
            continue
        speed, room = row.tokens / found.seconds, row.run.hardware.memory
        fits = "" if found.memory <= room else " TOO MUCH"
        ratio = found.seconds / row.seconds if row.seconds else None
        ratios += [] if ratio is None else [ratio]
        print(
            f"{begin}| {found.seconds:.2f} | {speed:.0f} | {found.memory / 2**30:.0f}, "
            f"{room / 2**30:.0f}{fits} | {found.planning:.1f} | "
            f"{'' if ratio is None else f'{ratio:.2f}'} |",
            flush=True,
        )
    print(summary(ratios))


def summary(ratios: Sequence[float]) -> str:
    """Return the median error, the share within WITHIN, and the worst ratio."""
    if not ratios:
        return "no measured row was planned"
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    share = sum(error <= WITHIN for error in errors) / len(errors)
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    return (
        f"{len(ratios)} rows: median error {median(errors):.1%}, {share:.0%} within {WITHIN:.0%}, "
        f"worst ratio {worst:.2f}"
    )


def main(names: Sequence[str]) -> None:
    print("| run | measured, s | estimated, s | ratio |\n|---|--:|--:|--:|")
    within = 0
    for name in names or RUNS:
        run, seconds = RUNS[name], estimated(name)
        ratio = seconds / run.seconds
        within += abs(ratio - 1) <= WITHIN
        print(f"| {name} | {run.seconds:.3g} | {seconds:.3g} | {ratio:.2f} |", flush=True)
    print(f"{within} of {len(names or RUNS)} within {WITHIN:.0%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--rows", metavar="FILE.csv", help="a table of runs")
    chosen = parser.parse_args()
    try:
        print_rows(chosen.rows) if chosen.rows else main(chosen.names)
    except BadRow as error:
        parser.error(str(error))
