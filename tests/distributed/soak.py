"""A process that works on and on, for test_soak.py: python soak.py SECONDS prints its meter."""

import gc
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import torchgspmd as gspmd
from torchgspmd.comm import process_groups

ROUNDS = 4  # of each kind of work; the first one fills caches


def meter() -> dict[str, float]:
    """Return the memory, descriptors, threads, groups and objects of this process."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return {
        "MiB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "groups": len(process_groups._GROUPS),
        "objects": len(gc.get_objects()),
    }


def model() -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return gspmd.parallelize(net, gspmd.Mesh(data=2), in_specs="data _", audit=7)


class Work:
    """The kinds of work. sizes: of batches, each of which is new."""

    def __init__(self) -> None:
        self.model, self.rows = model(), 2
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
        other = model()
        other(torch.ones(4, 8)).sum().backward()

    def step(self, rows: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(rows, 8)).sum().backward()
        self.optimizer.step()


def work(seconds: float) -> list:
    """Return how often each kind was done in each round, and the meter behind it."""
    todo, found = Work(), []
    for kind in ("steps", "shapes", "models"):
        for _ in range(ROUNDS):
            count = round_of(getattr(todo, kind), seconds / 3 / ROUNDS)
            found.append((kind, count, meter()))
    return found


def round_of(run, seconds: float) -> int:
    """Work for some seconds, on both ranks equally often; return how often."""
    until, count, goes_on = time.monotonic() + seconds, 0, torch.ones(())
    while goes_on:
        for _ in range(4):
            run()
            count += 1
        goes_on.fill_(time.monotonic() < until)
        dist.broadcast(goes_on, src=0)
    return count


if __name__ == "__main__":
    print(json.dumps(gspmd.launch(work, 2, float(sys.argv[1]))))
