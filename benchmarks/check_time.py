"""CPU time of a training step with `parallelize(check="always")` and with "never", on gloo.

    torchrun --nproc-per-node 2 benchmarks/check_time.py [--sizes 64 256] [--steps 60]
    torchrun --nproc-per-node 2 benchmarks/check_time.py --of watcher

The second: with the thread and the messages that find ranks that have died (comm/watcher.py), and
without.

The model, its layouts and the way of measuring are those of step_time.py. Printed: the median over
steps of the ratio of two steps that follow one another, in an order drawn anew for each.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics

import torch
import torch.distributed as dist
from step_time import BATCH, GPT, SEQUENCE, VOCABULARY, Trainer, mark

import torchgspmd as gspmd
from torchgspmd.comm.watcher import Watcher


def ours(model: GPT, layout: str, check: str) -> torch.nn.Module:
    mesh = gspmd.Mesh(**{"model" if layout == "tp" else "data": dist.get_world_size()})
    mark(model, mesh, layout)
    in_specs = None if layout == "tp" else ("data _", "data _")
    return gspmd.parallelize(model, mesh, in_specs=in_specs, check=check)


class Unwatched(Trainer):
    """Takes its steps while no rank tells another where it is, and none looks."""

    def step(self, *batch: torch.Tensor) -> float:
        kept = Watcher.begin, Watcher._look
        Watcher.begin = Watcher._look = lambda *_: None  # pyright: ignore
        try:
            return super().step(*batch)
        finally:
            Watcher.begin, Watcher._look = kept


def run(width: int, layout: str, steps: int, of: str) -> None:
    torch.manual_seed(0)
    model, checks = GPT(width), ("always", "never" if of == "check" else "always")
    trainers = [
        kind(model, lambda m, check=check: ours(m, layout, check), False, None)
        for kind, check in zip((Trainer, Trainer if of == "check" else Unwatched), checks)
    ]
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(VOCABULARY, (2, BATCH, SEQUENCE), generator=generator)
        for trainer in random.Random(step).sample(trainers, 2):
            trainer.step(*batch)
    always, never = (torch.tensor(t.seconds[3:]) for t in trainers)
    for seconds in (always, never):
        dist.all_reduce(seconds)
    ratio = statistics.median((always / never).tolist())
    if dist.get_rank() == 0:
        print(
            f"width {width:4} {layout:5} {never.median() * 1e3:8.2f} ms without {of} "
            f"{always.median() * 1e3:8.2f} ms with   ratio {ratio:.4f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--of", choices=("check", "watcher"), default="check")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for width in options.sizes:
        for layout in ("dp", "fsdp"):
            run(width, layout, options.steps, options.of)
    dist.barrier()
    os._exit(0)  # gloo may abort at exit


if __name__ == "__main__":
    main()
