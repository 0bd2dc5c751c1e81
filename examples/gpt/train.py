"""Trains the GPT of model.py on English text, on one process or on a mesh of them.

    python train.py                                                     one process, plain PyTorch
    torchrun --nproc-per-node 4 train.py --mesh data=2,model=2 --layout tp
    python train.py --backend xla --mesh data=4,model=2                 one process, all devices that XLA has
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from data import Characters, load_text
from model import GPT, LAYOUTS, Config
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import torchgspmd as gspmd

HERE = Path(__file__).resolve().parent
LAUNCHED = "RANK" in os.environ                                             # by torchrun
RANK, WORLD = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--mesh", type=gspmd.Mesh.parse, help="such as data=2,model=2; default: data=<number of processes>, or plain PyTorch on one")
    add("--layout", choices=LAYOUTS, default="tp", help="which marks of model.py (default: %(default)s)")
    add("--text", default="shakespeare", help="shakespeare (downloaded once), pydoc (no download) or a file")
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--width", type=int, default=128)
    add("--context", type=int, default=128, help="length of a sequence")
    add("--batch", type=int, default=16, help="sequences in the global batch")
    add("--steps", type=int, default=200)
    add("--lr", type=float, default=1e-3)
    add("--warmup", type=int, default=20, help="steps of linear warm-up")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--dtype", choices=("float32", "bfloat16", "float64"), default="float32", help="bfloat16: by autocast")
    add("--seed", type=int, default=0)
    add("--backend", choices=("torch", "inductor", "xla"), default="torch")
    add("--save", type=Path, help="write a torch.distributed.checkpoint at the end")
    add("--resume", type=Path, help="continue from one, whatever mesh wrote it")
    add("--losses", type=Path, help="write the losses as JSON")
    add("--plot", type=Path, default=HERE / "out" / "loss.png", help="where the loss curve goes")
    add("--sample", type=int, default=400, help="characters of text to generate at the end")
    add("--cache", type=Path, default=HERE / ".cache")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    console = Console(quiet=RANK > 0, highlight=False, width=None if sys.stdout.isatty() else 120)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if args.backend == "xla" and not args.mesh:
        sys.exit("--backend xla needs a --mesh of all devices, such as data=4,model=2")
    if (LAUNCHED or args.mesh) and args.backend != "xla":
        start_processes(device)
    mesh = args.mesh or (gspmd.Mesh(data=WORLD) if WORLD > 1 else None)

    text = load_on_one_rank(args.text, args.cache)
    torch.manual_seed(args.seed)
    config = Config(len(text.alphabet), args.context, args.layers, args.heads, args.width)
    model = GPT(config, mesh, args.layout) if mesh else GPT(config)
    model.to(device, torch.float64 if args.dtype == "float64" else torch.float32)
    console.print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(text.tokens):,} characters of {args.text}, "
                  f"{len(text.alphabet)} different; " + (f"mesh {mesh}, layout {args.layout}" if mesh else "one process, plain PyTorch"))
    if mesh:
        model = gspmd.parallelize(model, mesh, backend=args.backend)        # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    first = load(model, optimizer, args.resume) if args.resume else 0

    losses, rate = train(args, model, optimizer, text, device, first, console)

    if args.save:
        save(model, optimizer, first + args.steps, args.save)
        console.print(f"checkpoint: {args.save}")
    weights = whole_weights(model)
    if RANK == 0:
        if args.sample:
            console.rule("sample")
            console.print(sample(config, weights, text, args.sample, args.seed), markup=False)
            console.rule()
        if args.losses:
            args.losses.parent.mkdir(parents=True, exist_ok=True)
            args.losses.write_text(json.dumps({"name": f"{mesh} {args.layout}" if mesh else "one process", "first_step": first,
                                               "tokens_per_second": rate, "losses": losses}))
        plot(losses, first, f"{mesh}, {args.layout}" if mesh else "one process", args.plot)
        console.print(f"loss curve: {args.plot}")


def start_processes(device: torch.device) -> None:
    """The process group; of one process if torchrun did not start more."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def load_on_one_rank(name: str, cache: Path) -> Characters:
    """Rank 0 downloads what there is to download, the others wait for it."""
    if RANK == 0:
        load_text(name, cache)
    if dist.is_initialized():
        dist.barrier()
    return Characters(load_text(name, cache))


# ------------------------------------------------------------------------------------------------------------ training

def train(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, text: Characters, device: torch.device, first: int,
          console: Console) -> tuple[list[float], float]:
    """The loss of every step, and tokens per second without the first step, which compiles."""
    where = "xla" if args.backend == "xla" else device.type
    autocast = torch.autocast(where, torch.bfloat16) if args.dtype == "bfloat16" else contextlib.nullcontext()
    progress = Progress(TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.4f}"),
                        TextColumn("{task.fields[rate]:,.0f} tokens/s"), TimeRemainingColumn(), console=console,
                        disable=RANK > 0 or not console.is_terminal)
    losses: list[float] = []
    rate = start = 0.0
    with progress:
        task = progress.add_task("training", total=args.steps, loss=float("nan"), rate=0)
        for step in range(first, first + args.steps):
            tokens, targets = (t.to(device) for t in text.batch(step, args.seed, args.batch, args.context))
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min(1.0, (step + 1) / args.warmup)
            with autocast:
                loss = model(tokens, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step == first:
                show_plan(model, console)
                start = time.perf_counter()
            else:
                rate = (len(losses) - 1) * tokens.numel() / (time.perf_counter() - start)
            progress.update(task, advance=1, loss=losses[-1], rate=rate)
            if not console.is_terminal and (len(losses) % max(1, args.steps // 10) == 0):
                console.print(f"step {step + 1:5}  loss {losses[-1]:.4f}  {rate:,.0f} tokens/s")
    return losses, rate


def show_plan(model: nn.Module, console: Console) -> None:
    """What one device sends and keeps, as the plan of the compiled step says."""
    plan = getattr(model, "plan", None)
    if plan is None:
        return
    groups: dict[tuple[str, str, str], list[gspmd.Collective]] = {}
    for c in plan.collectives:
        groups.setdefault((c.kind, "+".join(c.axes), c.dtype), []).append(c)
    table = Table("collective", "over", "dtype", title="one step, one device: forward and backward", title_justify="left")
    table.add_column("count", justify="right")
    table.add_column("sent", justify="right")
    for (kind, axes, dtype), found in sorted(groups.items()):
        table.add_row(kind, axes, dtype, str(sum(c.count for c in found)), size(sum(c.sent_bytes for c in found)))
    table.add_section()
    table.add_row("all", "", "", str(sum(c.count for c in plan.collectives)), size(plan.sent_bytes))
    console.print(table)
    console.print(f"memory of a device: parameters {size(plan.memory.parameters)}, inputs {size(plan.memory.inputs)}, "
                  f"peak of a step {size(plan.memory.peak)}; planned in {getattr(model, 'planning_seconds', 0.0):.1f} s")


def size(count: float) -> str:
    """Bytes for a person."""
    unit = next((i for i in range(4) if count < 1024 ** (i + 1)), 3)
    return f"{count:.0f} B" if unit == 0 else f"{count / 1024 ** unit:.2f} {('KiB', 'MiB', 'GiB')[unit - 1]}"


# --------------------------------------------------------------------------------------------------------- checkpoints

def save(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, folder: Path) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "steps": torch.tensor(steps)}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """The number of steps that the checkpoint has behind it."""
    weights, state = get_state_dict(model, optimizer)
    found = {"model": weights, "optimizer": state, "steps": torch.tensor(0)}
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return int(found["steps"])


# ------------------------------------------------------------------------------------------------------------- results

def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights on every rank, gathered."""
    return {name: (w.full_tensor() if hasattr(w, "full_tensor") else w).detach().cpu() for name, w in model.state_dict().items()}


def sample(config: Config, weights: dict[str, torch.Tensor], text: Characters, count: int, seed: int) -> str:
    """Text by the same model on one device."""
    model = GPT(config)
    model.load_state_dict(weights)
    start = text.encode("\n")[None]                                                             # [1, 1]
    return text.decode(model.generate(start, count, torch.Generator().manual_seed(seed))[0])


def plot(losses: list[float], first: int, title: str, path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(first + 1, first + len(losses) + 1), losses, linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss (nats per character)", title=title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)                     # gloo's threads may abort a process that takes its time to exit
