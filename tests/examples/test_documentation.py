"""The code of README and docs prints the text below it; links and the table of names are true.

EXPECTTEST_ACCEPT=1 writes into the pages what their code prints.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import torchgspmd as gspmd

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


def blocks(text: str) -> list[re.Match[str]]:
    """Return the blocks of a page; the groups of a match are its kind and its text."""
    return list(BLOCK.finditer(text))


WITH_CODE = [page for page in PAGES if any(b[1] == "python" for b in blocks(page.read_text()))]

WORDS_OF_2_9 = {
    "an `if`, a loop or a slice": "an `if` or a loop",
    "torch.compile does not support strided NestedTensor": (
        "aten._nested_tensor_from_tensor_list.default"
    ),
}


def outputs(page: str, script: Path) -> Iterator[tuple[re.Match[str], str]]:
    """Run the python blocks of a page in one namespace.

    Yields:
        Each text block that follows one, and what that one printed.
    """
    found, space = blocks(page), {"__name__": "readme"}
    for i, block in enumerate(found):
        if block[1] != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block[2], str(script), "exec"), space)
        if i + 1 < len(found) and found[i + 1][1] == "text":
            yield found[i + 1], re.sub(r"\S*readme\.py", "readme.py", printed.getvalue())


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_code_of_the_documentation_prints_what_is_shown(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A python block followed by a text block must print it."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["train.py"])  # errors show torchrun's command line
    text, shift = page.read_text(), 0
    script = tmp_path / "readme.py"  # a real file, so that marks have a line
    shown = list(outputs(text, script))
    assert shown
    if os.environ.get("EXPECTTEST_ACCEPT") and torch.__version__ >= "2.10":
        for block, printed in shown:
            start, end = (place + shift for place in block.span(2))
            text = f"{text[:start]}{printed.strip()}\n{text[end:]}"
            shift += len(printed.strip()) + 1 - (end - start)
        if text != page.read_text():
            page.write_text(text)
        return
    for block, printed in shown:
        if torch.__version__ < "2.10":  # which cannot trace slices, either, and says so
            printed = re.sub(r"; on torch 2\.9, for x\[:n\].*", "", printed)
            for theirs, now in WORDS_OF_2_9.items():
                printed = printed.replace(theirs, now)
        assert printed.strip() == block[2].strip()


def test_the_readme_is_short_and_every_link_leads_to_a_file() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as the site and GitHub name them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)", text, re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_anchor_is_a_heading() -> None:
    """`mkdocs build --strict` finds the same, in minutes."""
    for page in (*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"):
        for link, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", page.read_text()):
            target = page.parent / link if link else page
            assert target.suffix != ".md" or anchor in anchors(target), (
                f"{page.name}: {link}#{anchor}"
            )


def test_every_page_is_in_the_list_and_links_the_glossary() -> None:
    folder = ROOT / "docs"
    listed = re.findall(r"^\| \[.*?\]\((.*?)\)", (folder / "pages.md").read_text(), re.M)
    pages = {page.name: page.read_text() for page in folder.glob("*.md")}
    assert {*pages} - {*listed} == {"pages.md"}
    assert [name for name, text in pages.items() if "(glossary.md)" not in text] == ["glossary.md"]


def test_the_page_of_public_names_has_them() -> None:
    table = (ROOT / "docs" / "public_names.md").read_text()
    assert set(re.findall(r"^\| `(\w+)", table, re.M)) == set(gspmd.NAMES)
