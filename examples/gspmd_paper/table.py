"""Plan the dense family on its meshes, and write the table of docs/gspmd_paper.md.

    python examples/gspmd_paper/table.py [--layers 2]

With --layers N, N and N - 1 layers are planned, and the others extrapolated: like layers add alike.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections import defaultdict

import torch
from model import CONFIGS, example

import torchgspmd as gspmd

# Size, mesh, and tokens per second that Lingvo's configuration expects (synthetic_packed_input.py).
# Without such a number: the same shapes with half or twice the layers.
RUNS = (
    ("69.0B", gspmd.Mesh(x=8, y=16), 0.0),
    ("137.7B", gspmd.Mesh(x=8, y=16), 3.7e3),
    ("137.7B", gspmd.Mesh(x=16, y=32), 18e3),
    ("137.7B", gspmd.Mesh(x=32, y=64), 62e3),
    ("275.1B", gspmd.Mesh(x=32, y=32), 0.0),
    ("174.4B", gspmd.Mesh(x=64, y=32), 51.53e3),
    ("550.3B", gspmd.Mesh(x=32, y=32), 0.0),
    ("1.10T", gspmd.Mesh(x=16, y=32), 1.4e3),
    ("1.10T", gspmd.Mesh(x=32, y=64), 0.0),
)


def numbers(size: str, mesh: gspmd.Mesh, layers: int) -> dict[str, float]:
    """Return what a device holds, computes and sends in a step."""
    with torch.device("meta"):
        model, batch = example(mesh, size, layers=layers)
        count = sum(p.numel() for p in model.parameters())
    plan = gspmd.plan(model, *batch, mesh=mesh, grad=True, advanced={"regather": "always"})
    report = plan.report("tpu_v3")
    sent: dict[str, float] = defaultdict(float)
    for row in report.collectives:
        sent["+".join(row.axes)] += row.sent_bytes
    return {
        "parameters": count,
        "stored": report.memory.parameters,
        "adam": report.memory.parameters + report.memory.optimizer,
        "saved": report.memory.saved,
        "x": sent["x"],
        "y": sent["y"],
        "both": sum(sent.values()) - sent["x"] - sent["y"],
        "flops": report.estimate.flops,
        "even": report.estimate.model_flops / mesh.size,
        "seconds": report.estimate.seconds,
    }


def row(size: str, mesh: gspmd.Mesh, rate: float, layers: int) -> str:
    start, config = time.perf_counter(), CONFIGS[size]
    n = numbers(size, mesh, layers or config.layers)
    if layers:
        fewer = numbers(size, mesh, layers - 1)
        n = {k: v + (config.layers - layers) * (v - fewer[k]) for k, v in n.items()}
    planned = time.perf_counter() - start
    tokens = mesh.count(("x",)) * config.sequence
    peak = 61.5e12 * mesh.size
    published = 6 * n["parameters"] * rate / peak
    mine = 6 * n["parameters"] * tokens / n["seconds"] / peak
    cells = [
        size,
        f"[{mesh.count(('x',))}, {mesh.count(('y',))}]",
        f"{n['parameters'] / 1e9:,.1f}",
        *(f"{n[key] / 2**30:.2f}" for key in ("stored", "adam", "saved", "x", "y", "both")),
        f"{n['flops'] / 1e12:.2f}",
        f"{n['flops'] / n['even']:.2f}",
        f"{mine:.0%}",
        f"{published:.0%}" if rate else "",
        f"{planned:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=0)
    args = parser.parse_args()
    print(
        "| model | mesh | parameters, G | stored, GiB | with Adam | saved, GiB | sent over x, GiB "
        "| over y | over both | Tflop | of an even split | utilization | published | planned, s |"
    )
    print("|" + "---|" * 14)
    for size, mesh, rate in RUNS:
        print(row(size, mesh, rate, args.layers), flush=True)
    print(f"\n{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GB at most")


if __name__ == "__main__":
    main()
