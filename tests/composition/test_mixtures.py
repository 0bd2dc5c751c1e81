"""Mixtures train on processes as on one: losses of 20 steps, and all weights after them.

`make test-mixtures` runs all, `make test` the cheapest two.
"""

import os

import pytest
import torch
from ranks import distributed

import torchgspmd as gspmd
from composition.mixtures import EXACT, LONG, MIXTURES, compare, long_model
from torchgspmd.fx_passes.printer import program_text

CHEAP = ("long_context", "unet")
# Both runs round a loss once, and each has rounded on its way there: through two blocks of five
# operations, one after the other.
HALF = 16 * torch.finfo(torch.bfloat16).eps


@distributed(timeout=600)
def train(mesh, name):
    compare(mesh, MIXTURES[name][1], HALF if "half" in name else EXACT)


@pytest.mark.xdist_group("ranks")
@pytest.mark.distributed
@pytest.mark.parametrize("name", MIXTURES if "TORCHGSPMD_MIXTURES" in os.environ else CHEAP)
def test_a_mixture(name):
    train(MIXTURES[name][0], name=name)


def test_keys_of_long_context_travel_round_a_ring():
    """In one program for all lengths. With as many rows as devices these would be divided."""
    model, batch = long_model()
    plan = gspmd.plan(model, *batch(0), mesh=gspmd.Mesh(data=2, seq=2), grad=True, **LONG)
    text = program_text(plan.program_graph)
    assert "ring_attention(" in text and "ring_attention_backward(" in text
    assert "size_length" in text
