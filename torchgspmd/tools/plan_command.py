"""`python -m torchgspmd plan FILE.py`: plan a file's example, without devices.

The file has a function `example(mesh, **options)` that returns (model, arguments). It runs on the
meta device, so that nothing is allocated.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..comm.hardware import PRESETS
from ..compiler.api import plan
from ..compiler.options import Option, Reader, settings_for
from ..compiler.plan import Plan
from ..errors import ShardingError
from ..layout.mesh import Mesh

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..compiler.option_types import PlanOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to a parser."""
    add = parser.add_argument
    add("file", type=Path, help="a file with example(mesh, **options) -> (model, arguments)")
    add("options", nargs="*", metavar="NAME=VALUE", help="options of example, such as layout=tp")
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
    """Return the text that the command prints."""
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
    """Plan a file's example.

    Args:
        file: A Python file with a function `example(mesh, **options)`.
        mesh: The devices, such as "data=64,model=32".
        options: Options for example, each "name=value".
        of_plan: Options for plan. grad is True by default if the example is a module.

    Returns:
        The plan.

    Raises:
        ShardingError: The file has no such function.
    """
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
    """Return the dtype with a name, such as bfloat16."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"torch has no dtype '{name}'")
    return dtype


def _option(text: str) -> tuple[str, Any]:
    """Return an option's name and value; digits are a number, also with a point."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ShardingError(f"'{text}' is no option of example", fix="write name=value")
    if value.replace(".", "", 1).isdecimal():
        return name, float(value) if "." in value else int(value)
    return name, value
