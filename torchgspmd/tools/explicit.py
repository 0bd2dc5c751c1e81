"""`torchgspmd explicit FILE`: the lines that name each exchange of a program in its source.

With --write they are written into the file. A line stays only if the program, planned again, sends
the same bytes and has fewer exchanges without a name. The rest is printed, to be written by hand.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..compiler.fix_candidates import ExchangeSite
from ..compiler.plan import Plan
from ..fx_passes.units import short_source
from . import plan_command


class Unnamed(NamedTuple):
    """Like exchanges without a name: the line, the layout, a value and how many there are."""

    line: str
    spec: str
    value: str
    count: int
    is_input: bool

    def __str__(self) -> str:
        if self.is_input:
            return f"%{self.value}  at the beginning of forward: gspmd.reshard(x, {self.spec!r})"
        return f"{self.line}  %{self.value}  x {self.count}: gspmd.reshard(..., {self.spec!r})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to a parser."""
    parser.add_argument("file", type=Path, help="as for `plan`")
    parser.add_argument("options", nargs="*", metavar="NAME=VALUE", help="options of example")
    parser.add_argument("--mesh", required=True, help="the devices, such as data=8,model=8")
    parser.add_argument("--write", action="store_true", help="write the lines into the file")
    plan_command.add_options(parser, "plan")


def run(args: argparse.Namespace) -> str:
    """Return the text that the command prints."""

    def planned(file: Path) -> Plan:
        options = plan_command.given_options(args, "plan")
        return plan_command.plan_file(file, args.mesh, args.options, **options)

    plan, written = planned(args.file), []
    if args.write:
        text = args.file.read_text(encoding="utf-8")
        for _ in range(len(plan.collectives)):
            step = _next(plan, text, args.file, planned)
            if step is None:
                break
            text, plan, line = step
            written.append(line)
        args.file.write_text(text, encoding="utf-8")
    left = [str(each).replace(_copy(args.file).name, args.file.name) for each in unnamed(plan)]
    return "\n".join(
        [
            *(f"written: {line}" for line in written),
            *left,
            f"{len(left)} left to name"
            if left
            else 'each exchange of the forward has a name: pass communication="explicit"',
        ]
    )


def unnamed(plan: Plan) -> list[Unnamed]:
    """List the exchanges in the forward that the source does not name."""
    inputs = {n.name for n in plan.captured.graph.find_nodes(op="placeholder")}
    found: dict[tuple[str, str], Unnamed] = {}
    for each in plan.collectives:
        move = None if each.backward or each.named else ExchangeSite.of(plan, each)
        if move is None:
            continue
        line = short_source(each.source) or each.module
        row = Unnamed(line, str(move.after), each.value, each.count, each.value in inputs)
        earlier = found.get((line, row.spec))
        found[line, row.spec] = (
            row if earlier is None else earlier._replace(count=earlier.count + row.count)
        )
    return [*found.values()]


def _next(
    plan: Plan, text: str, file: Path, planned: Callable[[Path], Plan]
) -> tuple[str, Plan, str] | None:
    """Return the text with one more exchange named, its plan, and the line."""
    before = sum(each.count for each in unnamed(plan))
    copy = _copy(file)
    for each in unnamed(plan):
        name, _, number = each.line.rpartition(":")
        if each.is_input or Path(name).name not in (file.name, copy.name):
            continue
        for edited, line in _edits(text, int(number), each.spec):
            copy.write_text(edited, encoding="utf-8")
            try:
                with suppress(Exception):  # an edited program may fail in any way
                    other = planned(copy)
                    less = sum(row.count for row in unnamed(other)) < before
                    if less and other.sent_bytes <= plan.sent_bytes:
                        return edited, other, line
            finally:
                copy.unlink()
    return None


def _copy(file: Path) -> Path:
    """Return the file for trials: beside the first one, whose neighbors it imports."""
    return file.with_name(f"{file.stem}_explicit_{file.suffix}")


def _edits(text: str, number: int, spec: str) -> Iterator[tuple[str, str]]:
    """Yield texts in which an expression on a line is named, the outermost first, and the line."""
    tree = ast.parse(text)
    module = _imported_as(tree)
    expressions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.Call, ast.BinOp))
        and node.lineno <= number <= (node.end_lineno or 0)
        and not ast.unparse(node).startswith(f"{module or 'gspmd'}.reshard(")
    ]
    lines = text.splitlines(keepends=True)
    for node in expressions:
        start = _offset(lines, node.lineno, node.col_offset)
        end = _offset(lines, node.end_lineno or 0, node.end_col_offset or 0)
        call = f'{module or "gspmd"}.reshard({text[start:end]}, "{spec}")'
        edited = text[:start] + call + text[end:]
        if module is None:
            first = next(n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom)))
            at = _offset(lines, first.end_lineno or 0, 0) + len(lines[(first.end_lineno or 1) - 1])
            edited = edited[:at] + "import torchgspmd as gspmd\n" + edited[at:]
        yield edited, f"{number}: {call}"


def _offset(lines: list[str], line: int, column: int) -> int:
    """Return the place of a line and a column, in bytes there, in the text."""
    before = lines[line - 1].encode()[:column].decode()
    return sum(map(len, lines[: line - 1])) + len(before)


def _imported_as(tree: ast.Module) -> str | None:
    """Return the name by which a module knows torchgspmd."""
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.Import) else ():
            if alias.name == "torchgspmd":
                return alias.asname or alias.name
    return None
