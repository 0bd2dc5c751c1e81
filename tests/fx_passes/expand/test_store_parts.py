"""Weights by parts: the bytes of three weights, the numbers of one device, and what stays."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path

import pytest
import torch
from fused_model import MARKS, SEPARATE, Block
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import Mesh, Plan, plan
from torchgspmd.dtensor.parts import IS_EXACT

pytestmark = pytest.mark.skipif(not IS_EXACT, reason="torch 2.9 has no exact _StridedShard")

CUTS = "split", "chunk", "slices", "unflatten", "vit", "index", "conv1d"
MESHES = "model=2", "model=3", "data=2,model=2", "model=6", "data=2,model=3"
TOKENS = 64  # few would be cheaper to move than weights


def planned(cut: str, mesh: Mesh, marks: dict[str, str] | None = None) -> tuple[nn.Module, Plan]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(cut), Block(cut)).double()
    marks = dict(SEPARATE if cut == "separate" else MARKS) if marks is None else marks
    if cut == "conv1d":
        marks["c_attn.weight"] = "_ model"
    gspmd.annotate(model, mesh, {f"*.{name}": spec for name, spec in marks.items()})
    batch = "data" if "data" in mesh.names else "_"
    x = torch.randn(4, TOKENS, 24, dtype=torch.float64)
    return model, plan(model, x, mesh=mesh, grad=True, in_specs=(f"{batch} _ _",))


def sent(result: Plan, axis: str) -> float:
    return sum(c.sent_bytes for c in result.collectives if axis in str(c.axes))


def check_numbers(model: nn.Module, result: Plan) -> None:
    x = torch.randn(4, TOKENS, 24, dtype=torch.float64)
    y, gradients = result.simulate(x, _poison=True)
    expected = model(x)
    expected.sum().backward()
    torch.testing.assert_close(y, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("cut", CUTS)
def test_sends_no_more_than_separate_weights(cut, mesh):
    mesh = Mesh.parse(mesh)
    model, fused = planned(cut, mesh)
    _, separate = planned("separate", mesh)
    kinds = [
        Counter((c.kind, c.axes) for c in p.collectives if "model" in str(c.axes))
        for p in (fused, separate)
    ]
    assert sent(fused, "model") <= sent(separate, "model"), kinds
    assert fused.sent_bytes <= separate.sent_bytes
    assert {str(s) for s in fused.in_specs if s.parts} >= {"3*model", "2*model _"}
    check_numbers(model, fused)


class FusedConvolution(nn.Module):
    """A convolution whose channels are three values."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.p = nn.Conv1d(rows, 48, 1, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.p(x.transpose(1, 2)).chunk(3, 1)
        return (q * k + v).transpose(1, 2)


class Uneven(nn.Module):
    """A fused weight whose other dimension has as few rows as given."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.p = nn.Linear(rows, 48, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.p(x).chunk(3, -1)
        return q * k + v


@pytest.mark.parametrize("rows", [1, 4, 5])
@pytest.mark.parametrize("cls, mark", [(Uneven, "model data"), (FusedConvolution, "model data _")])
def test_other_dimensions_may_be_uneven(cls, mark, rows):
    model, mesh = cls(rows), Mesh(data=2, model=2)
    gspmd.annotate(model, mesh, {"p.weight": mark})
    x = torch.randn(4, 512, rows, dtype=torch.float64)
    result = plan(model, x, mesh=mesh, grad=True)
    assert any(spec.parts for spec in result.in_specs)
    y, gradients = result.simulate(x, _poison=True)
    model(x).sum().backward()
    torch.testing.assert_close(y, model(x))
    torch.testing.assert_close(gradients["p.weight"], model.p.weight.grad)


def test_prints_the_parts():
    _, result = planned("split", Mesh(model=2))
    lines = result.text(full=True).splitlines()
    inputs = [line.split(" : ")[1].split(" = ")[0].strip() for line in lines if "= input" in line]
    assert inputs[2:6] == [
        "f64[3*24@model, 24]",
        "f64[3*24@model]",
        "f64[2*96@model, 24]",
        "f64[24, 24@model]",
    ]
    assert result.out_specs[1:] and str(result.in_specs[2]) == "3*model _"
    assert result.verify().complete


class Once(nn.Module):
    """One linear map, and how its result is used."""

    def __init__(self, use, outputs: int = 48) -> None:
        super().__init__()
        self.fc, self.use = nn.Linear(16, outputs, bias=False), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.fc(x), self)


def _unequal(y: Tensor, _: nn.Module) -> Tensor:
    q, k, v = y.split([32, 8, 8], -1)
    return q.sin().sum(-1) + (k * v).sum(-1)


UNCHANGED = {
    "heads first": lambda y, _: y.view(4, 4, 4, 12).chunk(3, -1)[0] * 2,
    "whole": lambda y, _: y.softmax(-1),
    "cut and whole": lambda y, _: y.chunk(3, -1)[0] + y.softmax(-1)[..., :16],
    "the weight too": lambda y, m: y.chunk(3, -1)[1] + m.fc.weight.norm(),
    "unequal": _unequal,
    "two ways": lambda y, _: y.chunk(3, -1)[0][..., :12] + y.chunk(4, -1)[0],
    "rows": lambda y, _: y.chunk(4, 0)[0],
}


@pytest.mark.parametrize("use", UNCHANGED)
def test_other_weights_stay(use):
    model = Once(UNCHANGED[use]).double()
    mesh = Mesh(model=2)
    gspmd.annotate(model, mesh, {"fc.weight": "model _"})
    x = torch.randn(4, 4, 16, dtype=torch.float64)
    result = plan(model, x, mesh=mesh, grad=True)
    assert not any(spec.parts for spec in result.in_specs)
    y, gradients = result.simulate(x)
    model(x).sum().backward()
    torch.testing.assert_close(y, model(x))
    torch.testing.assert_close(gradients["fc.weight"], model.fc.weight.grad)


@pytest.mark.parametrize(
    "mesh, spec, batch, why",
    [
        (Mesh(model=5), "model _", "_", "5 devices do not divide 16 rows of a part"),
        (Mesh(data=2), "data _", "data", "the weight is gathered for a batch"),
        (Mesh(data=2, model=2), "data+model _", "data", "two axes divide the rows"),
    ],
)
def test_layouts_that_stay(mesh, spec, batch, why):
    model = Once(lambda y, _: y.chunk(3, -1)[0] * y.chunk(3, -1)[2]).double()
    gspmd.annotate(model, mesh, {"fc.weight": spec})
    x = torch.randn(4, 4, 16, dtype=torch.float64)
    result = plan(model, x, mesh=mesh, grad=True, in_specs=(f"{batch} _ _",))
    assert not any(s.parts for s in result.in_specs), why
    y, gradients = result.simulate(x)
    model(x).sum().backward()
    torch.testing.assert_close(y, model(x))
    torch.testing.assert_close(gradients["fc.weight"], model.fc.weight.grad)


def test_a_file_has_the_parts(tmp_path):
    model, result = planned("chunk", Mesh(model=2))
    result.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", model)
    assert loaded.in_specs == result.in_specs and str(loaded) == str(result)
    check_numbers(model, loaded)


def test_users_write_no_parts():
    with pytest.raises(gspmd.ShardingError, match="names the parts of a dimension"):
        plan(nn.Linear(4, 6), torch.ones(2, 4), mesh=Mesh(model=2), in_specs=("_ 2*model",))


def test_gpt2_in_its_sizes():
    """nanoGPT's model with the sizes of GPT-2, of which two layers: sums alone are sent."""
    path = Path(__file__).parents[2] / "examples" / "nanogpt" / "model.py"
    made = runpy.run_path(str(path))
    with torch.device("meta"):
        model = made["GPT"](made["GPTConfig"](1024, 50304, 2, 12, 768))
    mesh = Mesh(data=2, model=4)
    gspmd.annotate(model, mesh, gspmd.marks("nanogpt"))
    words = torch.empty(4, 1024, dtype=torch.long, device="meta")
    result = plan(model, words, words, mesh=mesh, grad=True, in_specs="auto", out_specs="same")
    assert {c.kind for c in result.collectives if "model" in str(c.axes)} == {"all_reduce"}
    specs = {i.name: str(s) for i, s in zip(result.captured.inputs, result.in_specs)}
    assert specs["transformer.h.1.attn.c_attn.weight"] == "3*model _"
    assert specs["transformer.h.1.attn.c_attn.bias"] == "3*model"


def test_weights_on_both_dimensions():
    marks = {**MARKS, "c_attn.weight": "model data", "gate_up.weight": "model data"}
    model, result = planned("split", Mesh(data=2, model=2), marks)
    assert "3*model data" in map(str, result.in_specs)
    check_numbers(model, result)
