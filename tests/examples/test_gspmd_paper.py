"""The dense family is planned by two of its layers: the others add what one layer adds."""

import runpy
import sys
from pathlib import Path

import pytest

from torchgspmd import Mesh

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "gspmd_paper"


@pytest.fixture(scope="module")
def table():
    sys.path.insert(0, str(FOLDER))
    shadowed = sys.modules.pop("model", None)
    try:
        yield runpy.run_path(str(FOLDER / "table.py"))
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("model", None)
        if shadowed is not None:
            sys.modules["model"] = shadowed


def test_layers_add_alike(table):
    two, three, five = (table["numbers"]("137.7B", Mesh(x=8, y=16), n) for n in (2, 3, 5))
    for key, value in five.items():
        assert three[key] + 2 * (three[key] - two[key]) == pytest.approx(value, rel=0.02), key


def test_products_are_divided_evenly_and_the_parameters_are_the_published_ones(table):
    one, two = (table["numbers"]("1.10T", Mesh(x=16, y=32), n) for n in (1, 2))
    assert two["flops"] == pytest.approx(two["even"])
    total = two["parameters"] + 126 * (two["parameters"] - one["parameters"])
    assert total == pytest.approx(1_100_041_175_040, rel=1e-4)
