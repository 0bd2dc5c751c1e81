"""Checks on real processes: `@distributed("data=2,model=2")` runs a test on every rank of a mesh.

The first check of a size starts that many processes (gloo); all later checks of the session use
them. Each check is one item of pytest, and its failure shows the traceback of each rank. After a
failure the processes are new ones.

    @distributed("data=2", "data=2,model=2")
    def test_name(mesh): ...            # runs on the ranks; further arguments have to be picklable

Without meshes it is no test; `check("data=2", path=...)` runs it. In the runs of xdist one worker
has all of these tests (--dist loadgroup), so that there is one set of processes of a size.

A check begins with torch.manual_seed(0), float32 and default warnings on every rank.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import importlib.util
import inspect
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

TIMEOUT = float(os.environ.get("RANKS_TIMEOUT", "300"))  # seconds for a check on all ranks
GRACE = 5.0  # seconds that ranks have to answer after another one has failed
START = 300.0  # seconds for the start of a process


def distributed(
    *meshes: str, timeout: float = TIMEOUT, warning_filter: str = "default", alone: bool = False
):
    """Make a function of a mesh, and of other fixtures, a test that runs on every rank.

    alone: on processes of its own, in which no other check has left anything.
    """

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(check)
        def item(mesh: str, **arguments: Any) -> None:
            file = inspect.unwrap(check).__code__.co_filename
            call = (file, check.__module__, check.__name__, mesh, arguments)
            ranks = Ranks(size_of(mesh)) if alone else ranks_of(size_of(mesh))
            failure = ranks.run((*call, warning_filter), timeout)
            if alone:
                ranks.close()
            if failure:
                pytest.fail(failure, pytrace=False)

        item.check = check
        del item.__wrapped__  # pytest would look for the file and line of a test there
        item.__signature__ = inspect.signature(check)
        if not meshes:
            return item
        for mark in (pytest.mark.distributed(*meshes), pytest.mark.xdist_group("ranks")):
            item = mark(item)
        return pytest.mark.parametrize("mesh", meshes)(item)

    return decorate


def size_of(mesh: str) -> int:
    return functools.reduce(lambda n, size: n * int(size), re.findall(r"=(\d+)", mesh), 1)


class Ranks:
    """The processes of one size."""

    def __init__(self, size: int) -> None:
        from torch.distributed import TCPStore

        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.folder = tempfile.TemporaryDirectory()
        self.logs = [Path(self.folder.name, f"rank{rank}") for rank in range(size)]
        self.connections: list[Connection] = []
        self.processes: list[subprocess.Popen] = []
        for rank in range(size):
            self._start(rank, size)
        failure = self._answers("the start", START)
        if failure:
            self.close()
            raise RuntimeError(failure)

    def _start(self, rank: int, size: int) -> None:
        here, there = socket.socketpair()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
        }
        command = [sys.executable, __file__, str(there.fileno()), str(self.store.port)]
        with self.logs[rank].open("w") as log, there:
            process = subprocess.Popen(
                command, env=environment, pass_fds=[there.fileno()], stdout=log, stderr=log
            )
        self.processes.append(process)
        self.connections.append(Connection(here.detach()))

    def run(self, call: tuple, timeout: float) -> str:
        """Return what failed on which rank, or nothing."""
        begin = [log.stat().st_size for log in self.logs]
        for connection in self.connections:
            connection.send(call)
        failure = self._answers(call[2], timeout, begin)
        if failure:
            self.close()
        return failure

    def _answers(self, name: str, timeout: float, begin: list[int] | None = None) -> str:
        """Wait for all; after a failure for GRACE only."""
        waiting, answers = dict(zip(self.connections, range(len(self.logs)))), {}
        end = time.monotonic() + timeout
        while waiting and (left := end - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                rank = waiting.pop(connection)
                answers[rank] = self._answer(connection, rank)
                if answers[rank]:
                    end = min(end, time.monotonic() + GRACE)
        if not waiting and not any(answers.values()):
            return ""
        since = f"{GRACE:g} s of a failure" if any(answers.values()) else f"{timeout:g} s"
        for rank in waiting.values():  # faulthandler writes where it is into the log
            self.processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(0.5 if waiting else 0)
        for rank in waiting.values():
            answers[rank] = f"did not answer within {since}"
        logs = [log.read_text()[n:] for log, n in zip(self.logs, begin or [0] * len(self.logs))]
        sections = [
            f"--- {numbered(ranks)}{verb}\n{text}"
            for verb, texts in (("", answers), (" wrote", dict(enumerate(logs))))
            for text, ranks in alike(texts)
            if text
        ]
        failed = numbered(rank for rank, text in answers.items() if text)
        return "\n".join([f"{name}: {failed} of {len(self.logs)} failed", *sections])

    def _answer(self, connection: Connection, rank: int) -> str:
        try:
            return connection.recv()
        except (EOFError, ConnectionResetError):
            return f"ended with exit code {self.processes[rank].wait(10)}"

    def close(self) -> None:
        """End the processes; the next check starts others."""
        for process in self.processes:
            process.kill()
        for process, connection in zip(self.processes, self.connections):
            process.wait()
            connection.close()
        self.folder.cleanup()
        if _RANKS.get(len(self.logs)) is self:
            del _RANKS[len(self.logs)]


_RANKS: dict[int, Ranks] = {}


def ranks_of(size: int) -> Ranks:
    """Return the processes of this session."""
    if size in _RANKS and any(process.poll() is not None for process in _RANKS[size].processes):
        _RANKS[size].close()
    if size not in _RANKS:
        _RANKS[size] = Ranks(size)
    return _RANKS[size]


@atexit.register
def close_all() -> None:
    for ranks in list(_RANKS.values()):
        ranks.close()


def alike(texts: dict[int, str]) -> list[tuple[str, list[int]]]:
    """Return each text once, in order, with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank in texts:
        ranks.setdefault(texts[rank], []).append(rank)
    return list(ranks.items())


def numbered(ranks: Iterable[int]) -> str:
    ranks = sorted(ranks)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


# ------------------------------------------------------------------------------- on each process


def load(file: str, name: str) -> Any:
    """Import a file of tests under the name that it has in pytest."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def answer(file: str, name: str, check: str, mesh: str, arguments: dict, warning: str) -> str:
    """Run a check; return the traceback of its failure."""
    import torch

    from torchgspmd import Mesh

    try:
        function = getattr(load(file, name), check)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter(warning)
            function.check(Mesh.parse(mesh), **arguments)
    except (Exception, pytest.fail.Exception) as error:
        frames = error.__traceback__.tb_next  # without this one
        return "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    return ""


def serve(descriptor: int, port: int) -> None:
    """Answer until the other side closes."""
    import torch
    import torch.distributed as dist

    import torchgspmd  # noqa: F401 (before the first check, of whose time this is no part)

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    torch.set_num_threads(1)
    connection = Connection(descriptor)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    connection.send("")
    with contextlib.suppress(EOFError):
        while True:
            connection.send(answer(*connection.recv()))
    os._exit(0)  # gloo may abort at exit


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
