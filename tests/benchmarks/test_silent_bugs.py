"""The table of silent bugs has the benchmark's programs, and each one is right here."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from silent_bugs import PROGRAMS, difference, planned  # noqa: E402

PAGE = (ROOT / "docs/silent_bugs.md").read_text()


def test_the_table_has_every_program() -> None:
    cell = r" *([^|]*?) *\|"
    rows = re.findall(rf"^\|{cell * 6} certified", PAGE, re.M)
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        (name, program.report, "0") for name, program in PROGRAMS.items()
    ]
    # Each system that runs a program has a number there.
    systems = [re.findall(r"([A-Za-z][\w ]+): ", row[4]) for row in rows]
    assert systems == [[*program.others] for program in PROGRAMS.values()]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("uneven", [False, True])
def test_a_program_is_right(name: str, uneven: bool) -> None:
    program = PROGRAMS[name]
    first, *_ = program.mesh
    plan = planned(program, {**program.mesh, first: 3} if uneven else program.mesh)
    arguments = program.arguments()
    assert difference(plan.simulate(*arguments), program.function(*arguments)) == "0"
    assert plan.verify().complete
