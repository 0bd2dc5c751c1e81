"""Where this process's threads are: in which program and collective, at which line."""

from __future__ import annotations

import gc
import linecache
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain, compress, repeat, starmap, takewhile
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

from torch import fx

from ..errors import line_in_file
from .profiled_code import NodeLine, lines_of, named_code
from .rank_failure import COMPARISON, Status

_STACK = 12  # Stack entries that a report has.
_TRIES, _UNKNOWN = 5, -1  # to read one moment; meetings of a rank that did not hold still
# Waits outside programs, by a frame's file and function, innermost first.
_WAITS = {
    ("roll_call.py", "begin"): COMPARISON,
    ("roll_call.py", "finish"): COMPARISON,
    ("call_comparison.py", "differs"): COMPARISON,
    ("shared_plan.py", "broadcast_text"): "the plan of rank 0",
    ("_functional_collectives.py", "wait_tensor"): "a collective of a DTensor",
    ("optimizers.py", "_reduced"): "the norms of DTensors",
    ("optimizers.py", "_found_on_any"): "the infinities in gradients",
    ("call.py", "arrived"): "the messages between stages",
    ("call.py", "finish"): "the messages between stages",
    ("distributed_c10d.py", None): "torch.distributed's ",
}
_NOWHERE = NodeLine("", "", "", "")
# Calls that look are no place to tell.
_OWN = tuple(__file__.replace("places.py", name) for name in ("places.py", "watcher.py"))
_ONCE: list[tuple[()]] = [()]  # starmap calls a function once
_ROW = attrgetter("f_code.co_filename", "f_lineno", "f_code.co_name")


class StackRow(NamedTuple):
    """A call in a thread's stack: its file, line and function."""

    file: str
    line: int
    function: str


Stack = Sequence[StackRow]  # the innermost call first


def watch(function: Any) -> str:
    """Return the name of a program's code, by which frames lead to its nodes while it lives.

    function: a ProfiledCode, or a GraphModule's forward. Code that torch.compile compiled has
    no nodes that run.
    """
    function = getattr(function, "plain", function)
    is_graph = isinstance(getattr(function, "__self__", None), fx.GraphModule)
    return named_code(function) if is_graph else ""


def status(read: Callable[[], Status], program: str) -> tuple[Status, object]:
    """Return this rank's status, and an object that is equal while it waits there.

    The main thread runs meanwhile. Its counts and its stack are of one moment if the counts are the
    same before the stack is read and after.

    read: returns its counts, step and phase. program: the one that began last.
    """
    for _ in range(_TRIES):
        now = read()
        found, place = _status_at(now, program)
        if read() == now:
            return found, place
    return replace(found, waits_in="", met=_UNKNOWN), place


def _status_at(now: Status, program: str) -> tuple[Status, object]:
    main, found = threading.main_thread().ident or 0, stacks()
    if threading.get_ident() != main:
        found.pop(threading.get_ident(), None)
    # The main thread first: if it waits, the user's line is the one to tell.
    for thread in sorted(found, key=lambda t: t != main):
        status = _status_of(now, program, found[thread])
        if status.waits_in:
            return status, (thread, found[thread], status)
    status = _status_of(now, program, found.get(main, ()))
    return status, status


def status_of_error(now: Status, program: str, error: BaseException) -> Status:
    """Return this rank's status when an error was raised."""
    trace, rows = error.__traceback__, []
    while trace is not None:
        code = trace.tb_frame.f_code
        rows.append(StackRow(code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    around = stacks().get(threading.get_ident(), ())
    return _status_of(now, program, [*rows[::-1], *around])


def _status_of(now: Status, program: str, stack: Stack) -> Status:
    """Return a thread's status, by its stack."""
    waits_in, at, last = "", "", ""
    for name, line, function in stack:
        if (lines := lines_of(name)) is not None:
            row = lines.rows.get(line, _NOWHERE)
            waits_in, at, last = row.kind or waits_in, row.source, row.last
            break
        short = name.rpartition("/")[2]
        found = _WAITS.get((short, function), "")
        if not found and not waits_in and (short, None) in _WAITS:
            found = _WAITS[short, None] + function
        waits_in = found or waits_in
    at = at or next((t for row in stack if (t := line_in_file(row.file, row.line))), "")
    begun = lines_of(program)
    return replace(now, waits_in=waits_in, at=at, last=last or (begun.last if begun else ""))


def stack_of_main() -> tuple[str, ...]:
    """Return the main thread's innermost calls, the last one last."""
    rows = []
    for file, line, function in stacks().get(threading.main_thread().ident or 0, ()):
        if text := linecache.getline(file, line).strip():
            rows.append(f"{file}:{line} in {function}: {text}")
    return tuple(rows[:_STACK][::-1])


def stacks() -> dict[int, tuple[StackRow, ...]]:
    """Return the stack of each thread, without the calls of this file."""
    found = {}
    for thread in [*sys._current_frames()]:  # no frame is kept, nor the tensors in its variables
        rows = _rows_of(thread)
        while rows and rows[0].file in _OWN:
            rows.pop(0)
        found[thread] = tuple(rows)
    return found


def _rows_of(thread: int) -> list[StackRow]:
    """Return a thread's stack in one call of C, in which no other thread runs.

    f_back makes an object of a frame that the other thread may end meanwhile: Python 3.11 has
    crashed, if that started the collector and a finalizer let the thread run. So the collector
    rests. faulthandler crashes too: it reads threads that are just beginning.
    """
    innermost = map(methodcaller("get", thread), starmap(sys._current_frames, _ONCE))
    frames = takewhile(bool, accumulate(chain(innermost, repeat("f_back")), getattr))
    rows = deque[Any]()
    collected = starmap(rows.__getitem__, [(0,)])  # the first row, when it is asked for
    rows.extend(
        chain(
            starmap(gc.isenabled, _ONCE),
            filter(None, starmap(gc.disable, _ONCE)),
            map(_ROW, frames),
            filter(None, starmap(gc.enable, compress(_ONCE, collected))),
        )
    )
    return [StackRow(file, line or 0, function) for file, line, function in [*rows][1:]]
