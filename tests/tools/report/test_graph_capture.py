"""What a CUDA graph cannot compute is named, with a reason and a line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops import while_loop

import torchgspmd as gspmd

MESH = gspmd.Mesh(data=2)
X = torch.ones(4, 6)
SIZE = "its size is known only in a run"
ENDS = "the host reads where groups end"


def found(fn: Callable, *args: Any, mesh: gspmd.Mesh = MESH, **options: Any) -> tuple:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mesh divides nothing
        return gspmd.plan(fn, *args, mesh=mesh, **options).uncapturable()


def halved(x: Tensor) -> Tensor:
    return while_loop(lambda y: y.sum() > 1, lambda y: (y / 2,), (x,))[0].sum()


def masked(x: Tensor) -> Tensor:
    return x[x > 0].sort().values.sum()


def experts(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return gspmd.moe.grouped_mm(x, w, ends)


def test_a_dense_program_has_nothing() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.LayerNorm(8), nn.Linear(8, 6))
    assert found(model, X, in_specs="data _", grad=True) == ()
    image = torch.ones(2, 1, 4, 4)
    assert found(lambda x: nn.functional.interpolate(x, scale_factor=2.0), image) == ()


def test_sizes_of_a_run() -> None:
    first, *_ = found(masked, X)
    assert first.why == SIZE and "test_graph_capture.py" in first.where


def test_a_loop_that_a_value_ends() -> None:
    (loop,) = found(halved, X)
    assert loop.why == "the host reads the value that ends the loop", loop


def test_experts_without_a_kernel() -> None:
    ends = torch.tensor([1, 4])
    (row,) = found(experts, X, torch.ones(2, 6, 3), ends)
    assert row.why == f"{ENDS}, since they are not in bfloat16"
    (row,) = found(experts, X.bfloat16(), torch.ones(2, 6, 8).bfloat16(), ends)
    assert row.why == f"{ENDS}: a row is no multiple of 16 bytes"
    x, w = (torch.ones(*shape, dtype=torch.bfloat16) for shape in ((4, 8), (2, 8, 16)))
    assert found(experts, x, w, ends) == ()


def test_draws_whose_seed_the_host_reads() -> None:
    dropout = nn.Dropout(0.5)
    assert [row.why for row in found(dropout, X, advanced={"rng": "native"})] == [
        'with advanced={"rng": "native"} the host seeds a generator'
    ]
    assert found(dropout, X.double()) == ()
    rows = found(torch.rand_like, X.double())
    assert [row.why for row in rows] == ["the host reads the seed of float64 draws"]


def test_a_pipeline_between_stages() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            blocks = [nn.Linear(6, 6) for _ in range(2)]
            self.blocks = gspmd.pipeline(
                blocks, stages, microbatches=2, schedule="1f1b", loss=lambda y: y.square().mean()
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(x)

    stages = gspmd.Mesh(stage=2)
    rows = found(Model(), X, mesh=stages, grad=True)
    assert {row.why for row in rows} == {"the host sends and receives between stages"}
