"""Print every error message of the package with its fix, as a page: read from the code.

    python tools/error_list.py [WORD]     only messages with a word

A part of a message that depends on the program stands in braces, as in the code. The site of docs/
has this page beside errors.md, which makes the frequent errors and cures them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[1] / "torchgspmd"
# Parsers raise ValueError, and others wrap it.
MAKERS = {"ShardingError", "ShardingError.here", "RankError", "ValueError"}
NAMES = {maker.rpartition(".")[2] for maker in MAKERS}  # unparse is slow


class Message(NamedTuple):
    place: str  # file of the package
    what: str
    why: str
    fix: str


def text_of(node: ast.expr | None) -> str:
    """Return a text as it is written, with its variable parts in braces; "" for no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            text_of(part) if isinstance(part, ast.Constant) else f"{{{name_of(part)}}}"
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return f"{{{name_of(node)}}}" if node is not None else ""


def name_of(node: ast.AST) -> str:
    """Return a short name of an expression: its last name, or three dots."""
    value = node.value if isinstance(node, ast.FormattedValue) else node
    if isinstance(value, ast.Call):
        value = value.func
    if isinstance(value, ast.Attribute):
        return value.attr
    return value.id if isinstance(value, ast.Name) else "..."


def messages() -> Iterator[Message]:
    """Yield the errors of the package whose text is written where they are made."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args or name_of(node) not in NAMES:
                continue
            if ast.unparse(node.func) in MAKERS:
                options = {each.arg: each.value for each in node.keywords}
                texts = (node.args[0], options.get("why"), options.get("fix"))
                message = Message(str(path.relative_to(PACKAGE)), *map(text_of, texts))
                if set(message.what) - set("{}.") and " " in message.what:
                    yield message


def code(text: str) -> str:
    """Return a text as a piece of code of Markdown."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def page(word: str = "") -> str:
    """Return the list as Markdown, by folder, in the order of the alphabet."""
    lines = [
        "# Every error",
        "",
        "The texts are those of the code. A part in braces depends on your program.",
    ]
    found = sorted({m for m in messages() if word in " ".join(m)})
    for folder in dict.fromkeys(m.place.partition("/")[0] for m in found):
        lines += ["", f"## {folder}", ""]
        for each in (m for m in found if m.place.partition("/")[0] == folder):
            lines.append(f"* {code(each.what)}")
            lines += [f"    * why: {code(each.why)}"] * bool(each.why)
            lines += [f"    * fix: {code(each.fix)}"] * bool(each.fix)
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


if __name__ == "__main__":
    print(page(*sys.argv[1:2]), end="")
