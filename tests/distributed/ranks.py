"""Checks on real processes: `@distributed("data=2,model=2")` runs a test on every rank of a mesh.

The first check of a size starts that many processes (gloo); all later checks of the session use
them. Each check is one item of pytest, and its failure shows the traceback of each rank. After a
failure the processes are new ones. Rank n is a fork of template n, a process that has only imported
torch and the package: a start takes no seconds, and hash seeds of ranks differ.

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
import gc
import importlib.util
import inspect
import os
import pickle
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
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

TIMEOUT = float(os.environ.get("RANKS_TIMEOUT", "300"))  # seconds for a check on all ranks
GRACE = 5.0  # seconds that ranks have to answer after another one has failed
START = 300.0  # seconds for the start of a process
GROUP = os.environ.get("RANKS_GROUP", "gloo")  # or "late", see late_group.py
# For tests of what ranks find at once: with TORCHGSPMD_ASSUME_CUDA=1 they find it some calls later.
on_cpu = patch.dict(os.environ, TORCHGSPMD_ASSUME_CUDA="0")
SKIPPED = "skipped: "  # begins the answer of a rank that skips the check
MESSAGE = 1 << 16  # bytes of a question to a template, at most


def distributed(
    *meshes: str,
    timeout: float = TIMEOUT,
    warning_filter: str = "default",
    alone: bool = False,
    group: str = GROUP,
):
    """Make a function of a mesh, and of other fixtures, a test that runs on every rank.

    alone: on processes of its own, in which no other check has left anything. group: the backend.
    """

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(check)
        def item(mesh: str, **arguments: Any) -> None:
            file = inspect.unwrap(check).__code__.co_filename
            call = (file, check.__module__, check.__name__, mesh, arguments)
            ranks = (Ranks if alone else ranks_of)(size_of(mesh), group)
            with tempfile.TemporaryDirectory() as cache:  # rank 0 plans, as in a user's job
                failure = ranks.run((*call, warning_filter, cache), timeout)
            if alone:
                ranks.close()
            if failure.startswith(SKIPPED):
                pytest.skip(failure.removeprefix(SKIPPED))
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


class Template:
    """A process that has imported torch and the package, and forks itself when it is asked."""

    def __init__(self) -> None:
        self.calls, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        command = [sys.executable, __file__, str(there.fileno())]
        with there:
            subprocess.Popen(command, env=environment, pass_fds=[there.fileno()])

    def fork(self, environment: dict[str, str], port: int, log: Path) -> tuple[Process, Connection]:
        """Start a rank that writes into a log."""
        here, there = socket.socketpair()
        with log.open("w") as file, there:
            pid = self._ask((environment, port), [there.fileno(), file.fileno()])
        return Process(self, pid), Connection(here.detach())

    def code(self, pid: int) -> int | None:
        """Return the exit code of a rank, None while it runs."""
        return self._ask(pid, [])

    def _ask(self, question: Any, files: list[int]) -> Any:
        socket.send_fds(self.calls, [pickle.dumps(question)], files)
        if answer := self.calls.recv(MESSAGE):
            return pickle.loads(answer)
        raise RuntimeError("a template of ranks has ended; what it wrote says why")


@dataclass
class Process:
    """A rank."""

    template: Template
    pid: int
    code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        if self.code is None:
            self.code = self.template.code(self.pid)
        return self.code

    def wait(self, seconds: float = 10.0) -> int | None:
        """Return the exit code, None if it runs on."""
        end = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        return self.code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


_TEMPLATES: dict[int, Template] = {}


class Ranks:
    """The processes of one size, in groups of one backend."""

    def __init__(self, size: int, group: str = GROUP) -> None:
        from torch.distributed import TCPStore

        self.key = size, group
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.folder = tempfile.TemporaryDirectory()
        self.logs = [Path(self.folder.name, f"rank{rank}") for rank in range(size)]
        self.connections: list[Connection] = []
        self.processes: list[Process] = []
        for rank in range(len(_TEMPLATES), size):  # all import at the same time
            _TEMPLATES[rank] = Template()
        for rank in range(size):
            self._start(rank, size)
        failure = self._answers("the start", START)
        if failure:
            self.close()
            raise RuntimeError(failure)

    def _start(self, rank: int, size: int) -> None:
        environment = dict(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
        environment["RANKS_GROUP"] = self.key[1]
        process, connection = _TEMPLATES[rank].fork(environment, self.store.port, self.logs[rank])
        self.processes.append(process)
        self.connections.append(connection)

    def run(self, call: tuple, timeout: float) -> str:
        """Return the failures by rank, or the reason why all ranks skip; else nothing."""
        begin = [log.stat().st_size for log in self.logs]
        for connection in self.connections:
            connection.send(call)
        failure = self._answers(call[2], timeout, begin)
        if failure and not failure.startswith(SKIPPED):
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
                if answers[rank] and not answers[rank].startswith(SKIPPED):
                    end = min(end, time.monotonic() + GRACE)
        if (
            not waiting
            and answers[0][: len(SKIPPED)] in ("", SKIPPED)
            and len({*answers.values()}) == 1
        ):
            return answers[0]
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
            return f"ended with exit code {self.processes[rank].wait()}"

    def close(self) -> None:
        """End the processes; the next check starts others."""
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
        for process, connection in zip(self.processes, self.connections):
            process.wait()
            connection.close()
        self.folder.cleanup()
        if _RANKS.get(self.key) is self:
            del _RANKS[self.key]


_RANKS: dict[tuple[int, str], Ranks] = {}


def ranks_of(size: int, group: str = GROUP) -> Ranks:
    """Return the processes of this session."""
    key = size, group
    if key in _RANKS and any(process.poll() is not None for process in _RANKS[key].processes):
        _RANKS[key].close()
    if key not in _RANKS:
        _RANKS[key] = Ranks(*key)
    return _RANKS[key]


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


def answer(
    file: str, name: str, check: str, mesh: str, arguments: dict, warning: str, cache: str
) -> str:
    """Run a check; return the traceback of its failure.

    cache: a folder for the plans of this check.
    """
    import torch

    from torchgspmd import Mesh

    try:
        function = getattr(load(file, name), check)
        os.environ["TORCHGSPMD_CACHE"] = cache
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter(warning)
            function.check(Mesh.parse(mesh), **arguments)
    except (Exception, pytest.fail.Exception) as error:
        frames = error.__traceback__.tb_next  # without this one
        return "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    except pytest.skip.Exception as skipped:
        return f"{SKIPPED}{skipped.msg}"
    return ""


def serve(descriptor: int, port: int) -> None:
    """Answer until the other side closes."""
    import torch
    import torch.distributed as dist

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    torch.set_num_threads(1)
    connection = Connection(descriptor)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    group = os.environ["RANKS_GROUP"]
    if group == "late":
        importlib.import_module("late_group")  # registers it
    dist.init_process_group(group, store=store, rank=rank, world_size=size)
    connection.send("")
    with contextlib.suppress(EOFError):
        while True:
            connection.send(answer(*connection.recv()))
    os._exit(0)  # gloo may abort at exit


def fork_ranks(descriptor: int) -> None:
    """Fork a rank, or tell the exit code of one, as often as the other side asks."""
    import torchgspmd.model_api.train_step  # noqa: F401 (all: no part of the first check's time)

    gc.freeze()  # of what is imported: a collection in a rank has only what came later
    calls = socket.socket(fileno=descriptor)
    while (question := socket.recv_fds(calls, MESSAGE, 2))[0]:
        text, files, *_ = question
        match pickle.loads(text):
            case int(pid):
                ended, status = os.waitpid(pid, os.WNOHANG)
                reply = os.waitstatus_to_exitcode(status) if ended else None
            case environment, port:
                if not (reply := os.fork()):
                    return become_rank(calls, files, environment, port)
                for file in files:
                    os.close(file)
        calls.send(pickle.dumps(reply))


def become_rank(calls: socket.socket, files: list[int], environment: dict, port: int) -> None:
    """Be a rank that knows nothing of its template."""
    calls.close()
    connection, log = files
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    os.environ.update(environment)
    serve(connection, port)


if __name__ == "__main__":
    fork_ranks(int(sys.argv[1]))
