"""Proposals of `suggest` for published models, beside their published layouts, by one estimate.

    python benchmarks/suggest_published.py [--seconds 60] [NAME ...]
    python benchmarks/suggest_published.py --rows FILE.csv [--only N] [--seconds 120]

Prints a row for each model: mesh, layers that are computed twice, estimated step and memory of
both, the ratio of the steps, and the bound that no layout can be below. A published layout is
planned with its marks, and as many layers computed twice as its run had. The proposal starts from
no mark, and may use as much memory. Ends with an error if a published layout is faster. Nothing
runs but the planner.

--rows: the runs of a table, as in published_runs.py. Prints a row for each: the published layout
and its estimated step, the proposed one for the same model, machine, batch, precision and recipe,
the ratio of the steps, how much longer than the best one in the search's space the proposed one is
at most, plans of candidates, and CPU seconds. The search tries the published layout first. --only:
that row alone, from 1.

Sources: those of published_runs.py and published_models.py; for 70B and 405B tables 4 and 5 of
torchtitan's benchmarks, in bfloat16 here; Llama Team, arXiv 2407.21783, table 4 (405B on 4,096);
Korthikanti et al., arXiv 2205.05198, table 5 (175B).
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import Hardware
from torchgspmd.tools.decoders import RunDecoder
from torchgspmd.tools.decoders.run_steps import step
from torchgspmd.tools.suggest import Proposal
from torchgspmd.tools.suggest.layers import Layers

sys.path.insert(0, str(Path(__file__).resolve().parent))
from measured_rows import read_rows
from published_models import MODELS, Model
from published_runs import (
    A100,
    H100,
    LLAMA_8B,
    RUNS,
    TITAN,
    Layout,
    Run,
    Shape,
    Transformer,
    planned,
)

# Their seconds are those of float8: the tokens of a GPU, by its tokens a second.
LLAMA_70B = Shape(80, 8192, 64, 8, 128, 28672, 128256)
LLAMA_405B = Shape(126, 16384, 128, 8, 128, 53248, 128256)
# Two layers more than it has, which its first and last stages lack.
LLAMA_405B_IN_16 = replace(LLAMA_405B, layers=128)
GPT_175B = Shape(96, 12288, 96, 96, 128, 49152, 51200, gated=False, fused=True)
MORE = {
    "Llama 8B, 8 B200": Run(LLAMA_8B, "data=8,model=1", 16, 8192, Hardware.of("b200"), 0.0, 0.0),
    "torchtitan 70B, 256 H100": Run(
        LLAMA_70B, "data=32,model=8", 512, 8192, TITAN, 1.0, 16384 / 829
    ),
    "torchtitan 405B, 512 H100": Run(
        LLAMA_405B, "data=8,stage=8,model=8", 256, 8192, TITAN, 1.0, 4096 / 100, microbatches=32
    ),
    "Llama 405B, 4096 H100": Run(
        LLAMA_405B_IN_16, "data=32,stage=16,model=8", 2048, 8192, H100, 0.0, 0.0, microbatches=64
    ),
    "GPT-3 175B, 64 A100": Run(
        GPT_175B, "data=1,stage=8,model=8", 64, 2048, A100, 0.0, 13.75, microbatches=64
    ),
}
NAMES = (
    "torchtitan 8B, 8 H100",
    "torchtitan 8B, 128 H100",
    *MORE,
    "MaxText 32B, 64 v5p",
    "MaxText 128B, 256 v5p",
    "MaxText 512B, 512 v5p",
    *MODELS,
)
SLACK = 1.005


class Unmarked(Transformer):
    """The model without marks, its layers in a list; no argument but those with a batch."""

    angles: Tensor

    def __init__(self, run: Run) -> None:
        alone = replace(run, recomputed=0.0, microbatches=0, is_list=True)
        super().__init__(alone, gspmd.Mesh(data=1, model=1), Layout({}, {}))
        self.register_buffer("angles", torch.empty(run.length, run.shape.head // 2))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return super().forward(tokens, targets, self.angles)


def proposed(published: Run | Model, memory: float, seconds: float) -> Proposal:
    mesh = published.mesh if isinstance(published, Run) else published.meshes[0]
    with torch.device("meta"):
        if isinstance(published, Run):
            model: nn.Module = Unmarked(published)
            tokens = torch.empty(published.batch, published.length, dtype=torch.long)
            arguments = (tokens, tokens)
        else:
            model, arguments = published.make(published.layers, None), published.tensors()
    return gspmd.suggest(
        model,
        arguments,
        devices=gspmd.Mesh.parse(mesh).size,
        hardware=published.hardware,
        memory=memory,
        seconds=seconds,
        param_dtype=torch.bfloat16,
    )[0]


FEW = 2  # layers of the smaller program, as in a proposal's numbers


def numbers(plan: gspmd.Plan, hardware: Hardware) -> Tensor:
    """Return a step's seconds, and its bytes with Adam's states."""
    report = plan.report(hardware, tried=False)
    memory = report.memory.peak + report.memory.optimizer
    return torch.tensor([report.estimate.seconds, memory], dtype=torch.float64)


def of_list(run: Run) -> Tensor:
    """Return the numbers of a list of layers, extrapolated from few, as those of a proposal are."""

    def of_few(count: int, again: bool) -> Tensor:
        shape = replace(run.shape, layers=count)
        # A loop gathers a layer's weights in each pass; in a list an option says so.
        layout = replace(Layout.published(shape, zero=True), regather="always")
        few = replace(run, shape=shape, recomputed=float(again), is_list=True)
        return numbers(planned(few, layout), run.hardware)

    def of_all(again: bool) -> Tensor:
        few, more = of_few(FEW, again), of_few(FEW + 1, again)
        return few + (run.shape.layers - FEW) * (more - few)

    share = torch.tensor(run.recomputed, dtype=torch.float64)
    return torch.lerp(of_all(False), of_all(True), share)


def of_run(run: Run) -> tuple[Tensor, str]:
    """Return the numbers of the published layout: its layers as a loop or as a list."""
    plan = planned(run, Layout.published(run.shape, zero=True))
    ways = [numbers(plan, run.hardware)]
    ways += [of_list(run)] if not run.microbatches else []
    return min(ways, key=Tensor.tolist), run.mesh


def of_model(published: Model) -> tuple[Tensor, str]:
    """Return the numbers of a published layout, on the fastest of its meshes."""

    def of_layers(count: int, mesh: gspmd.Mesh) -> Tensor:
        with torch.device("meta"):
            model, arguments = published.make(count, mesh), published.tensors()
        layers = Layers.of(model)
        with layers.recomputed((("", count),) if published.recomputed else ()):
            plan = gspmd.plan(
                model,
                *arguments,
                mesh=mesh,
                in_specs=published.in_specs,
                grad=True,
                param_dtype=torch.bfloat16,
                hardware=published.hardware,
                advanced={"regather": "always", "rng": "native"},
            )
        return numbers(plan, published.hardware)

    def of_mesh(text: str) -> Tensor:
        mesh, layers = gspmd.Mesh.parse(text), published.layers
        if "stage" in mesh.names:  # a loop over all layers
            return of_layers(layers, mesh)
        few, more = of_layers(FEW, mesh), of_layers(FEW + 1, mesh)
        return few + (layers - FEW) * (more - few)

    ways = {mesh: of_mesh(mesh) for mesh in published.meshes}
    best = min(ways, key=lambda mesh: ways[mesh].tolist())
    return ways[best], best


def main(names: Sequence[str], seconds: float) -> None:
    print("| model | published | step, s | GiB | proposed | step, s | GiB | ratio | bound, s |")
    print("|---|---|--:|--:|---|--:|--:|--:|--:|")
    lost = []
    for name in names or NAMES:
        run = {**RUNS, **MORE, **MODELS}[name]
        of, on = of_run(run) if isinstance(run, Run) else of_model(run)
        hand, memory = of.tolist()
        best = proposed(run, max(memory, run.hardware.memory), seconds)
        mesh = ",".join(f"{axis}={size}" for axis, size in best.mesh.axes)
        saved = [f"{n} x {part or 'layer'}" for part, n in best.savings.recomputed]
        if best.savings.microbatches > 1:
            kind = "calls" if best.savings.in_calls else "microbatches"
            saved.append(f"{best.savings.microbatches} {kind}")
        count = run.shape.layers if isinstance(run, Run) else run.layers
        layers, ratio = round(run.recomputed * count), best.seconds / hand
        print(
            f"| {name} | {on}; {layers} x layer | {hand:.2f} | {memory / 2**30:.0f} "
            f"| {mesh}; {', '.join(saved) or 'none'} | {best.seconds:.2f} "
            f"| {best.memory / 2**30:.0f} | {ratio:.3f} | {best.bound:.2f} |",
            flush=True,
        )
        lost += [name] * (ratio > SLACK)
    raise SystemExit(f"faster by hand: {', '.join(lost)}" if lost else 0)


def print_rows(path: str, only: int | None, seconds: float) -> None:
    print("| run | published | step, s | proposed | step, s | ratio | within | plans | CPU s |")
    print("|---|---|--:|---|--:|--:|--:|--:|--:|")
    lost, rows = [], read_rows(path)
    for number, row in enumerate(rows, 1):
        if only not in (None, number):
            continue
        run = row.run
        published = step(run)
        begin = time.process_time()
        with torch.device("meta"):
            model = RunDecoder(run)
            tokens = torch.empty(row.global_batch, row.sequence, dtype=torch.long)
        best = gspmd.suggest(
            model,
            (tokens, tokens),
            devices=row.gpus,
            hardware=row.run.hardware,
            seconds=seconds,
            precision=row.precision.lower(),
        )[0]
        spent, ratio = time.process_time() - begin, best.seconds / published.seconds
        mesh = ",".join(f"{axis}={size}" for axis, size in best.mesh.axes)
        rounds = f" x {best.repeats}" if best.repeats > 1 else ""
        count = best.savings.microbatches
        fits = "" if best.memory <= best.limit else " TOO MUCH"
        print(
            f"| {number}. {row.name} | {run.layout} | {published.seconds:.2f} "
            f"| {mesh}{rounds}; {count} microbatches{fits} | {best.seconds:.2f} | {ratio:.3f} "
            f"| {best.gap:.1%} | {best.counts['plans']} of {best.counts['candidates']} "
            f"| {spent:.0f} |",
            flush=True,
        )
        lost += [row.name] * (ratio > SLACK or bool(fits))
    raise SystemExit(f"faster by hand: {', '.join(lost)}" if lost else 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--seconds", type=float, default=60, help="of a search")
    parser.add_argument("--rows", metavar="FILE.csv", help="a table of runs")
    parser.add_argument("--only", type=int, metavar="N", help="the row with this number, from 1")
    warnings.simplefilter("ignore")
    arguments = parser.parse_args()
    if arguments.rows:
        print_rows(arguments.rows, arguments.only, arguments.seconds)
    main(arguments.names, arguments.seconds)
