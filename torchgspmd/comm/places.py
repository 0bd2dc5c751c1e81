"""Where this process's threads are: in which program and collective, at which line."""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, BinaryIO, NamedTuple

from torch import fx

from ..errors import line_in_file
from .rank_failure import COMPARISON, Status

_STACK = 12  # Stack entries that a report has.
# Waits outside programs, by a frame's file and function, innermost first.
_WAITS = {
    ("rank_check.py", "begin"): COMPARISON,
    ("rank_check.py", "check"): COMPARISON,
    ("late_check.py", "differs"): COMPARISON,
    ("shared_plan.py", "_broadcast"): "the plan of rank 0",
    ("_functional_collectives.py", "wait_tensor"): "a collective of a DTensor",
    ("fused_optimizers.py", "_reduced"): "the norms of DTensors",
    ("transport.py", "arrived"): "the messages between stages",
    ("transport.py", "finish"): "the messages between stages",
    ("distributed_c10d.py", None): "torch.distributed's ",
}
_COLLECTIVES = "all_reduce all_gather reduce_scatter all_to_all permute broadcast ring".split()
_Lines = dict[str, tuple[str, str, str]]
# Calls that look are no place to tell.
_OWN = tuple(__file__.replace("places.py", name) for name in ("places.py", "watcher.py"))
_ROW = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


class StackRow(NamedTuple):
    """A call in a thread's stack: its file, line and function."""

    file: str
    line: int
    function: str


Stack = Sequence[StackRow]  # the innermost call first


class Places:
    """A mesh's programs, and the places of threads in them."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakValueDictionary[str, fx.Graph] = weakref.WeakValueDictionary()
        # Weak: a discarded program must not be kept for reports.
        self._lines: weakref.WeakKeyDictionary[fx.Graph, _Lines] = weakref.WeakKeyDictionary()

    def watch(self, function: Any) -> str:
        """Return a name for a program, by which its code leads to its nodes while it lives.

        function: a ProfiledCode, or a GraphModule's forward. Code that torch.compile compiled has
        no nodes that run.
        """
        function = getattr(function, "plain", function)
        owner = getattr(function, "__self__", None)
        if not isinstance(owner, fx.GraphModule):
            return ""
        name = function.__func__.__code__.co_filename
        self._graphs[name] = owner.graph
        return name

    def status(self, now: Status, program: str) -> tuple[Status, object]:
        """Return this rank's status, and an object that is equal while it waits there.

        now: its step and phase. program: the one that began last.
        """
        main, found = threading.main_thread().ident or 0, stacks()
        if threading.get_ident() != main:
            found.pop(threading.get_ident(), None)
        # The main thread first: if it waits, the user's line is the one to tell.
        for thread in sorted(found, key=lambda t: t != main):
            status = self._status_of(now, program, found[thread])
            if status.waits_in:
                return status, (thread, found[thread], status)
        status = self._status_of(now, program, found.get(main, ()))
        return status, status

    def status_of_error(self, now: Status, program: str, error: BaseException) -> Status:
        """Return this rank's status when an error was raised."""
        trace, rows = error.__traceback__, []
        while trace is not None:
            code = trace.tb_frame.f_code
            rows.append(StackRow(code.co_filename, trace.tb_lineno, code.co_name))
            trace = trace.tb_next
        around = stacks().get(threading.get_ident(), ())
        return self._status_of(now, program, [*rows[::-1], *around])

    def _status_of(self, now: Status, program: str, stack: Stack) -> Status:
        """Return a thread's status, by its stack."""
        waits_in, at, last = "", "", ""
        for name, line, function in stack:
            if name in self._graphs and not last:
                # A line of generated code is `name: type = call(...)`, with the node's name.
                result = linecache.getline(name, line).partition("=")[0].partition(":")[0].strip()
                kind, at, last = self._lines_of(self._graphs[name]).get(result, ("", "", ""))
                waits_in = kind or waits_in
                break
            short = name.rpartition("/")[2]
            found = _WAITS.get((short, function), "")
            if not found and not waits_in and (short, None) in _WAITS:
                found = _WAITS[short, None] + function
            waits_in = found or waits_in
        at = at or next((t for row in stack if (t := line_in_file(row.file, row.line))), "")
        return replace(now, waits_in=waits_in, at=at, last=last or self._last_of(program))

    def _lines_of(self, graph: fx.Graph) -> _Lines:
        """Return for each node its collective, if it is one, its line, and the last one begun.

        The last row is the whole graph's.
        """
        if graph not in self._lines:
            rows, last = {}, ""
            for node in graph.nodes:
                if (kind := _kind(node)) is not None:
                    last = _named(node, kind)
                rows[node.name] = kind or "", node.meta.get("source") or "", last
            self._lines[graph] = rows | {"": ("", "", last)}
        return self._lines[graph]

    def _last_of(self, program: str) -> str:
        """Return a program's last collective."""
        graph = self._graphs.get(program)
        return self._lines_of(graph)[""][2] if graph is not None else ""


def stack_of_main() -> tuple[str, ...]:
    """Return the main thread's innermost calls, the last one last."""
    rows = []
    for file, line, function in stacks().get(threading.main_thread().ident or 0, ()):
        if text := linecache.getline(file, line).strip():
            rows.append(f"{file}:{line} in {function}: {text}")
    return tuple(rows[:_STACK][::-1])


def stacks() -> dict[int, tuple[StackRow, ...]]:
    """Return the stack of each thread, without the calls of this file.

    Another thread's frame objects may not be read while it runs: Python 3.11 has crashed in f_back.
    faulthandler writes all stacks at once, while this thread holds the interpreter's lock. It also
    leaves no reference to frames, which would keep the tensors in their variables.
    """
    with _scratch_file() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode(errors="replace")
    found: dict[int, tuple[StackRow, ...]] = {}
    for part in re.split(r"^(?:Current thread|Thread) ", text, flags=re.M)[1:]:
        ident, _, lines = part.partition(" ")
        rows = [StackRow(*_unescaped(*row)) for row in _ROW.findall(lines)]
        while rows and rows[0].file in _OWN:
            rows.pop(0)
        found[int(ident, 16)] = tuple(rows)
    return found


def _scratch_file() -> BinaryIO:
    """Open a file without a name, in memory where the system has such files."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("stacks"), "w+b")
    return tempfile.TemporaryFile()


def _unescaped(file: str, line: str, function: str) -> tuple[str, int, str]:
    """Return a row of faulthandler's with the characters that it escapes, outside ASCII."""
    escape = re.compile(r"\\(?:x(..)|u(....)|U(........))")

    def plain(text: str) -> str:
        return escape.sub(lambda m: chr(int(m[1] or m[2] or m[3], 16)), text)

    return plain(file), int(line) if line.isdigit() else 0, plain(function)


def _kind(node: fx.Node) -> str | None:
    """Return the name of the collective that a lowered program's node starts or waits for."""
    if node.op != "call_function":
        return None
    name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    if name == "wait_tensor" and isinstance(node.args[0], fx.Node):
        return _kind(node.args[0]) or "wait"
    if name in ("carry", "total", "settle"):
        return COMPARISON
    if not any(word in name for word in _COLLECTIVES):
        return None
    planned = re.match("|".join(_COLLECTIVES), node.name)  # gloo may do it by another one
    return planned[0] if planned else name


def _named(node: fx.Node, kind: str) -> str:
    """Return a collective with its line."""
    source = node.meta.get("source")
    return f"{kind} at {source}" if source else kind
