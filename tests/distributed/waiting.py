"""Two processes of which one sleeps, ends, or does something alone; for test_waiting.py.

Each case has a process group of its own: after a wait that ended it is of no use.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate

import torchgspmd as gspmd

LIMIT = 2.0
RANK = int(os.environ["RANK"])
gspmd.parallelize  # noqa: B018 (its import takes seconds, which no rank may have to wait for)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()


def sleep_alone(function):
    """Let rank 1 sleep until rank 0 has waited for it, and given up."""
    done = Path(f"{sys.argv[1]}/{function.__code__.co_firstlineno}")
    if RANK == 0:
        try:
            function()
        finally:
            done.touch()
    while not done.exists():
        time.sleep(0.1)


def train(model, x):
    model(x).backward()
    model.zero_grad()


def first_call(model, x):
    sleep_alone(lambda: model(x))


def third_step(model, x):
    train(model, x), train(model, x)
    sleep_alone(lambda: train(model, x))


def backward(model, x):
    loss = model(x)
    sleep_alone(lambda: loss.backward())


def whole_tensor(model, x):
    train(model, x)
    sleep_alone(lambda: model.up.weight.full_tensor())


def redistributed(model, x):
    train(model, x)
    sleep_alone(lambda: model.up.weight.redistribute(placements=[Replicate()]))


def gathered_operand(model, x):
    train(model, x)
    sleep_alone(lambda: model.up.weight.softmax(0))


def whole_tensor_and_step(model, x):
    train(model, x)
    model.up.weight.full_tensor() if RANK == 0 else train(model, x)


def ended(model, x):
    train(model, x)
    if RANK == 0:
        train(model, x)


def main(name, folder):
    store = dist.FileStore(f"{folder}/{name}", 2)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=2)
    mesh, model = gspmd.Mesh(data=2), Model()
    gspmd.annotate(model, mesh, {"up.weight": "data _"})
    try:
        model = gspmd.parallelize(model, mesh, in_specs="data _", timeout=LIMIT)
        globals()[name](model, torch.ones(4, 8))
    except gspmd.ShardingError as error:
        print(f"=== {name}\n{error}", flush=True)
    if name != "ended":
        time.sleep(0.2)
        dist.destroy_process_group()


if __name__ == "__main__":
    for case in sys.argv[2:]:
        print(f"=== {case}", file=sys.stderr, flush=True)
        main(case, sys.argv[1])
