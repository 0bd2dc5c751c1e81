"""The notebook prints what it shows: its cells run in order, in one process that starts others."""

import contextlib
import io
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_tutorial_prints_what_it_shows():
    path = ROOT / "examples" / "tutorial.ipynb"
    space, shown = {"__name__": "__main__"}, 0
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), "tutorial.ipynb", "exec"), space)
        stored = "".join(text for output in cell["outputs"] for text in output["text"])
        assert printed.getvalue() == stored
        shown += bool(stored)
    assert shown >= 5
