"""Like layers stand once in a printed plan."""

import random

import torch
from expecttest import TestCase
from torch import nn

import torchgspmd as gspmd
from torchgspmd.fx_passes.printer import MIN_REPEATS, like, repetitions


class TestFolding(TestCase):
    def test_layers_stand_once(self):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)])
        mesh = gspmd.Mesh(data=2)
        text = str(gspmd.plan(model, torch.ones(4, 8), mesh=mesh, in_specs=("data _",)))
        self.assertExpectedInline(
            text.rpartition("\n\n")[0],
            """\
mesh data=2
  x 6, to %_5_0_bias:
    %_0_0_weight : f32[8, 8]      = input
    %_0_0_bias   : f32[8]         = input
  %input_1     : f32[4@data, 8] = input
  %einsum      : f32[4@data, 8] = einsum(cb,ab->ca, %input_1, %_0_0_weight)
  x 5, to %einsum_5:
    %add         : f32[4@data, 8] = add(%einsum, %_0_0_bias)
    %tanh        : f32[4@data, 8] = tanh(%add)
    %einsum_1    : f32[4@data, 8] = einsum(cb,ab->ca, %tanh, %_1_0_weight)
  %add_5       : f32[4@data, 8] = add(%einsum_5, %_5_0_bias)
  %tanh_5      : f32[4@data, 8] = tanh(%add_5)
  %tanh_5_g    : f32[4, 8]      = all_gather(%tanh_5, 0, data)
  return %tanh_5_g""",
        )


def test_runs_are_what_repeats():
    """Every row is in one run, and the rows of a run are like those of its first period."""
    rng = random.Random(0)
    for _ in range(200):
        rows = []
        for _ in range(rng.randint(1, 4)):
            period = [rng.choice("abc") for _ in range(rng.randint(1, 6))]
            rows += period * rng.randint(1, 8)
        found = list(repetitions(rows, min_saved=0))
        assert [run.start for run in found[1:]] + [len(rows)] == [run.stop for run in found]
        for run in found:
            assert run.repeats == 1 or run.repeats >= MIN_REPEATS
            period = rows[run.start : run.start + run.period]
            assert rows[run.start : run.stop] == period * run.repeats


def test_rows_differ_in_more_than_numbers():
    assert like("%add_12 = add(%relu_3_g, %w_1)") == like("%add = add(%relu_g, %w_7)")
    assert like("%add_1 = add(%relu, 2)") != like("%add_1 = add(%relu, 3)")
    assert like("%relu_1_g") != like("%relu_1")
