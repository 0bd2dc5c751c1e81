"""BERT, Conformer, weather and multimodal examples: loss and gradients of a layout simulated, what
it sends, and four steps on processes. Nothing is downloaded.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np
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
from conformer import data as speech_data  # noqa: E402
from conformer import model as conformer  # noqa: E402
from multimodal import data as pictures_data  # noqa: E402
from multimodal import model as multimodal  # noqa: E402
from weather import data as weather_data  # noqa: E402
from weather import model as weather  # noqa: E402


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


def largest_parameter(model: nn.Module) -> int:
    return max(p.numel() * p.element_size() for p in model.parameters())


def test_conformer() -> None:
    """169 frames over time=3 become 85, 43, and 8 blocks of 6. Nothing is gathered; what CTC asks
    of the whole time changes places with the batch.
    """
    torch.manual_seed(0)
    speech = speech_data.Speech.load("tones", Path("unused"))
    assert speech.features.shape == (6, 169, 40) and speech.frames.max() == 169
    features, *rest = speech.batch(0, 0, 6)
    model = conformer.Conformer(conformer.Config(layers=1, heads=3, width=12, window=6)).double()
    plan = simulate(model, conformer.LAYOUTS["time"], "data=2,time=3", features.double(), *rest)
    assert not plan.replicated_ops
    odds = 48 * 6 * 28 * 8
    allowed = {"permute": features.numel() * 8, "all_reduce": largest_parameter(model)}
    for c in plan.collectives:
        assert c.payload_bytes <= {**allowed, "all_to_all": odds}[c.kind]
    assert sum(c.count for c in plan.collectives if c.kind == "all_to_all") == 2


def test_letters() -> None:
    said = "one two"
    best = [speech_data.ALPHABET.index(c) for c in "oonn_ee_  ttw_oo__"]
    assert speech_data.spell(torch.tensor(best)) == said


def test_weather() -> None:
    """97 x 129 points, then 49 x 65 and 25 x 33, in rectangles: neighbours send rows, columns and
    corners; for attention along columns, and back, rows change places with these.
    """
    torch.manual_seed(0)
    maps, truth = torch.randn(1, 2, 97, 129).double(), torch.randn(1, 97, 129).double()
    config = weather.Config(97, width=4, heads=2, dilations=(8,))
    model = weather.Weather(config).double()
    torch.nn.init.normal_(model.head.weight)
    layout, month = weather.LAYOUTS["grid"], torch.tensor([3])
    plan = simulate(model, layout, "data=1,rows=2,columns=2", maps, month, truth)
    assert not plan.replicated_ops
    kinds = {c.kind for c in plan.collectives}  # of two devices an all_to_all may be a permute
    assert kinds <= {"permute", "all_reduce", "all_to_all"}
    sums = [c.payload_bytes for c in plan.collectives if c.kind == "all_reduce"]
    assert max(sums) <= largest_parameter(model)


def test_maps() -> None:
    """Of the PP format too: a header of 64 words, of which three are looked at, and a field."""
    maps = weather_data.Maps.load("waves", Path("unused"))
    before, month, after = maps.batch(3, 0, 4)
    assert before.shape == (4, 2, 25, 37) and after.shape == (4, 25, 37) and month.min() >= 2
    assert torch.equal(maps.test()[0][0, 1], maps.maps[-1, 1])
    header, field = np.zeros(64, ">i4"), np.arange(6, dtype=">f4")
    header[[17, 18]] = 2, 3
    records = [np.array([len(x.tobytes())], ">i4").tobytes() for x in (header, field)]
    parts = [records[0], header.tobytes(), *records, field.tobytes(), records[1]]
    fields = weather_data._fields(b"".join(parts) * 2)
    assert fields.shape == (2, 2, 3) and (fields[1] == np.arange(6).reshape(2, 3)).all()


def test_multimodal() -> None:
    """11 rows of a picture over model=2, then 6 and 3, for 3 heads over the same devices."""
    torch.manual_seed(0)
    data = pictures_data.Pictures.load("digits", Path("unused"))
    pictures, letters, targets = data.batch(0, 0, 5)
    assert pictures.shape == (5, 1, 11, 25)
    text = pictures_data.decode(targets[0])
    assert all(word in pictures_data.NAMES for word in text.split())
    assert pictures_data.encode([pictures_data.NAMES.index(w) for w in text.split()])[1:].equal(
        targets[0]
    )
    config = multimodal.Config(11, 25, channels=4, convolutions=1, layers=1, heads=3, width=12)
    model, layout = multimodal.Reader(config).double(), multimodal.LAYOUTS["space_tp"]
    simulate(model, layout, "data=2,model=2", pictures.double(), letters, targets)


def test_encoder_and_decoder_have_one_all_to_all_between_them() -> None:
    """Before it rows of neighbours, behind it Megatron's sums and those of the loss."""
    with torch.device("meta"):
        model = multimodal.Reader(multimodal.Config(37, 85, layers=2))
        pictures, letters = torch.empty(32, 1, 37, 85), torch.empty(32, 18, dtype=torch.long)
    layout = multimodal.LAYOUTS["space_tp"].on(gspmd.Mesh(data=2, model=2))
    plan = gspmd.plan(model, pictures, letters, letters, mesh=layout)
    kinds = [kind for kind, _ in itertools.groupby(c.kind for c in plan.collectives)]
    assert kinds == ["permute", "all_to_all", "all_reduce"] and not plan.replicated_ops
    assert [c.count for c in plan.collectives if c.kind == "all_to_all"] == [1]


def run_example(example: str, folder: Path, name: str, layout: str, mesh: str, *options: str):
    """The losses of steps in float64, on processes if there is a mesh."""
    path, picture = folder / f"{name}.json", str(folder / "picture.png")
    arguments = [*ALL[example].options.split(), "--warmup", "1", "--dtype", "float64", *options]
    arguments += ["--plot", picture, "--losses", str(path)]
    script = EXAMPLES / example / "train.py"
    if mesh:
        arguments += ["--mesh", mesh, "--layout", layout]
        run_main(mesh, script=script, arguments=arguments)
    else:
        run_script(script, arguments)
    return json.loads(path.read_text())["losses"]


@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("example, layout, mesh", [("bert", "zero", "data=2,model=2")])
def test_training_on_processes(example: str, layout: str, mesh: str, tmp_path: Path) -> None:
    """As `make examples` runs all of them, in more layouts and for more steps."""
    options = ["--layers", "1", "--steps", "4"]
    one = run_example(example, tmp_path, "one", "", "", *options)
    four = run_example(example, tmp_path, "four", layout, mesh, *options)
    assert one[-1] != one[0] and four == pytest.approx(one, rel=1e-8)


@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    "example, layout, mesh",
    [("conformer", "", ""), ("weather", "", ""), ("multimodal", "space_tp", "data=2,model=2")],
)
def test_checkpoints(example: str, layout: str, mesh: str, tmp_path: Path) -> None:
    """The losses after a checkpoint is read are those without a break; one process reads those of
    a mesh.
    """
    folder = str(tmp_path / "checkpoint")
    pictures = ["--picture", str(tmp_path / "picture.png"), "--steps"]
    whole = run_example(example, tmp_path, "whole", "", "", *pictures, "3")
    first = run_example(example, tmp_path, "first", layout, mesh, *pictures, "1", "--save", folder)
    rest = run_example(example, tmp_path, "rest", "", "", *pictures, "2", "--resume", folder)
    assert len(set(whole)) == 3 and [*first, *rest] == pytest.approx(whole, rel=1e-10)
