"""XLA with 8 virtual devices on the CPU, started before anything runs a backward."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path[:0] = map(str, (TESTS, TESTS / "distributed", HERE.parent / "examples", HERE))

from environment import ENVIRONMENT  # noqa: E402
from guarding import add_cases_option, guard_by_cases  # noqa: E402

os.environ.update(ENVIRONMENT)


def pytest_configure(config):
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # of xdist, the process that runs no test
    from torchgspmd import Mesh
    from torchgspmd.xla_backend.runtime import start

    start(Mesh(data=4, model=2))


def pytest_addoption(parser):
    add_cases_option(parser)


def pytest_collection_modifyitems(config, items):
    guard_by_cases(config, items)
