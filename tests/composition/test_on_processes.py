"""Sets of features on processes; `make test-pairs` runs all pairs."""

import pytest

from composition.features import parse
from composition.judge import RIGHT
from composition.on_processes import judge


@pytest.mark.xdist_group("ranks")
@pytest.mark.distributed
@pytest.mark.parametrize("text", ("tensor+evaluate", "1f1b+dropout"))
def test_a_set_on_processes(text):
    verdict = judge(parse(text))
    assert verdict.kind == RIGHT, verdict
