"""Attention of real models' shapes sends no more than the cheapest formula, and is balanced."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import long_context as bench

ROWS = [s for s in bench.SHAPES if not s.window]


@pytest.mark.parametrize("shape", ROWS[1::3], ids=lambda s: f"{s.name} {s.devices}")
def test_bytes_work_and_memory(shape) -> None:
    plan, mesh = bench.planned(shape, 1), bench.mesh_of(shape)
    assert plan.sent_bytes <= 1.003 * shape.least  # Tokens, targets and positions are exchanged.
    assert bench.work(plan, mesh) <= 1.1
