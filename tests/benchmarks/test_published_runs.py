"""The table of published runs in docs/report.md has the rows of the benchmark."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from published_runs import RUNS, WITHIN, estimated  # noqa: E402

ROW = r"\| {} \| (\S+) \| (\S+) \| (\S+) \|"
PAGE = (ROOT / "docs/report.md").read_text()


def test_the_table_has_every_run() -> None:
    within = 0
    for name, run in RUNS.items():
        row = re.search(ROW.format(re.escape(name)), PAGE)
        assert row is not None, name
        measured, estimated, ratio = map(float, row.groups())
        assert f"{run.seconds:.3g}" == row[1], name
        assert abs(estimated / measured - ratio) < 0.01, name
        within += abs(ratio - 1) <= WITHIN
    assert f"{within} of {len(RUNS)} are within" in PAGE


@pytest.mark.parametrize("name", RUNS)
def test_an_estimate_is_that_of_the_table(name: str) -> None:
    row = re.search(ROW.format(re.escape(name)), PAGE)
    assert row is not None
    assert f"{estimated(name):.3g}" == row[2]
