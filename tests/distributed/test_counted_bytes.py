"""The bytes of plans against those that ranks hand to their process groups, for some examples.

benchmarks/counted_bytes.py has all of them.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from ranks import distributed

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from counted_bytes import run_example, run_generate


@pytest.mark.parametrize(
    "name, layout", [("gpt", "tp"), ("multimodal", "space_tp"), ("vit", "spatial")]
)
@distributed("data=2,model=2")
def test_planned_bytes_are_counted(mesh, name, layout):
    """A vocabulary, rows of pictures and tokens that two devices do not divide."""
    row = run_example(name, layout, str(mesh))
    assert row.sent > 0
    assert row.sent == pytest.approx(row.plan.sent_bytes, abs=1e-6)


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs a model of transformers")
@distributed("data=2,model=2")
def test_planned_bytes_of_a_token_are_counted(mesh):
    """A prompt and a token of examples/generate: all devices have rows of the cache."""
    for _, row in run_generate(mesh):
        assert row.sent > 0
        assert row.sent == pytest.approx(row.plan.sent_bytes, abs=1e-6)
