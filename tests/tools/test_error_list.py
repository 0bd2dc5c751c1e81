"""The list of errors that tools/error_list.py reads from the code has the errors of the docs."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = runpy.run_path(str(ROOT / "tools" / "error_list.py"))


def test_the_list_has_each_error_that_the_page_prints():
    page = (ROOT / "docs" / "errors.md").read_text()
    printed = [
        block.splitlines()[0]
        for text in re.findall(r"^```text\n(.*?)^```", page, re.M | re.S)
        for block in text.strip().split("\n\n")
        if "\n  fix   " in block or "\n  where " in block
    ]
    patterns = [
        re.compile(re.sub(r"\\\{.*?\\\}", ".*", re.escape(message.what)), re.S)
        for message in LIST["messages"]()
    ]
    assert len(printed) > 30
    assert [line for line in printed if not any(p.match(line) for p in patterns)] == []


def test_variable_parts_stand_in_braces():
    tree = LIST["ast"].parse('f"axis {axis!r} of {mesh.names} has {len(x)} " + "ranks"')
    assert LIST["text_of"](tree.body[0].value) == "axis {axis} of {names} has {len} ranks"
