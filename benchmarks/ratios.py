"""Ratios of small plans and steps, compared with the baseline of the repository.

    python benchmarks/ratios.py             print all ratios; exit 1 if one moved by more than 10 %
    python benchmarks/ratios.py --accept    write the baseline

The subject is a GPT of two layers (examples/gpt) in each of its simple layouts. No ratio is a time:
all are the same on every machine, so a change of one is a change of the code or of torch.

    sent      bytes that a device sends in a step, over the bytes of all parameters
    memory    peak of a device, over the peak of one device with the whole model
    planning  Python calls of planning, over those of the bare capture
    step      Python calls of a step (forward and backward, the third), over those of eager PyTorch;
              collectives run on torch's fake process group

Beside them stand the ratios to the best peer and to a lower bound, where there is one (PEERS,
BOUNDS). `benchmarks/bounds.py` has bounds of bytes.

The baseline is that of torch 2.13, which `make venv` installs.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchgspmd as gspmd
from torchgspmd.capture.trace import capture

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parent.parent / "examples/gpt/model.py"))
LAYOUTS = EXAMPLE["LAYOUTS"]
BASELINE = Path(__file__).resolve().parent / "baselines" / "ratios.json"
TOLERANCE = 0.1
MESHES = {
    "dp": "data=4",
    "fsdp": "data=4",
    "tp": "model=4",
    "sp": "data=2,model=2",
    "2d": "data=2,model=2",
}

# In the units of the ratios, for the devices of MESHES. DDP reduces each gradient once; FSDP2
# gathers each parameter for the forward and for the backward, and reduces its gradient.
PEERS = {"sent dp": ("DDP", 2 * 3 / 4), "sent fsdp": ("FSDP2", 3 * 3 / 4)}
# A plan needs the capture.
BOUNDS = {f"planning {layout}": 1.0 for layout in MESHES}


class Calls:
    """Counts the Python functions that a block enters, and those under one of them."""

    def __init__(self, inner: Callable | None = None):
        self.inner = inner and getattr(inner, "__wrapped__", inner).__code__
        self.count = self.inside = self.depth = 0

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code is self.inner:
            self.depth += (event == "call") - (event == "return")
        self.count += event == "call"
        self.inside += event == "call" and self.depth > 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    config = EXAMPLE["Config"]
    return EXAMPLE["GPT"](config(vocabulary=96, context=16, layers=2, heads=4, width=32))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(8 * 16).reshape(8, 16) % 96
    return tokens, tokens.roll(-1)


def train(model: torch.nn.Module) -> None:
    model(*batch()).backward()


def count_step(model: torch.nn.Module) -> int:
    for _ in range(2):  # the second step still builds: it is the first to find gradients
        train(model)
    with Calls() as calls:
        train(model)
    return calls.count


def ratios() -> Iterator[tuple[str, float]]:
    alone = LAYOUTS["dp"].on(gspmd.Mesh(data=1))
    one = gspmd.plan(build(), *batch(), mesh=alone, grad=True)
    eager = count_step(build())
    parameters = sum(p.nbytes for p in build().parameters())
    for layout, axes in MESHES.items():
        mesh = gspmd.Mesh.parse(axes)
        marks = LAYOUTS[layout].on(mesh)
        gspmd.plan(build(), *batch(), mesh=marks, grad=True)  # fills caches
        with Calls(capture) as calls:
            plan = gspmd.plan(build(), *batch(), mesh=marks, grad=True)
        yield f"sent {layout}", plan.sent_bytes / parameters
        yield f"memory {layout}", plan.memory.peak / one.memory.peak
        yield f"planning {layout}", calls.count / calls.inside
        model = gspmd.parallelize(gspmd.annotate(build(), marks), mesh)
        yield f"step {layout}", count_step(model) / eager


def beside(name: str, ratio: float) -> str:
    """Return a ratio over that of the best peer, and over the lower bound."""
    peer, theirs = PEERS.get(name, ("", 0.0))
    bound = BOUNDS.get(name)
    of_peer = f"{ratio / theirs:5.2f} of {peer}" if peer else ""
    of_bound = f"{ratio / bound:5.2f} of bound" if bound else ""
    return f"  {of_peer:16} {of_bound}".rstrip()


def moved(now: dict[str, float], before: dict[str, float]) -> list[str]:
    """Return the names of ratios that differ by more than the tolerance, or are in one table."""
    return [
        name
        for name in sorted({*now, *before})
        if name not in now
        or name not in before
        or abs(now[name] - before[name]) > TOLERANCE * before[name]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--accept", action="store_true", help="write the baseline")
    options = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    now = {name: round(ratio, 3) for name, ratio in ratios()}
    before = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    changed = moved(now, before)
    for name in sorted({*now, *before}):
        mark = "  moved" if name in changed else ""
        ratio = now.get(name, 0)
        print(f"{name:15} {before.get(name, 0):8.3f} -> {ratio:8.3f}{beside(name, ratio)}{mark}")
    if options.accept:
        BASELINE.write_text(json.dumps(now, indent=1) + "\n")
        return
    print(f"{len(changed)} of {len(now)} ratios moved by more than {TOLERANCE:.0%}")
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
