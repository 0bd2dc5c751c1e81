"""Faults of a network in the middle of a training: does it go on, or who is named, and when.

    python benchmarks/wire/faults.py [--rate 50mbit] [--timeout 15] [--only "down for good"]

Two hosts with a process each train with `parallelize(..., timeout=)`. After three steps a fault
happens. Printed for each: the seconds until the next step, or until each surviving process has
ended, and the first line of its error.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from hosts import ADDRESS, PORT, Wire, missing

BEFORE, AFTER = 3, 3  # steps before a fault, and those that show that the job goes on
WIDTH = 256
START = 120.0  # seconds until the first steps, on a busy machine


def train(timeout: float) -> None:
    """Train until the steps are done, and print each."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import torchgspmd as gspmd

    dist.init_process_group("gloo", timeout=timedelta(seconds=START))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    model = gspmd.parallelize(
        model, gspmd.Mesh(data=2), in_specs="data _", timeout=timedelta(seconds=timeout)
    )
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x = torch.ones(8, WIDTH)
    for step in range(10**6):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.9g}", flush=True)


def down(wire: Wire) -> None:
    wire.set_up(1, False)


def down_for_5_s(wire: Wire) -> None:
    wire.set_up(1, False)
    time.sleep(5.0)
    wire.set_up(1, True)


def vanishes(wire: Wire) -> None:
    wire.vanish(1)


def slower(wire: Wire) -> None:
    for host in range(2):
        wire.set_rate(host, f"{wire.bits_per_second // 10:.0f}bit")


# name -> the fault, and the hosts whose processes survive it
FAULTS: dict[str, tuple[Callable[[Wire], None], Sequence[int]]] = {
    "down for 5 s": (down_for_5_s, (0, 1)),
    "down for good": (down, (0, 1)),
    "a host vanishes": (vanishes, (0,)),
    "a tenth of the rate": (slower, (0, 1)),
}


def steps(log: Path) -> list[str]:
    """Return the steps that a log has."""
    return re.findall(r"^step \d+ loss .*$", log.read_text(), re.M)


def wait(condition: Callable[[], bool], limit: float) -> float:
    """Return the seconds until a condition holds; infinity if it does not within the limit."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > limit:
            return float("inf")
        time.sleep(0.05)
    return time.monotonic() - start


def outcome(name: str, rate: str, timeout: float) -> str:
    """Return how a training ends after a fault, and the seconds until then."""
    fault, survivors = FAULTS[name]
    with tempfile.TemporaryDirectory() as folder, Wire(2, rate) as wire:
        logs, jobs = [Path(folder, f"{host}.log") for host in range(2)], []
        for host, log in enumerate(logs):
            command = [sys.executable, "-W", "ignore", __file__, "--rank", str(timeout)]
            where = {"MASTER_ADDR": ADDRESS.format(1), "MASTER_PORT": str(PORT)}
            jobs.append(wire.start(host, command, log, RANK=str(host), WORLD_SIZE="2", **where))
        if wait(lambda: all(len(steps(log)) >= BEFORE for log in logs), START) == float("inf"):
            raise RuntimeError("\n".join(log.read_text()[-3000:] for log in logs))
        begin = time.monotonic()
        fault(wire)
        counts = [len(steps(log)) for log in logs]

        def goes_on() -> bool:
            return all(len(steps(logs[host])) >= counts[host] + AFTER for host in survivors)

        def has_ended() -> bool:
            return all(jobs[host].poll() is not None for host in survivors)

        # Words about who is missing come before the error, which comes within the timeout.
        wait(lambda: goes_on() or has_ended(), 2 * timeout + 30)
        seconds = time.monotonic() - begin
        if goes_on():
            same = steps(logs[0])[: counts[0]] == steps(logs[1])[: counts[0]]
            return f"goes on after {seconds:.1f} s" + ("" if same else ", WITH OTHER LOSSES")
        if not has_ended():
            return f"HANGS for {seconds:.0f} s"
        errors = [re.findall(r"\w+Error: .*$", logs[h].read_text(), re.M) for h in survivors]
        texts = " | ".join(dict.fromkeys(e[-1] if e else "NO ERROR" for e in errors))
        return f"ends after {seconds:.1f} s: {texts}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="50mbit")
    parser.add_argument("--timeout", type=float, default=15.0, help="seconds")
    parser.add_argument("--only", nargs="+", choices=[*FAULTS])
    parser.add_argument("--rank", type=float, help=argparse.SUPPRESS)  # the timeout, in a process
    args = parser.parse_args()
    if args.rank:
        train(args.rank)
        return
    if why := missing():
        parser.error(why)
    for name in args.only or FAULTS:
        print(f"{name}: {outcome(name, args.rate, args.timeout)}", flush=True)


if __name__ == "__main__":
    main()
