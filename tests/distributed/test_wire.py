"""Two hosts in one machine: the bytes on the link between them are the plan's, and its faults."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("wire")]
WIRE = Path(__file__).parents[2] / "benchmarks" / "wire"
LAYOUTS = {"data": "dp", "tensor": "tp", "sharded": "fsdp"}
HEADERS = 3.0  # per cent: of packets, and the comparison of ranks


def table(script: str, flags: str, *names: str) -> str:
    """Return a script's output; skip the test where this machine can have no hosts."""
    if why := runpy.run_path(str(WIRE / "hosts.py"))["missing"]():
        pytest.skip(why)
    command = [sys.executable, "-W", "ignore", str(WIRE / script), *flags.split(), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("processes", [1, 2])
def test_the_link_carries_the_bytes_of_the_plan(processes):
    names = [f"{kind}: {by}" for kind, ours in LAYOUTS.items() for by in ("hand", ours)]
    names = [name.replace(": ", ": torchgspmd ") if "hand" not in name else name for name in names]
    flags = f"--rates 200mbit --width 128 --steps 3 --limit 240 --processes {processes} --variants"
    text = table("steps.py", flags, *names).splitlines()
    rows = {name: next(r for r in text if f" {name} " in r) for name in names}
    for kind, ours in LAYOUTS.items():
        over = float(re.search(r"([-+ ]+[\d.]+) %", rows[f"{kind}: torchgspmd {ours}"])[1])
        assert 0 <= over < HEADERS, rows
    losses = [float(rows[name].split("loss ")[1]) for name in names if name.startswith("tensor")]
    assert losses[0] == pytest.approx(losses[1], abs=2e-4), rows  # four digits are printed


@pytest.mark.parametrize("processes", [1, 2])
def test_the_link_carries_the_bytes_of_each_layout(processes):
    names = "sp cp ring zigzag ep gpipe 1f1b".split() if processes == 1 else ["two_axes"]
    flags = f"--bytes --rates 200mbit --steps 2 --limit 360 --processes {processes} --only"
    text = table("layouts.py", flags, *names)
    over = dict(re.findall(r"\| ([\w]+) \| [\d.]+ MiB out, ([-+\d.]+) %", text))
    assert [*over] == names, text
    assert all(0 <= float(percent) < HEADERS for percent in over.values()), text


@pytest.mark.parametrize(
    "fault, end",
    {
        "down for 5 s": "goes on",
        "down for good": "ends .* has not answered since .* a link to it is down",
        "a host vanishes": "ends .*: RankError: rank 1 on host .* has not answered since",
        "a tenth of the rate": "goes on",
    }.items(),
)
def test_a_fault_of_the_network(fault, end):
    text = table("faults.py", "--timeout 20 --only", fault)
    assert re.match(rf"{fault}: {end}", text), text
    assert float(re.search(r"after ([\d.]+) s", text)[1]) < 25, text
