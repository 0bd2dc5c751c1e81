"""The table of measured runs in docs/benchmarks.md: its summary follows from its rows."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from published_runs import WITHIN  # noqa: E402

PAGE = (ROOT / "docs/benchmarks.md").read_text()
SECTION = PAGE.split("## Measured runs of others")[1].split("\n## ")[0]


def test_the_summary_is_that_of_the_rows() -> None:
    rows = [line.split("|")[1:-1] for line in SECTION.splitlines() if line.startswith("| ")][1:]
    ratios = [float(row[-1]) for row in rows]
    for row, ratio in zip(rows, ratios):
        measured, estimated = float(row[2]), float(row[3])
        assert abs(estimated / measured - ratio) < 0.01, row
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    said = re.search(
        r"(\d+) rows: median error (\S+)%, (\d+)% within 20%, worst ratio (\S+)\.", SECTION
    )
    assert said is not None
    count, median, share, worst = map(float, said.groups())
    middle = (errors[(len(errors) - 1) // 2] + errors[len(errors) // 2]) / 2
    assert count == len(rows)
    assert abs(median / 100 - middle) < 0.01
    assert abs(share / 100 - sum(e < WITHIN + 0.005 for e in errors) / count) < 0.03
    assert abs(worst - 1) == errors[-1] or abs(abs(worst - 1) - errors[-1]) < 1e-9
