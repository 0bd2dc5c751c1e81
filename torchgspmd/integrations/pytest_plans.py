"""pytest: the fixture `check_plan` compares a plan with its golden text; --update-plans writes it.

    pytest_plugins = ["torchgspmd.integrations.pytest_plans"]  # in conftest.py

    def test_layout(check_plan):
        check_plan(gspmd.plan(model, tokens, mesh=mesh, grad=True))

The text lies in the folder `golden_plans` beside the test, in a file with the test's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ..compiler.plan import Plan

_OPTION = "--update-plans"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(_OPTION, action="store_true", help="write the golden texts of plans anew")


@pytest.fixture
def check_plan(request: pytest.FixtureRequest) -> Callable[[Plan], None]:
    """Return a function that raises ShardingError if a plan differs from its golden text."""
    name = re.sub(r"[^\w.=-]+", "_", request.node.name).strip("_")
    path = request.path.parent / "golden_plans" / f"{name}.txt"

    def check(plan: Plan) -> None:
        plan.check(path, update=request.config.getoption(_OPTION))

    return check
