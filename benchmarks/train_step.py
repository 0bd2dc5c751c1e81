"""Time of a training step as one program, against parallelize with an optimizer of torch.optim.

    torchrun --nproc-per-node 2 benchmarks/train_step.py [--sizes 64 256 512] [--steps 30] [--clip]

Both live in one run and take turns step by step, in an order drawn anew for each step. Printed: the
median CPU time of a step summed over the processes (forward, backward, AdamW), for data parallelism
(dp) and with weights and states sharded over the same axis (zero).
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from step_time import BATCH, GPT, SEQUENCE, VOCABULARY
from torch import Tensor, nn

import torchgspmd as gspmd

BATCHES = ("data _", "data _")
Step = Callable[[Tensor, Tensor], Tensor]


def loop(model: nn.Module, mesh: gspmd.Mesh, axis: str | None, clip: float | None) -> Step:
    """Return a step of parallelize and foreach AdamW."""
    module = gspmd.parallelize(model, mesh, in_specs=BATCHES, shard_updates=axis)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3, foreach=True)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = module(tokens, targets)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def program(model: nn.Module, mesh: gspmd.Mesh, axis: str | None, clip: float | None) -> Step:
    """Return a step of one program."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = gspmd.train_step(model, optimizer, clip=clip)
    return gspmd.parallelize(step, mesh, in_specs=BATCHES, shard_updates=axis)


def run(width: int, steps: int, clip: float | None) -> None:
    torch.manual_seed(0)
    model, mesh = GPT(width), gspmd.Mesh(data=dist.get_world_size())
    variants = {
        f"{name}: {kind.__name__}": kind(copy.deepcopy(model), mesh, axis, clip)
        for name, axis in (("dp", None), ("zero", "data"))
        for kind in (loop, program)
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    losses: dict[str, float] = {}
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(VOCABULARY, (2, BATCH, SEQUENCE), generator=generator)
        for name in random.Random(step).sample(list(variants), len(variants)):
            dist.barrier()
            start = time.process_time()
            loss = variants[name](*batch)
            seconds[name].append(time.process_time() - start)
            losses[name] = loss.item()
    rows = torch.tensor([statistics.median(times[3:]) for times in seconds.values()])
    dist.all_reduce(rows)
    if dist.get_rank() == 0:
        print(f"width {width}: {sum(p.numel() for p in model.parameters()):,} parameters")
        for (name, each), base in zip(zip(variants, rows.tolist()), rows[[0, 0, 2, 2]].tolist()):
            print(f"  {name:16} {each * 1e3:8.1f} ms  {each / base:5.2f}  loss {losses[name]:.6f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 512], help="widths")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--clip", type=float, help="largest norm of the gradients")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for width in options.sizes:
        run(width, options.steps, options.clip)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
