"""tools/house.py: a figure that is worse than the committed one fails, a better one does not."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOUSE = runpy.run_path(str(ROOT / "tools" / "house.py"))
Figure, main = HOUSE["Figure"], HOUSE["main"]
COMMITTED = {"lines": 100, "median": 150}


@pytest.mark.parametrize(
    "lines, median, code",
    [(100, 150, 0), (99, 150, 0), (100, 151, 0), (101, 150, 1), (100, 149, 1)],
)
def test_only_a_worse_figure_fails(tmp_path, lines, median, code):
    path = tmp_path / "house.json"
    path.write_text(json.dumps(COMMITTED))
    measured = [Figure("lines", lines, 60), Figure("median", median, 170, is_floor=True)]
    assert main([], lambda: measured, path) == code
    assert main(["--update"], lambda: measured, path) == 0
    assert json.loads(path.read_text()) == {"lines": lines, "median": median}
    assert main([], lambda: measured, path) == 0


def test_figures_are_neither_added_nor_dropped_unseen(tmp_path, capsys):
    path = tmp_path / "house.json"
    path.write_text(json.dumps(COMMITTED))
    timed = Figure("seconds", 3, 1, is_timed=True)
    measured = [Figure("lines", 100, 60), Figure("walks", 7, 1), timed]
    assert main([], lambda: measured, path) == 1
    assert "walks: 7 is not in house.json\n  median: no longer measured" in capsys.readouterr().out


def test_the_committed_figures_are_those_of_the_goals():
    committed = json.loads((ROOT / "tools" / "house.json").read_text())
    assert {"lines of the package", "files", "walks of its graph", "circles of imports"} <= {
        *committed
    }


def test_a_hidden_import_is_an_import():
    named = HOUSE["IMPORTS"]._named
    package = ["compiler"]
    assert named("..tools.report.plan_views", package) == "tools.report.plan_views"
    assert named("torchgspmd.tools.report", package) == "tools.report"
    assert named(".options", package) == "compiler.options"
    others = ".tmp", "torchgspmd", "torchgspmd.", "tools.report", ".."
    assert {named(text, package) for text in others} == {None}
