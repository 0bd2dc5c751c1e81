"""examples/diloco/train.py: DiLoCo on a mesh is DiLoCo with a model and an optimizer per island."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import load

import torchgspmd as gspmd

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "diloco" / "train.py"
ISLANDS, EVERY, ROWS, STEPS = 3, 2, 4, 5


RUN = """
import sys
sys.path.insert(0, {folder!r})
import train
def run(*options):
    sys.argv = ["train.py", "--every", "2", "--batch", "4", "--folder", {run!r}, *options]
    train.main()
run("--processes", "2", "--steps", "2")
run("--processes", "1", "--steps", "4")
print("alone", flush=True)
run("--steps", "4")
"""


@pytest.fixture(scope="module")
def script():
    return load(str(SCRIPT), "diloco")


def by_hand(script, wire):
    """DiLoCo as its paper writes it; return the islands' losses in each step, and the weights."""
    torch.manual_seed(0)
    common = script.Model().double()
    islands = [script.Model().double() for _ in range(ISLANDS)]
    for island in islands:
        island.load_state_dict(common.state_dict())
    inner = [torch.optim.AdamW(island.parameters(), lr=3e-3) for island in islands]
    outer = torch.optim.SGD(common.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    found = []
    for number in range(STEPS):
        losses, batch = [], script.batch(number, ISLANDS, ROWS)
        for i, (island, optimizer) in enumerate(zip(islands, inner)):
            optimizer.zero_grad()
            losses.append(island(*(each[i] for each in batch)))
            losses[-1].backward()
            optimizer.step()
        found.append(torch.stack(losses).detach())
        if (number + 1) % EVERY == 0:
            for place, weight in enumerate(common.parameters()):
                own = torch.stack([[*island.parameters()][place].detach() for island in islands])
                weight.grad = (weight.detach() - own).to(wire).mean(0).to(weight.dtype)
            outer.step()
            for island in islands:
                island.load_state_dict(common.state_dict())
    return found, [[*island.parameters()] for island in islands]


def of_script(script, wire):
    torch.manual_seed(0)
    copies = script.Islands(script.Model().double(), ISLANDS)
    optimizer = torch.optim.AdamW(copies.parameters(), lr=3e-3)
    return script.DiLoCo(copies, optimizer, wire=wire)


def test_the_step_is_that_of_islands_by_themselves(script):
    expected, weights = by_hand(script, torch.double)
    step = of_script(script, torch.double)
    for number in range(STEPS):
        batch = script.batch(number, ISLANDS, ROWS)
        found = step(*batch, (number + 1) % EVERY == 0)
        torch.testing.assert_close(found, expected[number], rtol=1e-9, atol=1e-12)
    for place, weight in enumerate(step.islands.parameters()):
        for i in range(ISLANDS):
            torch.testing.assert_close(weight[i], weights[i][place], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("mesh", ["island=3,data=2", "island=2,data=2"])
@pytest.mark.parametrize("synchronize", [False, True])
def test_simulated_devices(script, mesh, synchronize):
    """Three islands on two devices along `island`, too."""
    mesh = gspmd.Mesh.parse(mesh)
    step, alone = (of_script(script, torch.double) for _ in range(2))
    for each in (step, alone):
        each(*script.batch(0, ISLANDS, ROWS), False)  # islands differ
    script.mark(step, mesh)
    batch = script.batch(1, ISLANDS, ROWS)
    specs = ("island data _",) * 2 + (None,)
    plan = gspmd.plan(step, *batch, synchronize, mesh=mesh, in_specs=specs, out_specs="same")
    found = plan.simulate(*batch, synchronize)
    torch.testing.assert_close(found, alone(*batch, synchronize), rtol=1e-9, atol=1e-12)
    for weight, expected in zip(step.islands.parameters(), alone.islands.parameters()):
        torch.testing.assert_close(weight, expected, rtol=1e-8, atol=1e-10)
        assert synchronize == bool((weight == weight[:1]).all())


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_bytes_over_the_slow_axis(script, wire):
    """A step sends none; a synchronization 2 (k - 1) / k of a device's shards of the weights."""
    mesh = gspmd.Mesh(island=4, data=2)
    step, _ = script.make(4, wire)
    script.mark(step, mesh)
    batch, specs = script.batch(0, 4, ROWS), ("island data _",) * 2 + (None,)
    size = sum(weight[0].numel() for weight in step.islands.parameters())
    for synchronize in (False, True):
        plan = gspmd.plan(step, *batch, synchronize, mesh=mesh, in_specs=specs, out_specs="same")
        sent = sum(c.sent_bytes for c in plan.collectives if "island" in c.axes)
        item = getattr(torch, wire).itemsize
        assert sent == pytest.approx(synchronize * 2 * 3 / 4 * size / 2 * item, rel=0.01)


@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
def test_a_job_goes_on_with_fewer_processes(tmp_path):
    """Two islands on two processes, then on one; the losses are those without a job."""
    # A job forks its processes: all three runs begin with one import of torch.
    command = [
        sys.executable,
        "-c",
        RUN.format(folder=str(SCRIPT.parent), run=str(tmp_path / "run")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stderr
    rows, alone = (
        re.findall(r"step (\d+): loss ([\d.]+)", text) for text in done.stdout.split("alone\n")
    )
    assert [number for number, _ in rows] == [number for number, _ in alone] == ["2", "4"]
    for (_, one), (_, other) in zip(rows, alone):
        assert float(one) == pytest.approx(float(other), abs=2e-5)
