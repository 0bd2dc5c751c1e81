"""BERT, Conformer, weather and multimodal examples: loss and gradients of a layout simulated, what
it sends, and four steps on processes. Nothing is downloaded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from scripts import run_main, run_script
from torch import Tensor, nn

import torchgspmd as gspmd

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from bert import data as bert_data  # noqa: E402
from bert import model as bert  # noqa: E402
from common.all import ALL  # noqa: E402


def simulate(model: nn.Module, layout: gspmd.Layout, mesh: str, *batch: Tensor) -> gspmd.Plan:
    """Compare loss and gradients with those of one device; return the plan. In float64."""
    loss = model(*batch)
    loss.backward()
    plan = gspmd.plan(model, *batch, mesh=layout.on(gspmd.Mesh.parse(mesh)), grad=True)
    got, gradients = plan.simulate(*batch, _poison=True)
    torch.testing.assert_close(got, loss.detach(), rtol=1e-12, atol=0)
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(gradients) == set(wanted)
    largest = max(float(g.abs().max()) for g in wanted.values())
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-11 * largest)
    return plan


def test_bert() -> None:
    """3 heads and 29 words over model=2, 5 sequences of 8 words over data=2."""
    torch.manual_seed(0)
    text = bert_data.Words("To be, or not to be: that is the question. " * 20, 5)
    assert text.decode(text.tokens[:5]) == ["to", "be", ",", "[other]", "[other]"]
    tokens, places, targets = text.batch(0, 0, 5, 8, share=0.3)
    untouched = torch.ones_like(tokens, dtype=torch.bool).scatter(1, places, False)
    assert tokens.shape == (5, 8) and places.shape == targets.shape == (5, 2)
    assert bert_data.OTHER not in targets and bert_data.MASK not in tokens[untouched]
    model = bert.Bert(bert.Config(29, context=8, layers=1, heads=3, width=12)).double()
    plan = simulate(model, bert.LAYOUTS["zero"], "data=2,model=2", tokens, places, targets)
    specs = dict(zip((name for name, _ in model.named_parameters()), map(str, plan.in_specs)))
    assert specs["blocks.0.up.weight"] == specs["embedding"] == "model data"
    assert specs["blocks.0.norm1.weight"] == "data"


@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("example, layout, mesh", [("bert", "zero", "data=2,model=2")])
def test_training_on_processes(example: str, layout: str, mesh: str, tmp_path: Path) -> None:
    """As `make examples` runs them, which has more layouts and more steps."""
    script, paths = EXAMPLES / example / "train.py", [tmp_path / f"{n}.json" for n in (1, 4)]
    options = [
        *ALL[example].options.split(),
        "--layers",
        "1",
        "--steps",
        "4",
        "--warmup",
        "1",
        "--dtype",
        "float64",
    ]
    options += ["--plot", str(tmp_path / "loss.png"), "--losses"]
    run_script(script, [*options, str(paths[0])])
    arguments = [*options, str(paths[1]), "--mesh", mesh, "--layout", layout]
    run_main(mesh, script=script, arguments=arguments)
    one, four = (json.loads(path.read_text())["losses"] for path in paths)
    assert one[-1] != one[0] and four == pytest.approx(one, rel=1e-8)
