"""Products in parts that travel round a ring: which, when it pays, the same numbers, in simulate
and on processes.
"""

from __future__ import annotations

import re

import models
import pytest
import torch
from helpers import assert_same, eager
from torch import fx, nn

import torchgspmd as gspmd
from torchgspmd import Mesh
from torchgspmd.comm import hardware
from torchgspmd.comm.hardware import CPU, GPU
from torchgspmd.comm.kinds.ring_einsum import einsum_scatter, gather_einsum
from torchgspmd.fx_passes.printer import program_text
from torchgspmd.fx_passes.schedule import collective_matmul as passed
from torchgspmd.fx_passes.schedule.collective_matmul import EINSUM, pays


@pytest.fixture
def always(monkeypatch):
    """It pays on CPUs, however small the product is."""
    monkeypatch.setattr(hardware, "CPU", GPU)
    monkeypatch.setattr(passed, "GAIN", float("inf"))


class OfSines(nn.Sequential):
    """Products with something that was computed: inputs that are gathered are left alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.sin())


def counts(plan: gspmd.Plan) -> tuple[int, int]:
    targets = [n.target for n in plan.program.graph.nodes]
    return targets.count(gather_einsum), targets.count(einsum_scatter)


def product(m: int, k: int, n: int, dtype=torch.bfloat16) -> fx.Node:
    """An einsum of [m, k] and [k, n]."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    node = graph.call_function(EINSUM, ("ab,bc->ac", x, y))
    for value, shape in ((x, (m, k)), (y, (k, n)), (node, (m, n))):
        value.meta |= {"shape": shape, "dtype": dtype}
    return node


def test_it_pays_for_large_products_on_gpus_only():
    large, small = product(16384, 8192, 4096), product(256, 64, 64)
    assert pays(GPU, [large], 16384 * 8192 * 2, 8)
    assert not pays(GPU, [small], 256 * 64 * 2, 8)
    assert not pays(
        GPU, [product(16384, 8192, 64)], 16384 * 8192 * 2, 8
    )  # nothing to hide the transfer behind
    assert not pays(GPU, [large], 16384 * 8192 * 2, 1)
    assert not CPU.beside


def test_a_large_model_on_meta_is_planned_so_and_a_small_one_is_not():
    def planned(width, tokens, **options):
        mesh = Mesh(model=8)
        with torch.device("meta"):
            model = OfSines(
                nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
            ).bfloat16()
            x = torch.empty(1, tokens, width, dtype=torch.bfloat16)
        gspmd.annotate(model, mesh, {"0.weight": "model _", "1.weight": "_ model"})
        return gspmd.plan(
            model, x, mesh=mesh, in_specs="_ model _", out_specs="_ model _", **options
        )

    large = planned(8192, 16384)
    assert counts(large) == (1, 1)
    assert [c.kind for c in large.collectives] == ["all_gather", "reduce_scatter"]
    assert (
        counts(planned(8192, 16384, advanced={"skip_passes": ("collective_matmul",)}))
        == counts(planned(64, 64))
        == (0, 0)
    )
    assert (
        large.sent_bytes
        == planned(8192, 16384, advanced={"skip_passes": ("collective_matmul",)}).sent_bytes
    )


@pytest.mark.parametrize("size", [2, 4])
def test_sequence_parallel_numbers(always, size):
    mesh = Mesh(model=size)
    model = models.block(mesh, "sp")
    x = torch.randn(*models.TOKENS, models.WIDTH, generator=torch.Generator().manual_seed(0))
    plan = gspmd.plan(model, x, mesh=mesh, grad=True)
    gathers, scatters = counts(plan)
    assert gathers >= 2 and scatters >= 2, program_text(plan.program.graph)
    want, grads = eager(model, x)
    got, got_grads = plan.simulate(x)
    assert_same(got, want, terms=512)
    assert_same(got_grads, grads, terms=4096)


def test_what_is_gathered_and_summed_over_is_sliced_on_the_other_side(always):
    mesh = Mesh(m=4)
    x, w = torch.randn(6, 8), torch.randn(8, 12)
    plan = gspmd.plan(
        lambda x, w: x.sin() @ w, x, w, mesh=mesh, in_specs=("_ m", "_ _"), out_specs="_ _"
    )
    assert_same(plan.simulate(x, w), x.sin() @ w)


def test_one_text_for_any_number_of_devices(always):
    def text(count):
        mesh = Mesh(model=count)
        model = gspmd.annotate(
            OfSines(nn.Linear(64, 64 * count, bias=False)), mesh, {"0.weight": "model _"}
        )
        plan = gspmd.plan(
            model,
            torch.randn(2, 4 * count, 64),
            mesh=mesh,
            in_specs="_ model _",
            out_specs="_ _ model",
        )
        assert counts(plan) == (1, 0)
        return re.sub(r"\[[\d, ]+\]|\s+", " ", program_text(plan.program.graph))

    assert text(8) == text(64)
