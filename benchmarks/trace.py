"""What of a step's communication is hidden behind computation, with the overlap passes and without,
on gloo processes.

    torchrun --nproc-per-node 2 benchmarks/trace.py [--layout fsdp] [--width 512] [--steps 20]
        [--png trace.png]

Both versions of the model of step_time.py take turns, forward and backward. Printed: quartiles of a
step's wall and CPU time, and the share of the communication's time in which rank 0 was not waiting.
The picture: a step of rank 0 by torch.profiler, the computing thread and the communicating ones
below each other, without the passes above, with them below.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from step_time import BATCH, GPT, SEQUENCE, VOCABULARY, mark
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import torchgspmd as gspmd

VERSIONS = {"without": ("overlap", "prefetch"), "with": ()}  # passes left out
Span = tuple[float, float]  # microseconds


@dataclass
class Trace:
    """One step of one rank: what its main thread computed, when it waited, and what was
    communicated, in microseconds.
    """

    compute: list[Span]
    waiting: list[Span]
    sent: dict[str, list[Span]]

    @property
    def hidden(self) -> float:
        """The share of the time of communication in which nobody waited."""
        busy = union([span for spans in self.sent.values() for span in spans])
        return 1 - common(busy, union(self.waiting)) / max(sum(b - a for a, b in busy), 1e-9)


def union(spans: list[Span]) -> list[Span]:
    joined: list[Span] = []
    for a, b in sorted(spans):
        if joined and a <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(b, joined[-1][1])
        else:
            joined.append((a, b))
    return joined


def common(xs: list[Span], ys: list[Span]) -> float:
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in xs for c, d in ys)


def traced(model: nn.Module, batch: Tensor) -> Trace:
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(*batch).backward()
    trace = Trace([], [], {})
    for event in profiler.events():
        span = event.time_range.start, event.time_range.end
        if event.is_async and event.name.startswith("gloo:"):
            trace.sent.setdefault(event.name.removeprefix("gloo:"), []).append(span)
        elif event.name == "_c10d_functional::wait_tensor":
            trace.waiting.append(span)
        elif event.name.startswith("aten::"):
            trace.compute.append(span)
    trace.compute = union(trace.compute)
    return trace


def timed(model: nn.Module, batch: Tensor) -> tuple[float, float]:
    """(wall, CPU) milliseconds of a step of this process."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    model(*batch).backward()
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3


def draw(traces: dict[str, Trace], title: str, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(traces), 1, figsize=(12, 1.9 * len(traces)), sharex=True)
    colours = {
        "all_gather": "tab:orange",
        "all_reduce": "tab:green",
        "reduce_scatter": "tab:red",
        "all_to_all": "tab:purple",
    }
    for axis, (name, trace) in zip(axes, traces.items()):
        spans = [s for kind in trace.sent.values() for s in kind] + trace.compute + trace.waiting
        begin = min(a for a, _ in spans)
        rows = [
            (trace.compute, 1, "tab:blue", "compute"),
            (trace.waiting, 1, "lightgrey", "waiting"),
        ]
        rows += [
            (found, 0, colours.get(kind, "tab:brown"), kind) for kind, found in trace.sent.items()
        ]
        for found, row, colour, label in rows:
            axis.broken_barh(
                [((a - begin) / 1e3, (b - a) / 1e3) for a, b in found],
                (row + 0.1, 0.8),
                color=colour,
                label=label,
                alpha=0.9,
            )
        axis.set(yticks=[0.5, 1.5], yticklabels=["communication", "compute"])
        axis.set_title(
            f"{name} the passes: {trace.hidden:.0%} of the communication hidden, "
            f"{(max(b for _, b in spans) - begin) / 1e3:.0f} ms",
            loc="left",
            fontsize=10,
        )
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    axes[-1].set_xlabel("ms")
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def quartiles(values: list[float]) -> str:
    return " / ".join(f"{q:7.1f}" for q in statistics.quantiles(values, n=4))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", default="fsdp", choices=("dp", "fsdp", "tp"))
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--png")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = gspmd.Mesh(**{"model" if options.layout == "tp" else "data": dist.get_world_size()})
    whole, models = GPT(options.width), {}
    for name, skipped in VERSIONS.items():
        model = copy.deepcopy(whole)
        mark(model, mesh, options.layout)
        specs = None if options.layout == "tp" else ("data _", "data _")
        models[name] = gspmd.parallelize(
            model, mesh, in_specs=specs, advanced={"skip_passes": skipped}
        )
    batch = torch.randint(VOCABULARY, (2, BATCH, SEQUENCE))
    times: dict[str, list] = {name: [] for name in models}
    traces: dict[str, list[Trace]] = {name: [] for name in models}
    for step in range(options.steps):
        for name in list(models)[:: 1 if step % 2 else -1]:
            models[name].zero_grad()
            times[name].append(timed(models[name], batch))
        if step % 4 == 3:
            for name in models:
                models[name].zero_grad()
                traces[name].append(traced(models[name], batch))
    if dist.get_rank() == 0:
        print(
            f"{options.layout}, width {options.width}, {dist.get_world_size()} processes; "
            f"quartiles of {options.steps - 3} steps"
        )
        for name in models:
            wall, cpu = zip(*times[name][3:])
            shares = sorted(t.hidden for t in traces[name])
            print(
                f"  {name:8} wall {quartiles(wall)} ms   CPU {quartiles(cpu)} ms   hidden "
                f"{statistics.median(shares):.0%} "
                f"({shares[0]:.0%} to {shares[-1]:.0%})   {models[name].plan.memory}",
                flush=True,
            )
        if options.png:
            shown = {
                name: sorted(found, key=lambda t: t.hidden)[len(found) // 2]
                for name, found in traces.items()
            }
            where = f"rank 0 of {dist.get_world_size()}"
            draw(
                shown,
                f"GPT of width {options.width}, {options.layout}, {where}: one forward and "
                "backward",
                options.png,
            )
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
