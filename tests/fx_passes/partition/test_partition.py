"""Partition: the collectives of the usual layouts, counted, and the printed graphs.

EXPECTTEST_ACCEPT=1 refreshes the texts; a difference is to be read before it is accepted.
"""

from __future__ import annotations

import collections
import re

import models
import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from helpers import assert_same, eager
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import Mesh

FEW, MANY = models.TOKENS, models.MANY


def plan_of(
    module: nn.Module, mesh: Mesh, tokens: tuple[int, int] = FEW, grad: bool = True
) -> gspmd.Plan:
    x = torch.zeros(*tokens, models.WIDTH)
    return gspmd.plan(module, x, mesh=mesh, out_specs="same", grad=grad)


def counts(plan: gspmd.Plan) -> dict[tuple[str, bool], int]:
    """(kind, whether in the backward) -> how many collectives send more than a vector of the
    model's width.
    """
    return dict(
        collections.Counter(
            (n.meta["step"].kind, n.meta["backward"])
            for n in plan.sharded.nodes
            if "step" in n.meta and n.meta["val"].dim() > 1 and n.meta["step"].kind != "shard"
        )
    )


def sent(plan: gspmd.Plan, kind: str, backward: bool) -> float:
    return sum(
        n.meta["step"].sent
        for n in plan.sharded.nodes
        if "step" in n.meta and n.meta["step"].kind == kind and n.meta["backward"] == backward
    )


@pytest.mark.parametrize(
    "function",
    [lambda x: x.cumsum(0), lambda x: x.cummax(0), lambda x: x.softmax(0), lambda x: x.sort(0)],
)
def test_what_changes_places_anyway_passes_its_operation_whole(function):
    """Nothing is computed by blocks of the dimension, whose sums would be sent too."""
    x = torch.randn(16, 8, 12)
    plan = gspmd.plan(function, x, mesh=Mesh(a=4, b=2), in_specs="a b _", out_specs="_ a b")
    assert [(c.kind, c.sent_bytes) for c in plan.collectives] == [
        ("permute", 16 * 8 * 12 / 8 * 4)
    ] * len(plan.collectives)
    assert plan.collectives
    assert_same(tuple(plan.simulate(x, _poison=True)), tuple(function(x)))


def text_of(plan: gspmd.Plan) -> str:
    """The graph without the empty columns that wide types make."""
    return re.sub(r" +(?=[:=] )", " ", plan.text(full=True))


SIZES = [2, 4]
STREAM = FEW[0] * FEW[1] * models.WIDTH * 4  # bytes


@pytest.mark.parametrize("n", SIZES)
def test_megatron_costs_one_all_reduce_a_sublayer_and_direction(n):
    plan = plan_of(models.block(Mesh(model=n), "tp"), Mesh(model=n))
    assert counts(plan) == {("all_reduce", False): 2, ("all_reduce", True): 2}
    assert plan.sent_bytes == 4 * 2 * (n - 1) / n * STREAM


@pytest.mark.parametrize("make", [models.mlp, models.attention], ids=["mlp", "attention"])
@pytest.mark.parametrize("n", SIZES)
def test_a_sublayer_alone_costs_one_all_reduce_forward(make, n):
    mesh = Mesh(model=n)
    assert counts(plan_of(make(mesh), mesh, grad=False)) == {("all_reduce", False): 1}


@pytest.mark.parametrize("n", SIZES)
def test_sequence_parallel_sends_the_same_bytes_in_other_collectives(n):
    tp, sp = (
        plan_of(models.block(Mesh(model=n), layout), Mesh(model=n)) for layout in ("tp", "sp")
    )
    found = counts(sp)
    assert {kind: found[kind] for kind in found if not kind[1]} == {
        ("all_gather", False): 2,
        ("reduce_scatter", False): 2,
    }
    assert (
        found["all_gather", True] == 2
        and found["reduce_scatter", True] == 2
        and ("all_reduce", True) not in found
    )
    for backward in (False, True):
        pair = sent(sp, "all_gather", backward) + sent(sp, "reduce_scatter", backward)
        assert pair == sent(tp, "all_reduce", backward) == 2 * 2 * (n - 1) / n * STREAM


def test_sequence_parallel_sends_nothing_else():
    assert {
        kind for kind, _ in counts(plan_of(models.block(Mesh(model=2), "sp"), Mesh(model=2)))
    } == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize("n", SIZES)
def test_sequence_parallel_reduces_the_gradients_of_norms(n):
    plan = plan_of(models.block(Mesh(model=n), "sp"), Mesh(model=n))
    vectors = [c for c in plan.collectives if c.kind == "all_reduce"]
    assert len(vectors) == 4 and all(c.payload_bytes == models.WIDTH * 4 for c in vectors)


@pytest.mark.parametrize("n", SIZES)
def test_data_parallel_reduces_every_gradient_once(n):
    module = models.block(Mesh(data=n), "dp")
    plan = plan_of(module, Mesh(data=n), MANY)
    assert counts(plan) == {("all_reduce", True): 6}
    assert plan.sent_bytes == 2 * (n - 1) / n * sum(p.numel() * 4 for p in module.parameters())


class Biased(nn.Module):
    """Gradients that are sums of shared values; each part of a batch adds its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(64, 16), nn.LayerNorm(16)
        self.up, self.head = nn.Linear(16, 32), nn.Linear(32, 64)

    def forward(self, parts: Tensor, labels: Tensor) -> Tensor:
        losses = [
            F.cross_entropy(self.head(F.gelu(self.up(self.norm(self.table(x))))).float().mT, y)
            for x, y in zip(parts, labels)
        ]
        return torch.stack(losses).mean()


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
def test_gradients_of_all_parts_share_one_reduction(precision: str, parts: int) -> None:
    model = Biased().to(torch.bfloat16 if precision == "bfloat16" else torch.float32)
    tokens = torch.zeros(parts, 16, 64, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        plan = gspmd.plan(
            model, tokens, tokens, mesh=Mesh(data=4), in_specs=("_ data _",) * 2, grad=True
        )
    gradients = sorted(c.payload_bytes for c in plan.collectives if c.payload_bytes > 8)
    sizes = sorted(p.numel() * p.itemsize for p in model.parameters())
    assert len(gradients) == len(sizes) and all(a <= b for a, b in zip(gradients, sizes))


@pytest.mark.parametrize("n", SIZES)
def test_fsdp_gathers_weights_and_scatters_gradients(n):
    module = models.block(Mesh(data=n), "fsdp")
    plan = plan_of(module, Mesh(data=n), MANY)
    weights = sum(p.numel() * 4 for p in module.parameters())
    assert counts(plan) == {("all_gather", False): 6, ("reduce_scatter", True): 6}
    assert (
        sent(plan, "all_gather", False)
        == sent(plan, "reduce_scatter", True)
        == (n - 1) / n * weights
    )
    assert plan.memory.parameters == weights // n


@pytest.mark.parametrize("layout", ["tp", "sp", "dp", "fsdp"])
@pytest.mark.parametrize("n", [2, 3])
def test_numbers_are_those_of_one_device(layout, n):
    mesh = Mesh(**{"model" if layout in ("tp", "sp") else "data": n})
    module, x = (
        models.block(mesh, layout),
        torch.randn(2, 8, models.WIDTH, generator=torch.Generator().manual_seed(0)),
    )
    plan = gspmd.plan(module, x, mesh=mesh, grad=True)
    assert_same(plan.simulate(x, _poison=True), eager(module, x), terms=1024)


def test_nothing_is_sent_on_one_device():
    assert plan_of(models.block(Mesh(model=1), "tp"), Mesh(model=1)).collectives == ()


def test_unmarked_runs_replicated_without_communication():
    plan = plan_of(models.MLP(), Mesh(model=4))
    assert plan.collectives == () and all(spec.is_replicated for spec in plan.in_specs)


def test_program_is_the_same_on_any_number_of_devices():
    plans = [plan_of(models.block(Mesh(model=n), "tp"), Mesh(model=n)) for n in SIZES]
    shapes = [re.findall(r"\[[\d, ]+\]", plan.program.code) for plan in plans]
    assert len({re.sub(r"\[[\d, ]+\]", "[shape]", plan.program.code) for plan in plans}) == 1
    assert shapes[0] != shapes[1]  # sizes of local parts are all that differs


def test_a_mark_over_more_devices_than_rows_is_followed():
    """Six rows over eight devices: two have padding only, and nothing is gathered for their sake."""
    mesh = Mesh(data=8)

    def f(x, w):
        y = gspmd.mark_sharding(x @ w, mesh, "data _ _").relu()
        return gspmd.mark_sharding(y @ w, mesh, "data _ _").reshape(6 * 5, 4).square().sum()

    x, w = torch.randn(6, 5, 4), torch.randn(4, 4)
    plan = gspmd.plan(f, x, w, mesh=mesh, in_specs=("data _ _", "_ _"))
    assert [c.kind for c in plan.collectives] == ["permute", "all_reduce"]
    assert_same(plan.simulate(x, w, _poison=True), f(x, w))


def test_a_marked_value_that_is_used_otherwise_is_not_brought_to_the_mark_first():
    """c has the rows of its sum sharded, so that only parts of the marked value are used: nobody
    would see it whole.
    """
    mesh, inputs = Mesh(x=4), (torch.randn(16, 32), torch.randn(32, 64), torch.randn(64, 8))

    def chain(a, b, c):
        return gspmd.mark_sharding(a @ b, mesh, "_ _") @ c

    plan = gspmd.plan(chain, *inputs, mesh=mesh, in_specs=("_ x", "x _", "x _"), out_specs="_ _")
    assert [(c.kind, c.sent_bytes) for c in plan.collectives] == [
        ("reduce_scatter", 16 * 64 * 4 * 3 / 4),
        ("all_reduce", 16 * 8 * 4 * 2 * 3 / 4),
    ]
    assert_same(plan.simulate(*inputs, _poison=True), chain(*inputs))


def test_a_marked_result_is_as_marked():
    mesh, inputs = Mesh(x=4), (torch.randn(16, 32), torch.randn(32, 64))

    def both(a, b):
        y = gspmd.mark_sharding(a @ b, mesh, "_ _")
        return y, y.sin()

    plan = gspmd.plan(both, *inputs, mesh=mesh, in_specs=("_ x", "x _"))
    assert [c.kind for c in plan.collectives] == ["all_reduce"]
    assert str(plan.out_specs[0]) == "_ _"


class TestGolden(TestCase):
    maxDiff = None

    def test_mlp(self):
        mesh = Mesh(model=2)
        self.assertExpectedInline(
            text_of(plan_of(models.mlp(mesh), mesh)),
            """\
mesh model=2
  %up_weight : f32[256@model, 64] = input
  %up_bias : f32[256@model] = input
  %down_weight : f32[64, 256@model] = input
  %down_bias : f32[64] = input
  %x : f32[2, 32, 64] = input
  %tangent_0 : f32[2, 32, 64] = input
  %einsum : f32[2, 32, 256@model] = einsum(cdb,ab->cda, %x, %up_weight)
  %add : f32[2, 32, 256@model] = add(%einsum, %up_bias)
  %gelu : f32[2, 32, 256@model] = gelu(%add)
  %einsum_1 : f32[2, 32, 64] sum@model = einsum(cdb,ab->cda, %gelu, %down_weight)
  %einsum_1_r : f32[2, 32, 64] = all_reduce(%einsum_1, sum, model)
  %add_1 : f32[2, 32, 64] = add(%einsum_1_r, %down_bias)
  %sum_1 : f32[1, 1, 64] = sum(%tangent_0, [0, 1], True)
  %view : f32[64] = reshape(%sum_1, [64])
  %einsum_2 : f32[2, 32, 256@model] = einsum(cda,ab->cdb, %tangent_0, %down_weight)
  %einsum_3 : f32[64, 256@model] = einsum(cda,cdb->ab, %tangent_0, %gelu)
  %gelu_backward : f32[2, 32, 256@model] = gelu_backward(%einsum_2, %add)
  %sum_2 : f32[1, 1, 256@model] = sum(%gelu_backward, [0, 1], True)
  %view_1 : f32[256@model] = reshape(%sum_2, [256])
  %einsum_4 : f32[256@model, 64] = einsum(cda,cdb->ab, %gelu_backward, %x)
  return %add_1, %einsum_4, %view_1, %einsum_3, %view

all_reduce     over model           1 x, 16.00 KiB sent by a device
sent by a device in all: 16.00 KiB
memory of a device: parameters 64.75 KiB, inputs 32.00 KiB, peak 241.00 KiB""",
        )

    def test_attention(self):
        mesh = Mesh(model=2)
        self.assertExpectedInline(
            text_of(plan_of(models.attention(mesh), mesh)),
            """\
mesh model=2
  %q_weight : f32[64@model, 64] = input
  %k_weight : f32[64@model, 64] = input
  %v_weight : f32[64@model, 64] = input
  %out_weight : f32[64, 64@model] = input
  %x : f32[2, 32, 64] = input
  %tangent_0 : f32[2, 32, 64] = input
  %einsum : f32[2, 32, 64@model] = einsum(cdb,ab->cda, %x, %q_weight)
  %view : f32[2, 32, 4@model, 16] = reshape(%einsum, [2, 32, 4, 16])
  %transpose : f32[2, 4@model, 32, 16] = transpose(%view, 1, 2)
  %einsum_1 : f32[2, 32, 64@model] = einsum(cdb,ab->cda, %x, %k_weight)
  %view_1 : f32[2, 32, 4@model, 16] = reshape(%einsum_1, [2, 32, 4, 16])
  %transpose_1 : f32[2, 4@model, 32, 16] = transpose(%view_1, 1, 2)
  %einsum_2 : f32[2, 32, 64@model] = einsum(cdb,ab->cda, %x, %v_weight)
  %view_2 : f32[2, 32, 4@model, 16] = reshape(%einsum_2, [2, 32, 4, 16])
  %transpose_2 : f32[2, 4@model, 32, 16] = transpose(%view_2, 1, 2)
  %attention : (f32[2, 4@model, 32, 16]; f32[2, 4@model, 32]) = attention(%transpose, %transpose_1, %transpose_2, True, 0.25)
  %getitem : f32[2, 4@model, 32, 16] = %attention[0]
  %getitem_1 : f32[2, 4@model, 32] = %attention[1]
  %transpose_3 : f32[2, 32, 4@model, 16] = transpose(%getitem, 1, 2)
  %clone : f32[2, 32, 4@model, 16] = clone(%transpose_3, memory_format=torch.contiguous_format)
  %_unsafe_view : f32[2, 32, 64@model] = reshape(%clone, [2, 32, 64])
  %einsum_3 : f32[2, 32, 64] sum@model = einsum(cdb,ab->cda, %_unsafe_view, %out_weight)
  %einsum_4 : f32[2, 32, 64@model] = einsum(cda,ab->cdb, %tangent_0, %out_weight)
  %einsum_5 : f32[64, 64@model] = einsum(cda,cdb->ab, %tangent_0, %_unsafe_view)
  %view_3 : f32[2, 32, 4@model, 16] = reshape(%einsum_4, [2, 32, 4, 16])
  %transpose_4 : f32[2, 4@model, 32, 16] = transpose(%view_3, 1, 2)
  %attention_backward : (f32[2, 4@model, 32, 16]; f32[2, 4@model, 32, 16]; f32[2, 4@model, 32, 16]) = attention_backward(%transpose_4, %transpose, %transpose_1, %transpose_2, %getitem, %getitem_1, True, 0.25)
  %getitem_2 : f32[2, 4@model, 32, 16] = %attention_backward[0]
  %getitem_3 : f32[2, 4@model, 32, 16] = %attention_backward[1]
  %getitem_4 : f32[2, 4@model, 32, 16] = %attention_backward[2]
  %transpose_5 : f32[2, 32, 4@model, 16] = transpose(%getitem_4, 1, 2)
  %clone_1 : f32[2, 32, 4@model, 16] = clone(%transpose_5, memory_format=torch.contiguous_format)
  %_unsafe_view_1 : f32[2, 32, 64@model] = reshape(%clone_1, [2, 32, 64])
  %einsum_6 : f32[64@model, 64] = einsum(cda,cdb->ab, %_unsafe_view_1, %x)
  %transpose_6 : f32[2, 32, 4@model, 16] = transpose(%getitem_3, 1, 2)
  %clone_2 : f32[2, 32, 4@model, 16] = clone(%transpose_6, memory_format=torch.contiguous_format)
  %_unsafe_view_2 : f32[2, 32, 64@model] = reshape(%clone_2, [2, 32, 64])
  %einsum_7 : f32[64@model, 64] = einsum(cda,cdb->ab, %_unsafe_view_2, %x)
  %transpose_7 : f32[2, 32, 4@model, 16] = transpose(%getitem_2, 1, 2)
  %clone_3 : f32[2, 32, 4@model, 16] = clone(%transpose_7, memory_format=torch.contiguous_format)
  %_unsafe_view_3 : f32[2, 32, 64@model] = reshape(%clone_3, [2, 32, 64])
  %einsum_8 : f32[64@model, 64] = einsum(cda,cdb->ab, %_unsafe_view_3, %x)
  %einsum_3_r : f32[2, 32, 64] = all_reduce(%einsum_3, sum, model)
  return %einsum_3_r, %einsum_8, %einsum_7, %einsum_6, %einsum_5

all_reduce     over model           1 x, 16.00 KiB sent by a device
sent by a device in all: 16.00 KiB
memory of a device: parameters 32.00 KiB, inputs 32.00 KiB, peak 136.50 KiB""",
        )

    def test_block_forward_tensor_parallel(self):
        mesh = Mesh(model=2)
        self.assertExpectedInline(
            text_of(plan_of(models.block(mesh, "tp"), mesh, grad=False)),
            """\
mesh model=2
  %norm1_weight : f32[64] = input
  %norm1_bias : f32[64] = input
  %attention_q_weight : f32[64@model, 64] = input
  %attention_k_weight : f32[64@model, 64] = input
  %attention_v_weight : f32[64@model, 64] = input
  %attention_out_weight : f32[64, 64@model] = input
  %norm2_weight : f32[64] = input
  %norm2_bias : f32[64] = input
  %mlp_up_weight : f32[256@model, 64] = input
  %mlp_down_weight : f32[64, 256@model] = input
  %x : f32[2, 32, 64] = input
  %native_layer_norm : (f32[2, 32, 64]; f32[2, 32, 1]; f32[2, 32, 1]) = native_layer_norm(%x, [64], %norm1_weight, %norm1_bias, 1e-05)
  %getitem : f32[2, 32, 64] = %native_layer_norm[0]
  %einsum : f32[2, 32, 64@model] = einsum(cdb,ab->cda, %getitem, %attention_q_weight)
  %view : f32[2, 32, 4@model, 16] = reshape(%einsum, [2, 32, 4, 16])
  %transpose : f32[2, 4@model, 32, 16] = transpose(%view, 1, 2)
  %einsum_1 : f32[2, 32, 64@model] = einsum(cdb,ab->cda, %getitem, %attention_k_weight)
  %view_1 : f32[2, 32, 4@model, 16] = reshape(%einsum_1, [2, 32, 4, 16])
  %transpose_1 : f32[2, 4@model, 32, 16] = transpose(%view_1, 1, 2)
  %einsum_2 : f32[2, 32, 64@model] = einsum(cdb,ab->cda, %getitem, %attention_v_weight)
  %view_2 : f32[2, 32, 4@model, 16] = reshape(%einsum_2, [2, 32, 4, 16])
  %transpose_2 : f32[2, 4@model, 32, 16] = transpose(%view_2, 1, 2)
  %attention : (f32[2, 4@model, 32, 16]; f32[2, 4@model, 32]) = attention(%transpose, %transpose_1, %transpose_2, True, 0.25)
  %getitem_3 : f32[2, 4@model, 32, 16] = %attention[0]
  %transpose_3 : f32[2, 32, 4@model, 16] = transpose(%getitem_3, 1, 2)
  %clone : f32[2, 32, 4@model, 16] = clone(%transpose_3, memory_format=torch.contiguous_format)
  %_unsafe_view : f32[2, 32, 64@model] = reshape(%clone, [2, 32, 64])
  %einsum_3 : f32[2, 32, 64] sum@model = einsum(cdb,ab->cda, %_unsafe_view, %attention_out_weight)
  %einsum_3_r : f32[2, 32, 64] = all_reduce(%einsum_3, sum, model)
  %add : f32[2, 32, 64] = add(%x, %einsum_3_r)
  %native_layer_norm_1 : (f32[2, 32, 64]; f32[2, 32, 1]; f32[2, 32, 1]) = native_layer_norm(%add, [64], %norm2_weight, %norm2_bias, 1e-05)
  %getitem_5 : f32[2, 32, 64] = %native_layer_norm_1[0]
  %einsum_4 : f32[2, 32, 256@model] = einsum(cdb,ab->cda, %getitem_5, %mlp_up_weight)
  %gelu : f32[2, 32, 256@model] = gelu(%einsum_4)
  %einsum_5 : f32[2, 32, 64] sum@model = einsum(cdb,ab->cda, %gelu, %mlp_down_weight)
  %einsum_5_r : f32[2, 32, 64] = all_reduce(%einsum_5, sum, model)
  %add_1 : f32[2, 32, 64] = add(%add, %einsum_5_r)
  return %add_1

all_reduce     over model           2 x, 32.00 KiB sent by a device
sent by a device in all: 32.00 KiB
memory of a device: parameters 97.00 KiB, inputs 16.00 KiB, peak 193.00 KiB""",
        )

    def test_block_sequence_parallel(self):
        mesh = Mesh(model=2)
        self.assertExpectedInline(
            text_of(plan_of(models.block(mesh, "sp"), mesh)),
            """\
mesh model=2
  %norm1_weight : f32[64] = input
  %norm1_bias : f32[64] = input
  %attention_q_weight : f32[64@model, 64] = input
  %attention_k_weight : f32[64@model, 64] = input
  %attention_v_weight : f32[64@model, 64] = input
  %attention_out_weight : f32[64, 64@model] = input
  %norm2_weight : f32[64] = input
  %norm2_bias : f32[64] = input
  %mlp_up_weight : f32[256@model, 64] = input
  %mlp_down_weight : f32[64, 256@model] = input
  %x : f32[2, 32@model, 64] = input
  %tangent_0 : f32[2, 32@model, 64] = input
  %mark_sharding : f32[2, 32@model, 64] = mark_sharding(%x, model=2, _ model _)
  %native_layer_norm : (f32[2, 32@model, 64]; f32[2, 32@model, 1]; f32[2, 32@model, 1]) = native_layer_norm(%mark_sharding, [64], %norm1_weight, %norm1_bias, 1e-05)
  %getitem : f32[2, 32@model, 64] = %native_layer_norm[0]
  %getitem_1 : f32[2, 32@model, 1] = %native_layer_norm[1]
  %getitem_2 : f32[2, 32@model, 1] = %native_layer_norm[2]
  %getitem_g : f32[2, 32, 64] = all_gather(%getitem, 1, model)
  %einsum : f32[2, 32, 64@model] = einsum(cdb,ab->cda, %getitem_g, %attention_q_weight)
  %view : f32[2, 32, 4@model, 16] = reshape(%einsum, [2, 32, 4, 16])
  %transpose : f32[2, 4@model, 32, 16] = transpose(%view, 1, 2)
  %einsum_1 : f32[2, 32, 64@model] = einsum(cdb,ab->cda, %getitem_g, %attention_k_weight)
  %view_1 : f32[2, 32, 4@model, 16] = reshape(%einsum_1, [2, 32, 4, 16])
  %transpose_1 : f32[2, 4@model, 32, 16] = transpose(%view_1, 1, 2)
  %einsum_2 : f32[2, 32, 64@model] = einsum(cdb,ab->cda, %getitem_g, %attention_v_weight)
  %view_2 : f32[2, 32, 4@model, 16] = reshape(%einsum_2, [2, 32, 4, 16])
  %transpose_2 : f32[2, 4@model, 32, 16] = transpose(%view_2, 1, 2)
  %attention : (f32[2, 4@model, 32, 16]; f32[2, 4@model, 32]) = attention(%transpose, %transpose_1, %transpose_2, True, 0.25)
  %getitem_3 : f32[2, 4@model, 32, 16] = %attention[0]
  %getitem_4 : f32[2, 4@model, 32] = %attention[1]
  %transpose_3 : f32[2, 32, 4@model, 16] = transpose(%getitem_3, 1, 2)
  %clone : f32[2, 32, 4@model, 16] = clone(%transpose_3, memory_format=torch.contiguous_format)
  %_unsafe_view : f32[2, 32, 64@model] = reshape(%clone, [2, 32, 64])
  %einsum_3 : f32[2, 32, 64] sum@model = einsum(cdb,ab->cda, %_unsafe_view, %attention_out_weight)
  %einsum_3_rs : f32[2, 32@model, 64] = reduce_scatter(%einsum_3, sum, 1, model)
  %add : f32[2, 32@model, 64] = add(%mark_sharding, %einsum_3_rs)
  %mark_sharding_1 : f32[2, 32@model, 64] = mark_sharding(%add, model=2, _ model _)
  %native_layer_norm_1 : (f32[2, 32@model, 64]; f32[2, 32@model, 1]; f32[2, 32@model, 1]) = native_layer_norm(%mark_sharding_1, [64], %norm2_weight, %norm2_bias, 1e-05)
  %getitem_5 : f32[2, 32@model, 64] = %native_layer_norm_1[0]
  %getitem_6 : f32[2, 32@model, 1] = %native_layer_norm_1[1]
  %getitem_7 : f32[2, 32@model, 1] = %native_layer_norm_1[2]
  %getitem_5_g : f32[2, 32, 64] = all_gather(%getitem_5, 1, model)
  %einsum_4 : f32[2, 32, 256@model] = einsum(cdb,ab->cda, %getitem_5_g, %mlp_up_weight)
  %gelu : f32[2, 32, 256@model] = gelu(%einsum_4)
  %einsum_5 : f32[2, 32, 64] sum@model = einsum(cdb,ab->cda, %gelu, %mlp_down_weight)
  %einsum_5_rs : f32[2, 32@model, 64] = reduce_scatter(%einsum_5, sum, 1, model)
  %add_1 : f32[2, 32@model, 64] = add(%mark_sharding_1, %einsum_5_rs)
  %mark_sharding_2 : f32[2, 32@model, 64] = mark_sharding(%add_1, model=2, _ model _)
  %mark_sharding_3 : f32[2, 32@model, 64] = mark_sharding(%tangent_0, model=2, _ model _)
  %mark_sharding_3_g : f32[2, 32, 64] = all_gather(%mark_sharding_3, 1, model)
  %einsum_6 : f32[2, 32, 256@model] = einsum(cda,ab->cdb, %mark_sharding_3_g, %mlp_down_weight)
  %einsum_7 : f32[64, 256@model] = einsum(cda,cdb->ab, %mark_sharding_3_g, %gelu)
  %gelu_backward : f32[2, 32, 256@model] = gelu_backward(%einsum_6, %einsum_4)
  %einsum_8 : f32[2, 32, 64] sum@model = einsum(cda,ab->cdb, %gelu_backward, %mlp_up_weight)
  %einsum_9 : f32[256@model, 64] = einsum(cda,cdb->ab, %gelu_backward, %getitem_5_g)
  %einsum_8_rs : f32[2, 32@model, 64] = reduce_scatter(%einsum_8, sum, 1, model)
  %native_layer_norm_backward : (f32[2, 32@model, 64]; f32[64] sum@model; f32[64] sum@model) = native_layer_norm_backward(%einsum_8_rs, %mark_sharding_1, [64], %getitem_6, %getitem_7, %norm2_weight, %norm2_bias, [True, True, True])
  %getitem_8 : f32[2, 32@model, 64] = %native_layer_norm_backward[0]
  %getitem_9 : f32[64] sum@model = %native_layer_norm_backward[1]
  %getitem_10 : f32[64] sum@model = %native_layer_norm_backward[2]
  %add_2 : f32[2, 32@model, 64] = add(%mark_sharding_3, %getitem_8)
  %mark_sharding_4 : f32[2, 32@model, 64] = mark_sharding(%add_2, model=2, _ model _)
  %mark_sharding_4_g : f32[2, 32, 64] = all_gather(%mark_sharding_4, 1, model)
  %einsum_10 : f32[2, 32, 64@model] = einsum(cda,ab->cdb, %mark_sharding_4_g, %attention_out_weight)
  %einsum_11 : f32[64, 64@model] = einsum(cda,cdb->ab, %mark_sharding_4_g, %_unsafe_view)
  %view_3 : f32[2, 32, 4@model, 16] = reshape(%einsum_10, [2, 32, 4, 16])
  %transpose_4 : f32[2, 4@model, 32, 16] = transpose(%view_3, 1, 2)
  %attention_backward : (f32[2, 4@model, 32, 16]; f32[2, 4@model, 32, 16]; f32[2, 4@model, 32, 16]) = attention_backward(%transpose_4, %transpose, %transpose_1, %transpose_2, %getitem_3, %getitem_4, True, 0.25)
  %getitem_11 : f32[2, 4@model, 32, 16] = %attention_backward[0]
  %getitem_12 : f32[2, 4@model, 32, 16] = %attention_backward[1]
  %getitem_13 : f32[2, 4@model, 32, 16] = %attention_backward[2]
  %transpose_5 : f32[2, 32, 4@model, 16] = transpose(%getitem_13, 1, 2)
  %clone_1 : f32[2, 32, 4@model, 16] = clone(%transpose_5, memory_format=torch.contiguous_format)
  %_unsafe_view_1 : f32[2, 32, 64@model] = reshape(%clone_1, [2, 32, 64])
  %einsum_12 : f32[2, 32, 64] sum@model = einsum(cda,ab->cdb, %_unsafe_view_1, %attention_v_weight)
  %einsum_13 : f32[64@model, 64] = einsum(cda,cdb->ab, %_unsafe_view_1, %getitem_g)
  %transpose_6 : f32[2, 32, 4@model, 16] = transpose(%getitem_12, 1, 2)
  %clone_2 : f32[2, 32, 4@model, 16] = clone(%transpose_6, memory_format=torch.contiguous_format)
  %_unsafe_view_2 : f32[2, 32, 64@model] = reshape(%clone_2, [2, 32, 64])
  %einsum_14 : f32[2, 32, 64] sum@model = einsum(cda,ab->cdb, %_unsafe_view_2, %attention_k_weight)
  %einsum_15 : f32[64@model, 64] = einsum(cda,cdb->ab, %_unsafe_view_2, %getitem_g)
  %add_3 : f32[2, 32, 64] sum@model = add(%einsum_12, %einsum_14)
  %transpose_7 : f32[2, 32, 4@model, 16] = transpose(%getitem_11, 1, 2)
  %clone_3 : f32[2, 32, 4@model, 16] = clone(%transpose_7, memory_format=torch.contiguous_format)
  %_unsafe_view_3 : f32[2, 32, 64@model] = reshape(%clone_3, [2, 32, 64])
  %einsum_16 : f32[2, 32, 64] sum@model = einsum(cda,ab->cdb, %_unsafe_view_3, %attention_q_weight)
  %einsum_17 : f32[64@model, 64] = einsum(cda,cdb->ab, %_unsafe_view_3, %getitem_g)
  %add_4 : f32[2, 32, 64] sum@model = add(%add_3, %einsum_16)
  %add_4_rs : f32[2, 32@model, 64] = reduce_scatter(%add_4, sum, 1, model)
  %native_layer_norm_backward_1 : (f32[64] sum@model; f32[64] sum@model) = native_layer_norm_backward(%add_4_rs, %mark_sharding, [64], %getitem_1, %getitem_2, %norm1_weight, %norm1_bias, [False, True, True])
  %getitem_15 : f32[64] sum@model = %native_layer_norm_backward_1[1]
  %getitem_16 : f32[64] sum@model = %native_layer_norm_backward_1[2]
  %getitem_15_r : f32[64] = all_reduce(%getitem_15, sum, model)
  %getitem_16_r : f32[64] = all_reduce(%getitem_16, sum, model)
  %getitem_9_r : f32[64] = all_reduce(%getitem_9, sum, model)
  %getitem_10_r : f32[64] = all_reduce(%getitem_10, sum, model)
  return %mark_sharding_2, %getitem_15_r, %getitem_16_r, %einsum_17, %einsum_15, %einsum_13, %einsum_11, %getitem_9_r, %getitem_10_r, %einsum_9, %einsum_7

all_gather     over model           4 x, 32.00 KiB sent by a device
all_reduce     over model           4 x, 1.00 KiB sent by a device
reduce_scatter over model           4 x, 32.00 KiB sent by a device
sent by a device in all: 65.00 KiB
memory of a device: parameters 97.00 KiB, inputs 16.00 KiB, peak 346.00 KiB""",
        )

    def test_mlp_fsdp(self):
        mesh = Mesh(data=2)
        module = models.MLP(bias=False)
        for parameter in module.parameters():
            gspmd.mark_sharding(parameter, mesh, "data _")
        plan = gspmd.plan(
            module,
            torch.zeros(*MANY, models.WIDTH),
            mesh=mesh,
            in_specs="data _ _",
            out_specs="same",
            grad=True,
        )
        self.assertExpectedInline(
            text_of(plan),
            """\
mesh data=2
  %up_weight : f32[256@data, 64] = input
  %down_weight : f32[64@data, 256] = input
  %x : f32[8@data, 128, 64] = input
  %tangent_0 : f32[8@data, 128, 64] = input
  %up_weight_g : f32[256, 64] = all_gather(%up_weight, 0, data)
  %einsum : f32[8@data, 128, 256] = einsum(cdb,ab->cda, %x, %up_weight_g)
  %gelu : f32[8@data, 128, 256] = gelu(%einsum)
  %down_weight_g : f32[64, 256] = all_gather(%down_weight, 0, data)
  %einsum_1 : f32[8@data, 128, 64] = einsum(cdb,ab->cda, %gelu, %down_weight_g)
  %einsum_2 : f32[8@data, 128, 256] = einsum(cda,ab->cdb, %tangent_0, %down_weight_g)
  %einsum_3 : f32[64, 256] sum@data = einsum(cda,cdb->ab, %tangent_0, %gelu)
  %gelu_backward : f32[8@data, 128, 256] = gelu_backward(%einsum_2, %einsum)
  %einsum_4 : f32[256, 64] sum@data = einsum(cda,cdb->ab, %gelu_backward, %x)
  %einsum_4_rs : f32[256@data, 64] = reduce_scatter(%einsum_4, sum, 0, data)
  %einsum_3_rs : f32[64@data, 256] = reduce_scatter(%einsum_3, sum, 0, data)
  return %einsum_1, %einsum_4_rs, %einsum_3_rs

all_gather     over data            2 x, 64.00 KiB sent by a device
reduce_scatter over data            2 x, 64.00 KiB sent by a device
sent by a device in all: 128.00 KiB
memory of a device: parameters 64.00 KiB, inputs 256.00 KiB, peak 2.00 MiB""",
        )

    def test_two_axes_on_weights_and_activations(self):
        mesh = Mesh(data=2, model=2)
        module = gspmd.annotate(
            models.MLP(bias=False), mesh, {"up.weight": "model data", "down.weight": "data model"}
        )
        plan = gspmd.plan(
            module,
            torch.zeros(*FEW, models.WIDTH),
            mesh=mesh,
            in_specs="data _ model",
            out_specs="data _ model",
        )
        self.assertExpectedInline(
            text_of(plan),
            """\
mesh data=2 model=2
  %up_weight : f32[256@model, 64@data] = input
  %down_weight : f32[64@data, 256@model] = input
  %x : f32[2@data, 32, 64@model] = input
  %x_g : f32[2@data, 32, 64] = all_gather(%x, 2, model)
  %up_weight_g : f32[256@model, 64] = all_gather(%up_weight, 1, data)
  %einsum : f32[2@data, 32, 256@model] = einsum(cdb,ab->cda, %x_g, %up_weight_g)
  %gelu : f32[2@data, 32, 256@model] = gelu(%einsum)
  %down_weight_g : f32[64, 256@model] = all_gather(%down_weight, 0, data)
  %einsum_1 : f32[2@data, 32, 64] sum@model = einsum(cdb,ab->cda, %gelu, %down_weight_g)
  %einsum_1_rs : f32[2@data, 32, 64@model] = reduce_scatter(%einsum_1, sum, 2, model)
  return %einsum_1_rs

all_gather     over data            2 x, 32.00 KiB sent by a device
all_gather     over model           1 x, 4.00 KiB sent by a device
reduce_scatter over model           1 x, 4.00 KiB sent by a device
sent by a device in all: 40.00 KiB
memory of a device: parameters 32.00 KiB, inputs 4.00 KiB, peak 124.00 KiB""",
        )
