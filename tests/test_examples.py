"""The README's code and the example GPT: every layout simulated, some trained on real processes. Nothing is downloaded."""
from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchgspmd as gspmd

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from gpt.data import Characters, load_text  # noqa: E402
from gpt.model import GPT, LAYOUTS, Config  # noqa: E402

MESHES = ("data=4", "model=4", "data=2,model=2", "model=3")
SMALL = ["--text", "pydoc", "--layers", "2", "--width", "32", "--context", "32", "--batch", "12", "--steps", "20", "--sample", "0"]


# --------------------------------------------------------------------------------------------------------- simulation

@pytest.fixture(scope="module")
def text() -> Characters:
    return Characters(load_text("pydoc", Path("unused")))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mesh", MESHES)
def test_simulated_loss_and_gradients(mesh: str, layout: str, text: Characters) -> None:
    """4 heads over model=3 and an odd vocabulary do not divide; the batch of 6 does not over data=4."""
    torch.manual_seed(0)
    model = GPT(Config(len(text.alphabet), context=12, layers=2, heads=4, width=16), gspmd.Mesh.parse(mesh), layout)
    tokens, targets = text.batch(0, seed=0, size=6, context=12)
    loss = model(tokens, targets)
    loss.backward()
    plan = gspmd.plan(model, tokens, targets, mesh=model.mesh, grad=True)
    got, gradients = plan.simulate(tokens, targets, _poison=True)
    assert abs(got.item() - loss.item()) <= 1e-5 * loss.item()
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        error = (gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert error <= 1e-5, f"{name}: {error:.1e}"
    assert not [op for op in plan.replicated_ops if "is gathered" not in op.why]     # the 6 rows over 4 are, to be flattened


def test_layouts_say_what_is_marked() -> None:
    assert len({tuple(sorted(layout)) for layout in LAYOUTS.values()}) == 1


# --------------------------------------------------------------------------------------------------- real processes

def train(folder: Path, name: str, *options: str, processes: int = 0) -> list[float]:
    """The losses of one run of train.py; the runs of a test see the same batches."""
    losses = folder / f"{name}.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes else []
    files = ["--losses", str(losses), "--plot", str(folder / f"{name}.png")]
    command = [sys.executable, *launcher, str(ROOT / "examples" / "gpt" / "train.py"), *SMALL, *files, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if not losses.exists():
        raise RuntimeError(f"train.py stopped with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    assert (folder / f"{name}.png").stat().st_size > 5000
    return json.loads(losses.read_text())["losses"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def single(runs: Path) -> list[float]:
    return train(runs, "single")


@pytest.mark.parametrize("layout, mesh", [(layout, "data=2,model=2") for layout in LAYOUTS]
                         + [("fsdp", "data=4"), ("2d", "model=4"), ("sp", "model=3")])
def test_training_on_processes(layout: str, mesh: str, runs: Path, single: list[float]) -> None:
    losses = train(runs, f"{layout}-{mesh}", "--mesh", mesh, "--layout", layout, processes=gspmd.Mesh.parse(mesh).size)
    assert len(losses) == len(single) == 20
    assert max(abs(a - b) / b for a, b in zip(losses, single)) <= 1e-4
    assert single[-1] < single[0] - 0.1


# ------------------------------------------------------------------------------------------------------------- README

def blocks() -> list[tuple[str, str]]:
    return re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)


def test_readme_blocks_run_and_print_what_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A python block followed by a text block must print it. The blocks share one namespace."""
    monkeypatch.chdir(ROOT)
    script = tmp_path / "readme.py"                                             # a real file, so that marks have a line
    found, shown, space = blocks(), 0, {"__name__": "readme"}
    assert any(kind == "python" for kind, _ in found)
    for i, (kind, code) in enumerate(found):
        if kind != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(script), "exec"), space)
        if i + 1 < len(found) and found[i + 1][0] == "text":
            shown += 1
            assert re.sub(r"\S*readme\.py", "readme.py", printed.getvalue()).strip() == found[i + 1][1].strip()
    assert shown >= 2


def test_readme_names_are_the_public_names() -> None:
    table = (ROOT / "README.md").read_text().partition("## Public names")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)", table, re.M)) == set(gspmd.__all__)
