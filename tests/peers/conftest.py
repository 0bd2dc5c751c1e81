"""Other people's tests on the wrapper, and their results as a table: make test-peers.

    pytest tests/peers --write docs/coverage.md     # writes the table into the page
    pytest tests/peers --rows rows.json -k Llama    # a slice; runs what no earlier one has passed

A test is named after a behavior. Its parameters are a mesh, and a subject: a module, an optimizer,
or a family of models. A skip is a test that does not apply, with its reason.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
from guarding import keep

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parents[1] / "benchmarks")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tests of a family make the same calls: what one has planned, the next reads.
CACHE = tempfile.TemporaryDirectory(prefix="peers")
os.environ["TORCHGSPMD_CACHE"] = CACHE.name

HEADING = "## Other people's tests"
FOOTER = "\n---\n"
SUMS = {
    "test_torch_modules.py": "`common_modules.module_db`",
    "test_torch_operators.py": "`common_methods_invocations.op_db`, `autograd_function_db`",
    "test_torch_optimizers.py": "`common_optimizers.optim_db`",
    "test_torch_checkpoints.py": "helpers of `distributed.checkpoint`",
    "test_torch_dtensors.py": "helpers of DTensor",
    "test_transformers_checkpoints.py": "files with public names of transformers' models",
}
INTRODUCTION = """
    make test-peers

PyTorch's own databases of modules, optimizers and operators run on the wrapper. So do the models
with which PyTorch tests checkpoints and DTensors. The behaviors that transformers' common model
tests check are written anew, for small models of ten families. All compare with one device.
Operators run on two simulated devices, everything else on two processes with gloo. Layouts are
random.
"""


class Results(dict[tuple[str, str, str], tuple[str, str]]):
    """Outcome and reason by file, test and subject; kept in a file, if there is one."""

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self.path, self.written = path, time.monotonic()
        if path and path.exists():
            rows = json.loads(path.read_text())
            self |= {tuple(name): tuple(result) for name, result in rows}

    def write(self, seconds: float = 0.0) -> None:
        """Write the file, if the last time is so long ago."""
        if self.path and time.monotonic() >= self.written + seconds:
            self.path.write_text(json.dumps([*self.items()], indent=0))
            self.written = time.monotonic()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list) -> None:
        """Skip tests that have passed before, or do not apply."""
        done = {name for name, (outcome, _) in self.items() if outcome in ("passed", "skipped")}
        keep(config, items, [item for item in items if name_of(item.nodeid) not in done])

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            self[name_of(report.nodeid)] = report.outcome, reason_of(report)
            self.write(10.0)

    def pytest_terminal_summary(self, terminalreporter, config: pytest.Config) -> None:
        for report in terminalreporter.stats.get("error", ()):  # of a file
            self[name_of(report.nodeid)] = "error", reason_of(report)
        self.write()
        text = table_of(self)
        terminalreporter.write_sep("-", "the table of tests/peers")
        terminalreporter.write_line(text)
        if page := config.getoption("--write"):
            page.write_text(with_section(page.read_text(), text))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write", type=Path, help=f"a page whose section {HEADING!r} is written anew")
    parser.addoption("--rows", type=Path, help="a file of results, which this run continues")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # no worker of xdist
        config.pluginmanager.register(Results(config.getoption("--rows")))


def name_of(nodeid: str) -> tuple[str, str, str]:
    path, _, name = nodeid.partition("::")
    test, _, parameters = name.partition("[")
    subject = re.sub(r"(^|-)\w+=\d(,\w+=\d)*(?=-|$)", "", parameters.removesuffix("]")).strip("-")
    return Path(path).name, test.removeprefix("test_").replace("_", " "), subject


def reason_of(report) -> str:
    if report.outcome == "skipped":
        return report.longrepr[-1].removeprefix("Skipped: ")
    lines = [] if report.longrepr is None else str(report.longrepr).strip().splitlines()
    telling = (line for line in reversed(lines) if "Error" in line or "did not answer" in line)
    return next(telling, "")[:160]


def table_of(results: Results) -> str:
    """Return the counts by file, the grid of behaviors, and all reasons."""
    lines = [f"torch {torch.__version__.partition('+')[0]}{transformers_version()}.", ""]
    lines += ["| tests | passed | failed | not applicable |", "|---|--:|--:|--:|"]
    for file, title in SUMS.items():
        counts = Counter(outcome for (f, *_), (outcome, _) in results.items() if f == file)
        failed = counts["failed"] + counts["error"]
        lines.append(f"| {title} | {counts['passed']} | {failed} | {counts['skipped']} |")
    grid = {key[1:]: result for key, result in results.items() if key[0] not in SUMS}
    families = list(dict.fromkeys(subject for _, subject in grid))
    if families:
        lines += ["", "| transformers' behavior | " + " | ".join(families) + " |"]
        lines.append("|---" * (len(families) + 1) + "|")
        words = {"passed": "passed", "skipped": "-", "failed": "failed", "error": "failed", "": ""}
        for test in dict.fromkeys(test for test, _ in grid):
            cells = (words[grid.get((test, f), ("",))[0]] for f in families)
            lines.append(f"| {test} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, *reasons(results)])


def reasons(results: Results) -> list[str]:
    """Return each reason once, with the subjects that it is about."""
    about: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for (file, test, subject), (outcome, reason) in results.items():
        if outcome != "passed":
            where = SUMS.get(file, test)
            about[where, outcome.replace("skipped", "not applicable"), reason].append(subject)
    lines = [
        f"| {where} | {outcome} | {', '.join(dict.fromkeys(subjects))} | {reason} |"
        for (where, outcome, reason), subjects in about.items()
    ]
    head = ["", "| test | | of | reason |", "|---|---|---|---|"]
    return head + lines if lines else []


def transformers_version() -> str:
    module = sys.modules.get("transformers")
    return f", transformers {module.__version__}" if module else ""


def with_section(page: str, table: str) -> str:
    """Return the page with the section before its footer."""
    body, footer = page[: page.rindex(FOOTER)], page[page.rindex(FOOTER) :]
    before, _, rest = body.partition(HEADING)
    _, following, after = rest.partition("\n## ")
    section = f"{HEADING}\n{INTRODUCTION}\n{table}\n"
    return f"{before.rstrip()}\n\n{section}{following}{after}{footer}"
