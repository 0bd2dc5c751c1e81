"""Models and steps of the tests for one card."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchgspmd as gspmd

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt.model import DP as DP  # noqa: E402
from gpt.model import GPT, Config
from gpt.model import TP as TP

MESH = gspmd.Mesh(data=1, model=1)
SIZE = Config(96, context=32, layers=2, heads=4, width=64)


def gpt(device: torch.device, config: Config = SIZE) -> GPT:
    torch.manual_seed(0)
    return GPT(config).to(device)


def tokens(device: torch.device, rows: int = 4, config: Config = SIZE) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    shape = rows, config.context
    return [torch.randint(config.vocabulary, shape, generator=draw).to(device) for _ in range(2)]


def wrapped(device: torch.device, layout: Any = TP, **options: Any) -> nn.Module:
    model = gspmd.annotate(gpt(device), layout.on(MESH))
    return gspmd.parallelize(model, MESH, in_specs=("data _", "data _"), **options)


def losses(model: nn.Module, batch: list[Tensor], steps: int = 4, **options: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [float(loss) for loss in found]


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.dropout(self.up(x).relu(), 0.5, self.training))
