"""The table of silent bugs has the benchmark's programs, and each one is right here."""

import re
import sys
from pathlib import Path

import pytest

import torchgspmd as gspmd

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from silent_bugs import DEVICES, PROGRAMS, difference  # noqa: E402

PAGE = (ROOT / "docs/silent_bugs.md").read_text()


def test_the_table_has_every_program() -> None:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \| ([^|]+) \| certified", PAGE, re.M)
    assert rows == [(name, "0") for name in PROGRAMS]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("devices", [DEVICES, 3])
def test_a_program_is_right(name: str, devices: int) -> None:
    program = PROGRAMS[name]
    arguments, mesh = program.arguments(), gspmd.Mesh(x=devices)
    plan = gspmd.plan(program.function, *arguments, mesh=mesh, in_specs=program.specs())
    assert difference(plan.simulate(*arguments), program.function(*arguments)) == "0"
    assert plan.verify().complete
