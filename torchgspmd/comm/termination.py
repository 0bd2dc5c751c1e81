"""A process's end: SIGTERM after a rank's death, waits in gloo, and errors of many ranks.

torch.distributed.run ends all ranks by SIGTERM within 0.1 s after a death: before a RankError is
raised. A process with watchers, whose SIGTERM nobody else handles, ends later: after GRACE if a
rank has failed, else after the time in which it learns about that. Python's handlers run between
two calls, which a wait in C++ is not: a thread reads the signal, and ends the process.

A gloo group has no abort (torch's is empty). A wait for a rank that lives, but will not come since
it waits for a dead one, would last until the time limit: `end_waits` closes gloo's connections.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from ..compat.patches import wrapping
from ..compat.private_apis import _get_default_store, is_missing
from ..errors import ShardingError

_SAME = 60.0  # Seconds in which an equal error is the same one: a job may be started anew.
_ANSWER = 2.0  # Seconds to wait for the store's answer.

_FILES, _DETAILS = Path("/proc/self/fd"), Path("/proc/self/fdinfo")
# An entry in gloo's epoll has a pointer; in those of libuv and asyncio it has the file number. gloo
# asks for EPOLLIN, EPOLLERR and EPOLLHUP.
_EVENTS = "19"

GRACE, NEWS = 10.0, 0.5  # Seconds from the signal to the end, if a rank has failed, and if none.


class Termination:
    """This process's signal. file: the file that a thread polls for it, or None.

    The thread calls `decide` several times a second. It must live as long as the process group.
    """

    def __init__(self) -> None:
        self.file: socket.socket | None = None
        self._since = 0.0
        self._holders: set[int] = set()

    def hold(self, holder: object) -> None:
        """Handle the signal while a holder lives, if nobody else does."""
        self._holders.add(id(holder))
        is_main = threading.current_thread() is threading.main_thread()
        if self.file is not None or not is_main:
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self.file, self._writes = socket.socketpair()
        for each in (self.file, self._writes):
            each.setblocking(False)
        before = signal.set_wakeup_fd(self._writes.fileno(), warn_on_full_buffer=False)
        if before != -1:  # of an event loop
            signal.set_wakeup_fd(before)
            self.file = None
            return
        signal.signal(signal.SIGTERM, self._handle)

    def release(self, holder: object) -> None:
        self._holders.discard(id(holder))

    def decide(self, has_failed: bool) -> None:
        """End the process if the signal has come, and the time for an error is over."""
        if self.file is None:
            return
        with contextlib.suppress(BlockingIOError):
            if signal.SIGTERM in self.file.recv(4096) and not self._since:
                self._since = time.monotonic()
        if self._since and time.monotonic() > self._since + (GRACE if has_failed else NEWS):
            if signal.getsignal(signal.SIGTERM) == self._handle:  # nobody has taken its place
                _end()

    def forget(self) -> None:
        """Handle nothing in a forked process: its signals would be read as this one's."""
        if self.file is not None:
            self.file = None
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _handle(self, *_: object) -> None:
        if not self._holders:
            _end()


def _end() -> None:
    """End this process by the signal. Python lets its main thread alone reset a handler."""
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
    os.kill(os.getpid(), signal.SIGTERM)


TERMINATION = Termination()
os.register_at_fork(after_in_child=TERMINATION.forget)


def end_waits() -> int:
    """Close gloo's connections and return their number; 0 where there is no /proc."""
    closed = 0
    for each in os.listdir(_FILES) if _FILES.is_dir() else ():
        try:
            if os.readlink(_FILES / each) == "anon_inode:[eventpoll]":
                rows = map(str.split, (_DETAILS / each).read_text().splitlines())
                # Those that a gloo epoll waits for; any other epoll has none.
                closed += sum(
                    _shut(int(row[1]))
                    for row in rows
                    if row[:1] == ["tfd:"]
                    and len(row) > 5
                    and row[3] == _EVENTS
                    and int(row[5], 16) != int(row[1])
                )
        except OSError:  # closed in the meantime
            continue
    return closed


def _shut(file: int) -> bool:
    """Close a connection for both ends; False for other files."""
    try:
        connection = socket.socket(fileno=file)
    except OSError:  # no socket
        return False
    try:
        connection.getpeername()  # An error for the one that listens: gloo would abort.
        connection.shutdown(socket.SHUT_RDWR)
        return True
    except OSError:
        return False
    finally:
        connection.detach()  # The file is gloo's to close.


def print_errors_once() -> None:
    """Print an uncaught ShardingError on one rank, and a line that names that rank on the others.

    rank 2     the traceback, and the error's text
    rank 0     torchgspmd: rank 0 has raised the same as rank 2: RankError: ...
    """
    sys.excepthook = _once(sys.excepthook)


@wrapping
def _once(before: Callable, kind: type, error: BaseException, trace: TracebackType | None) -> None:
    first = _first_rank(error) if isinstance(error, ShardingError) else None
    if first is None:
        before(kind, error, trace)
        return
    text = f"{kind.__name__}: {error}".partition("\n")[0]
    # One write: lines of several ranks must not run into one another.
    said = f"torchgspmd: rank {dist.get_rank()} has raised the same as rank {first}: {text}\n"
    os.write(2, said.encode())


def _first_rank(error: ShardingError) -> int | None:
    """Return the rank that prints an error, if it is another one; None if it is this one."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or is_missing(_get_default_store):
        return None
    own, now = dist.get_rank(), time.time()
    key = f"torchgspmd.uncaught.{zlib.crc32(error.what.encode())}"
    said: list[str] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError):  # The process that has the store has ended.
            # The store sets the value if it is not there, and returns the one that is there.
            said.extend(_get_default_store().compare_set(key, "", f"{own} {now}").decode().split())

    # On a thread: behind a link that is down the store never answers.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_ANSWER)
    if len(said) != 2:
        return None
    first, since = said
    return int(first) if int(first) != own and now < float(since) + _SAME else None
