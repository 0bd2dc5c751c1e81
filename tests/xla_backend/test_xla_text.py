"""The XLA backend without torch_xla: texts, decompositions, the error that it is missing."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers import message

import torchgspmd as gspmd
import torchgspmd.features.tables  # noqa: F401 (registers all operations)
from torchgspmd import Collective, Mesh, ShardSpec
from torchgspmd.rules import unpartitioned_of
from torchgspmd.xla_backend.hlo import collectives
from torchgspmd.xla_backend.sharding import spec_of_text, text_of

MESH = Mesh(data=2, model=2)
HLO = """\
HloModule step, entry_computation_layout={(f32[4,8]{1,0})->f32[8,8]{1,0}}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(f32[] %a, f32[] %b)
}

%half (p0: f32[4,8], p1: s32[]) -> f32[2,8] {
  %p1 = s32[] parameter(1)
  %p0 = f32[4,8]{1,0} parameter(0)
  %zero = s32[] constant(0)
  ROOT %slice = f32[2,8]{1,0} dynamic-slice(f32[4,8]{1,0} %p0, s32[] %p1, s32[] %zero), dynamic_slice_sizes={2,8}
}

ENTRY %main (x: f32[4,8], i: s32[]) -> f32[8,8] {
  %x = f32[4,8]{1,0} parameter(0), sharding={devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}
  %i = s32[] parameter(1)
  %kept = f32[4,8]{1,0} all-reduce(f32[4,8]{1,0} %x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%sum
  %used = f32[4,8]{1,0} negate(f32[4,8]{1,0} %kept)
  %cut = f32[4,8]{1,0} all-reduce(f32[4,8]{1,0} %used), channel_id=2, replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%sum
  %mine = f32[2,8]{1,0} fusion(f32[4,8]{1,0} %cut, s32[] %i), kind=kLoop, calls=%half
  %pieces = (bf16[2,4]{1,0}, bf16[2,4]{1,0}) all-to-all(bf16[2,4]{1,0} %u, bf16[2,4]{1,0} %v), channel_id=3, replica_groups={{0,1},{2,3}}
  %next = s64[2,8]{1,0} collective-permute(s64[2,8]{1,0} %w), channel_id=4, source_target_pairs={{0,2},{2,0},{1,3},{3,1}}
  ROOT %whole = f32[8,8]{1,0} all-gather(f32[2,8]{1,0} %mine), channel_id=5, replica_groups={{0,1,2,3}}, dimensions={0}
}
"""


def test_collectives_of_a_program():
    assert collectives(HLO, MESH) == (
        Collective("all_reduce", ("model",), 2, "f32", 128, 128),
        Collective("reduce_scatter", ("data",), 2, "f32", 128, 64),  # only slices of it are used
        Collective("all_to_all", ("model",), 2, "bf16", 32, 16),
        Collective("permute", ("data",), 2, "i64", 128, 128),
        Collective("all_gather", ("data", "model"), 4, "f32", 256, 192),
    )


@pytest.mark.parametrize(
    "spec, text",
    [
        ("_ _", "{replicated}"),
        ("data _", "{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}"),
        ("_ model", "{devices=[1,2,2]0,2,1,3 last_tile_dim_replicate}"),
        ("data model", "{devices=[2,2]0,1,2,3}"),
        ("model data", "{devices=[2,2]0,2,1,3}"),
        ("data+model _", "{devices=[4,1]0,1,2,3}"),
        ("_ model+data", "{devices=[1,4]0,2,1,3}"),
    ],
)
def test_layouts_in_xlas_words(spec, text):
    order = (0, 1, 2, 3)
    assert text_of(ShardSpec.parse(spec), MESH, order) == text
    assert spec_of_text(text, 2, MESH, order) == ShardSpec.parse(spec)


def test_parts_of_axes_in_xlas_words():
    mesh, order = Mesh(data=2, model=4), tuple(range(8))
    spec = ShardSpec((("model:(2)2",), ()))
    assert text_of(spec, mesh, order) == "{devices=[2,1,4]0,2,4,6,1,3,5,7 last_tile_dim_replicate}"
    assert spec_of_text(text_of(spec, mesh, order), 2, mesh, order) == spec


@pytest.mark.parametrize("text", ["", "{maximal device=0}", "{devices=[4,1]0,3,1,2}"])
def test_layouts_that_no_axes_express(text):
    assert spec_of_text(text, 2, MESH, (0, 1, 2, 3)) is None


@pytest.mark.parametrize("causal", [False, True])
def test_attention_taken_apart(causal):
    q, k, v, grad = (torch.randn(2, 3, 6, 4, dtype=torch.float64) for _ in range(4))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    want = F.scaled_dot_product_attention(*leaves, is_causal=causal, scale=0.3)
    want.backward(grad)
    ours = torch.ops.torchgspmd
    out, lse = unpartitioned_of(ours.attention.default)(q, k, v, causal, 0.3)
    torch.testing.assert_close(out, want.detach())
    gradients = unpartitioned_of(ours.attention_backward.default)(
        grad, q, k, v, out, lse, causal, 0.3
    )
    for got, leaf in zip(gradients, leaves):
        torch.testing.assert_close(got, leaf.grad)


@pytest.mark.parametrize(
    "shifts, dims", [([1], [0]), ([-2], [1]), ([3, 1], [0, 1]), ([5], []), ([7], [0]), ([0], [1])]
)
def test_roll_as_slices(shifts, dims):
    x = torch.randn(7, 4)
    assert torch.equal(
        unpartitioned_of(torch.ops.aten.roll.default)(x, shifts, dims),
        torch.roll(x, shifts, dims or None),
    )


def test_without_torch_xla_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert_expected_inline(
        message(lambda: gspmd.parallelize(torch.nn.Linear(2, 2), Mesh(data=8), backend="xla")),
        """\
backend 'xla' needs torch_xla
  where test_xla_text.py:N
  fix   run pip install torch==2.9.0 torch_xla==2.9.0; on a TPU VM torch==2.9.0 'torch_xla[tpu]==2.9.0'""",
    )


@pytest.mark.parametrize(
    "backend, option, name",
    [
        ("xla", {"strict": True}, "strict"),
        ("xla", {"advanced": {"rng": "native"}}, "rng"),
        ("torch", {"advanced": {"pin": "all"}}, "pin"),
    ],
)
def test_options_of_the_other_backend(backend, option, name):
    assert message(
        lambda: gspmd.parallelize(torch.nn.Linear(2, 2), Mesh(data=8), backend=backend, **option)
    ) == (f"backend '{backend}' has no option {name}\n  where test_xla_text.py:N")
