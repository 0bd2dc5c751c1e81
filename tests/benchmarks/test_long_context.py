"""Attention of real models' shapes sends no more than the cheapest formula, and is balanced."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import long_context as bench


@pytest.mark.parametrize("shape", bench.SHAPES[1::3], ids=lambda s: f"{s.name} {s.devices}")
def test_bytes_work_and_memory(shape) -> None:
    plan = bench.planned(shape, 1)
    assert plan.sent_bytes <= 1.003 * shape.least  # Tokens, targets and positions are exchanged.
    assert bench.work(plan, shape) <= 1.1
