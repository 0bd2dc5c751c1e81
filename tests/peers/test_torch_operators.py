"""PyTorch's samples of its operators and autograd functions under random layouts, each by name.

On two simulated devices, forward and backward. tests/rules/test_op_db.py has the comparison, and
the operators that do not apply.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

pytest.importorskip("torch.testing._internal.common_methods_invocations", reason="no op_db")
sys.path.insert(0, str(Path(__file__).parents[1] / "rules"))
import test_op_db  # noqa: E402
from op_coverage import OPS, full_name  # noqa: E402
from torch.testing._internal.autograd_function_db import autograd_function_db  # noqa: E402

FUNCTIONS = {f"autograd.{full_name(op)}": op for op in autograd_function_db}
REASONS = {
    **dict.fromkeys(test_op_db.UNCOMPARED, "draws numbers, or one device runs no sample of it"),
    **dict.fromkeys(test_op_db.SLOW, "takes minutes: its program has thousands of operations"),
    **test_op_db.RAISES,
}


def subjects() -> list:
    return [
        pytest.param(name, marks=[pytest.mark.skip(REASONS[name])] if name in REASONS else [])
        for name in (*test_op_db.NAMES, *FUNCTIONS)
    ]


@pytest.mark.parametrize("name", subjects())
def test_operator(name, monkeypatch):
    monkeypatch.setattr(test_op_db, "SAMPLES", 1)
    monkeypatch.setattr(test_op_db, "OPS", {**OPS, **FUNCTIONS})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples, failures = test_op_db.failures(name)
    assert samples and not failures, failures
