"""A checkpoint's files: checksums beside each rank's files, faults, and who writes.

A rank puts its files' sizes and checksums into a sum file before rank 0 is told that it has
written. Then rank 0 puts all into gspmd.json. A reader looks at its share.
States of schedulers, scalers and loaders are JSON, with their tensors beside it.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.futures import Future
from torch.optim import Optimizer

from ..comm.process_groups import all_ranks
from ..comm.rank_check import agree, all_gather_rows
from ..errors import ShardingError

SUMS, OWNER, METADATA = ".sums", ".owner", ".metadata"
_FRESH = 60.0  # seconds since another host's process has written last, if it still writes
_PART = 1 << 22  # bytes that are read at once

Sums = Mapping[str, tuple[int, int]]  # bytes and checksum, by file


class CheckedWriter(FileSystemWriter):
    """Writes one rank's files, and leaves their sizes and checksums beside them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    def write_data(self, plan: Any, planner: Any) -> Future[list[Any]]:
        """Write this rank's files, then the file with their sums."""
        written = super().write_data(plan, planner)
        names = {result.storage_data.relative_path for result in written.wait()}
        sums = {name: sum_of(self.folder / name) for name in sorted(names)}
        (self.folder / f"{plan.storage_data.prefix}{SUMS}").write_text(json.dumps(sums))
        return written


def sum_of(file: Path) -> tuple[int, int]:
    """Return a file's size and the checksum over its bytes."""
    size, checksum = 0, 0
    with file.open("rb") as opened:
        while part := opened.read(_PART):
            size, checksum = size + len(part), zlib.crc32(part, checksum)
    return size, checksum


def collect_sums(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the sums that all ranks have left, and remove their files."""
    sums = {METADATA: sum_of(folder / METADATA)}
    for file in sorted(folder.glob(f"*{SUMS}")):
        sums |= {name: (size, checksum) for name, (size, checksum) in _read(file).items()}
        file.unlink()
    return sums


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


def are_sums(value: object) -> bool:
    """Return whether a JSON value has sizes and checksums by file names."""
    return isinstance(value, dict) and all(
        isinstance(each, list)
        and len(each) == 2
        and all(type(n) is int for n in each)
        # A name with a folder in it could lead out of the checkpoint.
        and Path(name).name == name
        for name, each in value.items()
    )


def fault_of(folder: Path, sums: Sums, names: Iterable[str]) -> str:
    """Return the first damaged file's fault; "" if all are whole."""
    for name in names:
        file, (size, checksum) = folder / name, sums[name]
        try:
            found = sum_of(file)
        except FileNotFoundError:
            return f"{file} is missing"
        except OSError as error:
            return f"{file} cannot be read: {error.strerror}"
        if found[0] != size:
            return f"{file} has {found[0]:,} bytes, and {size:,} were written"
        if found[1] != checksum:
            return f"{file} has other bytes than were written"
    return ""


def make_own(writing: Path, token: str) -> None:
    """Make the folder that is written into, without a dead process's files.

    Raises:
        ShardingError: Another process that lives writes into it.
    """
    owner = writing / OWNER
    if owner.exists():
        host, pid, other = (owner.read_text().split() + ["", "0", ""])[:3]
        # The same token is a former attempt of this process.
        if other != token and _lives(host, int(pid), writing):
            raise _shared(writing, f"process {pid} on host {host} writes it")
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    owner.write_text(f"{socket.gethostname()} {os.getpid()} {token}")


def release(writing: Path, token: str) -> None:
    """Take the writer's mark out of a folder that becomes a checkpoint.

    Raises:
        ShardingError: Another process has written into it.
    """
    owner = writing / OWNER
    found = owner.read_text().split() if owner.exists() else []
    if len(found) != 3 or found[2] != token:
        by = f"process {found[1]} on host {found[0]}" if len(found) == 3 else "another process"
        raise _shared(writing, f"{by} has written it meanwhile")
    owner.unlink()


def _shared(writing: Path, why: str) -> ShardingError:
    return ShardingError.here(
        f"two jobs write the checkpoint {writing}",
        why=why,
        fix="give each job a folder of its own; end the other one if it is a former start of this",
    )


def _lives(host: str, pid: int, writing: Path) -> bool:
    """Return whether a folder's writer may still write; on another host, whether it has lately."""
    if host != socket.gethostname():
        # A process on another host cannot be asked.
        times = [each.stat().st_mtime for each in writing.iterdir()]
        return time.time() - max(times, default=0.0) < _FRESH
    # An earlier save of this process, which has failed.
    if pid == os.getpid():
        return False
    try:
        # Signal 0 only asks whether the process is there.
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


Optimizers = Optimizer | Sequence[Optimizer] | None

_PLAIN = (type(None), bool, int, float, str)
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if type(d) is torch.dtype}


def is_plain_state(value: Any) -> bool:
    if not isinstance(value, dict):
        return isinstance(value, _PLAIN)
    if len(value) != 1:
        return False
    ((kind, content),) = value.items()
    if not isinstance(content, list):
        return False
    if kind == "tensor":
        # The file may be damaged or foreign: its form is checked before anything is made of it.
        number, dtype, shape = content if len(content) == 3 else (None, None, ())
        sizes = shape if isinstance(shape, list) else [None]
        return isinstance(number, str) and dtype in _DTYPES and all(type(n) is int for n in sizes)
    if kind == "dict":
        pairs = all(isinstance(each, list) and len(each) == 2 for each in content)
        return pairs and all(is_plain_state(part) for each in content for part in each)
    return kind in ("list", "tuple") and all(map(is_plain_state, content))


def as_plain(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a state as JSON has it. Its tensors are put into `tensors`, by numbers."""
    if isinstance(value, Tensor):
        number = f"{len(tensors)}"
        tensors[number] = value
        return {"tensor": [number, str(value.dtype).removeprefix("torch."), [*value.shape]]}
    if isinstance(value, Mapping):
        pairs = [[as_plain(k, name, tensors), as_plain(v, name, tensors)] for k, v in value.items()]
        # Pairs, since JSON would turn keys that are numbers into texts.
        return {"dict": pairs}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [as_plain(each, name, tensors) for each in value]}
    if not isinstance(value, _PLAIN):
        raise ShardingError.here(
            f"the state of '{name}' holds a {type(value).__name__}",
            why="a checkpoint is data: tensors, numbers, texts, lists and dicts",
            fix="leave it out of states, or save it in a file of your own",
        )
    return value


def allocate_state(value: Any, tensors: dict[str, Tensor]) -> None:
    """Make a state's tensors, to be read into."""
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        if kind == "tensor":
            number, dtype, shape = content
            tensors[number] = torch.empty(shape, dtype=_DTYPES[dtype])
        else:
            for each in content:
                allocate_state({"list": each} if kind == "dict" else each, tensors)


def as_state(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the state that `as_plain` turned into JSON."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content[0]]
    if kind == "dict":
        return {as_state(k, tensors): as_state(v, tensors) for k, v in content}
    values = [as_state(each, tensors) for each in content]
    return tuple(values) if kind == "tuple" else values


# Where an optimizer has no state, torch's get_state_dict makes one by a step with zero gradients.
# That is not the state before the first step: AdamW has counted one. It is a place to read into.
def state_of(
    model: nn.Module, optimizers: Optimizers
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return weights, optimizer states, and the parameters that have no state yet, by name.

    The optimizers stay as they are. Those parameters' states are places to read into.
    """
    # Before torch's step, which gives every parameter a state.
    known = {id(p) for each in _listed(optimizers) for p in each.state}
    with _without_gradients(optimizers):
        found: Any = get_state_dict(model, _listed(optimizers))
    weights, state = found
    fresh = [name for _, p, name in _named(optimizers, state) if id(p) not in known]
    _forget(optimizers, state, fresh)
    return weights, state, fresh


def set_state(
    model: nn.Module,
    optimizers: Optimizers,
    weights: dict[str, Any],
    state: dict[str, Any],
    fresh: Collection[str],
) -> None:
    """Set weights and states. fresh: the parameters that had no state when it was saved."""
    with _without_gradients(optimizers):
        set_state_dict(model, _listed(optimizers), model_state_dict=weights, optim_state_dict=state)
    _forget(optimizers, state, fresh)


def _listed(optimizers: Optimizers) -> list[Optimizer]:
    if isinstance(optimizers, Optimizer):
        return [optimizers]
    return [*optimizers] if optimizers is not None else []


def _named(
    optimizers: Optimizers, state: Mapping[str, Any]
) -> Iterator[tuple[Optimizer, Tensor, str]]:
    # torch names parameters by their order in the groups.
    groups = [(each, group) for each in _listed(optimizers) for group in each.param_groups]
    for (each, group), named in zip(groups, state.get("param_groups", ()), strict=True):
        for parameter, name in zip(group["params"], named["params"], strict=True):
            yield each, parameter, name


def _forget(optimizers: Optimizers, state: Mapping[str, Any], names: Collection[str]) -> None:
    chosen = {*names}
    for each, parameter, name in [*_named(optimizers, state)]:
        if name in chosen:
            each.state.pop(parameter, None)


@contextmanager
def _without_gradients(optimizers: Optimizers) -> Generator[None, None, None]:
    """Set gradients aside: torch makes no state for an optimizer whose parameters have some."""
    groups = [group for each in _listed(optimizers) for group in each.param_groups]
    gradients = [(p, p.grad) for group in groups for p in group["params"]]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def failure_of(function: Callable[[], object]) -> BaseException | None:
    try:
        function()
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        return error
    return None


def meet(failure: BaseException | None) -> None:
    """Wait for all ranks. If one has an error, all raise it: else they would wait for it."""
    said = None if failure is None else f"{type(failure).__name__}: {failure}"
    texts = gathered(said)
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text is not None:
            raise ShardingError.here(
                f"rank {rank} has not written the checkpoint: {text}",
                why="a checkpoint needs the parts of all ranks; the one before stays as it was",
                fix="read the error of that rank",
            )


def gathered(value: Any) -> list[Any]:
    """Return all ranks' values, as JSON has them."""
    everyone = all_ranks()
    return (
        [value]
        if everyone is None
        else all_gather_rows(everyone, value, "the files of a checkpoint")
    )


def meet_all(call: str) -> None:
    """Meet all ranks before a call that communicates; see `agree`."""
    if (everyone := all_ranks()) is not None:
        agree(everyone, call)


def run(function: Callable, *args: Any, **options: Any) -> Any:
    """Call a function that communicates: a wait in it that ends says for whom."""
    everyone = all_ranks()
    if everyone is None:
        return function(*args, **options)
    return everyone.watcher.run(function, *args, **options)
