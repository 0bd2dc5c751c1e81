"""Plans of published models on three meshes each are those in tests/golden_plans.

`make golden` writes them anew, and `git diff` shows each collective that differs.
"""

import os
import warnings
from pathlib import Path

import pytest
import torch
from golden_models import MODELS, example

import torchgspmd as gspmd

FOLDER = Path(__file__).parent / "golden_plans"
# Each model's first mesh comes first: under --cases these guard.
CASES = [(name, meshes[i]) for i in range(3) for name, (_, meshes) in MODELS.items()]
# Decompositions of operations differ between releases, and bytes with them.
RELEASE = "2.13"


@pytest.mark.skipif(
    not torch.__version__.startswith(RELEASE), reason=f"the texts are of torch {RELEASE}"
)
@pytest.mark.parametrize("name, mesh", CASES)
def test_a_published_model_sends_what_was_agreed(name: str, mesh: str) -> None:
    devices = gspmd.Mesh.parse(mesh)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, arguments = example(devices, name)
        plan = gspmd.plan(model, *arguments, mesh=devices, grad=True)
    plan.check(FOLDER / f"{name},{mesh}.txt", update=bool(os.environ.get("EXPECTTEST_ACCEPT")))


def test_every_text_has_a_model() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {",".join(case) for case in CASES}
