"""save and load: a training run in a folder, by torch.distributed.checkpoint.

    folder/.metadata, *.distcp    tensors: the model's, the optimizer's, other states'
    folder/gspmd.json             the step, states without tensors, sizes and checksums of files

A folder becomes a checkpoint by one rename, so a process that dies while it writes leaves the
checkpoint before. Any mesh, and any number of processes, reads it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from ..errors import ShardingError
from .checkpoint_files import (
    CheckedWriter,
    Optimizers,
    allocate_state,
    are_sums,
    as_plain,
    as_state,
    collect_sums,
    failure_of,
    fault_of,
    gathered,
    is_plain_state,
    make_own,
    meet,
    meet_all,
    release,
    run,
    set_state,
    state_of,
)

FILE = "gspmd.json"
WRITING = ".writing"  # behind the name of a folder that is not a checkpoint yet


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    step: int = 0,
    states: Mapping[str, Any] | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
) -> Future[None] | None:
    """Write a checkpoint. Call it on every rank.

    Args:
        folder: The folder that the checkpoint becomes, on a file system that all processes see.
            One with that name is moved aside first, and removed when the new one stands there.
        model: The result of `parallelize`.
        optimizer: The optimizer of its parameters, or all of them.
        step: How many steps lie behind it.
        states: Objects with state_dict and load_state_dict, by name: a scheduler, a scaler, a
            loader. Rank 0's states are written.
        keep: How many of the run's checkpoints stay, this one and the latest steps' among them.
            They are folders beside it whose names differ in numbers alone. None: all.
        asynchronous: Whether training goes on while files are written. Values are copied to the CPU
            before the call returns, and a thread with its own process group writes them.

    Returns:
        With asynchronous=True a Future: `result()` waits until this rank has written, on rank 0
        until the folder is the checkpoint. The next save and load wait for it. Else None.

    Raises:
        ShardingError: A state holds more than tensors, numbers, texts, lists and dicts; a file
            could not be written, or another job writes the same folder. The text names the newest
            whole checkpoint.

    Example:
        >>> import tempfile, torch.distributed as dist
        >>> from torchgspmd import load, parallelize, save
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = parallelize(torch.nn.Linear(4, 8), Mesh(data=1))
        >>> folder = tempfile.mkdtemp()
        >>> save(f"{folder}/step-7", model, step=7)
        >>> load(folder, model)
        7
        >>> dist.destroy_process_group()
    """
    meet_all("gspmd.save")
    _LATEST.wait()
    path = Path(folder)
    content, said = content_of(model, optimizer, step, states or {})
    writing = path.with_name(path.name + WRITING)
    meet(failure_of(partial(_prepare, writing)))
    complete = partial(_complete, path, said, keep)
    if asynchronous:
        return _LATEST.start(content, path, writing, complete)
    failure = failure_of(lambda: run(dcp.save, content, storage_writer=CheckedWriter(writing)))
    meet(_not_written(path, failure) if failure else failure_of(complete))


def content_of(
    model: nn.Module, optimizer: Optimizers, step: int, states: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a checkpoint's tensors, and the step and states without their tensors."""
    tensors = dict[str, Tensor]()
    plain = {name: as_plain(each.state_dict(), name, tensors) for name, each in states.items()}
    weights, state, fresh = state_of(model, optimizer)
    # Without torch's places to read into, which have counted a step.
    state["state"] = {n: each for n, each in state.get("state", {}).items() if n not in fresh}
    content = {"model": weights, "optimizer": state, "rng": torch.get_rng_state()}
    return {**content, "states": tensors}, {"step": step, "states": plain, "fresh": fresh}


def write_said(folder: Path, said: dict[str, Any]) -> None:
    """Write the file that makes a folder a checkpoint."""
    (folder / FILE).write_text(json.dumps({**said, "checksum": _checksum(said)}))


def _prepare(writing: Path) -> None:
    """Make the new checkpoint's folder, without a dead process's files; rank 0 does it."""
    if _rank() == 0:
        make_own(writing, _TOKEN)


def _complete(path: Path, said: dict[str, Any], keep: int | None) -> None:
    """Make a checkpoint from all ranks' files; rank 0 does it."""
    if _rank() != 0:
        return
    writing = path.with_name(path.name + WRITING)
    try:
        said = {**said, "files": collect_sums(writing)}
        release(writing, _TOKEN)
        write_said(writing, said)
    except OSError as error:
        raise _not_written(path, error) from error
    if path.exists():
        # A rename over a folder that has files fails, and a removal first could lose both.
        old = path.with_name(path.name + WRITING + ".old")
        path.rename(old)
        writing.rename(path)
        shutil.rmtree(old)
    else:
        writing.rename(path)
    others = [each for each in checkpoints_in(path.parent) if _is_of_a_run(each, path)]
    for each in others[: len(others) + 1 - keep] if keep else ():
        shutil.rmtree(each)


class _Latest:
    """The asynchronous checkpoint that is being written, and the process group for these."""

    def __init__(self) -> None:
        self.saving: Future[None] | None = None
        self.world, self.group = None, None  # a default group, and that of its checkpoints

    def start(
        self, content: dict[str, Any], path: Path, writing: Path, complete: Any
    ) -> Future[None]:
        """Copy the content to the CPU and write it in a thread, then complete it."""
        if dist.is_initialized() and self.world is not dist.group.WORLD:
            self.world, self.group = dist.group.WORLD, dist.new_group(backend="gloo")
        saving = self.saving = Future[None]()

        def finish(written: Future) -> None:
            try:
                written.result()
                complete()
            except ShardingError as error:
                saving.set_exception(error)
            except BaseException as error:
                saving.set_exception(_not_written(path, error))
            else:
                saving.set_result(None)

        group: Any = self.group
        writer = CheckedWriter(writing)
        written: Any = dcp.async_save(content, storage_writer=writer, process_group=group)
        written.add_done_callback(finish)
        return saving

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, on all ranks."""
        saving, self.saving = self.saving, None
        if saving is not None:
            meet(saving.exception())


_LATEST = _Latest()
_TOKEN = uuid.uuid4().hex  # of this process, as a writer


def _not_written(path: Path, error: BaseException) -> ShardingError:
    """Return the error for a checkpoint that could not be written; the one before it stays."""
    failures = getattr(error, "failures", None) or {_rank(): (error, None)}  # of dcp, by rank
    rank, (cause, *_) = next(iter(failures.items()))
    text = f"{type(cause).__name__}: {cause}".partition("\n")[0]
    return ShardingError.here(
        f"the checkpoint {path} could not be written: rank {rank} has raised {text}",
        why=_newest_text(path.parent),
        fix="make room on the disk, or use another folder; training may go on",
    )


def _newest_text(folder: Path) -> str:
    """Return a clause about the newest checkpoint in a folder, which need not be whole."""
    found = checkpoints_in(folder)
    if not found:
        return f"there is no other checkpoint in {folder}"
    return f"the newest checkpoint is {found[-1]}, of step {_read(found[-1] / FILE)['step']}"


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    states: Mapping[str, Any] | None = None,
) -> int:
    """Read a checkpoint into a model, an optimizer and other states, and return its step.

    Call it on every rank. The random number generator goes on as it was.

    Args:
        folder: A checkpoint, or a folder with checkpoints: the one with the latest step is read.
        model: The result of `parallelize`, on any mesh.
        optimizer: The optimizer of its parameters, or all of them.
        states: The objects whose states `save` got, by the same names.

    Returns:
        How many steps lie behind the checkpoint.

    Raises:
        ShardingError: There is no checkpoint, it lacks a state, or one of its files is missing or
            has other bytes than were written. The text names the file and the newest whole
            checkpoint.

    Example:
        >>> import tempfile, torch.distributed as dist
        >>> from torchgspmd import load, parallelize, save
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> folder, model = tempfile.mkdtemp(), parallelize(torch.nn.Linear(4, 8), Mesh(data=1))
        >>> for step in (1, 2):
        ...     save(f"{folder}/step-{step}", model, step=step)
        >>> load(folder, model)
        2
        >>> dist.destroy_process_group()
    """
    meet_all("gspmd.load")
    _LATEST.wait()
    path = Path(folder)
    if not (path / FILE).exists():
        for file in sorted(path.glob(f"*/{FILE}")):
            if WRITING not in file.parent.name:
                # It raises for a damaged file: the latest checkpoint must not be passed over in
                # silence.
                _read(file)
        found = checkpoints_in(path)
        if not found:
            raise ShardingError.here(
                f"there is no checkpoint at {path}",
                fix="pass a folder that gspmd.save has written, or a folder of such folders",
            )
        path = found[-1]
    said = _read(path / FILE)
    if fault := _fault(path, said):
        raise _damaged(path, fault)
    lacking = [name for name in states or {} if name not in said["states"]]
    if lacking:
        raise ShardingError.here(
            f"the checkpoint {path} has no state '{lacking[0]}'",
            why=f"it was saved with {', '.join(map(repr, said['states'])) or 'no states'}",
            fix="use the names that save got",
        )
    weights, state, _ = state_of(model, optimizer)
    fresh = said.get("fresh", [])
    tensors = dict[str, Tensor]()
    for each in said["states"].values():
        allocate_state(each, tensors)
    content: dict[str, Any] = {"model": weights, "rng": torch.get_rng_state(), "states": tensors}
    if optimizer is not None:
        saved = {n: each for n, each in state["state"].items() if n not in fresh}
        content["optimizer"] = {**state, "state": saved}
    # A path alone makes torch import fsspec, and the plan cache tells imported packages apart.
    run(dcp.load, content, storage_reader=dcp.FileSystemReader(path))
    if optimizer is not None:
        read = content["optimizer"]
        state = {**read, "state": {**state["state"], **read.get("state", {})}}
    set_state(model, optimizer, weights, state, fresh)
    torch.set_rng_state(content["rng"])
    for name, each in (states or {}).items():
        each.load_state_dict(as_state(said["states"][name], tensors))
    return said["step"]


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, by their steps."""
    found = dict[Path, int]()
    for file in folder.glob(f"*/{FILE}"):
        if WRITING not in file.parent.name and (said := parsed(file)) is not None:
            found[file.parent] = said["step"]
    return sorted(found, key=lambda each: (found[each], each))


def _fault(path: Path, said: Mapping[str, Any]) -> str:
    """Return the fault in a checkpoint's files, or ""; each rank reads a share."""
    sums, ranks = said.get("files", {}), dist.get_world_size() if dist.is_initialized() else 1
    fault = fault_of(path, sums, sorted(sums)[_rank() :: ranks])
    return next(filter(None, gathered(fault)), "")


def _damaged(path: Path, fault: str) -> ShardingError:
    """Return the error for a damaged checkpoint, which names the newest whole one."""
    whole = newest_whole(path.parent, besides=path)
    return ShardingError.here(
        fault,
        why=f"the checkpoint {path} is damaged, and nothing of it was loaded",
        fix=f"start from the beginning: there is no other whole checkpoint in {path.parent}"
        if whole is None
        else f"call gspmd.load('{whole}', ...): it is the newest whole checkpoint, of step "
        f"{_read(whole / FILE)['step']}",
    )


def newest_whole(folder: Path, besides: Path | None = None) -> Path | None:
    """Return the newest checkpoint in a folder whose files are whole; every rank calls it."""
    found = (each for each in reversed(checkpoints_in(folder)) if each != besides)
    return next((each for each in found if not _fault(each, _read(each / FILE))), None)


def _is_of_a_run(other: Path, path: Path) -> bool:
    """Return whether another folder's name differs in numbers alone: step-4 and step-5."""
    same = re.sub(r"\d+", "0", other.name) == re.sub(r"\d+", "0", path.name)
    return same and other.name != path.name


def _read(file: Path) -> dict[str, Any]:
    """Return a file's contents; raise ShardingError if save has not written it."""
    said = parsed(file)
    if said is None:
        raise ShardingError.here(
            f"{file} is no file of gspmd.save",
            why="it has another checksum, or holds more than a step and states",
            fix=f"use another checkpoint: {_newest_text(file.parent.parent)}",
        )
    return said


def parsed(file: Path) -> dict[str, Any] | None:
    """Return a file's contents: a step, sums, states that `as_plain` turned into JSON."""
    try:
        said = json.loads(file.read_text())
        is_right = said.pop("checksum") == _checksum(said)
        optional, fresh = {"files", "fresh"}, said.get("fresh", [])
        is_right = is_right and {"step", "states"} <= set(said) <= {"step", "states", *optional}
        is_right = is_right and isinstance(fresh, list) and all(type(n) is str for n in fresh)
        is_right = is_right and type(said["step"]) is int and are_sums(said.get("files", {}))
        is_right = is_right and all(map(is_plain_state, said["states"].values()))
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        is_right = False
    return said if is_right else None


def _checksum(said: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
