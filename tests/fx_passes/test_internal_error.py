"""What a pass raises is an InternalError, which says what the program uses, and writes a report."""

import sys

import pytest
import torch
from torch import nn

import torchgspmd as gspmd
from torchgspmd.fx_passes.pass_runner import InternalError
from torchgspmd.fx_passes.pipeline import Pass, with_pass
from torchgspmd.fx_passes.stages import LOCAL

MESH = gspmd.Mesh(data=2)


def _fail(program):
    raise KeyError("loop_next")


def _refuse(program):
    raise gspmd.ShardingError("a mistake")


def _plan(run):
    with with_pass(Pass("broken", run, LOCAL, LOCAL), after="localize"):
        model, x = nn.Linear(4, 4), torch.full((2, 4), 0.123456)
        gspmd.plan(model, x, mesh=MESH, in_specs="data _", hardware="h100")


def test_a_pass_that_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["train.py", "--layers", "2"])
    monkeypatch.delenv("TORCHGSPMD_BUG_REPORT", raising=False)
    with pytest.raises(InternalError) as raised:
        _plan(_fail)
    assert isinstance(raised.value.__cause__, KeyError)
    assert str(raised.value).splitlines() == [
        "internal error in pass broken: KeyError: 'loop_next'",
        "  features  mesh data=2, hardware=h100, einsum",
        "  why       a fault of torchgspmd: a program is right, or refused by a ShardingError",
        "  report    TORCHGSPMD_BUG_REPORT=bug.txt python train.py --layers 2",
        "            writes what to attach: graph, marks, mesh and versions, no weights",
    ]
    path = tmp_path / "bug.txt"
    monkeypatch.setenv("TORCHGSPMD_BUG_REPORT", str(path))
    with pytest.raises(InternalError, match="report .*bug.txt"):
        _plan(_fail)
    text = path.read_text()
    for part in (
        "pass broken",
        f"torch {torch.__version__}",
        "KeyError: 'loop_next'",
        "parameter weight: torch.float32 [4, 4] mark None",
        "%input_1 : f32[2, 4]",
    ):
        assert part in text
    assert "0.1234" not in text


def test_a_mistake_stays_one():
    with pytest.raises(gspmd.ShardingError, match="a mistake"):
        _plan(_refuse)
