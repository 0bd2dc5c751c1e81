"""What suggest proposes for the examples, beside their hand-made layouts: seconds, bytes, memory.

    python benchmarks/suggest_layouts.py [--only vit] [--devices 8] [--hardware h100]

Each layout is planned on every mesh of so many devices that its axes can have; its best mesh is
printed. Nothing runs but the planner. Ends with an error if a layout is faster than the proposal.
"""

from __future__ import annotations

import argparse
import itertools
import math
import runpy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchgspmd import Hardware, Mesh, ShardingError, plan, suggest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SIZES: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 4, "batch": 16},
    "vit": {"layers": 4, "batch": 64},
    "moe": {"layers": 2, "batch": 16, "experts": 16},
    "unet3d": {"levels": 3, "batch": 2, "size": 128},
}
NOT_ALONE = ("pp", "pp_dp", "pp_tp")  # microbatches of another program


@dataclass(frozen=True)
class Row:
    """A layout on its best mesh."""

    name: str
    mesh: Mesh
    seconds: float
    sent: float
    memory: float

    def text(self, best: Row) -> str:
        """Return a line, with ratios to the proposal."""
        axes = " ".join(f"{name}={size}" for name, size in self.mesh.axes)
        ratio, milliseconds = self.seconds / best.seconds, self.seconds * 1e3
        sent, memory = self.sent / 2**20, self.memory / 2**30
        return (
            f"{self.name:10} {axes:22} {milliseconds:8.2f} ms {ratio:6.2f} {sent:9.1f} MiB"
            f" {memory:7.2f} GiB"
        )


def meshes(axes: list[str], devices: int) -> Iterator[Mesh]:
    """Yield the meshes of axes, each of two devices at least."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for sizes in itertools.product(divisors, repeat=len(axes)):
        if math.prod(sizes) == devices and (min(sizes) > 1 or len(axes) == 1):
            yield Mesh(**dict(zip(axes, sizes)))


def by_hand(name: str, devices: int, hardware: Hardware) -> Iterator[Row]:
    """Yield the layouts of an example, each on its fastest mesh."""
    module = runpy.run_path(str(EXAMPLES / name / "model.py"))
    for layout, table in module["LAYOUTS"].items():
        axes = sorted(
            {a for choices in table.rules.values() for each in choices for a in each.axes}
        )
        rows = []
        for mesh in meshes(axes, devices) if layout not in NOT_ALONE else ():
            try:
                with torch.device("meta"):
                    model, batch = module["example"](mesh, layout, **SIZES[name])
                report = plan(model, *batch, mesh=mesh, grad=True).report(hardware, tried=False)
            except ShardingError:  # a dimension that the mesh does not divide
                continue
            sent = sum(row.sent_bytes for row in report.collectives)
            memory = report.memory.peak + report.memory.optimizer
            rows.append(Row(layout, mesh, report.estimate.seconds, sent, memory))
        if rows:
            yield min(rows, key=lambda row: row.seconds)


def proposed(name: str, devices: int, hardware: Hardware, seconds: float) -> tuple[Row, str]:
    """Return the best proposal for an example, and its code."""
    module = runpy.run_path(str(EXAMPLES / name / "model.py"))
    cut = Mesh(expert=devices)  # the experts are; to other examples it is one device
    with torch.device("meta"):
        model, batch = module["example"](cut, next(iter(module["LAYOUTS"])), **SIZES[name])
    best = suggest(model, batch, devices=devices, hardware=hardware, seconds=seconds)[0]
    return Row("suggest", best.mesh, best.seconds, best.sent_bytes, best.memory), best.code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SIZES)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--seconds", type=float, default=600, help="of a search")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    hardware, lost = Hardware.of(args.hardware), []
    for name in [args.only] if args.only else SIZES:
        best, code = proposed(name, args.devices, hardware, args.seconds)
        print(f"{name}\n{best.text(best)}", flush=True)
        for row in by_hand(name, args.devices, hardware):
            print(row.text(best), flush=True)
            lost += [f"{name} {row.name}"] if row.seconds < best.seconds * 0.995 else []
        print(code + "\n")
    raise SystemExit(f"faster by hand: {', '.join(lost)}" if lost else 0)


if __name__ == "__main__":
    main()
