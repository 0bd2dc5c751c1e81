"""elastic: a training function that goes on after a process or a host is lost.

torch's elastic agent starts the processes, as forks, and starts them anew when one dies or a host
comes or goes. Each start runs the function from its first line. `job.steps` goes on behind the last
step with a copy in the hosts' memory (runtime/peer_copies.py), or with a checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import getpass
import logging
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..compat.patches import Patch, apply
from ..errors import RankError, ShardingError, user_line
from ..runtime.checkpoint import FILE, Optimizers, load, newest_whole, parsed, save
from ..runtime.peer_copies import PeerCopies

COPIES = "TORCHGSPMD_COPIES"  # the variable that names this host's folder for copies in memory
# The agent's store would still have the addresses of processes from the start before.
_NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_PDEATHSIG = 1  # for prctl: the signal that a process gets when its parent dies
_RENDEZVOUS = {"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 5}


_QUICK_NAMES = Patch(
    dynamic_rendezvous,
    "get_method_name",
    lambda _: lambda depth=2: sys._getframe(depth).f_code.co_name,
    "a name for a log reads the sources of all frames, a second where many modules are imported: "
    "hosts that live are late with their signs of life, and are taken for lost",
)


@dataclass(frozen=True)
class Job:
    """One start of a training function, as one process sees it.

    Args:
        rank: This process's number.
        processes: How many processes there are in this start.
        starts: How often this host's processes have been started before.
        folder: The folder for checkpoints.
        every: Steps from one checkpoint to the next.
        copies: Steps from one copy in memory to the next.
        keep: Checkpoints that stay.

    Example:
        >>> Job(0, 4, 0, Path("run"), 1000, 10, 2).processes
        4
    """

    rank: int
    processes: int
    starts: int
    folder: Path
    every: int
    copies: int
    keep: int

    def steps(
        self,
        model: nn.Module,
        optimizer: Optimizers = None,
        *,
        total: int,
        states: Mapping[str, Any] | None = None,
    ) -> Iterator[int]:
        """Yield the numbers of steps that are still to be done, and save behind them.

        The first call loads the newest copy or checkpoint: model, optimizer, states, and the random
        number generator.

        Args:
            model: The module from parallelize.
            optimizer: Its optimizer, or all its optimizers.
            total: The number of steps in all.
            states: Objects with state_dict and load_state_dict, by name.

        Yields:
            The step's number, from 0.

        Example:
            >>> def train(job):
            ...     model = gspmd.parallelize(torch.nn.Linear(4, 1), Mesh(data=job.processes))
            ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            ...     for step in job.steps(model, optimizer, total=2):
            ...         model(torch.ones(4, 4)).sum().backward()
            ...         optimizer.step()
            ...     return step
        """
        copies = PeerCopies(_root())
        step = self._restore(copies, model, optimizer, states)
        while step < total:
            yield step
            step += 1
            if step % self.every == 0 or step == total:
                path = self.folder / f"step-{step}"
                save(path, model, optimizer, step=step, states=states, keep=self.keep)
            # A checkpoint is as new as a copy would be.
            elif step % self.copies == 0:
                copies.save(model, optimizer, step, states)

    def _restore(
        self, copies: PeerCopies, model: nn.Module, optimizer: Optimizers, states: Any
    ) -> int:
        """Load the newest copy or checkpoint, and return how many steps it has done."""
        # A checkpoint that a lost process has left incomplete does not count.
        path = newest_whole(self.folder)
        said = None if path is None else parsed(path / FILE)
        on_disk, in_memory = -1 if said is None else said["step"], copies.newest()
        if in_memory > on_disk:
            copies.load(in_memory, model, optimizer, states)
            self._tell(f"goes on behind step {in_memory}, from copies in memory")
            return in_memory
        if path is not None:
            load(path, model, optimizer, states=states)
            self._tell(f"goes on behind step {on_disk}, from {path}")
        return max(on_disk, 0)

    def _tell(self, text: str) -> None:
        if self.rank == 0:
            print(f"torchgspmd: the job {text}, on {self.processes} processes", flush=True)


def elastic(
    fn: Callable[..., object],
    processes: int,
    *args: object,
    folder: str | Path,
    every: int = 1000,
    copies: int = 10,
    keep: int = 2,
    hosts: int | tuple[int, int] = 1,
    endpoint: str = "localhost:0",
    name: str = "",
    restarts: int = 100,
    backend: str = "auto",
    threads: int = 1,
) -> list[object]:
    """Run a training function on processes that are started anew when one is lost.

    Call it once on each host, in a process that uses no GPU and no process group yet. Where
    torchrun has started the process, it runs the function as torchrun's worker.

    Args:
        fn: The function. It gets a Job and `args`, builds model and optimizer for
            `job.processes` devices, and trains in `for step in job.steps(model, optimizer, ...)`.
        processes: Processes on this host.
        args: Further arguments for the function.
        folder: The folder for checkpoints, on a file system that all hosts see.
        every: Steps from one checkpoint to the next.
        copies: Steps from one copy in the hosts' memory to the next. Each shard is on its own host
            and on the next one, so that losing one host costs no read from disk.
        keep: Checkpoints that stay.
        hosts: The number of hosts, or the least and the most: then a job goes on with fewer hosts,
            and takes in those that come.
        endpoint: The first host's host:port; this host must not be lost. One host needs none.
        name: The job's name, equal on all hosts.
        restarts: How often processes are started anew before the error is raised.
        backend: The process group's backend. "auto": "nccl" where there are GPUs, else "gloo".
        threads: Threads in each process for operations on the CPU.

    Returns:
        The results from this host's processes.

    Raises:
        RankError: Processes have failed more often than `restarts`.
        ShardingError: This process has a process group already.

    Example:
        >>> def train(job, steps):
        ...     model = gspmd.parallelize(torch.nn.Linear(4, 1), Mesh(data=job.processes))
        ...     for step in job.steps(model, total=steps):
        ...         model(torch.ones(4, 4))
        ...     return step
        >>> import tempfile
        >>> gspmd.elastic(train, 2, 3, folder=tempfile.mkdtemp())
        [2, 2]
    """
    if dist.is_initialized():
        raise ShardingError.here(
            "elastic is called in a process that has a process group",
            fix="call elastic first, before any process group exists: it starts the processes "
            "and makes their groups",
        )
    for option, value in {"processes": processes, "every": every, "copies": copies}.items():
        if value < 1:
            what = f"elastic gets {value} processes" if option == "processes" else None
            raise ShardingError.here(
                what or f"{option} is {value}", fix=f"give {option}=1, or more"
            )
    saving = {"folder": Path(folder), "every": every, "copies": copies, "keep": keep}
    worker = _Worker(fn, args, backend, threads, saving)
    # torchrun has started this process, and starts it anew.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return [worker.run()]
    least, most = (hosts, hosts) if isinstance(hosts, int) else hosts
    name = name or uuid.uuid4().hex[:8]
    # The agent's pid: two hosts of a job may be on one machine.
    root = _memory() / f"torchgspmd-{getpass.getuser()}-{name}" / str(os.getpid())
    config = LaunchConfig(
        min_nodes=least,
        max_nodes=most,
        nproc_per_node=processes,
        run_id=name,
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        rdzv_configs=dict(_RENDEZVOUS),
        max_restarts=restarts,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(),
    )
    # RankError has the failure, and `steps` tells each new start.
    for quiet in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(quiet).setLevel(logging.CRITICAL)
    changed = {COPIES: str(root), _NO_SHARED_STORE: "1"}
    before = {key: os.environ.get(key) for key in changed}
    os.environ.update(changed)
    found: dict[int, object] | None = None
    try:
        with apply([_QUICK_NAMES]):
            found = elastic_launch(config, worker.run)()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RankError(
            f"rank {rank} has failed, after {restarts} starts anew: {failure.message}",
            where=user_line(),
            fix="read the error of that rank; restarts= is the number of starts",
        ) from None
    except SignalException as error:
        if error.sigval != signal.SIGINT:
            raise
    finally:
        # Nobody reads the copies once this agent has ended.
        shutil.rmtree(root, ignore_errors=True)
        with contextlib.suppress(OSError):
            root.parent.rmdir()  # unless the job's other host is on this machine
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})
    if found is None:
        # torch's thread with the signs of life ends with its agent, which the error above held. In
        # C++ at Python's end, it would abort the process.
        gc.collect()
        raise KeyboardInterrupt
    return [found[rank] for rank in sorted(found)]


@dataclass(frozen=True)
class _Worker:
    """One process in a job: its process group around the function."""

    fn: Callable[..., object]
    args: tuple
    backend: str
    threads: int
    saving: Mapping[str, Any]  # fields of a Job

    def run(self) -> object:
        ctypes.CDLL(None).prctl(_PDEATHSIG, int(signal.SIGKILL))  # no process outlives its agent
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the agent's: the others start anew
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback: the agent has one
        torch.set_num_threads(self.threads)
        backend = self.backend
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if backend == "auto":
            backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend)
        job = Job(
            rank=dist.get_rank(),
            processes=dist.get_world_size(),
            starts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
            **self.saving,
        )
        result = self.fn(job, *self.args)
        dist.barrier()
        dist.destroy_process_group()
        return result


def _memory() -> Path:
    """Return a folder in memory; where there is none, one for temporary files."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(os.environ.get("TMPDIR", "/tmp"))


def _root() -> Path:
    """Return this host's folder for copies: the agent's, or by torchrun's name."""
    if COPIES in os.environ:
        return Path(os.environ[COPIES])
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return _memory() / f"torchgspmd-{getpass.getuser()}-{name}" / str(os.getppid())
