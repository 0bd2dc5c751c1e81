"""`torchgspmd plan FILE.py`, `torchgspmd explicit FILE.py`: plan a file's example, without devices.

The file has a function `example(mesh, **options)` that returns (model, arguments). It runs on the
meta device, so that nothing is allocated.
"""

from __future__ import annotations

import argparse
import ast
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..comm.hardware import PRESETS
from ..compiler.agreement import row_for
from ..compiler.api import plan
from ..compiler.fix_candidates import ExchangeSite
from ..compiler.golden import place_text
from ..compiler.options import Option, Reader, settings_for
from ..compiler.plan import Plan
from ..errors import ShardingError
from ..fx_passes.units import short_source
from ..layout.mesh import Mesh

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..compiler.option_types import PlanOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_example(
        parser, "a file with example(mesh, **options) -> (model, arguments)", ", such as layout=tp"
    )
    add("--mesh", required=True, help="the devices, such as data=64,model=32")
    add("--hardware", default="h100", choices=sorted(PRESETS), help="for the times")
    add_options(parser, "plan")
    add("--forward", action="store_true", help="without the backward")
    add("--verify", action="store_true", help="check each value against one device")
    add("--print", action="store_true", help="print the partitioned graph too")
    add("--explain", metavar="NAME", help="tell why a value has its layout")
    add("--html", type=Path, metavar="FILE", help="write a page that shows the plan")
    add("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto")
    add("--save", type=Path, metavar="FILE", help="write the plan, for Plan.load and --diff")
    add("--diff", type=Path, metavar="FILE", help="compare with a plan that was written")


def add_example(
    parser: argparse.ArgumentParser, file: str = "as for `plan`", such: str = ""
) -> None:
    """Add the file, and the options of its example."""
    parser.add_argument("file", type=Path, help=file)
    parser.add_argument(
        "options", nargs="*", metavar="NAME=VALUE", help=f"options of example{such}"
    )


def add_options(parser: argparse.ArgumentParser, reader: Reader) -> None:
    """Add those options in the table that a function reads."""
    for _, row in settings_for(reader):
        if how := _argument(row):
            name = f"--{row.name.replace('_', '-')}"
            parser.add_argument(name, help=row.doc.replace("%", "%%"), **how)


def given_options(args: argparse.Namespace, reader: Reader) -> dict[str, Any]:
    """Return those options that the command line has."""
    given: dict[str, Any] = {}
    for group, row in settings_for(reader):
        value = vars(args)[row.name] if _argument(row) else None
        if value is not None:  # None: not on the command line, so plan's default holds.
            (given.setdefault(group, {}) if group else given)[row.name] = value
    return given


def run(args: argparse.Namespace) -> str:
    options = given_options(args, "plan")
    result = plan_file(args.file, args.mesh, args.options, grad=not args.forward, **options)
    if args.trace:
        args.trace.write_text(result.trace(args.hardware))
    if args.save:
        result.save(args.save)
    if args.html:
        # model.py is in a folder that names the model.
        name = args.file.stem if args.file.stem != "model" else args.file.resolve().parent.name
        result.html(args.html, args.hardware, " ".join([name, *args.options]))
    return "\n\n".join(
        [
            *([str(result)] if args.print else []),
            *([result.explain(args.explain, costs=True)] if args.explain else []),
            str(result.report(args.hardware)),
            *([str(result.verify())] if args.verify else []),
            *([str(Plan.load(args.diff).diff(result, args.hardware))] if args.diff else []),
        ]
    )


def plan_file(file: Path, mesh: str, options: list[str], **of_plan: Unpack[PlanOptions]) -> Plan:
    """Plan a file's example. options: of the example, each "name=value"."""
    devices = Mesh.parse(mesh)
    model, arguments = example_of(file, devices, options)
    # A plain function has no parameters to take gradients for.
    of_plan["grad"] = of_plan.get("grad", True) and isinstance(model, nn.Module)
    return plan(model, *arguments, mesh=devices, **of_plan)


def example_of(file: Path, mesh: Mesh, options: list[str]) -> tuple[Any, tuple]:
    """Return the model and arguments that a file's `example` makes, on the meta device."""
    # As `python FILE` does: the file may import its neighbors.
    sys.path.insert(0, str(file.resolve().parent))
    try:
        example = runpy.run_path(str(file)).get("example")
    finally:
        sys.path.pop(0)
    if example is None:
        raise ShardingError(
            f"{file} has no function 'example'",
            fix="write def example(mesh): return model, (tokens, targets)",
        )
    with torch.device("meta"):
        return example(mesh, **dict(map(_option, options)))


def _argument(row: Option) -> dict[str, Any] | None:
    """Return how the command line takes a plan option; None if it does not."""
    if row.choices:
        return {"choices": row.choices}
    if row.name == "strict":
        return {"action": "store_const", "const": True}
    if row.type.startswith("torch.dtype"):
        return {"type": _dtype, "metavar": "DTYPE"}
    return {"nargs": "+", "metavar": "PASS"} if row.name == "skip_passes" else None


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"torch has no dtype '{name}'")
    return dtype


def _option(text: str) -> tuple[str, object]:
    """Return an option's name and value; digits are a number, also with a point."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ShardingError(f"'{text}' is no option of example", fix="write name=value")
    if value.replace(".", "", 1).isdecimal():
        return name, float(value) if "." in value else int(value)
    return name, value


# Exchanges, named in the source.


class Unnamed(NamedTuple):
    """Like exchanges without a name: where, the layout, a value and how many there are.

    line: of the source; "" for an input. row: agrees to it in place of a name.
    """

    line: str
    spec: str
    value: str
    count: int
    row: str

    def __str__(self) -> str:
        # A weight may have no line in the source: a linear layer reads its own.
        place = f"{self.line}  %{self.value}" if self.line else self.value
        return f'{place}  x {self.count}: gspmd.reshard(..., "{self.spec}"), or "{self.row}"'


def add_explicit_arguments(parser: argparse.ArgumentParser) -> None:
    add_example(parser)
    parser.add_argument("--mesh", required=True, help="the devices, such as data=8,model=8")
    parser.add_argument("--write", action="store_true", help="write the lines into the file")
    add_options(parser, "plan")


def run_explicit(args: argparse.Namespace) -> str:
    """Return the lines that name each exchange of a program in its source.

    With --write they are written into the file. A line stays only if the program, planned again,
    sends the same bytes and has fewer exchanges without a name. The rest is printed, to be written
    by hand.
    """

    def planned(file: Path) -> Plan:
        options = given_options(args, "plan")
        return plan_file(file, args.mesh, args.options, **options)

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
    left = unnamed(plan)
    rows = ["named", "backward *", *dict.fromkeys(each.row for each in left)]
    return "\n".join(
        [
            *(f"written: {line}" for line in written),
            *(str(each).replace(_copy(args.file).name, args.file.name) for each in left),
            f"{len(left)} left to name, or to agree to: communication={json.dumps(rows)}"
            if left
            else 'each exchange of the forward has a name: pass communication="explicit"',
        ]
    )


def unnamed(plan: Plan) -> list[Unnamed]:
    """List the exchanges in the forward that the source does not name."""
    inputs = {n.name for n in plan.captured.graph.find_nodes(op="placeholder")}
    found: dict[tuple[str, ...], Unnamed] = {}
    for each in plan.collectives:
        move = None if each.backward or each.named else ExchangeSite.of(plan, each)
        if move is None:
            continue
        is_input = each.value in inputs
        line = "" if is_input else short_source(each.source) or each.module
        value = place_text(each.module) if is_input else each.value
        row = Unnamed(line, str(move.after), value, each.count, row_for(each))
        key = (line or value, row.spec)
        earlier = found.get(key)
        found[key] = row if earlier is None else earlier._replace(count=earlier.count + row.count)
    return [*found.values()]


def _next(
    plan: Plan, text: str, file: Path, planned: Callable[[Path], Plan]
) -> tuple[str, Plan, str] | None:
    """Return the text with one more exchange named, its plan, and the line."""
    before = sum(each.count for each in unnamed(plan))
    copy = _copy(file)
    for each in unnamed(plan):
        name, _, number = each.line.rpartition(":")
        if Path(name).name not in (file.name, copy.name):
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
    imports = (node.names for node in ast.walk(tree) if isinstance(node, ast.Import))
    known = (alias for names in imports for alias in names if alias.name == "torchgspmd")
    module = next((alias.asname or alias.name for alias in known), None)
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
