"""Two hosts in one machine: the bytes on the link between them are the plan's."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

WIRE = Path(__file__).parents[2] / "benchmarks" / "wire"
LAYOUTS = {"data": "dp", "tensor": "tp", "sharded": "fsdp"}
HEADERS = 3.0  # per cent: of packets, and the comparison of ranks


@pytest.mark.distributed
@pytest.mark.parametrize("processes", [1, 2])
def test_the_link_carries_the_bytes_of_the_plan(processes):
    if why := runpy.run_path(str(WIRE / "hosts.py"))["missing"]():
        pytest.skip(why)
    names = [f"{kind}: {by}" for kind, ours in LAYOUTS.items() for by in ("hand", ours)]
    names = [name.replace(": ", ": torchgspmd ") if "hand" not in name else name for name in names]
    flags = f"--rates 200mbit --width 128 --steps 3 --limit 240 --processes {processes} --variants"
    command = [sys.executable, "-W", "ignore", str(WIRE / "steps.py"), *flags.split(), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {name: next(r for r in done.stdout.splitlines() if f" {name} " in r) for name in names}
    for kind, ours in LAYOUTS.items():
        over = float(re.search(r"([-+ ]+[\d.]+) %", rows[f"{kind}: torchgspmd {ours}"])[1])
        assert 0 <= over < HEADERS, rows
    losses = [float(rows[name].split("loss ")[1]) for name in names if name.startswith("tensor")]
    assert losses[0] == pytest.approx(losses[1], abs=2e-4), rows  # four digits are printed
