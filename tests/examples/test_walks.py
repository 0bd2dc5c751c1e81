"""The walk of docs/adding_an_op.md, as it stands: without its diffs the operators lack a rule."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree, ignore_patterns

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "adding_an_op.md").read_text()


def diffs() -> Iterator[tuple[str, str, str]]:
    """Yield (file, text before, text after) of the page's diffs."""
    for block in re.findall(r"^```diff\n(.*?)^```", PAGE, re.M | re.S):
        header, *lines = block.splitlines()
        before = "".join(line[1:] + "\n" for line in lines if line[0] == " ")
        after = "".join(line[1:] + "\n" for line in lines)
        yield header.removeprefix("--- "), before, after


def test_the_diffs_of_the_page_are_the_code() -> None:
    found = list(diffs())
    assert len(found) == 5
    for file, _, after in found:
        assert (ROOT / file).read_text().count(after) == 1, after


def test_without_the_diffs_every_operator_of_the_walk_runs_whole(tmp_path: Path) -> None:
    copytree(ROOT / "torchgspmd", tmp_path / "torchgspmd", ignore=ignore_patterns("__pycache__"))
    for file, before, after in diffs():
        if file.startswith("torchgspmd/"):
            path = tmp_path / file
            path.write_text(path.read_text().replace(after, before))
    program, shown = re.search(
        r"^## Three operators.*?^```python\n(.*?)^```\n\n```text\n(.*?)^```", PAGE, re.M | re.S
    ).groups()
    (tmp_path / "walk.py").write_text(program)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "walk.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    operators = [
        "fake_quantize_per_tensor_affine_cachemask",
        "fake_quantize_per_channel_affine_cachemask",
        "index_reduce",
    ]
    names = [line.split()[0] for line in shown.splitlines()]
    assert run.stdout.splitlines() == [
        f"{name} ['aten.{operator}.default']" for name, operator in zip(names, operators)
    ]
