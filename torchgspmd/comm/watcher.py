"""Watcher: which rank the others wait for, said before the time limit and in the error after it.

A thread of each process wakes a few times within the limit. It looks where the other threads are
(sys._current_frames), and writes that into the store of the process group: the step, the
collective, its line. Where a rank has waited for long, it reads what the others wrote, and says on
stderr for whom it waits. A step costs no more than a few assignments.

The limit is that of the process groups (`timeout` of parallelize): gloo and NCCL end a wait.
`run` makes a ShardingError of the error that this is.
"""

from __future__ import annotations

import atexit
import functools
import json
import linecache
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import fx

from ..compat.private_apis import _get_default_store, is_missing
from ..errors import RankError, line_in_file, user_line

FIRST_NOTICE = 60.0  # Seconds after which a wait is told at the latest; earlier, at half the limit.
WAKES = 4  # How often the thread wakes until then.
# What ranks wait for outside of programs, by the file and function of a frame, innermost first.
_WAITS = {
    ("rank_check.py", "check"): "the comparison of the ranks",
    ("shared_plan.py", "_broadcast"): "the plan of rank 0",
    ("_functional_collectives.py", "wait_tensor"): "a collective of a DTensor",
    ("distributed_c10d.py", None): "torch.distributed's ",
}
_COLLECTIVES = "all_reduce all_gather reduce_scatter all_to_all permute broadcast ring".split()


@dataclass(frozen=True)
class Status:
    """What a rank does, as others read it. step: of its programs, the number of those begun."""

    step: int = 0
    phase: str = ""  # of the last program: "forward" or "backward"
    waits_in: str = ""  # the collective, if it is in one
    at: str = ""  # of the model's code if it is in a program, otherwise of the user's
    last: str = ""  # the last collective that it has begun, with its line
    ended: bool = False

    def place(self) -> tuple:
        """Return what is equal for ranks that are in the same collective."""
        return self.step, self.phase, self.waits_in, self.at if self.phase else ""

    def __str__(self) -> str:
        step = f"step {self.step}" + (f", {self.phase}" if self.phase else "")
        is_new = self.last and not (self.waits_in and self.last.startswith(self.waits_in))
        last = f", its last collective {self.last}" if is_new else ""
        if self.ended and not self.waits_in:
            return f"has ended ({step}{last})"
        if self.waits_in:
            verb = "has given up" if self.ended else "is"
            return f"{verb} in {self.waits_in} at {self.at} ({step}{last})"
        return f"is in no collective, but at {self.at} ({step}{last})"


class Watcher:
    """What one rank of a mesh is doing, its thread, and the errors of waits that ended.

    step, phase, program: written by the programs that run. name: of the mesh, the same on all of
    its ranks. processes: these, in the world.
    """

    def __init__(self, name: str, processes: Sequence[int], limit: float) -> None:
        self._key = f"torchgspmd.{name}.{processes[0]}."
        self.step, self.phase, self.program = 0, "", ""
        self.processes, self.rank, self.limit = list(processes), dist.get_rank(), limit
        self.world = dist.group.WORLD
        self._graphs: weakref.WeakValueDictionary[str, fx.Graph] = weakref.WeakValueDictionary()
        self._written = Status()
        self._since, self._told, self._before = time.monotonic(), False, None
        self._wake = threading.Event()
        self._is_over = False
        self._store: Any = None
        if len(self.processes) > 1 and not is_missing(_get_default_store):
            self._store = _get_default_store().clone()
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
            atexit.register(self._end)

    def watch(self, function: Any) -> str:
        """Return a name for a program, by which its code leads to its nodes while it lives.

        function: forward of a GraphModule. What torch.compile made has no nodes that run.
        """
        owner = getattr(function, "__self__", None)
        if not isinstance(owner, fx.GraphModule):
            return ""
        name = function.__func__.__code__.co_filename
        self._graphs[name] = owner.graph
        return name

    def begin(self, program: str, phase: str) -> None:
        """Note that a program begins, by its name."""
        self.program, self.phase = program, phase

    def set_limit(self, seconds: float) -> None:
        """Let the thread wake more often, for a shorter limit."""
        self.limit = seconds
        self._wake.set()

    # ------------------------------------------------------------------------------- the thread

    @property
    def _notice_after(self) -> float:
        return min(self.limit / 2, FIRST_NOTICE)

    def _watch(self) -> None:
        while True:
            self._wake.wait(self._notice_after / WAKES)
            self._wake.clear()
            if self._is_over or dist.group.WORLD is not self.world:
                return
            try:
                self._look()
            except (RuntimeError, AttributeError):  # The store or the process group has ended.
                return

    def _look(self) -> None:
        """Write where this rank is. If it has waited there for long, say for whom."""
        now, (status, place) = time.monotonic(), self._status()
        if place != self._before or not status.waits_in:
            self._before, self._since, self._told = place, now, False
        self._write(status)
        if now - self._since >= self._notice_after and not self._told:
            self._told = True
            others = self._read()
            late = {
                rank: other for rank, other in others.items() if other.place() != status.place()
            }
            if late and not any(r < self.rank and r not in late for r in others):
                print(self._notice(status, now - self._since, late), file=sys.stderr, flush=True)

    def _notice(self, status: Status, seconds: float, late: dict[int, Status]) -> str:
        return "\n".join(
            [
                f"torchgspmd: rank {self.rank} has waited {seconds:.1f} s for {_ranks(late)}",
                f"  it {status}",
                *(f"  rank {rank} {other}" for rank, other in sorted(late.items())),
                f"  the wait ends after {self.limit:g} s: parallelize(..., timeout=)",
            ]
        )

    def _status(self) -> tuple[Status, Any]:
        """Return what this rank does, and an object that is equal while it stays there."""
        own, main = threading.get_ident(), threading.main_thread().ident
        frames = {t: f for t, f in sys._current_frames().items() if t != own}
        for thread in sorted(frames, key=lambda t: t != main):
            status = self._status_of([*_outwards(frames[thread])])
            if status.waits_in:
                frame = frames[thread]
                return status, (thread, id(frame), frame.f_lasti, status)
        status = self._status_of([*_outwards(frames[main])] if main in frames else [])
        return status, status

    def _status_of(self, frames: Sequence[tuple[FrameType, int]]) -> Status:
        """Return what a thread does. frames: with their lines, the innermost first."""
        waits_in, at, last = "", "", ""
        for frame, line in frames:
            name = frame.f_code.co_filename
            if name in self._graphs and not last:
                waits_in, at, last = self._in_program(name, line)
                break
            short = name.rpartition("/")[2]
            found = _WAITS.get((short, frame.f_code.co_name), "")
            if not found and not waits_in and (short, None) in _WAITS:
                found = _WAITS[short, None] + frame.f_code.co_name
            waits_in = found or waits_in
        at = at or next((t for f, n in frames if (t := line_in_file(f.f_code.co_filename, n))), "?")
        return Status(self.step, self.phase, waits_in, at, last or self._last_of_program())

    def _in_program(self, name: str, line: int) -> tuple[str, str, str]:
        """Return the collective in which a program is, if any, its line, and the last begun."""
        result = linecache.getline(name, line).partition("=")[0].partition(":")[0].strip()
        waits_in = at = last = ""
        for node in self._graphs[name].nodes:
            if (kind := _kind(node)) is not None:
                last = _named(node, kind)
            if node.name == result:
                at = node.meta.get("source") or ""
                waits_in = kind or ""
                break
        return waits_in, at, last or self._last_of_program()

    def _last_of_program(self) -> str:
        """Return the last collective of the program that began last."""
        graph = self._graphs.get(self.program)
        for node in reversed(graph.nodes) if graph is not None else ():
            if (kind := _kind(node)) is not None:
                return _named(node, kind)
        return ""

    # -------------------------------------------------------------------------------- the store

    def _write(self, status: Status) -> None:
        if status != self._written:
            self._written = status
            self._store.set(f"{self._key}{self.rank}", json.dumps(asdict(status)))

    def _read(self) -> dict[int, Status]:
        """Return what the other ranks wrote."""
        keys = {rank: f"{self._key}{rank}" for rank in self.processes if rank != self.rank}
        return {
            rank: Status(**json.loads(self._store.get(key)))
            if self._store.check([key])
            else Status()
            for rank, key in keys.items()
        }

    def _end(self) -> None:
        """Write that this process ends, if the others can still read it."""
        was_over, self._is_over = self._is_over, True
        self._wake.set()
        self._thread.join(1.0)  # A thread that waits while Python ends may abort the process.
        if was_over or not dist.is_initialized() or dist.group.WORLD is not self.world:
            return
        try:
            status = Status(self.step, self.phase, "", "", self._last_of_program(), ended=True)
            self._write(status)
        except RuntimeError:
            pass

    # -------------------------------------------------------------------------------- the error

    def run(self, function: Callable, *args: Any, **options: Any) -> Any:
        """Call a function. Raise a ShardingError where a wait in it has ended."""
        try:
            return function(*args, **options)
        except RuntimeError as error:
            self._explain(error)
            raise

    def _explain(self, error: RuntimeError) -> None:
        """Raise a ShardingError for the error of a wait that ended; return for any other error."""
        text = str(error)
        is_over = isinstance(error, dist.DistError) or "gloo/" in text
        if not is_over or self._store is None:
            return
        trace, frames = error.__traceback__, []
        while trace is not None:
            frames.append((trace.tb_frame, trace.tb_lineno))
            trace = trace.tb_next
        status = self._status_of([*frames[::-1], *_outwards(sys._getframe())])
        self._is_over = True  # Others read the place where this rank has given up.
        try:
            self._write(replace(status, ended=True))
            others = self._read()
        except RuntimeError:  # The process that has the store has ended.
            others = {}
        late = _late(status, others)
        ended = {rank for rank, each in others.items() if each.ended}
        timed_out = "imed out" in text or "imeout" in text
        raise RankError(
            f"rank {self.rank} has waited {self.limit:g} s for {_ranks(late)}"
            if timed_out
            else f"rank {self.rank} has lost the connection to {_ranks(ended)}",
            where=user_line(),
            why="; ".join(
                [
                    f"rank {self.rank} {status}",
                    *(f"rank {rank} {each}" for rank, each in sorted((late or others).items())),
                ]
            ),
            fix="make the same calls on every rank; if one has more to do, "
            "parallelize(..., timeout=) waits longer. The connections are closed: start anew",
        ) from error


def watched(method: Callable) -> Callable:
    """Return a method of what has `_groups`, whose waits that end say for whom."""

    @functools.wraps(method)
    def explaining(self: Any, *args: Any) -> Any:
        return self._groups.watcher.run(method, self, *args)

    return explaining


def _late(status: Status, others: dict[int, Status]) -> dict[int, Status]:
    """Return the ranks for which one waits: those in no collective, or else in another one."""
    idle = {rank: other for rank, other in others.items() if not other.waits_in}
    return idle or {r: other for r, other in others.items() if other.place() != status.place()}


def _outwards(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of a thread with their lines, the innermost first."""
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _kind(node: fx.Node) -> str | None:
    """Return the name of the collective that a node of a lowered program starts or waits for."""
    if node.op != "call_function":
        return None
    name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    if name == "wait_tensor" and isinstance(node.args[0], fx.Node):
        return _kind(node.args[0]) or "wait"
    if name in ("carry", "total", "settle"):
        return "the comparison of the ranks"
    if not any(word in name for word in _COLLECTIVES):
        return None
    planned = re.match("|".join(_COLLECTIVES), node.name)  # gloo may do it by another one
    return planned[0] if planned else name


def _named(node: fx.Node, kind: str) -> str:
    """Return a collective with its line."""
    source = node.meta.get("source")
    return f"{kind} at {source}" if source else kind


def _ranks(ranks: Iterable[int]) -> str:
    """Return the names of ranks."""
    listed = sorted(ranks)
    if not listed:
        return "another rank"
    return f"rank{'s' * (len(listed) > 1)} {', '.join(map(str, listed[:8]))}" + (
        f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    )
