"""save and load: a training run in a folder, by torch.distributed.checkpoint.

    folder/.metadata, *.distcp    tensors: of the model, of the optimizer, of other states
    folder/gspmd.json             the step, and the other states without their tensors

A folder becomes a checkpoint by one rename, so a process that dies while it writes leaves the
checkpoint before. Any mesh, and any number of processes, reads it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from ..errors import ShardingError, user_line

FILE = "gspmd.json"
WRITING = ".writing"  # behind the name of a folder that is not a checkpoint yet
Optimizers = Optimizer | Sequence[Optimizer] | None
_PLAIN = (type(None), bool, int, float, str)
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if type(d) is torch.dtype}


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
            One of that name is moved aside first, and removed when the new one stands there.
        model: The result of `parallelize`.
        optimizer: The optimizer of its parameters, or all of them.
        step: The number of steps behind it.
        states: Objects with state_dict and load_state_dict, by name: a scheduler, a scaler, a
            loader. Their states are those of rank 0.
        keep: How many checkpoints of the run stay, this one and those of the latest steps: of
            folders beside it whose names differ in numbers alone; None: all.
        asynchronous: Whether training goes on while files are written. Values are copied to the CPU
            before the call returns, and a thread with a process group of its own writes them.

    Returns:
        With asynchronous=True a Future: `result()` waits until this rank has written, on rank 0
        until the folder is the checkpoint. The next save and load wait for it. Else None.

    Raises:
        ShardingError: A state holds more than tensors, numbers, texts, lists and dicts.

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
    _LATEST.wait()
    path, tensors = Path(folder), dict[str, Tensor]()
    plain = {
        name: _plain(each.state_dict(), name, tensors) for name, each in (states or {}).items()
    }
    weights, state = _state(model, optimizer)
    content = {"model": weights, "optimizer": state, "rng": torch.get_rng_state()}
    content["states"] = tensors
    writing = path.with_name(path.name + WRITING)
    _meet(_failure_of(partial(_prepare, writing)))
    complete = partial(_complete, path, {"step": step, "states": plain}, keep)
    if asynchronous:
        return _LATEST.start(content, writing, complete)
    dcp.save(content, checkpoint_id=writing)
    _meet(_failure_of(complete))


def _prepare(writing: Path) -> None:
    """Make the folder of the new checkpoint, without files of a dead process; rank 0 does it."""
    if _rank() == 0:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)


def _complete(path: Path, said: dict[str, Any], keep: int | None) -> None:
    """Make a checkpoint from the files of all ranks; rank 0 does it."""
    if _rank() != 0:
        return
    writing = path.with_name(path.name + WRITING)
    (writing / FILE).write_text(json.dumps({**said, "checksum": _checksum(said)}))
    if path.exists():
        old = path.with_name(path.name + WRITING + ".old")
        path.rename(old)
        writing.rename(path)
        shutil.rmtree(old)
    else:
        writing.rename(path)
    others = [each for each in _checkpoints(path.parent) if _is_of_a_run(each, path)]
    for each in others[: len(others) + 1 - keep] if keep else ():
        shutil.rmtree(each)


class _Latest:
    """The asynchronous checkpoint that is being written, and the process group for these."""

    def __init__(self) -> None:
        self.saving: Future[None] | None = None
        self.world, self.group = None, None  # a default group, and that of its checkpoints

    def start(self, content: dict[str, Any], writing: Path, complete: Any) -> Future[None]:
        """Copy the content to the CPU and write it in a thread, then complete it."""
        if dist.is_initialized() and self.world is not dist.group.WORLD:
            self.world, self.group = dist.group.WORLD, dist.new_group(backend="gloo")
        saving = self.saving = Future[None]()

        def finish(written: Future) -> None:
            try:
                written.result()
                complete()
            except BaseException as error:
                saving.set_exception(error)
            else:
                saving.set_result(None)

        group: Any = self.group
        written: Any = dcp.async_save(content, checkpoint_id=writing, process_group=group)
        written.add_done_callback(finish)
        return saving

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, on all ranks."""
        saving, self.saving = self.saving, None
        if saving is not None:
            _meet(saving.exception())


_LATEST = _Latest()


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    states: Mapping[str, Any] | None = None,
) -> int:
    """Read a checkpoint into a model, an optimizer and other states, and return its step.

    Call it on every rank. The generator of random numbers goes on as it was.

    Args:
        folder: A checkpoint, or a folder of checkpoints: that of the latest step is read.
        model: The result of `parallelize`, on any mesh.
        optimizer: The optimizer of its parameters, or all of them.
        states: The objects whose states `save` got, by the same names.

    Returns:
        The number of steps behind the checkpoint.

    Raises:
        ShardingError: There is no checkpoint, or it lacks a state.

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
    _LATEST.wait()
    path = Path(folder)
    if not (path / FILE).exists():
        found = _checkpoints(path)
        if not found:
            raise ShardingError(
                f"there is no checkpoint at {path}",
                where=user_line(),
                fix="a folder that gspmd.save has written, or one of such folders",
            )
        path = found[-1]
    said = _read(path / FILE)
    lacking = [name for name in states or {} if name not in said["states"]]
    if lacking:
        raise ShardingError(
            f"the checkpoint {path} has no state '{lacking[0]}'",
            where=user_line(),
            why=f"it was saved with {', '.join(map(repr, said['states'])) or 'no states'}",
            fix="the names that save got",
        )
    weights, state = _state(model, optimizer)
    tensors = dict[str, Tensor]()
    for each in said["states"].values():
        _allocate(each, tensors)
    content: dict[str, Any] = {"model": weights, "rng": torch.get_rng_state(), "states": tensors}
    if optimizer is not None:
        content["optimizer"] = state
    dcp.load(content, checkpoint_id=path)
    _set_state(model, optimizer, weights, state)
    torch.set_rng_state(content["rng"])
    for name, each in (states or {}).items():
        each.load_state_dict(_whole(said["states"][name], tensors))
    return said["step"]


def _state(model: nn.Module, optimizer: Optimizers) -> tuple[dict[str, Any], dict[str, Any]]:
    found: Any = get_state_dict(model, [] if optimizer is None else optimizer)
    return found


def _set_state(
    model: nn.Module, optimizer: Optimizers, weights: dict[str, Any], state: dict[str, Any]
) -> None:
    optimizers = [] if optimizer is None else optimizer
    set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=state)


def _checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, by their steps."""
    found = [each.parent for each in folder.glob(f"*/{FILE}") if WRITING not in each.parent.name]
    return sorted(found, key=lambda each: (_read(each / FILE)["step"], each))


def _is_of_a_run(other: Path, path: Path) -> bool:
    """Return whether another folder's name differs in numbers alone: step-4 and step-5."""
    same = re.sub(r"\d+", "0", other.name) == re.sub(r"\d+", "0", path.name)
    return same and other.name != path.name


def _read(file: Path) -> dict[str, Any]:
    """Return the contents of a file: a step, and states of which `_plain` made JSON. It is data."""
    try:
        said = json.loads(file.read_text())
        is_right = said.pop("checksum") == _checksum(said) and set(said) == {"step", "states"}
        is_right = is_right and type(said["step"]) is int
        is_right = is_right and all(map(_is_state, said["states"].values()))
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        is_right = False
    if not is_right:
        raise ShardingError(
            f"{file} is no file of gspmd.save",
            where=user_line(),
            why="it has another checksum, or holds more than a step and states",
            fix="another checkpoint; the folder before it stays as it was",
        )
    return said


def _checksum(said: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _is_state(value: Any) -> bool:
    """Return whether `_plain` may have made this."""
    if not isinstance(value, dict):
        return isinstance(value, _PLAIN)
    if len(value) != 1:
        return False
    ((kind, content),) = value.items()
    if not isinstance(content, list):
        return False
    if kind == "tensor":
        number, dtype, shape = content if len(content) == 3 else (None, None, ())
        sizes = shape if isinstance(shape, list) else [None]
        return isinstance(number, str) and dtype in _DTYPES and all(type(n) is int for n in sizes)
    if kind == "dict":
        pairs = all(isinstance(each, list) and len(each) == 2 for each in content)
        return pairs and all(_is_state(part) for each in content for part in each)
    return kind in ("list", "tuple") and all(map(_is_state, content))


def _plain(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a state as JSON has it. Its tensors are put into `tensors`, by numbers."""
    if isinstance(value, Tensor):
        number = f"{len(tensors)}"
        tensors[number] = value
        return {"tensor": [number, str(value.dtype).removeprefix("torch."), [*value.shape]]}
    if isinstance(value, Mapping):
        pairs = [[_plain(k, name, tensors), _plain(v, name, tensors)] for k, v in value.items()]
        return {"dict": pairs}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_plain(each, name, tensors) for each in value]}
    if not isinstance(value, _PLAIN):
        raise ShardingError(
            f"the state of '{name}' holds a {type(value).__name__}",
            where=user_line(),
            why="a checkpoint is data: tensors, numbers, texts, lists and dicts",
            fix="leave it out of states, or save it in a file of your own",
        )
    return value


def _allocate(value: Any, tensors: dict[str, Tensor]) -> None:
    """Make the tensors of a state, to be read into."""
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        if kind == "tensor":
            number, dtype, shape = content
            tensors[number] = torch.empty(shape, dtype=_DTYPES[dtype])
        else:
            for each in content:
                _allocate({"list": each} if kind == "dict" else each, tensors)


def _whole(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a state of which `_plain` made JSON."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content[0]]
    if kind == "dict":
        return {_whole(k, tensors): _whole(v, tensors) for k, v in content}
    values = [_whole(each, tensors) for each in content]
    return tuple(values) if kind == "tuple" else values


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _failure_of(function: Callable[[], None]) -> Exception | None:
    try:
        function()
    except Exception as error:
        return error
    return None


def _meet(failure: BaseException | None) -> None:
    """Wait for all ranks. An error of one of them is an error of all: none would wait for it."""
    said = None if failure is None else f"{type(failure).__name__}: {failure}"
    texts: list[str | None] = [said]
    if dist.is_initialized():
        texts *= dist.get_world_size()
        dist.all_gather_object(texts, said)
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text is not None:
            raise ShardingError(
                f"rank {rank} has not written the checkpoint: {text}",
                where=user_line(),
                why="a checkpoint needs the parts of all ranks; the one before stays as it was",
                fix="the error of that rank",
            )
