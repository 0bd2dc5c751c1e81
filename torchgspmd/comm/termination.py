"""SIGTERM after a rank's death: the others have time for the error that names it.

torch.distributed.run ends all ranks by SIGTERM within 0.1 s after a death: before a RankError is
raised. A process with watchers, whose SIGTERM nobody else handles, ends later: after GRACE if a
rank has failed, else after the time in which it learns about that. Python's handlers run between
two calls, which a wait in C++ is not: a thread reads the signal, and ends the process as it would
have.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time

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
        """Note that a holder has ended."""
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
