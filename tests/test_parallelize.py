"""parallelize on real gloo processes: see worker_parallelize.py for what is compared."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchgspmd as gspmd

WORKER = Path(__file__).with_name("worker_parallelize.py")


def launch(mesh: str, *arguments: str, worker: Path = WORKER) -> str:
    """What rank 0 printed; fails with all output if a process failed."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(gspmd.Mesh.parse(mesh).size),
        str(worker),
        mesh,
        *arguments,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("mesh", ["data=2", "model=3", "data=2,model=2"])
def test_processes_compute_what_one_process_does(mesh):
    assert launch(mesh, "checks").count(f"holds on {mesh}") == 21


def test_a_checkpoint_is_resumed_on_other_meshes(tmp_path):
    path = str(tmp_path / "checkpoint")
    launch("data=2,model=2", "save", path)
    for mesh in ("model=3", "data=1"):
        launch(mesh, "load", path)


def test_without_processes_the_error_says_what_to_do():
    with pytest.raises(gspmd.ShardingError) as error:
        gspmd.parallelize(torch.nn.Linear(2, 2), gspmd.Mesh(data=2))
    assert str(error.value).splitlines()[0] == "there is no process group"
