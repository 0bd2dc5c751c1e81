"""The first step of the demo (examples/gpt) against DistributedDataParallel's, on gloo processes.

    python benchmarks/first_step.py [--rounds 5] [--processes 4] [--layout tp]

Every start is a new torchrun. A round starts all three, in an order drawn anew:

    ddp      DistributedDataParallel
    cold     torchgspmd, whose folder of plans is empty
    warm     torchgspmd, whose folder of plans has this one

A start goes from the wrapped model to the end of the first step: wrap, forward, backward, clipping,
AdamW. Printed: for each part the seconds of the slowest process, and CPU seconds (user and system)
of all processes; medians over the rounds, the differences to DDP, and the load of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve()
PARTS = ("wrap", "forward", "backward", "clip", "optimizer")
KINDS = ("ddp", "cold", "warm")
GOALS = {"cold": 1.5, "warm": 0.5}  # seconds of wall time beyond DDP's


# ---------------------------------------------------------------------------------------- a process


class Clock:
    """Seconds, and CPU seconds of this process, of each part."""

    def __init__(self) -> None:
        self.parts: dict[str, tuple[float, float]] = {}
        self.last = self.now()

    @staticmethod
    def now() -> tuple[float, float]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return time.perf_counter(), usage.ru_utime + usage.ru_stime

    def end(self, part: str) -> None:
        now = self.now()
        self.parts[part] = now[0] - self.last[0], now[1] - self.last[1]
        self.last = now


def work(kind: str, mesh_text: str, layout: str) -> None:
    """Run the first step in this process; rank 0 prints what all of them took."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import torchgspmd as gspmd

    sys.path.insert(0, str(HERE.parent.parent / "examples" / "gpt"))
    from model import GPT, LAYOUTS, Config

    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    mesh = gspmd.Mesh.parse(mesh_text)
    tokens = torch.randint(65, (16, 128), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1)
    torch.manual_seed(0)
    model = GPT(Config(65))
    dist.barrier()
    clock = Clock()
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
        tokens, targets = (t.chunk(count)[rank] for t in (tokens, targets))
    else:
        model = gspmd.parallelize(model, LAYOUTS[layout].on(mesh))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
    )
    clock.end("wrap")
    loss = model(tokens, targets)
    clock.end("forward")
    loss.backward()
    clock.end("backward")
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    clock.end("clip")
    optimizer.step()
    clock.end("optimizer")
    everything = [None] * count
    dist.all_gather_object(everything, (clock.parts, getattr(model, "planning_seconds", 0.0)))
    if rank == 0:
        print(f"RESULT {json.dumps(everything)}", flush=True)
    dist.barrier()
    os._exit(0)  # gloo may abort at exit


# -------------------------------------------------------------------------------------- the parent


def start(kind: str, options: argparse.Namespace, folder: str) -> dict[str, tuple[float, float]]:
    """Return wall seconds of the slowest process, and CPU seconds of all, of each part."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(options.processes), str(HERE), "--worker", kind]
    command += ["--mesh", options.mesh, "--layout", options.layout]
    environment = os.environ | {"TORCHGSPMD_CACHE": folder, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    rows = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not rows:
        raise SystemExit(done.stderr)
    ranks = [parts for parts, _ in json.loads(rows[0].removeprefix("RESULT "))]
    return {
        part: (max(r[part][0] for r in ranks), sum(r[part][1] for r in ranks)) for part in PARTS
    }


def load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--mesh", default="data=2,model=2")
    parser.add_argument("--layout", default="tp")
    parser.add_argument("--worker", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.mesh, options.layout)
    print(f"{os.cpu_count()} cores, load {load()} before")
    taken: dict[str, list[dict[str, tuple[float, float]]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        start("warm", options, f"{folder}/warm")
        for i in range(options.rounds):
            for kind in random.Random(i).sample(KINDS, len(KINDS)):
                where = f"{folder}/warm" if kind == "warm" else f"{folder}/{i}"
                taken[kind].append(start(kind, options, where))
    report(taken)
    print(f"load {load()} after")


def report(taken: dict[str, list[dict[str, tuple[float, float]]]]) -> None:
    """Print medians, and how much more than DDP it is."""
    for index, title in enumerate(("seconds", "CPU seconds of all processes")):
        print(f"\n{title:30} {'  '.join(f'{part:>9}' for part in (*PARTS, 'in all'))}   to DDP")
        of_ddp = 0.0
        for kind, rounds in taken.items():
            row = [statistics.median(r[part][index] for r in rounds) for part in PARTS]
            whole = statistics.median(sum(r[part][index] for part in PARTS) for r in rounds)
            of_ddp = whole if kind == "ddp" else of_ddp
            numbers = "  ".join(f"{value:9.3f}" for value in (*row, whole))
            goal = f" (goal {GOALS[kind]})" if kind in GOALS and index == 0 else ""
            print(f"{kind:30} {numbers}   {whole - of_ddp:+.3f}{goal}")


if __name__ == "__main__":
    main()
