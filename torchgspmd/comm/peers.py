"""Peers: a side channel between a mesh's ranks. It says at once when a process has ended.

Every rank has TCP connections to the ranks that are 1, 2, 4, ... positions away. The kernel closes
a killed process's connections. Each rank passes news on, so they reach all survivors if few die.
The process group's store is needed only to find the addresses: it may end with rank 0.

Messages are JSON lines. A connection begins with a token that the store alone tells.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

_MAX_LINE = 1 << 18  # bytes of a message
_CONNECT, _PATIENCE = 2.0, 20.0  # seconds for one attempt to connect, and for all
_CLOSES = getattr(select, "POLLRDHUP", 0)  # Data must not wake the thread: a step sends some.
_OPTIONS = (  # A host that is off sends nothing: the kernel gives up after 9 s. A link that is back
    # after 5 s carries the next attempt, 6.2 s after the first.
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 2),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 7),
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", 9000),
)
_NO_ANSWER = {
    errno.ETIMEDOUT,
    *(errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN),
}
Message = dict[str, Any]


class Peers:
    """This rank's connections.

    key: the prefix of its keys in the store, equal on all ranks. processes: all ranks, in mesh
    order. handle: called in `turn` with each message, and with {"kind": "closed", "rank": 3}, or
    "lost" if that rank's host does not answer.
    """

    def __init__(
        self,
        key: str,
        processes: Sequence[int],
        rank: int,
        store: Any,
        handle: Callable[[Message], None],
    ) -> None:
        self.rank, self.host, self.hosts = rank, socket.gethostname(), {}
        self._key, self._store, self._handle = key, store, handle
        self._links: dict[int, _Link] = {}
        self._strangers: list[_Link] = []  # accepted, without a greeting so far
        self._numbers, self._seen = itertools.count(), set[tuple[int, int]]()
        index, n = processes.index(rank), len(processes)
        # At distances of powers of two, news reaches all ranks in log2(n) steps, with few
        # connections.
        steps = {1 << k for k in range(n.bit_length()) if 1 << k < n}
        near = [i for i in range(n) if steps & {(i - index) % n, (index - i) % n}]
        self._unconnected = {processes[i] for i in near if i > index}
        self._expected, self._until = len(near), time.monotonic() + _PATIENCE
        self._beside = {processes[(index + 1) % n], processes[index - 1]}
        # Anyone may connect to the port; only a rank can read the token in the store.
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server((bound_to(store), 0))
        self._listener.setblocking(False)
        self._waker, self._wakes = socket.socketpair()
        self._poll = select.poll()
        for each in (self._listener, self._wakes):
            self._poll.register(each, select.POLLIN)
        address = [reached_at(store), self._listener.getsockname()[1], self._token]
        store.set(f"{key}{rank}", json.dumps(address))
        close_in_child(self)

    @property
    def is_complete(self) -> bool:
        """True if all connections were made, or given up."""
        return len(self._links) == self._expected or time.monotonic() > self._until

    def turn(self, seconds: float) -> None:
        """Wait until a connection closes, at most so long; then handle all that has come."""
        events = self._poll.poll(1000 * seconds)
        if any(fd == self._wakes.fileno() for fd, _ in events):
            self._wakes.recv(4096)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._strangers.append(self._watched(_Link(self._listener.accept()[0])))
        # Only the rank with the lower index connects, so that a pair has one connection.
        if self._unconnected and not self.is_complete:
            self._connect()
        for link in [*self._strangers, *self._links.values()]:
            self._receive(link)

    def listen_to(self, file: socket.socket | None) -> None:
        """Wake `turn` when another's file has something to read."""
        if file is not None:
            self._poll.register(file, select.POLLIN)

    def wake(self) -> None:
        """End the wait in `turn`, which another thread runs."""
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def mark(self, **message: Any) -> None:
        """Send a message to the two ranks beside this one, if there is room: 10 us."""
        line = _line(message)
        for rank in self._beside:
            if (link := self._links.get(rank)) is not None:
                link.send(line, may_drop=True)

    def tell(self, **message: Any) -> None:
        """Send a message to all ranks, which pass it on."""
        number = next(self._numbers)  # Two threads may tell at once.
        message["id"] = [self.rank, number]
        self._seen.add((self.rank, number))
        self._send(_line(message))

    def close(self) -> None:
        links = [*self._links.values(), *self._strangers]
        for each in (*(link.socket for link in links), self._listener, self._waker, self._wakes):
            each.close()

    def _send(self, line: bytes, besides: _Link | None = None) -> None:
        for link in [*self._links.values()]:
            if link is not besides:
                link.send(line)

    def _watched(self, link: _Link) -> _Link:
        self._poll.register(link.socket, _CLOSES)
        return link

    def _connect(self) -> None:
        """Connect to the ranks whose addresses are in the store by now."""
        for rank in sorted(self._unconnected):
            try:
                is_there = self._store.check([f"{self._key}{rank}"])
                text = self._store.get(f"{self._key}{rank}") if is_there else ""
            except RuntimeError:  # The process that has the store has ended.
                self._unconnected.clear()
                return
            addresses, port, token = json.loads(text) if text else ([], 0, "")
            for address in addresses:
                with contextlib.suppress(OSError):
                    link = _Link(socket.create_connection((address, port), _CONNECT))
                    link.rank = rank
                    self._links[rank] = self._watched(link)
                    self._unconnected.remove(rank)
                    link.send(_line(self._greeting(token)))
                    break

    def _greeting(self, token: str) -> Message:
        return {"kind": "hello", "rank": self.rank, "host": self.host, "token": token}

    def _receive(self, link: _Link) -> None:
        lines, is_open = link.receive()
        for line in lines:
            try:
                self._take(link, json.loads(line))
            except (ValueError, TypeError, KeyError):  # It is no rank.
                is_open = False
                break
        if not is_open:
            self._poll.unregister(link.socket)
            link.socket.close()
            if link in self._strangers:
                self._strangers.remove(link)
            elif self._links.pop(link.rank, None) is not None:
                kind = "lost" if link.is_lost else "closed"
                self._handle({"kind": kind, "rank": link.rank})

    def _take(self, link: _Link, message: Message) -> None:
        """Handle a message, and pass it on if it is for all."""
        # Before it has said hello a connection may be of anyone.
        if link.rank < 0:
            if message["kind"] != "hello" or message["token"] != self._token:
                raise ValueError
            link.rank = int(message["rank"])
            self._strangers.remove(link)
            self._links[link.rank] = link
            link.send(_line(self._greeting("")))
        if message["kind"] == "hello":
            self.hosts[link.rank] = str(message["host"])
        elif (number := message.get("id")) is None:
            self._handle(message | {"rank": link.rank})
        # News comes by several ways; each rank passes it on once.
        elif (key := (int(number[0]), int(number[1]))) not in self._seen:
            self._seen.add(key)
            self._send(_line(message), besides=link)
            self._handle(message)


class _Link:
    """One connection. rank: the other end's; negative before it has said so.

    is_lost: it has closed since the other end does not answer.
    """

    def __init__(self, link: socket.socket) -> None:
        self.socket, self.rank, self.is_lost = link, -1, False
        self._received, self._unsent, self._lock = b"", b"", threading.Lock()
        link.setblocking(False)
        for level, name, value in _OPTIONS:
            if hasattr(socket, name):
                link.setsockopt(level, getattr(socket, name), value)

    def send(self, line: bytes, may_drop: bool = False) -> None:
        """Send a line; the rest that does not fit into the kernel's memory follows later."""
        with self._lock:
            # The next mark replaces this one, so a slow neighbor must not delay the step.
            if self._unsent and may_drop:
                return
            rest = self._unsent + line
            try:
                self._unsent = rest[self.socket.send(rest) :]
            except BlockingIOError:
                self._unsent = b"" if may_drop else rest
            except OSError as error:  # `receive` says that it has closed.
                self._unsent, self.is_lost = b"", self.is_lost or error.errno in _NO_ANSWER

    def receive(self) -> tuple[list[bytes], bool]:
        """Return the lines that have come, and whether more may come."""
        self.send(b"")
        is_open = True
        while is_open:
            try:
                data = self.socket.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError as error:
                data, self.is_lost = b"", self.is_lost or error.errno in _NO_ANSWER
            self._received += data
            # A line without an end would fill the memory.
            is_open = bool(data) and len(self._received) <= _MAX_LINE
        *lines, self._received = self._received.split(b"\n")
        return lines, is_open


def _line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _local_address(store: Any) -> str:
    """Return this host's address on the way to the store's host, of which a TCPStore tells."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None) or os.environ.get("MASTER_ADDR") or socket.gethostname()
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # Nothing is sent.
        return probe.getsockname()[0]
    return "127.0.0.1"


def bound_to(store: Any) -> str:
    """Return the address on which to listen: this host alone if it has all ranks."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", ""), os.environ.get("WORLD_SIZE", "")
    local = _local_address(store)
    return local if local.startswith("127.") and ranks[0] in ("", ranks[1]) else ""


def reached_at(store: Any) -> list[str]:
    """Return the addresses at which others reach this host, the likely ones first."""
    addresses = [_local_address(store)]
    with contextlib.suppress(OSError):
        addresses.append(socket.gethostbyname(socket.gethostname()))
    return [*dict.fromkeys(addresses)]


_OPEN: weakref.WeakSet[Any] = weakref.WeakSet()


def close_in_child(connections: Any) -> None:
    """Close the copies that a forked process has: its parent's death would not be seen."""
    _OPEN.add(connections)


os.register_at_fork(after_in_child=lambda: [each.close() for each in [*_OPEN]])
