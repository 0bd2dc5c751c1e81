"""Where this process's threads are: in which program and collective, at which line."""

from __future__ import annotations

import linecache
import re
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

from torch import fx

from ..errors import line_in_file
from .rank_failure import COMPARISON, Status

_STACK = 12  # Stack entries that a report has.
# Waits outside programs, by a frame's file and function, innermost first.
_WAITS = {
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
Frames = Sequence[tuple[FrameType, int]]


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
        main = threading.main_thread().ident
        frames = _frames_of_threads()
        if threading.get_ident() != main:
            frames.pop(threading.get_ident(), None)
        # The main thread first: if it waits, the user's line is the one to tell.
        for thread in sorted(frames, key=lambda t: t != main):
            status = self._status_of(now, program, [*outwards(frames[thread])])
            if status.waits_in:
                frame = frames[thread]
                return status, (thread, id(frame), frame.f_lasti, status)
        status = self._status_of(now, program, [*outwards(frames.get(main or 0))])
        return status, status

    def status_of_error(self, now: Status, program: str, error: BaseException) -> Status:
        """Return this rank's status when an error was raised."""
        trace, frames = error.__traceback__, []
        while trace is not None:
            frames.append((trace.tb_frame, trace.tb_lineno))
            trace = trace.tb_next
        return self._status_of(now, program, [*frames[::-1], *outwards(sys._getframe(1))])

    def _status_of(self, now: Status, program: str, frames: Frames) -> Status:
        """Return a thread's status. frames: with their lines, the innermost first."""
        waits_in, at, last = "", "", ""
        for frame, line in frames:
            name = frame.f_code.co_filename
            if name in self._graphs and not last:
                # A line of generated code is `name: type = call(...)`, with the node's name.
                result = linecache.getline(name, line).partition("=")[0].partition(":")[0].strip()
                kind, at, last = self._lines_of(self._graphs[name]).get(result, ("", "", ""))
                waits_in = kind or waits_in
                break
            short = name.rpartition("/")[2]
            found = _WAITS.get((short, frame.f_code.co_name), "")
            if not found and not waits_in and (short, None) in _WAITS:
                found = _WAITS[short, None] + frame.f_code.co_name
            waits_in = found or waits_in
        at = at or next((t for f, n in frames if (t := line_in_file(f.f_code.co_filename, n))), "")
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
    frame = _frames_of_threads().get(threading.main_thread().ident or 0)
    rows = [row for row in traceback.extract_stack(frame) if row.line][-_STACK:]
    return tuple(f"{row.filename}:{row.lineno} in {row.name}: {row.line}" for row in rows)


def _frames_of_threads() -> dict[int, FrameType]:
    """Return each thread's frame; for this thread, the frame of the caller's caller.

    A function with its own frame in a variable makes a reference cycle. The cycle has other
    threads' frames too, with the tensors in their variables. Collecting it takes attributes from
    DTensors that autograd alone holds: torch 2.9 counts no references from C++.
    """
    frames = {
        thread: frame
        for thread, frame in sys._current_frames().items()
        if thread != threading.get_ident()
    }
    return frames | {threading.get_ident(): sys._getframe(2)}


def outwards(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    """Yield a thread's frames with their lines, the innermost first."""
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


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
