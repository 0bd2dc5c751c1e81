"""Roll call: all ranks of a mesh exchange short rows before any of them waits for anything else.

    round 0    rank i sends a line to rank i + 1, and reads the line of rank i - 1
    round 1    the same with i + 2 and i - 2, then i + 4 and i - 4, ...

A line has all rows that its sender knows; equal rows are one, with the set of their ranks. After
log2(n) rounds every rank has all rows. Two processes on one host take 20 us of CPU time each, where
an all_to_all of gloo takes 280 us. Rows are JSON: nothing that ranks send is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import select
import socket
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from .peers import bound_to, close_in_child, reached_at

_TRY = 0.05  # Seconds between two looks for a rank that has no address so far.
_CONNECT = 5.0  # Seconds for one attempt to connect.


class RollCallEnded(RuntimeError):
    """A rank has closed its connection, or has not answered within the time limit."""


class RollCall:
    """This rank's connections: to the ranks 1, 2, 4, ... behind it, from those before it.

    key: the prefix of its keys in the store, equal on all ranks. processes: all ranks, in mesh
    order. The main thread calls `begin` and `finish`; any thread may call `end`.
    """

    def __init__(self, key: str, processes: Sequence[int], rank: int, store: Any) -> None:
        self.key, self.processes, self.store = key, processes, store
        self.index, self.size = processes.index(rank), len(processes)
        self.limit, self.is_over = 600.0, False  # seconds of a wait; whether `end` was called
        self._steps = [1 << k for k in range(self.size.bit_length()) if 1 << k < self.size]
        self._to: list[socket.socket] = []
        self._from: dict[int, socket.socket] = {}  # by step
        self._received: dict[int, bytes] = dict.fromkeys(self._steps, b"")
        self._unsent: dict[socket.socket, bytes] = {}
        self._rows: dict[str, int] = {}  # row -> its ranks, as bits; empty: no call goes on
        self._round = 0
        self._listener = socket.create_server((bound_to(store), 0), backlog=2 * len(self._steps))
        # Anyone may connect to the port; only a rank can read the token in the store.
        self._token = secrets.token_hex(16)
        address = [reached_at(store), self._listener.getsockname()[1], self._token]
        store.set(f"{key}{rank}", json.dumps(address))
        close_in_child(self)

    def begin(self, row: str) -> None:
        """Send this rank's row, JSON on one line; `finish` returns those of all ranks."""
        if self._rows:  # An error came between begin and finish.
            self.finish()
        if not self._to:
            self._connect()
        self._rows, self._round = {row: 1 << self.index}, 0
        self._send()

    def finish(self) -> list[str]:
        """Wait for all ranks, and return their rows in the order of the mesh."""
        while self._round < len(self._steps):
            parts = self._read(self._steps[self._round]).decode().split("\t")
            for ranks, row in zip(parts[::2], parts[1::2]):
                self._rows[row] = self._rows.get(row, 0) | int(ranks, 16)
            self._round += 1
            if self._round < len(self._steps):
                self._send()
        while self._unsent:
            self._write(select.select([], [*self._unsent], [], self.limit)[1])
        rows, self._rows = self._rows, {}
        if len(rows) == 1:
            return [*rows] * self.size
        return [next(row for row in rows if rows[row] >> i & 1) for i in range(self.size)]

    def end(self) -> None:
        """End the wait of the thread that is in `finish`: it raises RollCallEnded."""
        self.is_over = True
        for each in (*self._to, *self._from.values()):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for each in (*self._to, *self._from.values(), self._listener):
            each.close()

    def _send(self) -> None:
        line = "\t".join(f"{ranks:x}\t{row}" for row, ranks in self._rows.items())
        link = self._to[self._round]
        self._unsent[link] = self._unsent.get(link, b"") + line.encode() + b"\n"
        self._write([link])

    def _write(self, links: Sequence[socket.socket]) -> None:
        """Send what fits into the kernel's memory."""
        if not links:
            self._raise("it timed out")
        for link in links:
            line = self._unsent.pop(link)
            try:
                rest = line[link.send(line) :]
            except BlockingIOError:
                rest = line
            except OSError as error:
                self._raise(str(error))
            if rest:
                self._unsent[link] = rest

    def _read(self, step: int) -> bytes:
        """Return the next line of the rank `step` positions before this one."""
        link = self._from[step]
        if link.gettimeout() != self.limit:
            link.settimeout(self.limit)
        while b"\n" not in self._received[step]:
            # Two ranks whose rows do not fit must read while they write.
            if self._unsent:
                reads, writes, _ = select.select([link], [*self._unsent], [], self.limit)
                if writes or not reads:
                    self._write(writes)
                if not reads:
                    continue
            try:
                data = link.recv(1 << 16)
            except OSError as error:
                self._raise("it timed out" if isinstance(error, TimeoutError) else str(error))
            if not data:
                self._raise("a rank has closed its connection")
            self._received[step] += data
        line, _, self._received[step] = self._received[step].partition(b"\n")
        return line

    def _connect(self) -> None:
        """Connect to the ranks behind this one, and accept those before it."""
        until, links = time.monotonic() + self.limit, []
        for step in self._steps:
            link = self._connected(self.processes[(self.index + step) % self.size], until)
            link.sendall(f"{step}\n".encode())
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setblocking(False)
            links.append(link)
        self._listener.settimeout(_TRY)
        while len(self._from) < len(self._steps):
            self._check(until)
            with contextlib.suppress(TimeoutError, ValueError):
                link = self._listener.accept()[0]
                link.settimeout(_CONNECT)
                token, step = _line(link).split()
                if token == self._token and int(step) in self._steps:
                    self._from[int(step)] = link
        self._to = links

    def _connected(self, rank: int, until: float) -> socket.socket:
        """Return a connection to a rank, as soon as it has an address."""
        while True:
            self._check(until)
            try:
                if not self.store.check([f"{self.key}{rank}"]):
                    time.sleep(_TRY)
                    continue
                addresses, port, token = json.loads(self.store.get(f"{self.key}{rank}"))
            except RuntimeError as error:  # The process that has the store has ended.
                self._raise(str(error))
            for address in addresses:
                with contextlib.suppress(OSError):
                    link = socket.create_connection((address, port), _CONNECT)
                    link.sendall(f"{token} ".encode())
                    return link
            self._raise(f"rank {rank} is not reached at {addresses}, port {port}")

    def _check(self, until: float) -> None:
        if self.is_over:
            self._raise("another rank has failed")
        if time.monotonic() > until:
            self._raise("it timed out")

    def _raise(self, why: str) -> NoReturn:
        raise RollCallEnded(f"the roll call of the ranks has ended: {why}")


def _line(link: socket.socket) -> str:
    """Return the first line of a connection, without a byte behind it."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 80 and (byte := link.recv(1)):
        line += byte
    return line.decode()
