"""InternalError: a pass has failed, which no program may cause. With a file for a bug report.

The file has the captured graph with its marks, the mesh, the options and the versions, as text. It
has no tensor values.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
import traceback
from dataclasses import fields

import torch

from ..capture import ARGUMENT, refused_operation
from ..errors import ShardingError
from .printer import graph_text
from .program import Program, Request

VARIABLE = "TORCHGSPMD_BUG_REPORT"  # the file to write
_OWN = "torchgspmd::"
# Fields of a Request that the report has by itself, and what no program is described by.
_BESIDE = frozenset(
    {"captured", "mesh", "arguments", "expand", "constants", "shared", "stored", "of_module"}
)


class InternalError(AssertionError):
    """A fault in torchgspmd: a pass failed on a program that it should have taken.

    Args:
        error: The pass's exception.
        name: The pass's name.
        program: The program, as the pass found it.
    """

    def __init__(self, error: BaseException, name: str, program: Program) -> None:
        request = program.request
        kind, text = type(error).__name__, str(error)
        command = shlex.join(["python", *sys.argv])
        lines = [
            f"internal error in pass {name}: {kind}: {text}",
            f"  features  {', '.join(features(request))}",
            "  why       a fault of torchgspmd: a program is right, or refused by a ShardingError",
            f"  report    {VARIABLE}=bug.txt {command}",
            "            writes what to attach: graph, marks, mesh and versions, no weights",
        ]
        if path := os.environ.get(VARIABLE):
            with open(path, "w") as file:
                file.write(report(error, name, request))
            lines[3:] = [f"  report    {path}"]
        super().__init__("\n".join(lines))


def reported(error: Exception, name: str, program: Program) -> Exception:
    """Return the error to raise in place of a pass's own."""
    # Errors of the user's program, and the machine's memory, are no faults of ours.
    if isinstance(error, (ShardingError, InternalError, MemoryError)):
        return error
    if (refused := refused_operation(program.request.captured.graph)) is not None:
        return refused
    return InternalError(error, name, program)


def features(request: Request) -> list[str]:
    """Return a program's features: its mesh, options that are set, operations from torchgspmd."""
    targets = {str(getattr(n.target, "name", str)()) for n in request.captured.graph.nodes}
    operations = sorted(
        t.removeprefix(_OWN).partition(".")[0] for t in targets if t.startswith(_OWN)
    )
    return [f"mesh {request.mesh}", *_options(request), *operations]


def _options(request: Request) -> list[str]:
    plain = Request(request.captured, request.mesh, regather="auto")
    values = {
        each.name: (getattr(request, each.name), getattr(plain, each.name))
        for each in fields(Request)
        if each.name not in _BESIDE
    }
    return [
        f"{name}={_text(value)}" for name, (value, default) in values.items() if value != default
    ]


def _text(value: object) -> str:
    return str(getattr(value, "name", value))


def report(error: BaseException, name: str, request: Request) -> str:
    """Return a bug report as text."""
    captured = request.captured
    arguments = iter(request.arguments)
    inputs = [
        f"  {each.kind} {each.name}: {each.dtype} {list(each.shape)} mark {each.mark} spec "
        f"{next(arguments, None) if each.kind == ARGUMENT else request.stored.get(each.name)}"
        for each in captured.inputs
    ]
    return "\n".join(
        [
            f"pass {name}",
            f"versions: torch {torch.__version__}, Python {platform.python_version()}",
            f"features: {', '.join(features(request))}",
            "".join(traceback.format_exception(type(error), error, error.__traceback__)),
            "inputs",
            *inputs,
            graph_text(captured.graph, request.mesh),
            "",
        ]
    )
