"""The arithmetic of all devices is that of the program, evenly split (benchmarks/arithmetic.py)."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import arithmetic  # noqa: E402

HALO = 1 / 4        # of the four rows of a device one more is read to make the gradient of the rows, a third of the arithmetic


@pytest.mark.parametrize("name", arithmetic.PROGRAMS)
def test_arithmetic_is_split_evenly(name):
    assert 1 <= arithmetic.ratio(name) <= (1 + HALO / 3 if name == "convolutions" else 1.02)
