"""Files that earlier versions wrote are read: tests/checkpoints has a folder for each version.

    python tests/test_compatibility.py      # writes the folder of this version, on two processes

A folder stays until two later versions have read it (docs/compatibility.md).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import torchgspmd as gspmd

FOLDER = Path(__file__).parent / "checkpoints"
VERSIONS = sorted(path.name for path in FOLDER.iterdir())
STEP = 3


class Net(nn.Module):
    """Sizes that two devices do not divide, a buffer and tied weights."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(5), nn.Linear(5, 7), nn.Linear(7, 5)
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.up.weight

    def forward(self, x):
        x = self.norm(x)
        return (self.down((self.up(x) + self.tied(x)).relu()) - x).square().mean()


def run(mesh=None):
    """Return a model, its optimizer and its schedule after some steps. mesh: None for no mesh."""
    model = Net()
    with torch.no_grad():
        for i, value in enumerate(model.parameters()):
            value.copy_(torch.linspace(-1, 1 + i / 4, value.numel()).view(value.shape))
    if mesh is not None:
        gspmd.annotate(model, mesh, {"up.weight": "data _", "down.weight": "_ data"})
        model = gspmd.parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(STEP):
        model(torch.linspace(step, step + 1, 20).view(4, 5)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model, optimizer, schedule


def write(folder):
    """Write every format, on each of two processes."""
    model, optimizer, schedule = run(gspmd.Mesh(data=2))
    states = {"schedule": schedule}
    gspmd.save(folder / "run", model, optimizer, step=STEP, states=states)
    full = gspmd.full_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(full, folder / "full.pt")


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield gspmd.Mesh(data=1)
    dist.destroy_process_group()


def blank(mesh):
    model = gspmd.parallelize(Net(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def states_of(full):
    rows = {
        f"{n}.{key}": t
        for n, state in full["optimizer"]["state"].items()
        for key, t in state.items()
    }
    return {**full["model"], **rows}, full["optimizer"]["param_groups"][0]["lr"]


def check(found):
    reference, theirs, _ = run()
    expected = {
        f"{n}.{key}": t
        for n, state in theirs.state_dict()["state"].items()
        for key, t in state.items()
    }
    expected |= reference.state_dict()
    values, rate = found
    assert values.keys() == expected.keys() and rate == theirs.param_groups[0]["lr"]
    for name, value in values.items():
        # Three steps on two processes: sums of four rows in another order.
        torch.testing.assert_close(value, expected[name], msg=name)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_of_an_earlier_version_is_read(version, one_process):
    model, optimizer, schedule = blank(one_process)
    states = {"schedule": schedule}
    assert gspmd.load(FOLDER / version / "run", model, optimizer, states=states) == STEP
    assert schedule.last_epoch == STEP
    check(states_of(gspmd.full_state_dict(model, optimizer)))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_full_state_of_an_earlier_version_is_read(version, one_process):
    model, optimizer, _ = blank(one_process)
    full = torch.load(FOLDER / version / "full.pt", weights_only=True)
    gspmd.load_full_state_dict(model, full["model"])
    optimizer.load_state_dict(full["optimizer"])
    check(states_of(gspmd.full_state_dict(model, optimizer)))
    # One device's model takes it as it is.
    one = Net()
    one.load_state_dict(full["model"], strict=True)
    torch.optim.AdamW(one.parameters()).load_state_dict(full["optimizer"])


def leave(folder):
    """Run the lines of docs/compatibility.md that write one device's files."""
    model, optimizer, _ = run(gspmd.Mesh(data=2))
    page = (Path(__file__).parents[1] / "docs/compatibility.md").read_text()
    lines = page.split("## How do I leave?")[1].split("\n    ")[1:]
    code = "\n".join(line.split("\n")[0] for line in lines)
    os.chdir(folder)
    given = {"model": model, "optimizer": optimizer, "rank": dist.get_rank()}
    exec(code, {"gspmd": gspmd, "torch": torch, "save_file": save_file, **given})


def test_three_lines_write_what_one_device_reads(tmp_path):
    # In a process without threads of other tests: launch forks.
    subprocess.run([sys.executable, __file__, tmp_path], check=True, timeout=300)
    one = Net()
    one.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    optimizer = torch.optim.AdamW(one.parameters())
    optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    check(states_of({"model": one.state_dict(), "optimizer": optimizer.state_dict()}))


if __name__ == "__main__" and len(sys.argv) > 1:
    gspmd.launch(leave, 2, Path(sys.argv[1]))
elif __name__ == "__main__":
    target = FOLDER / gspmd.__version__
    target.mkdir(parents=True)
    gspmd.launch(write, 2, target)
