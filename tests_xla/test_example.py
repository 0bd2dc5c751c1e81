"""The examples on XLA, and checkpoints of the GPT between gloo processes and XLA."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from environment import ENVIRONMENT, ROOT
from programs import furthest
from scripts import run_script

SMALL = {
    "gpt": [
        "--text",
        "pydoc",
        "--layers",
        "2",
        "--width",
        "32",
        "--context",
        "32",
        "--batch",
        "12",
        "--sample",
        "0",
    ],
    "moe": "--text pydoc --layers 2 --width 32 --context 32 --batch 12".split(),
    "multimodal": "--data digits --channels 4 --layers 1 --width 16 --batch 12".split(),
    "vit": ["--data", "digits", "--patch", "2", "--layers", "1", "--width", "32", "--batch", "13"],
}


def train(
    folder: Path, name: str, *options: str, processes: int = 0, example: str = "gpt"
) -> list[float]:
    """The losses of one run of train.py; the runs of a test see the same batches."""
    script, losses = ROOT / "examples" / example / "train.py", folder / f"{name}.json"
    arguments = [*SMALL[example], *options, "--losses", str(losses)]
    arguments += ["--plot", str(folder / f"{name}.png")]
    if not processes:  # here: a process that imports torch_xla takes 10 s
        run_script(script, arguments)
        return json.loads(losses.read_text())["losses"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1", "XLA_USE_SPMD": "0"}
    done = subprocess.run(
        [sys.executable, *launcher, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    if not losses.exists():
        raise RuntimeError(
            f"train.py stopped with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return json.loads(losses.read_text())["losses"]


GLOO = ("--mesh", "model=2", "--layout", "tp")
XLA = ("--backend", "xla", "--mesh", "data=4,model=2", "--layout", "2d")


def test_from_gloo_to_xla_and_back(tmp_path: Path) -> None:
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    losses = train(tmp_path, "gloo", *GLOO, "--steps", "4", "--save", there, processes=2)
    losses += train(tmp_path, "xla", *XLA, "--steps", "4", "--resume", there, "--save", back)
    losses += train(tmp_path, "again", *GLOO, "--steps", "4", "--resume", back, processes=2)
    assert furthest(losses, train(tmp_path, "single", "--steps", "12")) <= 1e-5


@pytest.mark.parametrize(
    "example, layout, mesh",
    [
        ("gpt", "sp", "data=4,model=2"),
        ("vit", "spatial", "data=4,model=2"),
        ("moe", "ep_tp", "expert=4,model=2"),
        ("multimodal", "space", "data=2,model=4"),
    ],
)
def test_losses_of_an_example(example, layout, mesh, tmp_path: Path) -> None:
    """13 images and 103 different characters divide over nothing."""
    four = ["--steps", "4", "--dtype", "float64"]
    losses = train(
        tmp_path,
        "xla",
        *four,
        "--backend",
        "xla",
        "--mesh",
        mesh,
        "--layout",
        layout,
        example=example,
    )
    assert furthest(losses, train(tmp_path, "single", *four, example=example)) <= 1e-8
