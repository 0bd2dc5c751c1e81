"""`make bench` says which ratios moved, and the baseline has ratios of all rows."""

import json
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RATIOS = runpy.run_path(str(ROOT / "benchmarks" / "ratios.py"))


def test_a_ratio_that_moved_by_more_than_a_tenth_is_named():
    before = {"sent dp": 1.0, "sent tp": 2.0, "gone": 1.0, "zero": 0.0}
    now = {"sent dp": 1.09, "sent tp": 2.3, "new": 1.0, "zero": 0.0}
    assert RATIOS["moved"](now, before) == ["gone", "new", "sent tp"]


def test_the_baseline_has_each_ratio_of_each_layout_and_no_path_or_time():
    baseline = json.loads((ROOT / "benchmarks" / "baselines" / "ratios.json").read_text())
    kinds = re.findall(r"^    (\w+)  +\w", RATIOS["__doc__"], re.M)
    assert set(baseline) == {f"{kind} {layout}" for kind in kinds for layout in RATIOS["MESHES"]}
    assert all(0 < ratio < 100 for ratio in baseline.values())
