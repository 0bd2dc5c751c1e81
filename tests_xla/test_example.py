"""The example GPT on XLA, and its checkpoints between gloo processes and XLA."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, ROOT
from programs import furthest

SMALL = ["--text", "pydoc", "--layers", "2", "--width", "32", "--context", "32", "--batch", "12", "--sample", "0"]


def train(folder: Path, name: str, *options: str, processes: int = 0) -> list[float]:
    """The losses of one run of train.py; the runs of a test see the same batches."""
    losses = folder / f"{name}.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes else []
    command = [sys.executable, *launcher, str(ROOT / "examples" / "gpt" / "train.py"), *SMALL, *options,
               "--losses", str(losses), "--plot", str(folder / f"{name}.png")]
    environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1", "XLA_USE_SPMD": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    if not losses.exists():
        raise RuntimeError(f"train.py stopped with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(losses.read_text())["losses"]


GLOO = ("--mesh", "data=2,model=2", "--layout", "tp")
XLA = ("--backend", "xla", "--mesh", "data=4,model=2", "--layout", "2d")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(tmp_path_factory.mktemp("single"), "single", "--steps", "8")


def test_from_gloo_to_xla(tmp_path: Path, single: list[float]) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    losses = train(tmp_path, "gloo", *GLOO, "--steps", "4", "--save", checkpoint, processes=4)
    losses += train(tmp_path, "xla", *XLA, "--steps", "4", "--resume", checkpoint)
    assert furthest(losses, single) <= 1e-5


def test_from_xla_to_gloo(tmp_path: Path, single: list[float]) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    losses = train(tmp_path, "xla", *XLA, "--steps", "4", "--save", checkpoint)
    losses += train(tmp_path, "gloo", *GLOO, "--steps", "4", "--resume", checkpoint, processes=4)
    assert furthest(losses, single) <= 1e-5
