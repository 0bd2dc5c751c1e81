"""Print how plain the texts are: pages, docstrings and comments, against goals.

    python tools/words.py                 all figures; exit 1 if one misses its goal
    python tools/words.py --list what     the places of one figure: what, begins, sentences, columns

Texts are the prose of pages (code blocks apart), the docstrings of the package, and its comments. A
sentence ends with a full stop, a question mark or a colon at the end of its paragraph. Code in it
counts as one word. Rows of tables and code may be wide.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torchgspmd"
MOST_WORDS, MOST_COLUMNS = 30, 120
BEGINS = re.compile(r"(Return|Yield) what\b|Let |What ")
SECTION = re.compile(r"(Args|Returns|Raises|Yields|Example|Examples|Attributes|Source):$")


class Text(NamedTuple):
    """A paragraph, a list item, a cell of a table or an entry of a section, and its line."""

    where: str
    words: str


class Figure(NamedTuple):
    key: str
    name: str
    value: float
    goal: float
    places: list[str]

    @property
    def is_met(self) -> bool:
        return self.value >= self.goal if self.key == "comments" else self.value <= self.goal


def pages() -> list[Path]:
    names = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
    folders = (ROOT / "docs").glob("*.md"), PACKAGE.rglob("README.md")
    return [*(ROOT / name for name in names), *sorted(p for each in folders for p in each)]


def texts_of_page(path: Path) -> Iterator[Text]:
    """Yield the prose of a page: without fenced and indented code, cells of tables one by one."""
    name, fenced, block, start = str(path.relative_to(ROOT)), False, [], 0
    for number, line in enumerate([*path.read_text().splitlines(), ""], 1):
        if fence := line.startswith("```"):
            fenced = not fenced
        starts = re.match(r"\s*([*-]|\d+\.) ", line)
        is_code = fenced or fence or (line.startswith("    ") and not block)
        if block and (is_code or not line.strip() or starts or line[0] in "#|"):
            yield Text(f"{name}:{start}", " ".join(block))
            block = []
        if is_code or not line.strip() or re.match(r"\|[-:| ]+\|$", line):
            continue
        if line[0] in "|#":
            cells = re.split(r"(?<!\\)\|", line.strip("| ")) if line[0] == "|" else [line]
            yield from (Text(f"{name}:{number}", cell.strip("# ")) for cell in cells)
            continue
        start = start if block else number
        block.append(line.strip().removeprefix("* ").removeprefix("- "))


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def texts_of_docstring(where: str, docstring: str) -> Iterator[Text]:
    """Yield paragraphs and entries of sections; lines that are indented otherwise are code."""
    block: list[str] = []
    indent, in_example = 0, False
    for line in [*docstring.splitlines(), ""]:
        depth = len(line) - len(line.lstrip())
        section = SECTION.match(line.strip())
        entry = indent and depth == indent and re.match(r"\s*[\w*., ]+: ", line)
        is_picture = re.search(r"\S {2,}\S", line)  # columns, such as a program before and after
        if block and (not line.strip() or section or entry or is_picture or depth < indent):
            yield Text(where, " ".join(block))
            block = []
        if section and not depth:
            indent, in_example = 4, "Example" in line
        elif line.strip() and not depth:
            indent, in_example = 0, False
        is_prose = line.strip() and not (section or in_example or is_picture)
        if is_prose and (not depth or indent):
            block.append(line.strip())


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def all_docstrings() -> list[tuple[str, str]]:
    return [
        (f"{path.relative_to(ROOT)}:{line}", text)
        for path in sources()
        for line, text in docstrings(path)
    ]


def all_texts() -> list[Text]:
    of_pages = (text for path in pages() for text in texts_of_page(path))
    of_code = (text for each in all_docstrings() for text in texts_of_docstring(*each))
    return [*of_pages, *of_code]


def words_of(text: str) -> list[str]:
    """Return the words of a text, of which a piece of code and a link are one each."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"(`+).+?\1", "code", text)
    return re.findall(r"[A-Za-z0-9][\w'./%,-]*", text)


def sentences(text: str) -> list[str]:
    """Split a text into its sentences; a stop inside of code or of a number ends none."""
    code = re.sub(r"(`+).+?\1|\([^()]*\)", lambda m: m[0].replace(". ", " "), text)
    return re.split(r"(?<=[.?!])['\")\]*]*\s+(?=[A-Z`*\[\"'(]|[\w*]+: )", code)


def comments(path: Path) -> Iterator[int]:
    """Yield the lines of comments, without directives to tools."""
    for token in tokenize.generate_tokens(StringIO(path.read_text()).readline):
        directive = re.match(r"#\s*(noqa|pyright|type:|fmt|-{3,})", token.string)
        if token.type == tokenize.COMMENT and not directive:
            yield token.start[0]


def wide_lines(path: Path) -> Iterator[str]:
    fenced = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        fenced ^= line.startswith("```")
        if len(line) > MOST_COLUMNS and not fenced and not line.startswith(("|", "    ")):
            yield f"{path.relative_to(ROOT)}:{number} {len(line)} columns"


def places_of(word: str, texts: list[Text]) -> list[str]:
    found = re.compile(rf".{{0,30}}\b{word}\b.{{0,30}}", re.I)
    return [f"{t.where} ...{m[0]}..." for t in texts for m in found.finditer(t.words)]


def figures() -> Iterator[Figure]:
    texts = all_texts()
    count = sum(len(words_of(text.words)) for text in texts)
    for word, goal in (("what", 1), ("of", 23)):
        found = places_of(word, texts)
        yield Figure(word, f"'{word}' per 1,000 words", 1000 * len(found) / count, goal, found)
    begins = [f"{where} {t[:60]}" for where, t in all_docstrings() if BEGINS.match(t)]
    yield Figure("begins", "docstrings: Return what, Let, What", len(begins), 0, begins)
    long = [
        f"{text.where} {len(words_of(each))} words: {each[:70]}"
        for text in texts
        for each in sentences(text.words)
        if len(words_of(each)) > MOST_WORDS
    ]
    yield Figure("sentences", f"sentences of more than {MOST_WORDS} words", len(long), 0, long)
    wide = [each for path in pages() for each in wide_lines(path)]
    yield Figure("columns", f"lines of pages over {MOST_COLUMNS} columns", len(wide), 0, wide)
    lines = sum(len(path.read_text().splitlines()) for path in sources())
    said = [f"{p.relative_to(ROOT)}:{line}" for p in sources() for line in comments(p)]
    yield Figure("comments", "comments, % of lines (at least)", 100 * len(said) / lines, 3, said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", metavar="FIGURE", help="print the places of a figure")
    options = parser.parse_args()
    found = list(figures())
    for each in found:
        if each.key == options.list:
            print("\n".join(each.places))
    for each in found:
        verdict = "ok    " if each.is_met else "missed"
        print(f"{verdict} {each.key:10} {each.name:42} {each.value:8.1f} of {each.goal}")
    sys.exit(not all(each.is_met for each in found))


if __name__ == "__main__":
    main()
