"""A job of gspmd.elastic that loses processes, for test_elastic.py.

python elastic_job.py FOLDER            one host of 4 processes, of which three are killed
python elastic_job.py FOLDER PORT       one of four hosts of one process each
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

import torchgspmd as gspmd
from torchgspmd.runtime import checkpoint
from torchgspmd.runtime.sharded_module import ShardedModule

TOTAL = int(os.environ.get("TOTAL", "24"))
PAUSE = float(os.environ.get("PAUSE", "0"))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 1))


def batch(step: int) -> torch.Tensor:
    return torch.randn(11, 8, generator=torch.Generator().manual_seed(step))


def note(folder: Path, *row: object) -> None:
    with (folder / "log").open("a") as log:
        log.write(json.dumps([time.time(), *row]) + "\n")


def die_once(folder: Path, where: str) -> None:
    """Kill this process, unless it has died there before."""
    try:
        (folder / f"killed {where}").touch(exist_ok=False)
    except FileExistsError:
        return
    note(folder, "killed", where)
    os.kill(os.getpid(), signal.SIGKILL)


def train(job, folder: Path, kills: bool) -> int:
    plan, complete = ShardedModule._plan_here, checkpoint.collect_sums

    def planning(*args):
        if job.rank == 0 and kills:
            die_once(folder, "in planning")
        note(folder, "planned", 0, job.processes)
        return plan(*args)

    def saving(writing):
        if "step-12" in writing.name:
            die_once(folder, "in a save")
        return complete(writing)

    with (
        patch.object(ShardedModule, "_plan_here", planning),
        patch.object(checkpoint, "collect_sums", saving if kills else complete),
    ):
        return steps(job, folder, kills)


def steps(job, folder: Path, kills: bool) -> int:
    model = gspmd.parallelize(
        net(), gspmd.Mesh(data=job.processes), in_specs="data _", shard_updates="data"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in job.steps(model, optimizer, total=TOTAL):
        loss = model(batch(step)).square().mean()
        if kills and step == 17 and job.rank == 2:
            die_once(folder, "in a step")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if job.rank == 0:
            note(folder, step, loss.item(), job.processes)
        time.sleep(PAUSE)
    return step


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    options = {"folder": folder / "run", "every": 12, "copies": 5}
    if len(sys.argv) > 2:
        options |= {"every": 1000, "copies": 2, "hosts": (3, 4), "name": folder.name}
        options["endpoint"] = f"localhost:{sys.argv[2]}"
    processes = 1 if len(sys.argv) > 2 else 4
    try:
        found = gspmd.elastic(train, processes, folder, processes > 1, **options)
    except KeyboardInterrupt:
        names = [each.name for each in threading.enumerate()]
        (folder / "threads").write_text(" ".join(names))
        raise
    assert found == [TOTAL - 1] * processes, found
