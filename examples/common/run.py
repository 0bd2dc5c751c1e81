"""One run of an example: its options, its processes, its training loop."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from torchgspmd import Mesh
from torchgspmd.tools.evaluation import evaluate

from .report import plot_losses, show_plan

RANK, WORLD = (
    int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1))
)
LAUNCHED = "RANK" in os.environ  # by torchrun
HALVES = ("bfloat16", "float16", "float32")
Data = TypeVar("Data")


def options(
    description: str | None, layouts: Sequence[str], layout: str, folder: Path
) -> argparse.ArgumentParser:
    """The options of all examples. layout: the one taken by default. folder: the example's, where
    its files go.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--mesh",
        type=Mesh.parse,
        help="such as data=2,model=2; default: data=<number of processes>, or plain PyTorch on one",
    )
    add(
        "--layout",
        choices=list(layouts),
        default=layout,
        help="which marks of model.py (default: %(default)s)",
    )
    add("--batch", type=int, default=16, help="examples in the global batch (default: %(default)s)")
    add("--steps", type=int, default=200)
    add("--lr", type=float, default=1e-3)
    add("--warmup", type=int, default=20, help="steps of linear warm-up")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float64"),
        default="float32",
        help="bfloat16: by autocast",
    )
    for name, use in (("param", "computes"), ("reduce", "sums gradients over devices")):
        add(f"--{name}-dtype", choices=HALVES, help=f"in which a mesh {use}, with float32 weights")
    add("--seed", type=int, default=0)
    add("--backend", choices=("torch", "inductor", "xla"), default="torch")
    add("--save", type=Path, help="write a torch.distributed.checkpoint at the end")
    add("--resume", type=Path, help="continue from one, whatever mesh wrote it")
    add("--losses", type=Path, help="write the losses as JSON")
    add("--plot", type=Path, default=folder / "out" / "loss.png", help="where the loss curve goes")
    add(
        "--plan",
        action="store_true",
        help="only print what a device of --mesh would send and keep; runs nowhere",
    )
    add("--cache", type=Path, default=folder / ".cache")
    return parser


@dataclass(frozen=True)
class Run:
    """mesh: None for plain PyTorch on one process."""

    args: argparse.Namespace
    console: Console
    device: torch.device
    mesh: Mesh | None

    @classmethod
    def start(cls, args: argparse.Namespace) -> Run:
        """Starts the process group, if there is to be one."""
        console = Console(
            quiet=RANK > 0, highlight=False, width=None if sys.stdout.isatty() else 120
        )
        device = (
            torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if args.backend == "xla" and not args.mesh:
            sys.exit("--backend xla needs a --mesh of all devices, such as data=4,model=2")
        if (LAUNCHED or args.mesh) and args.backend != "xla":
            for name, value in (
                ("RANK", "0"),
                ("WORLD_SIZE", "1"),
                ("MASTER_ADDR", "localhost"),
                ("MASTER_PORT", "0"),
            ):
                os.environ.setdefault(
                    name, value
                )  # a group of one process if torchrun did not start more
            if not dist.is_initialized():
                dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(args, console, device, args.mesh or (Mesh(data=WORLD) if WORLD > 1 else None))

    def __str__(self) -> str:
        return f"{self.mesh} {self.args.layout}" if self.mesh else "one process"

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return torch.float64 if self.args.dtype == "float64" else torch.float32

    @property
    def precision(self) -> dict[str, Any]:
        """What parallelize takes of the options."""
        dtypes = {n: getattr(self.args, n) for n in ("param_dtype", "reduce_dtype")}
        return {name: getattr(torch, dtype) for name, dtype in dtypes.items() if dtype}

    def autocast(self) -> contextlib.AbstractContextManager:
        where = "xla" if self.args.backend == "xla" else self.device.type
        return (
            torch.autocast(where, torch.bfloat16)
            if self.args.dtype == "bfloat16"
            else contextlib.nullcontext()
        )

    def load(self, load: Callable[[], Data]) -> Data:
        """Rank 0 downloads what there is to download, the others wait for it."""
        found = load() if RANK == 0 else None
        if dist.is_initialized():
            dist.barrier()
        return load() if found is None else found

    def batches(self, size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Parts of tensors, `size` rows each; the last one may have fewer."""
        for part in zip(*(t.split(size) for t in tensors)):
            yield tuple(
                t.to(self.device, self.dtype if t.is_floating_point() else None) for t in part
            )

    def evaluate(
        self,
        model: nn.Module,
        batches: Iterable[tuple[Tensor, ...]],
        metrics: dict[str, Any],
        call: Callable[..., tuple[Tensor, ...]],
    ) -> dict[str, float]:
        """The metrics of a model, as of one process. call: the outputs and targets of a batch."""
        with self.autocast():
            scores = evaluate(model, batches, metrics, call=call)  # the one line
        self.console.print(", ".join(f"{name} {score:.4f}" for name, score in scores.items()))
        return scores

    def write(
        self, losses: list[float], first: int, unit: str, scores: dict[str, float] | None = None
    ) -> None:
        """The losses as JSON and as a curve. unit: of the loss."""
        if RANK > 0:
            return
        if self.args.losses:
            self.args.losses.parent.mkdir(parents=True, exist_ok=True)
            self.args.losses.write_text(
                json.dumps(
                    {
                        "name": str(self),
                        "first_step": first,
                        "losses": losses,
                        "scores": scores or {},
                    }
                )
            )
        plot_losses(losses, first, str(self), unit, self.args.plot)
        self.console.print(f"loss curve: {self.args.plot}")


def train(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[int], tuple[Tensor, ...]],
    first: int,
    unit: str = "examples",
    count: Callable[[Tensor], int] = len,
    lr: Callable[[int], float] = lambda step: 1.0,
    watch: Callable[..., None] = lambda: None,
    whole: bool = False,
) -> list[float]:
    """The loss of every step, which the model returns. batch: the global one of a step. count: how
    many units are in its first tensor. lr: what the learning rate is multiplied by, besides the
    warm-up. watch: sees what else the model returns. whole: the model is a train_step, whose call
    clips and updates as well.
    """
    args, console = run.args, run.console
    progress = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TextColumn(f"{{task.fields[rate]:,.0f}} {unit}/s"),
        TimeRemainingColumn(),
        console=console,
        disable=RANK > 0 or not console.is_terminal,
    )
    losses: list[float] = []
    rate = start = 0.0
    compiled = first + (
        args.backend == "xla"
    )  # the step that compiles last: XLA's second one has a state
    with progress:
        task = progress.add_task("training", total=args.steps, loss=float("nan"), rate=0)
        for step in range(first, first + args.steps):
            arguments = [
                t.to(run.device, run.dtype if t.is_floating_point() else None) for t in batch(step)
            ]
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min(1.0, (step + 1) / args.warmup) * lr(step)
            with run.autocast():
                out = model(*arguments)
            loss, *others = out if isinstance(out, tuple) else (out,)
            if not whole:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
                optimizer.zero_grad()
            watch(*others)
            losses.append(loss.item())
            if step == first and (plan := getattr(model, "plan", None)) is not None:
                show_plan(plan, getattr(model, "planning_seconds", 0.0), console)
            if step <= compiled:
                start = time.perf_counter()
            else:
                rate = (step - compiled) * count(arguments[0]) / (time.perf_counter() - start)
            progress.update(task, advance=1, loss=losses[-1], rate=rate)
            if not console.is_terminal and (len(losses) % max(1, args.steps // 10) == 0):
                console.print(f"step {step + 1:5}  loss {losses[-1]:.4f}  {rate:,.0f} {unit}/s")
    return losses


def leave() -> None:
    """Ends the process; gloo's threads may abort one that takes its time to exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
