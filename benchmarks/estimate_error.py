"""Measured and estimated times of steps of random plans, after `calibrate`, on gloo processes.

    torchrun --nproc-per-node 4 benchmarks/estimate_error.py [--plans 30] [--plot docs/estimate.png]

Sizes, layout and mesh of examples/gpt are drawn at random. Measured is the median of a step without
optimizer, on the slowest process. Printed: a row for each plan, the rank correlation (Spearman) of
measured and estimated times, and the median of the relative errors.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchgspmd as gspmd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "gpt"))
from model import GPT, LAYOUTS, Config


def draws(devices: int, count: int, seed: int) -> Iterator[tuple[gspmd.Mesh, str, dict[str, int]]]:
    """Yield mesh, layout and sizes."""
    draw = random.Random(seed)
    for _ in range(count):
        model = draw.choice([n for n in range(1, devices + 1) if devices % n == 0])
        layout = draw.choice(["dp", "tp", "sp", "fsdp", "2d"])
        heads = draw.choice([4, 8])
        yield (
            gspmd.Mesh(data=devices // model, model=model),
            layout,
            dict(
                batch=draw.choice([4, 8, 16]),
                context=draw.choice([32, 64, 128]),
                layers=draw.choice([1, 2, 4]),
                heads=heads,
                width=heads * draw.choice([8, 16, 32, 64]),
                vocabulary=draw.choice([256, 1024]),
            ),
        )


def measured(step: Any, seconds: float) -> float:
    """Return the median of the seconds of a step, on the slowest process."""
    times: list[float] = []
    for i in range(200):
        dist.barrier()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
        enough = torch.tensor(float(i >= 6 and sum(times) > seconds))
        dist.broadcast(enough, 0)
        if enough:
            break
    result = torch.tensor(statistics.median(times[2:]))
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return result.item()


def run(mesh: gspmd.Mesh, layout: str, size: dict[str, int]) -> tuple[Any, Any]:
    """Return the wrapped model and a function that runs a step."""
    torch.manual_seed(0)
    batch, context, vocabulary = size["batch"], size["context"], size["vocabulary"]
    config = Config(vocabulary, context, size["layers"], size["heads"], size["width"])
    model = gspmd.annotate(GPT(config), LAYOUTS[layout].on(mesh))
    model = gspmd.parallelize(model, mesh)
    tokens = torch.randint(vocabulary, (batch, context))

    def step() -> None:
        model.zero_grad()
        model(tokens, tokens).backward()

    return model, step


def ranks(values: list[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    return sorted(range(len(values)), key=order.__getitem__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1.0, help="that each plan is measured")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    first, devices = dist.get_rank() == 0, dist.get_world_size()
    hardware = {}
    rows = []
    for mesh, layout, size in draws(devices, args.plans, args.seed):
        if mesh not in hardware:
            hardware[mesh] = gspmd.calibrate(mesh)
        model, step = run(mesh, layout, size)
        seconds = measured(step, args.seconds)
        estimate = model.plan.estimate(hardware[mesh])
        rows.append((seconds, estimate.seconds))
        if first:
            print(
                f"{str(mesh):18} {layout:5} {' '.join(map(str, size.values())):24} measured "
                f"{seconds * 1e3:8.2f} ms  estimated {estimate.seconds * 1e3:8.2f} ms  of it "
                f"communication {estimate.busy('communication') * 1e3:7.2f} ms",
                flush=True,
            )
    if first:
        actual, predicted = [row[0] for row in rows], [row[1] for row in rows]
        correlation = statistics.correlation(ranks(actual), ranks(predicted))
        errors = [abs(p / a - 1) for a, p in rows]
        text = f"rank correlation {correlation:.3f}, median error {statistics.median(errors):.1%}"
        print(f"{len(rows)} plans on {devices} processes: {text}")
        if args.plot:
            plot(args.plot, actual, predicted, text)
    dist.destroy_process_group()


def plot(path: Path, actual: list[float], predicted: list[float], text: str) -> None:
    """Write a plot of measured against estimated times."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 5), layout="constrained")
    ends = [min(actual + predicted) * 900, max(actual + predicted) * 1100]
    axes.plot(ends, ends, color="#b9c0cc")
    axes.fill_between(ends, [0.8 * e for e in ends], [1.2 * e for e in ends], color="#eef1f5")
    axes.scatter([1e3 * a for a in actual], [1e3 * p for p in predicted], s=20)
    axes.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="estimated, ms", title=text)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
