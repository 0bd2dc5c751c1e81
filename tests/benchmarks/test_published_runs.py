"""The table of published runs in docs/report.md has the rows of the benchmark."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from published_runs import RUNS, WITHIN  # noqa: E402


def test_the_table_has_every_run() -> None:
    page = (ROOT / "docs/report.md").read_text()
    within = 0
    for name, run in RUNS.items():
        row = re.search(rf"\| {re.escape(name)} \| (\S+) \| (\S+) \| (\S+) \|", page)
        assert row is not None, name
        measured, estimated, ratio = map(float, row.groups())
        assert f"{run.seconds:.3g}" == row[1], name
        assert abs(estimated / measured - ratio) < 0.01, name
        within += abs(ratio - 1) <= WITHIN
    assert f"{within} of {len(RUNS)} are within" in page
