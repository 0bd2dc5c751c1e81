"""End the waits of this process in gloo: close the connections that gloo has.

A gloo group has no abort (torch's is empty). A wait for a rank that lives, but will not come since
it waits for a dead one, would last until the time limit.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

_FILES, _DETAILS = Path("/proc/self/fd"), Path("/proc/self/fdinfo")
# An entry in gloo's epoll has a pointer; in those of libuv and asyncio it has the file number. gloo
# asks for EPOLLIN, EPOLLERR and EPOLLHUP.
_EVENTS = "19"


def end_waits() -> int:
    """Close gloo's connections and return their number; 0 where there is no /proc."""
    closed = 0
    for each in os.listdir(_FILES) if _FILES.is_dir() else ():
        try:
            if os.readlink(_FILES / each) == "anon_inode:[eventpoll]":
                closed += sum(map(_shut, _connections((_DETAILS / each).read_text())))
        except OSError:  # closed in the meantime
            continue
    return closed


def _connections(details: str) -> list[int]:
    """Return the files that a gloo epoll waits for, and none for any other epoll."""
    rows = [row.split() for row in details.splitlines() if row.startswith("tfd:")]
    return [
        int(row[1])
        for row in rows
        if len(row) > 5 and row[3] == _EVENTS and int(row[5], 16) != int(row[1])
    ]


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
