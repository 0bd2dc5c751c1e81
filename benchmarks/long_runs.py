"""Memory, descriptors, threads, groups and objects of a process that works on and on.

    python benchmarks/long_runs.py --seconds 9     four rounds a kind of work; prints the meters
    python benchmarks/long_runs.py --picture docs/long_runs.png

Kinds of work, on two gloo processes: steps, batches of new sizes, models that are wrapped and
deleted, meshes that no model had before. --picture draws 20,000 steps, 2,000 sizes, 500 models and
50 meshes; a fifth of each comes first and is not drawn, since it fills caches.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

import torchgspmd as gspmd
from torchgspmd.comm import process_groups

ROUNDS = 4  # of each kind of work; the first one fills caches
COUNTS = {"steps": 20_000, "shapes": 2_000, "models": 500, "meshes": 50}
POINTS = 40  # of a curve
LOOKS = 5  # at the descriptors


def meter() -> dict[str, float]:
    """Return the memory, descriptors, threads, groups and objects of this process."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return {
        "MiB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "descriptors": min(map(open_files, range(LOOKS))),
        "threads": len(os.listdir("/proc/self/task")),
        "groups": len(process_groups._GROUPS),
        "objects": len(gc.get_objects()),
    }


def open_files(look: int) -> int:
    """Return the number of descriptors; later looks wait until a thread may have closed one.

    The watcher's thread opens a file for a moment whenever it looks where other threads are.
    """
    time.sleep(0.02 * look)
    return len(os.listdir("/proc/self/fd"))


def wrapped(mesh: gspmd.Mesh) -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return gspmd.parallelize(net, mesh, in_specs=f"{mesh.names[0]} _", check={"audit": 7})


class Work:
    """The kinds of work. rows: of the last batch, meshes: how many were made."""

    def __init__(self) -> None:
        self.model, self.rows, self.made = wrapped(gspmd.Mesh(data=2)), 2, 0
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def steps(self) -> None:
        """Train on batches of one size."""
        self.step(6)

    def shapes(self) -> None:
        """Train on a batch of another size than all before."""
        self.rows += 1
        self.step(self.rows)

    def models(self) -> None:
        """Wrap a model on an equal mesh, run it, and delete it."""
        wrapped(gspmd.Mesh(data=2))(torch.ones(4, 8)).sum().backward()

    def meshes(self) -> None:
        """Wrap a model on a mesh with other groups than all before, run it, and delete it."""
        self.made += 1
        mesh = gspmd.Mesh(**{f"data{self.made}": 2, "model": 1})
        wrapped(mesh)(torch.ones(4, 8)).sum().backward()

    def step(self, rows: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(rows, 8)).sum().backward()
        self.optimizer.step()


Row = tuple[str, int, dict[str, float]]  # a kind of work, how often, and the meter behind it


def work_for(seconds: float) -> list[Row]:
    """Do three kinds of work for some seconds, in rounds."""
    todo, found = Work(), []
    for kind in ("steps", "shapes", "models"):
        for _ in range(ROUNDS):
            count = round_of(getattr(todo, kind), seconds / 3 / ROUNDS)
            found.append((kind, count, meter()))
    return found


def round_of(run: Callable[[], None], seconds: float) -> int:
    """Work for some seconds, on both ranks equally often; return how often."""
    until, count, goes_on = time.monotonic() + seconds, 0, torch.ones(())
    while goes_on:
        for _ in range(4):
            run()
            count += 1
        goes_on.fill_(time.monotonic() < until)
        dist.broadcast(goes_on, src=0)
    return count


def work_often(share: float) -> list[Row]:
    """Do all kinds of work, so often as COUNTS says or a share of it."""
    todo, found = Work(), []
    for kind, count in COUNTS.items():
        count = max(POINTS, int(count * share))
        for i in range(-count // 5, count + 1):
            getattr(todo, kind)()
            if i >= 0 and i % max(count // POINTS, 1) == 0:
                found.append((kind, i, meter()))
    return found


def draw(rows: list[Row], path: Path) -> None:
    """Draw a column for each kind of work and a row for each number of the meter."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(rows[0][2])
    figure, plots = pyplot.subplots(
        len(names), len(COUNTS), figsize=(11, 9), sharex="col", sharey="row", layout="constrained"
    )
    for column, kind in enumerate(COUNTS):
        of_kind = [(count, found) for each, count, found in rows if each == kind]
        for line, name in enumerate(names):
            plot = plots[line][column]
            plot.plot([count for count, _ in of_kind], [found[name] for _, found in of_kind])
            plot.set_ylim(0, 1.1 * max(found[name] for _, _, found in rows))  # one for a row
            plot.set_ylabel("" if column else name)
        plots[0][column].set_title(kind)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=9)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--share", type=float, default=1.0, help="of the counts of the picture")
    options = parser.parse_args()
    if options.picture is None:
        print(json.dumps(gspmd.launch(work_for, 2, options.seconds)[0]))
        return
    rows = cast(list[Row], gspmd.launch(work_often, 2, options.share)[0])
    draw(rows, options.picture)
    for kind in COUNTS:
        first, *_, last = [found for each, _, found in rows if each == kind]
        print(f"{kind:7}", *(f"{name} {first[name]:,.0f} -> {last[name]:,.0f}" for name in first))


if __name__ == "__main__":
    main()
