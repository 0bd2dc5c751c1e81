"""Work of a step of pipeline() beside that of the blocks of a stage alone, in CPU time.

    torchrun --nproc-per-node 4 benchmarks/pipeline_step.py --microbatches 16
    torchrun --nproc-per-node 4 benchmarks/pipeline_step.py --microbatches 16 --schedule 1f1b

Without a schedule a stage computes in every tick: in m of them on microbatches, in p - 1 on what is
thrown away. So a process works (m + p - 1) / m times as long as its blocks take alone, and on
devices that run at once a step takes as long. With a schedule (and the loss in the pipeline) it
computes what its blocks do alone, and is idle in the bubble. CPU time says so however many
processes share a core. All processes run their blocks at once, as they do in the pipeline. The two
take turns, step by step.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence

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


def loss(y: torch.Tensor) -> torch.Tensor:
    """Return the loss of what the last block returns."""
    return y.square().mean()


class Model(nn.Module):
    """The loss of blocks, in a loop or a pipeline, which may have it inside."""

    def __init__(self, blocks: nn.Module, has_loss: bool = False) -> None:
        super().__init__()
        self.blocks, self.has_loss = blocks, has_loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks(x)
        return y if self.has_loss else loss(y)


def seconds(steps: Sequence[Callable[[], None]], count: int) -> list[float]:
    """Return the median CPU seconds of each step; they take turns, after two uncounted turns."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(2 + count):
        for step, each in zip(steps, times):
            dist.barrier()
            begin = time.process_time()
            step()
            each.append(time.process_time() - begin)
    return [statistics.median(each[2:]) for each in times]


def main() -> None:
    """Compare the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--rows", type=int, default=128, help="of a microbatch")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2, help="blocks of a stage")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--schedule", help="1f1b, zero_bubble or gpipe, with the loss inside")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    p, m = dist.get_world_size(), args.microbatches
    torch.manual_seed(0)
    blocks = [Block(args.width) for _ in range(p * args.layers)]
    x = torch.randn(m * args.rows, args.width)
    mesh = gspmd.Mesh(stage=p)
    inside = {"schedule": args.schedule, "loss": loss} if args.schedule else {}
    pipeline = gspmd.pipeline(copy.deepcopy(blocks), mesh, microbatches=m, **inside)
    model = gspmd.parallelize(Model(pipeline, bool(inside)), mesh)
    own = blocks[dist.get_rank() * args.layers :][: args.layers]
    alone = Model(nn.Sequential(*own))

    def in_microbatches() -> None:
        for rows in x.unflatten(0, (m, -1)):
            (alone(rows.clone().requires_grad_()) / m).backward()

    steps = (in_microbatches, lambda: model(x).backward())
    times = torch.tensor(seconds(steps, args.steps))
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    share, work = times.tolist()
    if dist.get_rank() == 0:
        counted = 1.0 if inside else (m + p - 1) / m
        print(f"{p} stages, {m} microbatches: CPU {work:.3f} s a step of the busiest process,")
        print(f"its blocks alone {share:.3f} s: {work / share:.3f} times, counted {counted:.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
