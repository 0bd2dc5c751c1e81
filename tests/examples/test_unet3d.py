"""The example U-Net: every layout simulated, what it sends, some layouts trained on real processes.
Nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scripts import run_main

import torchgspmd as gspmd

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from unet3d.data import Head  # noqa: E402
from unet3d.model import LAYOUTS, Config, UNet, overlap  # noqa: E402

MESHES = {"dp": "data=2", "spatial": "data=2,space=2", "spatial2d": "space=2,rows=3"}


@pytest.fixture(scope="module")
def head() -> Head:
    return Head.load("synthetic", 11, Path("unused"))  # 17 x 21 x 17


def test_synthetic_head(head: Head) -> None:
    assert head.image.shape == head.labels.shape == (17, 21, 17)
    assert head.labels.unique().tolist() == [0, 1, 2]
    images, labels = head.batch(3, seed=0, size=2)
    assert images.shape == (2, 1, 17, 21, 17) and torch.equal(labels[1], head.labels)
    assert torch.equal(images, head.batch(3, seed=0, size=2)[0]) and not torch.equal(
        images, head.batch(4, seed=0, size=2)[0]
    )


def test_overlap() -> None:
    labels = torch.tensor([0, 0, 1, 1]).view(1, 4, 1, 1)
    found = torch.nn.functional.one_hot(torch.tensor([0, 1, 1, 1]), 3).T.float().view(1, 3, 4, 1, 1)
    torch.testing.assert_close(overlap(found, labels), torch.tensor([2 / 3, 4 / 5, 1.0]))


# --------------------------------------------------------------------------------------- simulation


@pytest.mark.parametrize("up", ["transposed", "trilinear"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_simulated_loss_and_gradients(layout: str, up: str, head: Head) -> None:
    torch.manual_seed(0)
    mesh, model = (
        gspmd.Mesh.parse(MESHES[layout]),
        UNet(Config(width=4, levels=3 if layout == "spatial2d" else 2, up=up)).double(),
    )
    image, labels = head.batch(0, seed=0, size=2)
    loss = model(image.double(), labels)
    loss.backward()
    plan = gspmd.plan(model, image.double(), labels, mesh=LAYOUTS[layout].on(mesh), grad=True)
    got, gradients = plan.simulate(image.double(), labels, _poison=True)
    assert abs(got.item() - loss.item()) <= 1e-12 * loss.item()
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        error = (gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert error <= 1e-10, f"{name}: {error:.1e}"


@pytest.mark.parametrize("up", ["transposed", "trilinear"])
@pytest.mark.parametrize("layout, mesh", [("spatial", "space=2"), ("spatial2d", "space=2,rows=2")])
def test_only_rows_for_neighbours_and_sums_are_sent(layout: str, mesh: str, up: str) -> None:
    """At the default size of train.py, 65 x 77 x 63, odd on every side."""
    with torch.device("meta"):
        model = UNet(Config(up=up))
        arguments = torch.empty(1, 1, 65, 77, 63), torch.empty(1, 65, 77, 63, dtype=torch.long)
    mesh = gspmd.Mesh.parse(mesh)
    marks = LAYOUTS[layout].on(mesh)
    plan = gspmd.plan(model, *arguments, mesh=marks, grad=True, strict=True)
    largest = max(p.numel() for p in model.parameters()) * 4
    assert {c.kind for c in plan.collectives} == {"permute", "all_reduce"}
    assert all(c.payload_bytes <= largest for c in plan.collectives if c.kind == "all_reduce")
    axes = {c.axes for c in plan.collectives if c.kind == "permute"}
    assert axes <= {("space",), ("rows",), ("space", "rows")}
    alone = LAYOUTS[layout].on(gspmd.Mesh(space=1))
    whole = gspmd.plan(UNet(Config(up=up)).to("meta"), *arguments, mesh=alone, grad=True)
    assert (
        plan.memory.peak < 1.5 * whole.memory.peak / mesh.size
    )  # windows are kept beside what they were made of


# ----------------------------------------------------------------------------------- real processes


SMALL = "--volume synthetic --mm 13 --width 4 --levels 2 --steps 20 --batch 2"


def train(folder: Path, name: str, *options: str, mesh: str = "") -> list[float]:
    """The losses of one run of train.py; the runs of a test see the same batches."""
    script = EXAMPLES / "unet3d" / "train.py"
    files = {kind: folder / f"{name}-{kind}" for kind in ("losses", "plot.png", "picture.png")}
    arguments = [*SMALL.split(), *options]
    for kind, path in files.items():
        arguments += [f"--{kind.removesuffix('.png')}", str(path)]
    if mesh:
        run_main(mesh, script=script, arguments=[*arguments, "--mesh", mesh])
    else:
        done = subprocess.run(
            [sys.executable, str(script), *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert "dice: background" in done.stdout, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert files["picture.png"].stat().st_size > 5000
    return json.loads(files["losses"].read_text())["losses"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def single(runs: Path) -> list[float]:
    return train(runs, "single")


@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("layout, mesh", [("spatial", "space=2"), ("spatial2d", "space=2,rows=2")])
def test_training_on_processes(layout: str, mesh: str, runs: Path, single: list[float]) -> None:
    losses = train(runs, f"{layout}-{mesh}", "--layout", layout, mesh=mesh)
    assert len(losses) == len(single) == 20
    assert max(abs(a - b) / b for a, b in zip(losses, single)) <= 1e-4
    assert single[-1] < single[0] - 0.1


def test_plan_of_the_full_volume_needs_no_devices() -> None:
    command = [
        sys.executable,
        str(EXAMPLES / "unet3d" / "train.py"),
        "--plan",
        "--mm",
        "1",
        "--levels",
        "2",
        "--mesh",
        "space=8",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert (
        "1 x 197 x 233 x 189 voxels" in done.stdout
        and "memory of a device: parameters" in done.stdout
    )
