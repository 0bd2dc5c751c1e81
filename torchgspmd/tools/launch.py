"""launch: run a function on local processes, from a script or a notebook cell.

Processes are forks, so that the function may be defined in a cell. Their output comes line by line,
each line with its rank. The first rank that fails ends the others.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist

from ..errors import RankError, ShardingError

GRACE = 1.0  # seconds in which a rank that failed earlier may still say so
END = 5.0  # seconds from SIGTERM to SIGKILL


def launch(
    fn: Callable[..., object],
    processes: int,
    *args: object,
    backend: str | None = "auto",
    threads: int = 1,
) -> list[object]:
    """Run a function on local processes, one a device, and return its results.

    Each process has a default process group and torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR, MASTER_PORT). With GPUs, process n uses GPU n.

    Args:
        fn: The function. It may be defined in a notebook; results have to be picklable.
        processes: The number of processes.
        args: Arguments for the function.
        backend: The process group's backend. "auto": "nccl" where there are GPUs, else "gloo".
            None: the function calls init_process_group itself.
        threads: Threads in each process for operations on the CPU.

    Returns:
        The results, in rank order.

    Raises:
        RankError: A rank has failed. The text has its traceback, and the others are ended.
        ShardingError: This process uses GPUs already, or has a process group.

    Example:
        >>> def train(steps):
        ...     return torch.distributed.get_rank() * steps
        >>> gspmd.launch(train, 2, 10)
        [0, 10]
    """
    _check(processes)
    with socket.socket() as free:
        # Port 0 lets the system choose one that is free.
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cards = _cards()
    if backend == "auto":
        backend = "nccl" if cards else "gloo"
    variables = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    sys.stdout.flush()
    sys.stderr.flush()
    ranks: list[_Rank] = []
    try:
        for rank in range(processes):
            own = {**variables, "RANK": rank, "LOCAL_RANK": rank}
            use = {"variables": own, "card": rank % cards if cards else None}
            child = partial(_child, fn, args, **use, backend=backend, threads=threads)
            ranks.append(_start(rank, child, ranks))
        _follow(ranks)
    finally:
        _end(ranks)
    return [rank.result for rank in ranks]


@dataclass
class _Rank:
    """A process that launch runs, seen from the one that started it."""

    number: int
    process: BaseProcess
    answer: Connection  # its result, or its error
    output: int  # file descriptor for its output
    result: object = None
    error: tuple[float, str] | None = None  # when it failed, and its traceback
    has_answered: bool = False
    has_ended: bool = False
    line: bytes = b""  # the start of an incomplete line


def _check(processes: int) -> None:
    if processes < 1:
        raise ShardingError.here(f"launch gets {processes} processes")
    if dist.is_initialized():
        raise ShardingError.here(
            "launch is called in a process that is part of a process group",
            fix="call it where no process group is: under torchrun the processes are there",
        )
    if torch.cuda.is_initialized():
        raise ShardingError.here(
            "this process uses a GPU already, and its forks cannot",
            fix="restart the notebook, and create tensors on GPUs inside of the function alone",
        )


def _cards() -> int:
    """Count the GPUs by NVML: the CUDA runtime would not work in forks."""
    before = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    finally:
        if before is None:
            del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
        else:
            os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = before


def _start(rank: int, child: Callable[..., None], others: Sequence[_Rank]) -> _Rank:
    context = multiprocessing.get_context("fork")
    answer, answering = context.Pipe(duplex=False)
    output, printing = os.pipe()
    # Ends of pipes that the fork inherits and the parent alone reads.
    unused = [output, answer.fileno(), *(r.output for r in others)]
    process = context.Process(target=child, args=(answering, printing, unused), daemon=False)
    process.start()
    answering.close()
    os.close(printing)
    # The parent reads what is there, and must not wait for a full line.
    os.set_blocking(output, False)
    return _Rank(rank, process, answer, output)


def _child(
    fn: Callable[..., object],
    args: Sequence[object],
    answer: Connection,
    printing: int,
    unused: Sequence[int],
    *,
    variables: dict[str, object],
    card: int | None,
    backend: str | None,
    threads: int,
) -> None:
    """Run the function, and send its result or its error. unused: the parent's descriptors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    for descriptor in unused:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    for stream in (1, 2):
        os.dup2(printing, stream)
    sys.stdout, sys.stderr = (open(i, "w", buffering=1, closefd=False) for i in (1, 2))
    os.environ.update({name: str(value) for name, value in variables.items()})
    torch.set_num_threads(threads)
    code = 0
    try:
        if card is not None:
            _use_card(card)
        if backend is not None:
            dist.init_process_group(backend)
        message = pickle.dumps((True, fn(*args)))
    except BaseException as error:  # SystemExit too: the others would wait
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        text = "".join(traceback.format_exception(type(error), error, trace))
        message, code = pickle.dumps((False, (time.monotonic(), text))), 1
    # Connection.send would share the memory of tensors, which ends with this process.
    answer.send_bytes(message)
    sys.stdout.flush()
    sys.stderr.flush()
    if not code and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    os._exit(code)  # the forked notebook's own exit handlers must not run


def _use_card(card: int) -> None:
    try:
        torch.cuda.set_device(card)
    except RuntimeError as error:
        raise ShardingError(
            "this process is a fork of one that has asked CUDA for its GPUs",
            why="CUDA does not work in forks then; torch.cuda.is_available() asks it",
            fix="set PYTORCH_NVML_BASED_CUDA_CHECK=1 before torch is imported, or launch first",
        ) from error


def _follow(ranks: list[_Rank]) -> None:
    """Print the ranks' output until all have ended. Raise RankError if one has failed."""
    while any(not rank.has_ended for rank in ranks):
        _turn(ranks, None)
        if any(rank.error for rank in ranks):
            until = time.monotonic() + GRACE
            while (left := until - time.monotonic()) > 0 and any(not r.has_ended for r in ranks):
                _turn(ranks, left)
            # By time, since the first failure is often the cause of others.
            failed = sorted((rank.error, rank.number) for rank in ranks if rank.error)
            (_, text), number = failed[0]
            raise RankError(f"rank {number} of {len(ranks)} failed\n\n{text}")


def _turn(ranks: list[_Rank], timeout: float | None) -> None:
    """Wait until some ranks have output, an answer or an end, and take it."""
    running = {r.process.sentinel: r for r in ranks if not r.has_ended}
    answers = [r.answer for r in running.values() if not r.has_answered]
    ready = wait([*running, *(r.output for r in running.values()), *answers], timeout)
    for rank in running.values():
        if rank.output in ready:
            _print(rank)
        if rank.answer in ready:
            # Read a rank's result or error; a process that was killed sends neither.
            rank.has_answered = True
            with contextlib.suppress(EOFError, OSError):
                is_result, value = pickle.loads(rank.answer.recv_bytes())
                rank.result, rank.error = (value, None) if is_result else (None, value)
        if rank.process.sentinel in ready:
            rank.process.join()
            _print(rank, is_last=True)
            rank.has_ended = True
            code = rank.process.exitcode
            if code and rank.error is None:
                ended = f"exit code {code}"
                if code < 0:
                    ended = f"ended by {signal.Signals(-code).name}"
                rank.error = time.monotonic(), ended


def _print(rank: _Rank, is_last: bool = False) -> None:
    """Print the lines that a rank has printed, each behind its number."""
    data = rank.line
    with contextlib.suppress(BlockingIOError, OSError):
        while part := os.read(rank.output, 1 << 16):
            data += part
    *lines, rank.line = data.split(b"\n")
    if is_last and rank.line:
        lines.append(rank.line)
    for line in lines:
        print(f"[{rank.number}] {line.decode(errors='replace')}", flush=True)


def _end(ranks: Sequence[_Rank]) -> None:
    """End all processes that still run, and close their pipes."""
    for rank in ranks:
        if rank.process.is_alive():
            rank.process.terminate()
    # One deadline for all ranks, so that many hung ones take no longer than one.
    until = time.monotonic() + END
    for rank in ranks:
        rank.process.join(max(0.0, until - time.monotonic()))
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        rank.answer.close()
        os.close(rank.output)
