"""Each command of the command line, its exit codes, and mistakes: a few lines, no traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

from torchgspmd.tools import command_line
from torchgspmd.tools.command_line import COMMANDS, run

MODEL = """
import torch, torchgspmd as gspmd
def example(mesh, width=8, bad=0):
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 8))
    if bad:
        raise KeyError("of the user")
    if "model" in mesh.names:
        gspmd.annotate(model, mesh, {"0.weight": "model _"})
    return model, (torch.empty(4, 8),)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MODEL)
    return path


def test_plans_are_saved_reported_and_compared(file, tmp_path, capsys):
    one, two, page = (str(tmp_path / name) for name in ("one", "two", "page.html"))
    plan = ["plan", str(file), "width=16", "--mesh"]
    assert run([*plan, "data=2,model=2", "--print", "--save", one]) == 0
    assert "%_0_weight  : f32[16@model, 8]" in capsys.readouterr().out
    assert run([*plan, "data=4", "--save", two, "--verify"]) == 0
    assert "values and 5 results, in 2 trials" in capsys.readouterr().out
    assert run(["report", one, "--explain", "_0_weight", "--html", page]) == 0
    assert "marked at" in capsys.readouterr().out and "<html" in Path(page).read_text()
    assert run(["diff", one, two, "--hardware", "a100"]) == 0
    assert "sent by a device" in capsys.readouterr().out


def test_a_golden_text_is_checked(file, tmp_path, capsys):
    golden = str(tmp_path / "plan.txt")
    line = ["check", str(file), "width=16", golden]
    assert run(line) == 1 and "there is no file" in capsys.readouterr().err
    assert run([*line, "--mesh", "data=2,model=2", "--update"]) == 0 and Path(golden).exists()
    assert run(line) == 0  # on the mesh of the text
    assert run([*line[:2], golden, line[2]]) == 0
    line[2] = "width=32"
    capsys.readouterr()
    assert run(line) == 1
    (weights,) = (t for t in capsys.readouterr().err.splitlines() if ".weight" in t)
    assert weights.startswith("  changed  *.weight  f32[16@model, 8], f32[")
    assert " -> f32[32@model, 8], f32[" in weights
    assert run([*line, "--update"]) == 0 and "f32[32@model, 8]" in capsys.readouterr().out


def test_suggest(file, capsys):
    line = ["suggest", str(file), "--devices", "2", "--seconds", "2", "--param-dtype", "bfloat16"]
    assert run(line) == 0
    assert "param_dtype=torch.bfloat16" in capsys.readouterr().out


def test_calibrate(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(command_line, "launch", lambda *args: calls.append(args) or ["speed"])
    assert run(["calibrate", "--mesh", "data=2,model=2"]) == 0
    assert capsys.readouterr().out == "'speed'\n" and calls[0][1] == 4


def test_doctor(capsys):
    assert run(["doctor"]) == 0 and "torch" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line, text",
    [
        (["plan", "no.py", "--mesh", "data=2"], "no.py: No such file"),
        (["plan", "FILE", "--mesh", "data"], "data"),
        (["plan", "FILE", "width", "--mesh", "data=2"], "is no option of example"),
        (["plan", "FILE", "bad=1", "--mesh", "data=2"], "KeyError: 'of the user'\n  where"),
        (["report", "FILE"], "is no plan"),
        (["suggest", "FILE", "--devices", "2", "--memory", "much"], "much"),
    ],
)
def test_mistakes_are_said_in_a_few_lines(line, text, file, capsys):
    assert run([str(file) if word == "FILE" else word for word in line]) == 1
    error = capsys.readouterr().err
    assert text in error and "Traceback" not in error and len(error.splitlines()) < 8


def test_a_wrong_line_has_code_2_and_help_has_examples(capsys):
    for line in ([], ["plam"], ["plan", "x.py"], ["plan", "x.py", "--mesh", "a=1", "--rng", "no"]):
        with pytest.raises(SystemExit) as exit_:
            run(line)
        assert exit_.value.code == 2
    for command in COMMANDS:
        with pytest.raises(SystemExit) as exit_:
            run([command.name, "--help"])
        assert exit_.value.code == 0
        assert command.example in capsys.readouterr().out


def test_as_a_program(file):
    line = [sys.executable, "-m", "torchgspmd", "report", str(file)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "is no plan" in done.stderr and not done.stdout
