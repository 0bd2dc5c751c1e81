"""Seconds of a training step over a link with a rate, and the bytes on the link.

    python benchmarks/wire/steps.py [--rates 50mbit 200mbit 1gbit] [--hosts 2] [--processes 1]

Variants of benchmarks/step_time.py take turns in one run, in an order drawn anew for each step.
Printed for each: median wall time of a step; its ratio to the same by hand; MiB that host 0's
interface sent; how many per cent more these are than the plan's bytes that have to leave a host
(headers of packets, the comparison of ranks); the bound, bytes / rate (of payload: 0.956 of the
link's).
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from pathlib import Path

from hosts import Wire, missing

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

WARM = 2  # steps that are not counted: planning, and buffers of sockets


def sent() -> int:
    """Return the bytes that this host has sent."""
    return int(Path(f"/sys/class/net/{os.environ['WIRE']}/statistics/tx_bytes").read_text())


def share() -> float:
    """Return how many of a rank's bytes its host sends, if each sum and gather is over all ranks.

    Of a payload's 1 - 1/n parts that a rank sends, 1 - 1/hosts leave the host once.
    """
    ranks, each = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return (1 - each / ranks) / (1 - 1 / ranks)


def measure(width: int, steps: int, rate: str, names: list[str]) -> None:
    """Print the table of one run, in which each process is a rank."""
    import step_time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = step_time.GPT(width)
    trainers = {n: step_time.Trainer(model, *step_time.VARIANTS[n]) for n in names}
    seconds: dict[str, list[float]] = {n: [] for n in names}
    link: dict[str, list[int]] = {n: [] for n in names}
    losses = {}
    for step in range(WARM + steps):
        generator = torch.Generator().manual_seed(step)
        shape = 2, step_time.BATCH, step_time.SEQUENCE
        batch = torch.randint(step_time.VOCABULARY, shape, generator=generator)
        for name in random.Random(step).sample(names, len(names)):
            dist.barrier()
            before, start = sent(), time.perf_counter()
            losses[name] = trainers[name].step(*batch)
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
            link[name].append(sent() - before)
    if dist.get_rank() == 0:
        for name in names:
            wall, out = (statistics.median(c[name][WARM:]) for c in (seconds, link))
            hand = statistics.median(seconds[name.split(":")[0] + ": hand"][WARM:])
            plan = getattr(trainers[name].model, "plan", None)
            over = " " * 7
            if plan is not None:
                over = f"{100 * (out / (plan.sent_bytes * share()) - 1):+5.1f} %"
            bound = out / Wire(0, rate).payload
            print(
                f"  {rate:8} {name:24} {1e3 * wall:8.0f} ms {wall / hand:5.2f} of hand  "
                f"{out / 2**20:6.2f} MiB out {over}  bound {1e3 * bound:6.0f} ms  "
                f"loss {losses[name]:.4f}",
                flush=True,
            )
    dist.barrier()
    os._exit(0)  # FSDP2 and DDP of one process group end in no order.


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", default=["50mbit", "200mbit", "1gbit"])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1, help="on each host")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--limit", type=float, default=900, help="seconds of a run")
    parser.add_argument("--variants", nargs="+", help="names of step_time.py's VARIANTS")
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # the rate, in a process of torchrun
    args = parser.parse_args()
    if args.rank:
        measure(args.width, args.steps, args.rank, args.variants)
    import step_time

    if why := missing():
        parser.error(why)
    print(f"{args.hosts} hosts with {args.processes} processes each, width {args.width}")
    names = args.variants or [*step_time.VARIANTS]
    for rate in args.rates:
        with Wire(args.hosts, rate) as wire:
            flags = f"--rank {rate} --width {args.width} --steps {args.steps} --variants".split()
            text = wire.torchrun(args.processes, [__file__, *flags, *names], args.limit)
            print("\n".join(row for row in text.splitlines() if "of hand" in row), flush=True)


if __name__ == "__main__":
    main()
