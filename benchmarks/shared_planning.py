"""Who plans when processes start: the CPU seconds of each rank in the first step.

    python benchmarks/shared_planning.py [lstm] [unet] [diffusers] [--processes 4]

Rank 0 captures and plans, the others receive the plan. Printed for each model: the CPU seconds of
each rank from the wrapped module to the end of the first forward and backward, beside those of the
second step and of the capture alone; and why a rank planned for itself, if any did. The folder of
plans is empty. diffusers: a UNet2DModel, where that package is installed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd.capture.trace import capture


class Language(nn.Module):
    """Two LSTM layers over 32 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(256, 64)
        self.cells = nn.LSTM(64, 128, num_layers=2, batch_first=True)
        self.head = nn.Linear(128, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.cells(self.words(tokens))[0]).square().mean()


class Denoiser(nn.Module):
    """A U-Net of diffusers."""

    def __init__(self) -> None:
        super().__init__()
        net = importlib.import_module("diffusers").UNet2DModel
        self.net = net(
            sample_size=32,
            block_out_channels=(32, 64, 64),
            down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=8,
        )

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        return self.net(x, times).sample.square().mean()


class Net(nn.Module):
    """A plain U-Net: three resolutions, two convolutions each, down and up."""

    widths = 16, 32, 64

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(block(a, b) for a, b in zip((3, *self.widths), self.widths))
        self.up = nn.ModuleList(block(a + b, b) for a, b in zip((64, 32), (32, 16)))
        self.head = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:  # [b, 3, h, w]
        skips = []
        for each in self.down:
            x = each(F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        for each, skip in zip(self.up, skips[-2::-1]):
            x = each(torch.cat([F.interpolate(x, scale_factor=2), skip], 1))
        return self.head(x).square().mean()


def block(inner: int, outer: int) -> nn.Sequential:
    layers = [(inner, outer), (outer, outer)]
    parts = [
        m for a, b in layers for m in (nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU())
    ]
    return nn.Sequential(*parts)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "lstm": lambda: (Language(), (torch.randint(0, 256, (8, 32)),)),
    "unet": lambda: (Net(), (torch.randn(4, 3, 32, 32),)),
    "diffusers": lambda: (Denoiser(), (torch.randn(4, 3, 32, 32), torch.arange(4))),
}


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def of_step(model: nn.Module, inputs: tuple[Tensor, ...]) -> float:
    """Run a step; return its CPU seconds."""
    begin = cpu_seconds()
    model(*inputs).backward()
    return cpu_seconds() - begin


def work(name: str) -> None:
    """Measure in this process; rank 0 prints what all found."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    reasons: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: reasons.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchgspmd")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    dist.init_process_group("gloo")
    mesh = gspmd.Mesh(data=2, model=dist.get_world_size() // 2)
    begin = cpu_seconds()
    wrapped = gspmd.parallelize(model, mesh, in_specs="auto")
    wrap = cpu_seconds() - begin
    wall = time.perf_counter()
    first = of_step(wrapped, inputs)
    wall = time.perf_counter() - wall
    row: dict[str, Any] = {"first": wrap + first, "wall": wall, "reasons": reasons}
    row["second"] = of_step(wrapped, inputs)
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    if dist.get_rank() == 0:
        begin = cpu_seconds()
        capture(MODELS[name]()[0], inputs, {}, mesh, grad=True)
        print(json.dumps({"rows": rows, "capture": cpu_seconds() - begin}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("models", nargs="*", choices=[[], *MODELS])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.work)
    for name in options.models or ("lstm", "unet"):
        with tempfile.TemporaryDirectory() as folder:
            found = subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                + [f"--nproc-per-node={options.processes}", __file__, "--work", name],
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHGSPMD_CACHE": folder},
                capture_output=True,
                text=True,
            )
        if found.returncode:
            sys.exit(found.stderr)
        result = json.loads(found.stdout.splitlines()[-1])
        print(f"{name}: capture alone {result['capture']:.1f} s; CPU seconds of the first step:")
        for rank, row in enumerate(result["rows"]):
            print(
                f"  rank {rank}: {row['first']:.1f} ({row['wall']:.1f} s of wall time), "
                f"second step {row['second']:.2f} {'; '.join(row['reasons'])}"
            )
    return None


if __name__ == "__main__":
    main()
