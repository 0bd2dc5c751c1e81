"""Checkpoints inside of the blocks of a stack, written in all ways. Each torch has others."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import torchgspmd as gspmd

SAVED = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
selective = partial(create_selective_checkpoint_contexts, SAVED)
without_reentry = partial(checkpoint, use_reentrant=False)
HAS_DECORATOR = hasattr(checkpointing, "_make_checkpoint_wrapper")


def decorated(region, x):
    if not HAS_DECORATOR:
        pytest.skip("checkpoint is a decorator since torch 2.14")
    return checkpoint(use_reentrant=False)(region)(x)


class Region(nn.Module):
    def __init__(self, region):
        super().__init__()
        self.region = region

    def forward(self, x):
        return self.region(x)


# name -> what runs region(x) in a checkpoint
CHECKPOINTS = {
    "function": without_reentry,
    "reentrant": partial(checkpoint, use_reentrant=True),
    "selective": partial(without_reentry, context_fn=selective),
    "without random numbers": partial(without_reentry, preserve_rng_state=False),
    "to the end": partial(without_reentry, early_stop=False),
    "unchecked": partial(without_reentry, determinism_check="none"),
    "debug": partial(without_reentry, debug=True),
    "keywords": lambda region, x: without_reentry(lambda *, x: region(x), x=x),
    "two": lambda region, x: without_reentry(torch.tanh, without_reentry(region, x)),
    "nested": lambda region, x: without_reentry(lambda x: without_reentry(region, x).sin(), x),
    "sequential": lambda region, x: checkpointing.checkpoint_sequential(
        [region, torch.tanh, torch.sin], 2, x, use_reentrant=False
    ),
    "decorator": decorated,
    "wrapper": lambda region, x: checkpoint_wrapper(
        Region(region), checkpoint_impl=CheckpointImpl.NO_REENTRANT
    )(x),
}


class Block(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.up, self.down, self.run = nn.Linear(4, 8), nn.Linear(8, 4, bias=False), run

    def forward(self, x):
        return x + self.down(self.run(lambda x: torch.tanh(self.up(x)), x))


class Model(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x):
        return self.blocks(x).square().sum()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_gradients_of_a_stack_with_checkpoints_inside(name):
    torch.manual_seed(0)
    blocks = [Block(CHECKPOINTS[name]).double() for _ in range(2)]
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    loss = Model(nn.Sequential(*blocks))(x)
    loss.backward()  # a reentrant checkpoint knows no torch.autograd.grad
    expected = {
        name: torch.stack([block.get_parameter(name).grad for block in blocks])
        for name, _ in blocks[0].named_parameters()
    }
    model = Model(gspmd.stack(blocks))
    plan = gspmd.plan(model, x, mesh=gspmd.Mesh(data=2), in_specs="data _", grad=True)
    found, of_parameters = plan.simulate(x, _poison=True)
    torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=1e-12)
    for end, want in expected.items():
        (got,) = [g for name, g in of_parameters.items() if name.endswith(end)]
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
