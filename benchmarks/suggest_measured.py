"""The first proposal of suggest for examples/gpt, measured beside all its layouts.

    torchrun --nproc-per-node 4 benchmarks/suggest_measured.py [--rounds 30] [--sizes small wide]

Layouts are tried on all meshes of the processes. All steps (forward and backward) of a size run in
turn, so that what else the machine does meets all of them. Printed: the median of each, on the
slowest process, and its ratio to the fastest. That of the proposal is to be at most 1.05.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchgspmd as gspmd

MODEL = Path(__file__).resolve().parent.parent / "examples" / "gpt" / "model.py"


def load(name: str) -> Any:
    """Return a copy of the example."""
    spec = importlib.util.spec_from_file_location(name, MODEL)
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MARKED, UNMARKED = load("marked_gpt"), load("unmarked_gpt")
UNMARKED.mark_sharding = lambda tensor, *_: tensor  # what the proposal is for

LAYOUT_AXES = {"dp": "data", "fsdp": "data", "cp": "data seq"}  # else data and model
NAMES = ("dp", "fsdp", "tp", "sp", "cp", "2d")
SIZES = {
    "small": {"batch": 8, "context": 32, "layers": 2, "heads": 4, "width": 64},
    "long": {"batch": 4, "context": 256, "layers": 2, "heads": 4, "width": 128},
    "wide": {"batch": 4, "context": 32, "layers": 2, "heads": 8, "width": 512},
}
VOCABULARY = 256
BAR = 1.05

Step = tuple[Callable[[], None], Any]  # forward and backward, and the module


def model_of(example: Any, size: dict[str, int]) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return the model of a copy of the example, and a batch."""
    torch.manual_seed(0)
    sizes = (size["context"], size["layers"], size["heads"], size["width"])
    model = example.GPT(example.Config(VOCABULARY, *sizes))
    return model, torch.randint(VOCABULARY, (size["batch"], size["context"]))


def step_of(model: torch.nn.Module, tokens: torch.Tensor) -> Step:
    """Return a function that runs forward and backward, and the module."""

    def step() -> None:
        model.zero_grad()
        model(tokens, tokens).backward()

    return step, model


def by_hand(size: dict[str, int]) -> Iterator[tuple[str, Step]]:
    """Yield each layout on each mesh."""
    devices = dist.get_world_size()
    for name in NAMES:
        axes = LAYOUT_AXES.get(name, "data model").split()
        counts = [n for n in range(1, devices + 1) if devices % n == 0]
        for count in counts if len(axes) > 1 else [1]:
            mesh = gspmd.Mesh(**dict(zip(axes, (devices // count, count))))
            if size["batch"] % (devices // count) == 0 and (count > 1 or len(axes) == 1):
                model, tokens = model_of(MARKED, size)
                model = gspmd.annotate(model, MARKED.LAYOUTS[name].on(mesh))
                yield f"{name} {mesh}", step_of(gspmd.parallelize(model, mesh), tokens)


def proposed(size: dict[str, int], hardware: gspmd.Hardware, seconds: float) -> tuple[str, Step]:
    """Return the first proposal, which process 0 searches."""
    code: list[str | None] = [None]
    model, tokens = model_of(UNMARKED, size)
    if dist.get_rank() == 0:
        options = {"devices": dist.get_world_size(), "hardware": hardware, "seconds": seconds}
        code = [gspmd.suggest(model, (tokens, tokens), **options)[0].code]
    dist.broadcast_object_list(code)
    names = {"gspmd": gspmd, "model": model}
    exec(code[0] or "", names)
    return f"proposal\n{code[0]}", step_of(names["model"], tokens)


def medians(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Return the median of the seconds of each step on the slowest process; all run in turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + 2):
        for name, (step, _) in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if i >= 2:
                times[name].append(seconds.item())
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sizes", nargs="+", default=[*SIZES], choices=SIZES)
    parser.add_argument("--seconds", type=float, default=60, help="of a search")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    first, devices, worst = dist.get_rank() == 0, dist.get_world_size(), 0.0
    inner = next((n for n in range(2, devices) if devices % n == 0), 1)
    hardware = gspmd.calibrate(gspmd.Mesh(data=devices // inner, model=inner))
    for size in args.sizes:
        name, step = proposed(SIZES[size], hardware, args.seconds)
        steps = {name: step, **dict(by_hand(SIZES[size]))}
        found = medians(steps, args.rounds)
        fastest, ratio = min(found.values()), found[name] / min(found.values())
        worst = max(worst, ratio)
        if first:
            print(f"{size}: {' '.join(f'{k}={v}' for k, v in SIZES[size].items())}")
            for each, seconds in sorted(found.items(), key=lambda pair: pair[1]):
                estimate = steps[each][1].plan.estimate(hardware).seconds
                times = f"{seconds * 1e3:9.3f} ms {seconds / fastest:6.3f}"
                print(f"  {times}  estimated {estimate * 1e3:9.3f} ms  {each}", flush=True)
    if first:
        print(f"the proposal is at most {worst:.3f} of the fastest (bar {BAR})")
    dist.destroy_process_group()
    raise SystemExit(worst > BAR)


if __name__ == "__main__":
    main()
