"""Work of a step of pipeline() beside that of the same blocks on one process, in CPU time.

    torchrun --nproc-per-node 4 benchmarks/pipeline_step.py --microbatches 16

A stage computes in every tick: in m of them on microbatches, in p - 1 on what is thrown away. So a
process works (m + p - 1) / m times as long as its share of the blocks takes, and on devices that
run at once a step takes as long. CPU time says so however many processes share a core.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import torchgspmd as gspmd


class Block(nn.Module):
    """A residual block [rows, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """The loss of blocks, in a loop or a pipeline."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


def seconds(step: Callable[[], None], steps: int) -> float:
    """Return the CPU seconds of a step, after two that are not counted."""
    for _ in range(2):
        step()
    begin = time.process_time()
    for _ in range(steps):
        step()
    return (time.process_time() - begin) / steps


def main() -> None:
    """Compare the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--rows", type=int, default=128, help="of a microbatch")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2, help="blocks of a stage")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    p, m = dist.get_world_size(), args.microbatches
    torch.manual_seed(0)
    blocks = [Block(args.width) for _ in range(p * args.layers)]
    x = torch.randn(m * args.rows, args.width)
    mesh = gspmd.Mesh(stage=p)
    pipeline = gspmd.pipeline(copy.deepcopy(blocks), mesh, microbatches=m)
    model = gspmd.parallelize(Model(pipeline), mesh)
    alone = Model(nn.Sequential(*blocks))

    def in_microbatches() -> None:
        for rows in x.unflatten(0, (m, -1)):
            (alone(rows) / m).backward()

    work = torch.tensor(seconds(lambda: model(x).backward(), args.steps))
    dist.all_reduce(work, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        share = seconds(in_microbatches, args.steps) / p
        counted = (m + p - 1) / m
        print(f"{p} stages, {m} microbatches: CPU {work:.3f} s a step of the busiest process,")
        print(f"a share of the blocks alone {share:.3f} s: {work / share:.3f} times")
        print(f"counted from the ticks: {counted:.3f} times")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
