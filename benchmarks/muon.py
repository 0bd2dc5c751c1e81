"""Bytes of a step with Muon above AdamW's, beside those of devices that own matrices.

    python benchmarks/muon.py

An owner gets its matrices whole, in bfloat16, and returns their shards: 2 (n - 1) / n of its share.
Weights without marks need no way there, but each device gets all updates. The products of a device
are beside an even split of all, in the whole step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd.fx_passes.schedule.arithmetic import graph_flops

ROWS = {f"**{name}.weight": "{model} {data}" for name in ("q", "k", "v", "up", "head")}
COLUMNS = {f"**{name}.weight": "{data} {model}" for name in ("o", "down", "words")}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (
            w(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.head = nn.Linear(width, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x)
        for block in self.blocks:
            y = block(y)
        return F.cross_entropy(self.head(y).transpose(1, 2), x)


class Products(nn.Module):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


def planned(model: nn.Module, x: Tensor, mesh: gspmd.Mesh, spec: str, muon: bool) -> gspmd.Plan:
    matrices = [p for p in model.get_submodule("blocks").parameters() if p.dim() == 2]
    kept = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in kept]
    optimizers = [torch.optim.Muon(matrices) if muon else torch.optim.AdamW(matrices)]
    optimizers += [torch.optim.AdamW(others)] if others else []
    return gspmd.plan(gspmd.train_step(model, optimizers), x, mesh=mesh, in_specs=spec)


def row(
    name: str,
    make: Callable[[], nn.Module],
    x: Tensor,
    mesh: gspmd.Mesh,
    marks: dict[str, str],
    spec: str,
) -> None:
    plans, n = [], mesh.size
    for muon in (False, True):
        with torch.device("meta"):
            model = make()
        gspmd.annotate(model, mesh, marks)
        plans.append(planned(model, x, mesh, spec, muon))
    matrices = [p for p in model.get_submodule("blocks").parameters() if p.dim() == 2]
    ways = 2 if marks else n  # without marks each device sends its updates to all
    owners = ways * (n - 1) / n * sum(p.numel() for p in matrices) / n * 2
    whole = graph_flops(plans[1].captured.graph, mesh)
    adamw, muon = (plan.sent_bytes for plan in plans)
    even = graph_flops(plans[1].local_graph(), mesh) / (whole / n)
    print(
        f"| {name} | {mesh} | {adamw / 2**20:.2f} | {(muon - adamw) / 2**20:.2f} | "
        f"{owners / 2**20:.2f} | {(muon - adamw) / owners:.2f} | {even:.2f} |",
        flush=True,
    )


def main() -> None:
    data, grid = gspmd.Mesh(data=4), gspmd.Mesh(data=2, model=2)
    rows = {"blocks.*.weight": "data _"}
    for count, width in ((8, 256), (8, 512), (7, 256)):
        x = torch.empty(4096, width, device="meta")
        row(
            f"{count} of {width} x {width}",
            partial(Products, count, width),
            x,
            data,
            rows,
            "data _",
        )
    x = torch.empty(4096, 256, device="meta")
    row("8 of 256 x 256, no marks", partial(Products, 8, 256), x, data, {}, "data _")
    words = torch.zeros(16, 64, dtype=torch.long, device="meta")
    for mesh, names in (
        (data, ("data", "_")),
        (gspmd.Mesh(model=4), ("_", "model")),
        (grid, ("data", "model")),
    ):
        marks = {
            key: spec.format(data=names[0], model=names[1])
            for key, spec in (ROWS | COLUMNS).items()
        }
        row("GPT, 4 layers of 128", partial(GPT, 4, 128), words, mesh, marks, f"{names[0]} _")


if __name__ == "__main__":
    main()
