"""Run the pipeline rows on a program: alternatives, repetition, loop bodies, halves.

After each pass the runner adds to the program's seconds, prints the changes (TORCHGSPMD_DUMP=2) and
verifies the graph (TORCHGSPMD_CHECK=1).
"""

from __future__ import annotations

import copy
import difflib
import os
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from functools import partial
from itertools import dropwhile
from typing import Any

import torch

from ..capture import ARGUMENT, refused_operation
from ..capture.trace_context import without_gc
from ..errors import ShardingError
from .loop_call import loop_calls
from .pass_types import Alternatives, Pass, Step
from .printer import graph_text
from .program import Program, Request
from .stages import CAPTURED, Stage, drop_later_keys, verifies, verify


def dump_level() -> int:
    """Return the level in TORCHGSPMD_DUMP, 0 without one: prints on standard error.

    1: the final graph. 2: the changes of every pass, too. 3: why each value has its layout, too.
    """
    text = os.environ.get("TORCHGSPMD_DUMP") or "0"
    if not text.isdecimal():
        raise ShardingError.here(
            f"TORCHGSPMD_DUMP is {text!r}",
            fix="set it to 1 (the final graph), 2 (each pass's changes) or 3 (reasons, too)",
        )
    return int(text)


def dump_pass(program: Program, name: str) -> None:
    """Print a pass's changes, or the whole program at its first stage and on one device."""
    if dump_level() < 2:
        return
    before, text = program.printed.splitlines(), str(program).splitlines()
    changes = [*difflib.unified_diff(before, text, "before", name, lineterm="", n=0)]
    # The first line tells global programs and those of a device apart: a diff between them would
    # list every line.
    is_first = before[:1] != text[:1]
    dump_text("\n".join(text if is_first else changes or ["no change"]), f"after {name}")
    program.printed = "\n".join(text)


def dump_text(text: str, title: str) -> None:
    """Print a text below a title on standard error."""
    print(f"---- torchgspmd: {title}\n{text}", file=sys.stderr)


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


_observer: ContextVar[Callable[[str, Program], None] | None] = ContextVar("observer", default=None)

_ABOUT = 1.05  # Copies and views differ by less between two ways; replicated products do not.


@without_gc()
def run_steps(program: Program, steps: Sequence[Step], until: Stage | None = None) -> Program:
    """Return the program after the steps that follow its stage.

    until: the stage to stop at, as soon as a step reaches it.
    """
    # At the start only: a program that goes on has been printed before.
    if (first := program.stage) == CAPTURED:
        _inspect(program, "capture")
    for step in dropwhile(lambda step: step.needs != first, steps):
        if program.stage == until:
            break
        if isinstance(step, Pass):
            _run_pass(step, program, steps)
        else:
            program = _run_alternatives(step, program)
    return program


def _run_alternatives(step: Alternatives, program: Program) -> Program:
    """Run all passes, then without one at a time; return the program that is taken."""
    ways: list[Program] = []
    before: dict[str, Program] = {}  # pass -> the program before it, in the first way
    for left_out in step.order(program):
        # A pass that changed nothing in the first way: leaving it out would give the same program.
        if ways and left_out is not None and left_out not in ways[0].changed:
            continue
        passes = [each for each in step.passes if each.name != left_out]
        way, done = copy.copy(program), 0
        way.known = None  # the way before may have changed this graph
        if left_out is not None and left_out in before:
            way, done = before[left_out], [p.name for p in step.passes].index(left_out)
        for number, each in enumerate(passes[done:], done + 1):
            # A fork is a copy of the graph, made only where a second way will start from it.
            has_work = bool(ways) or each.changes is None or each.changes(way)
            if not ways and each.changes is not None and has_work:
                before[each.name] = way.fork()
            way.behind = partial(_run_passes, passes[number:])
            _run_pass(each, way, passes, has_work)
        limits = [each.limit for each in step.passes if each.name == left_out]
        if ways and any(limit(way) > _ABOUT * limit(ways[0]) for limit in limits):
            continue
        ways.append(way)
        if step.enough(way):
            break
    return min(ways, key=step.cost) if step.cost else ways[-1]


def _run_passes(passes: Sequence[Pass], program: Program) -> None:
    for each in passes:
        _run_pass(each, program, passes)


def _run_pass(step: Pass, program: Program, steps: Sequence[Step], has_work: bool = True) -> None:
    """Run a pass if it has work, then those that have to run again if it changed the program."""
    if not step.when(program) or step.optional and program.request.skip_passes >= {*step.optional}:
        return
    siblings = [each for each in steps if isinstance(each, Pass)]
    again = [each for name in step.again for each in siblings if each.name == name]
    for half in (*_halves(program), *(_bodies(program) if step.in_loops else ())):
        if half.stage != step.needs:
            raise AssertionError(
                f"{step.name} needs stage {step.needs.name}, not {half.stage.name}"
            )
        begin = time.perf_counter()
        graph = _run_on(step, half) if has_work else None
        program.seconds[step.name] = (
            program.seconds.get(step.name, 0.0) + time.perf_counter() - begin
        )
        half.stage = step.ensures
        if graph is not None:
            if half.call is not None:
                half.call.graph = graph
            half.graph, half.changed = graph, half.changed | {step.name}
            half.known = None
            if again:
                # The changed graph is at an earlier stage again: later metadata would be out of
                # date.
                half.stage = again[0].needs
                drop_later_keys(graph, half.stage)
    _inspect(program, step.name)
    for each in again if program.stage != step.ensures else ():
        _run_pass(each, program, steps)


def _run_on(step: Pass, program: Program) -> Any:
    """Run a pass once; an exception that is no ShardingError becomes an InternalError."""
    try:
        return step.run(program)
    except Exception as error:
        if (raised := reported(error, step.name, program)) is error:
            raise
        raise raised from error


def _inspect(program: Program, name: str) -> None:
    """Print and verify a program after the named pass, if the environment says so."""
    if program.is_trial:
        return
    for half in _halves(program):
        dump_pass(half, name)
        if verifies():
            try:
                verify(half.graph, half.stage, half.mesh)
            except AssertionError as error:
                raise AssertionError(f"{error}\n  behind pass {name}") from error
    if (look := _observer.get()) is not None:
        look(name, program)


@contextmanager
def observing(look: Callable[[str, Program], None]) -> Generator[None]:
    """Call a function with the name of each pass, and the program that it leaves."""
    token = _observer.set(look)
    try:
        yield
    finally:
        _observer.reset(token)


def _halves(program: Program) -> tuple[Program, ...]:
    """Return the forward and the backward, or the program alone while it has both."""
    return (program, program.backward) if program.backward else (program,)


def _bodies(program: Program) -> Iterator[Program]:
    """Yield the loop bodies in a program, inner ones first, at its stage."""
    for half in _halves(program):
        calls = loop_calls(half.graph) if half.has_bodies else ()
        for each in (each for _, call in calls for each in call.bodies):
            body = copy.copy(half)
            body.graph, body.call, body.backward = each.graph, each, None
            yield from _bodies(body)
            yield body
