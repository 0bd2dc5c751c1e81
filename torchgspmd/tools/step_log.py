"""StepLog: rows about a training loop's steps, by rank 0, from all ranks' measurements.

with gspmd.StepLog(model, total=1000, tokens=batch * length, file="log.jsonl") as log:
    for tokens, targets in loader:
        loss = train(tokens, targets)
        log.step(loss=loss)

step 20/1000  loss 3.4121  12.8 ms  640,000 tokens/s  MFU 41.2 %  9.10 GiB  waits 3 %
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..comm.hardware import Hardware
from ..comm.rank_check import all_gather_rows
from ..errors import ShardingError
from ..fx_passes.units import count_text, size_text, time_text

CARDS = ("h200", "h100", "b200", "a100")  # presets of Hardware that a card's name contains
STRAGGLES = 0.2  # how much less than the others a rank waits for whom they wait


class StepLog:
    """Rows about training steps: on the terminal, as JSON lines, for TensorBoard and W&B.

    Every rank calls `step` after each step; rank 0 writes. Tensors are read at each `every`-th step
    alone, so that the others wait for no device.

    Args:
        model: The module from parallelize. It knows a step's operations, and who waits.
        total: The number of steps, for the progress.
        every: Steps from one row to the next.
        tokens: Tokens (or samples) in a step on all devices together.
        file: A file that gets a JSON line for each row.
        tensorboard: A folder for TensorBoard's SummaryWriter.
        wandb: A W&B run, or another object with `log(row, step=)`.
        hardware: For the MFU: a preset or a Hardware. None: the card's, if it is known.

    Example:
        >>> log = gspmd.StepLog(every=2, tokens=8)
        >>> row = [log.step(loss=torch.tensor(0.5)) for _ in range(2)][-1]  # doctest: +ELLIPSIS
        step 2  loss 0.5000  ...
        >>> row["step"], row["loss"]
        (2, 0.5)
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        total: int | None = None,
        every: int = 10,
        tokens: int | None = None,
        file: str | Path | None = None,
        tensorboard: str | Path | None = None,
        wandb: Any = None,
        hardware: Hardware | str | None = None,
    ) -> None:
        if every < 1:
            raise ShardingError.here(f"every is {every}", fix="give every=1, or more")
        self.total, self.every, self.tokens = total, every, tokens
        self.count, self.rank = 0, dist.get_rank() if dist.is_initialized() else 0
        self._model, self._wandb = model, wandb if self.rank == 0 else None
        self._hardware = _hardware(hardware)
        # the plan that was last counted, and its FLOPs
        self._operations: tuple[object, float] = (None, 0.0)
        self._since, self._steps = time.perf_counter(), 0
        self._calls, self._seen = 0, (0, 0)
        # Appended, so that a job that is started anew goes on in its log.
        self._file = Path(file).open("a") if file and self.rank == 0 else None  # noqa: SIM115
        self._board = None
        if tensorboard and self.rank == 0:
            try:
                writer = import_module("torch.utils.tensorboard").SummaryWriter
            except ImportError as error:
                raise ShardingError.here(
                    "tensorboard is not installed", fix="run pip install tensorboard"
                ) from error
            self._board = writer(str(tensorboard))
        self._bar = _bar(total) if self.rank == 0 else None

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files.

        Example:
            >>> gspmd.StepLog().close()
        """
        for each in (self._file, self._board):
            if each is not None:
                each.close()
        if self._bar is not None:
            self._bar[0].stop()
        self._file = self._board = self._bar = None

    def step(self, **values: Any) -> dict[str, Any] | None:
        """Count a step, and write a row after every `every` steps.

        Args:
            values: Numbers and 0-d tensors, such as the loss: the same names on all ranks.

        Returns:
            The row, or None. seconds: for a step. memory: the most bytes that this rank has held.
            waits: the share of time in which ranks waited for communication. slowest: the rank for
            which the others waited, if there is one.

        Example:
            >>> gspmd.StepLog(every=2).step(loss=0.5) is None
            True
        """
        self.count, self._steps = self.count + 1, self._steps + 1
        # The last step gets a row in any case.
        if self.count % self.every and self.count != self.total:
            return None
        numbers = {name: _number(value) for name, value in values.items()}  # waits for the device
        now = time.perf_counter()
        seconds = (now - self._since) / self._steps
        row = {"step": self.count, **numbers, "seconds": seconds, **self._rates(seconds)}
        # Linux counts in KiB.
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            memory = torch.cuda.max_memory_allocated()
        row |= {"memory": memory, **self._waits()}
        self._since, self._steps = time.perf_counter(), 0
        if self.rank == 0:
            self._write(row, numbers)
        return row

    def _rates(self, seconds: float) -> dict[str, float]:
        """Return tokens and operations per second."""
        rates = {} if self.tokens is None else {"tokens_per_second": self.tokens / seconds}
        watcher, plan = _watcher(self._model), getattr(self._model, "plan", None)
        if watcher is None or plan is None:
            return rates
        # With gradient accumulation a step calls the model several times.
        calls = (watcher.step - self._calls) / self._steps
        self._calls = watcher.step
        if self._operations[0] is not plan:
            self._operations = plan, plan.estimate().model_flops / plan.mesh.size
        rate = calls * self._operations[1] / seconds
        rates["flops"] = rate
        if self._hardware is not None:
            rates["mfu"] = rate / self._hardware.peak
        return rates

    def _waits(self) -> dict[str, Any]:
        """Return the share of time in which ranks waited since the last row, and for whom."""
        watcher = _watcher(self._model)
        if watcher is None:
            return {}
        looks, waits = watcher.looks - self._seen[0], watcher.waits - self._seen[1]
        self._seen = watcher.looks, watcher.waits
        own = waits / max(looks, 1)
        if dist.get_world_size() != len(watcher.processes):  # a mesh over some processes only
            return {"waits": own, "slowest": None}
        by_rank = all_gather_rows(vars(self._model)["_groups"], own, "StepLog.step")
        # The slowest rank waits least: all others wait for it.
        mean, least = sum(by_rank) / len(by_rank), min(by_rank)
        others = (sum(by_rank) - least) / max(len(by_rank) - 1, 1)
        slowest = by_rank.index(least) if others - least > STRAGGLES else None
        return {"waits": mean, "slowest": slowest}

    def _write(self, row: Mapping[str, Any], numbers: Mapping[str, float]) -> None:
        text = self._text(row, numbers)
        if self._bar is None:
            print(text, flush=True)
        else:
            bar, task = self._bar
            bar.update(task, completed=self.count, description=text)
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        if self._board is not None:
            for name, value in row.items():
                if name != "step" and value is not None:
                    self._board.add_scalar(name, value, self.count)
        if self._wandb is not None:
            self._wandb.log(dict(row), step=self.count)

    def _text(self, row: Mapping[str, Any], numbers: Mapping[str, float]) -> str:
        parts = [f"step {self.count}" + (f"/{self.total}" if self.total else "")]
        parts += [f"{name} {value:.4f}" for name, value in numbers.items()]
        parts.append(time_text(row["seconds"]))
        if "tokens_per_second" in row:
            parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
        if "mfu" in row:
            parts.append(f"MFU {100 * row['mfu']:.1f} %")
        elif "flops" in row:
            parts.append(f"{count_text(row['flops'])}FLOP/s a device")
        parts.append(size_text(row["memory"]))
        if "waits" in row:
            parts.append(f"waits {100 * row['waits']:.0f} %")
        if row.get("slowest") is not None:
            parts.append(f"for rank {row['slowest']}")
        return "  ".join(parts)


def _watcher(model: nn.Module | None) -> Any:
    groups = None if model is None else vars(model).get("_groups")
    return None if groups is None else groups.watcher


def _number(value: Any) -> float:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.item() if isinstance(value, Tensor) else value


def _hardware(chosen: Hardware | str | None) -> Hardware | None:
    if chosen is None and torch.cuda.is_available():
        name = torch.cuda.get_device_name().lower()
        chosen = next((card for card in CARDS if card in name), None)
    return None if chosen is None else Hardware.of(chosen)


def _bar(total: int | None) -> tuple[Any, Any] | None:
    """Return a progress bar and its task on a terminal, if rich is installed; else None."""
    if not sys.stdout.isatty():
        return None
    try:
        progress = import_module("rich.progress")
    except ImportError:
        return None
    columns = "{task.description}", progress.BarColumn(), progress.TimeRemainingColumn()
    bar = progress.Progress(*columns)
    bar.start()
    return bar, bar.add_task("", total=total)
