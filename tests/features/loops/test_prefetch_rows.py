"""Gathers of the next iteration: hidden, the same messages, at most one layer more."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchgspmd as gspmd
from torchgspmd.comm.loop_call import loop_calls

FULLY_SHARDED = {"up.weight": "data _", "up.bias": "data", "down.weight": "_ data"}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, mesh, count, width, **options):
        super().__init__()
        blocks = [Block(width) for _ in range(count)]
        gspmd.annotate(blocks[0], mesh, FULLY_SHARDED)
        self.blocks = gspmd.stack(blocks, **options)

    def forward(self, x):
        return self.blocks(x).square().mean()


def plans(model, x, mesh, **options):
    """With and without gathers that begin an iteration earlier."""
    options |= {"mesh": mesh, "in_specs": "data _", "grad": True}
    return [gspmd.plan(model, x, **options, skip_passes=skip) for skip in ((), ("prefetch",))]


def held(plan):
    return [call.held for _, call in loop_calls(plan.program.graph)]


@pytest.mark.parametrize("count, recompute", ((5, False), (2, True)))
def test_numbers(count, recompute):
    """Forward and backward loops hold weights, of 2 and of 5 iterations; the last gathers none."""
    torch.manual_seed(0)
    mesh = gspmd.Mesh(data=3)  # uneven
    model, x = Model(mesh, count, 4, recompute=recompute).double(), torch.randn(600, 4).double()
    loss = model(x)
    loss.backward()
    plan, _ = plans(model, x, mesh, costs={"message_price": 1.0})  # else: one before the loop
    assert len(held(plan)) == 2 and all(held(plan))
    found, gradients = plan.simulate(x, _poison=True)
    torch.testing.assert_close(found, loss.detach(), rtol=1e-10, atol=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)


def test_gathers_of_the_next_layer_travel_beside_this_one():
    mesh, width = gspmd.Mesh(data=8), 1024
    with torch.device("meta"):
        model, x = Model(mesh, 12, width), torch.empty(8192, width)
    plan, other = plans(model, x, mesh)
    assert held(plan) == [1, 1] and held(other) == [0, 0]
    assert plan.sent_bytes == other.sent_bytes
    exposed, before = (each.estimate("h100").busy("exposed") for each in (plan, other))
    assert exposed < 0.15 * before
    layer = 2 * 4 * width * width * 4  # bytes of the two weights of one
    assert plan.memory.peak - other.memory.peak <= layer


def test_memory_bounds_it():
    """Weights that are large beside the activations are gathered when they are needed."""
    mesh = gspmd.Mesh(data=8)
    with torch.device("meta"):
        model, x = Model(mesh, 4, 1024), torch.empty(16, 1024)
    assert held(plans(model, x, mesh)[0]) == [0, 0]
