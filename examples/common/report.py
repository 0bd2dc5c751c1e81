"""What a run shows: the plan of a step, and the curve of its losses."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd.layout.layout_rules import MeshLayout

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def print_plan(
    title: str,
    layout: MeshLayout,
    model: nn.Module,
    *batch: Tensor,
    grad: bool = True,
    microbatches: int = 1,
) -> None:
    """Plan a step of a model on the meta device, for any number of devices, and print it. grad:
    the model has no backward of its own.
    """
    start = time.perf_counter()
    planned = gspmd.plan(model, *batch, mesh=layout, grad=grad, microbatches=microbatches)
    console = Console(highlight=False)
    console.print(f"{title}; {layout.mesh}")
    show_plan(planned, time.perf_counter() - start, console)


def show_plan(plan: gspmd.Plan, seconds: float, console: Console) -> None:
    """What one device sends and keeps. seconds: that planning took."""
    groups: dict[tuple[str, str, str], list[gspmd.Collective]] = {}
    for c in plan.collectives:
        groups.setdefault((c.kind, "+".join(c.axes), c.dtype), []).append(c)
    table = Table(
        "collective",
        "over",
        "dtype",
        title="one step, one device: forward and backward",
        title_justify="left",
    )
    table.add_column("count", justify="right")
    table.add_column("sent", justify="right")
    for (kind, axes, dtype), found in sorted(groups.items()):
        table.add_row(
            kind,
            axes,
            dtype,
            str(sum(c.count for c in found)),
            size(sum(c.sent_bytes for c in found)),
        )
    table.add_section()
    table.add_row("all", "", "", str(sum(c.count for c in plan.collectives)), size(plan.sent_bytes))
    console.print(table)
    console.print(
        f"memory of a device: parameters {size(plan.memory.parameters)}, inputs "
        f"{size(plan.memory.inputs)}, "
        f"peak of a step {size(plan.memory.peak)}; planned in {seconds:.1f} s"
    )


def size(count: float) -> str:
    """Bytes for a person."""
    unit = next((i for i in range(4) if count < 1024 ** (i + 1)), 3)
    return (
        f"{count:.0f} B"
        if unit == 0
        else f"{count / 1024**unit:.2f} {('KiB', 'MiB', 'GiB')[unit - 1]}"
    )


def figure(
    rows: int = 1, columns: int = 1, size: tuple[float, float] = (7, 4)
) -> tuple[Figure, Any]:
    """A figure for a file, no window is opened; its Axes, or an array of them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=size, layout="constrained")


def plot_losses(losses: list[float], first: int, title: str, unit: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture, axes = figure()
    axes.plot(range(first + 1, first + len(losses) + 1), losses, linewidth=1.2)
    axes.set(xlabel="step", ylabel=f"loss ({unit})", title=title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    picture.savefig(path, dpi=150)
