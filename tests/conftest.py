"""Every program that a test plans is verified. With --hide-operators 20 the package is imported
without 20 random operators of ATen.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import types
import zlib
from itertools import count
from pathlib import Path

import pytest
import torch
from guarding import add_cases_option, guard_by_cases, keep

os.environ.setdefault("TORCHGSPMD_CHECK", "1")
os.environ.setdefault("TORCHGSPMD_CACHE", "")  # a test plans what it tests


collect_ignore = ["peers"]  # make test-peers names them


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--hide-operators",
        type=int,
        default=0,
        help="how many operators of torch.ops.aten the package does not find",
    )
    parser.addoption("--hide-seed", type=int, default=0, help="which ones")
    parser.addoption(
        "--one-mesh", action="store_true", help="run each check on processes on one of its meshes"
    )
    add_cases_option(parser)


# Files whose tests take minutes together; `make fast` leaves them out.
SLOW = {
    "prover",
    "random_programs",
    "halo_reshard",
    "unet3d",
    "wheel",
    "interpolate",
    "examples",
    "documentation",
    "transformers",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem.removeprefix("test_") in SLOW:
            item.add_marker(pytest.mark.slow)
    if config.getoption("--one-mesh"):
        keep(config, items, [item for item in items if is_on_its_mesh(item)])
    guard_by_cases(config, items)


def is_on_its_mesh(item: pytest.Item) -> bool:
    """Return whether it is the case for the one mesh that the check's name draws.

    Five of six draw among the meshes of few processes: each process costs the same again.
    """
    meshes = getattr(item.get_closest_marker("distributed"), "args", ())
    if not meshes:
        return True
    drawn = zlib.crc32(item.originalname.encode())
    if drawn % 6:
        meshes = [mesh for mesh in meshes if "," not in mesh] or meshes
    return item.callspec.params["mesh"] == meshes[drawn // 6 % len(meshes)]


# A scan of all that a worker holds takes seconds, and planning makes the collector ask for many.
TESTS_A_SCAN = 1000
_TESTS = count(1)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Collect garbage at times, and end the processes behind the last test that runs on them.

    Idle groups of gloo poll.
    """
    if next(_TESTS) % TESTS_A_SCAN == 0:
        gc.collect()
    if runs_on_processes(item) and not (nextitem and runs_on_processes(nextitem)):
        import ranks

        ranks.close_all()


def pytest_sessionfinish() -> None:
    gc.freeze()  # pytest's last scans, five of them, find nothing


def runs_on_processes(item: pytest.Item) -> bool:
    return item.get_closest_marker("distributed") is not None


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(20_000, 50, 1_000_000)  # young objects alone; TESTS_A_SCAN
    config.addinivalue_line("markers", "slow: one of many that take minutes together")
    config.addinivalue_line("markers", "distributed(*meshes): runs on processes")
    config.addinivalue_line("markers", "xdist_group(name): one worker runs all of the group")
    if count := config.getoption("--hide-operators"):
        names = {
            name[6:].partition(".")[0]
            for name in torch._C._dispatch_get_all_op_names()
            if name.startswith("aten::")
        }
        hidden = random.Random(config.getoption("--hide-seed")).sample(sorted(names), count)
        config.stash[_HIDDEN] = hidden
        hide(hidden)


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [f"hidden operators: {', '.join(config.stash.get(_HIDDEN, ()))}"] * bool(
        config.stash.get(_HIDDEN, ())
    )


_HIDDEN = pytest.StashKey[list[str]]()


class Hiding:
    """torch.ops.aten without some operators, as the package sees it. Torch itself has them all."""

    def __init__(self, names: list[str]):
        self._names = names

    def __getattr__(self, name: str):
        if name in self._names:
            raise AttributeError(f"'_OpNamespace' 'aten' object has no attribute '{name}'")
        return getattr(torch.ops.aten, name)


def hide(names: list[str]) -> None:
    """Before the package is imported."""
    assert "torchgspmd" not in sys.modules
    package = sys.modules["torchgspmd"] = types.ModuleType("torchgspmd")
    package.__path__ = [str(Path(__file__).parents[1] / "torchgspmd")]
    from torchgspmd.compat import operators

    operators.aten._ops = Hiding(names)
    del sys.modules["torchgspmd"]
