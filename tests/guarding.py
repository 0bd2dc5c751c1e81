"""Tests that guard and tests that explore: --cases N runs so many cases of each test function."""

from __future__ import annotations

from pathlib import Path

import pytest

# Files of which --cases leaves out nothing: their cases are short, or are counted.
WHOLE = {"prover", "imports", "docstrings", "kinds", "mistakes"}

# Files that explore. Under --cases so many cases of each function guard; `make nightly` runs all.
EXPLORING = {"sets": 14, "mixtures": 0, "op_db": 2, "dynamic_programs": 2, "unet3d": 0}


def add_cases_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        type=int,
        help="how many cases of a test function guard it (but see WHOLE and EXPLORING)",
    )


def guard_by_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what explores, with --cases."""
    count = config.getoption("--cases")
    if not count:
        return
    functions: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        functions.setdefault((item.path, item.nodeid.partition("[")[0]), []).append(item)
    kept = []
    for (path, _), cases in functions.items():
        name = path.stem.removeprefix("test_")
        kept += cases if name in WHOLE else spread(cases, EXPLORING.get(name, count))
    keep(config, items, kept)


def keep(config: pytest.Config, items: list[pytest.Item], kept: list[pytest.Item]) -> None:
    """Deselect all tests but some; all keep their order."""
    ids = {item.nodeid for item in kept}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in ids])
    items[:] = [item for item in items if item.nodeid in ids]


def spread(cases: list[pytest.Item], count: int) -> list[pytest.Item]:
    """Return so many cases at equal distances, the first and the last among them."""
    last = len(cases) - 1
    places = {i * last // max(count - 1, 1) for i in range(min(count, len(cases)))}
    return [cases[place] for place in sorted(places)]
