"""Gathers of the next iteration: hidden, the same messages, at most one layer more."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops import scan

import torchgspmd as gspmd
from torchgspmd.fx_passes.loop_call import loop_calls

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
    given = {"mesh": mesh, "in_specs": "data _", "grad": True}
    return [
        gspmd.plan(model, x, **given, advanced={**options, "skip_passes": skip})
        for skip in ((), ("prefetch",))
    ]


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


class Shifted(nn.Module):
    """Reads all positions but the last, so that a result of its loops is not used."""

    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(x + F.pad(self.up(x)[:, :-1], (0, 0, 1, 0)))


class Convolved(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x):
        return torch.tanh(self.mix(x.mT).mT)


class ScanOfLoops(nn.Module):
    """A scan over parts of the batch, whose body runs blocks in stages, or stacked."""

    def __init__(self, blocks, inner, looped):
        super().__init__()
        self.first, self.inner, self.looped = nn.Linear(4, 4), inner(blocks), looped

    def forward(self, x):
        def step(total, part):
            y = self.inner(part)
            return total + y.square().sum(), y

        parts, total = self.first(x).unflatten(0, (2, -1)), x.new_zeros(())
        if self.looped:
            total, ys = scan(step, total, parts)
        else:  # torch's scan takes no pipeline in eager mode
            ys = []
            for part in parts:
                total, y = step(total, part)
                ys.append(y)
            ys = torch.stack(ys)
        return total + ys.sin().sum()


def _in_stages(mesh, **options):
    return lambda blocks: gspmd.pipeline(blocks, mesh, microbatches=3, **options)


@pytest.mark.parametrize("block", (Shifted, Convolved, Block))
@pytest.mark.parametrize(
    "mesh, spec",
    (("stage=2,seq=2", "_ seq _"), ("data=2,stage=3", "data _ _"), ("stage=2", None)),
)
@pytest.mark.parametrize(
    "options", ({"schedule": "gpipe"}, {"schedule": "gpipe", "recompute": True}, {"repeats": 2}, {})
)
def test_loops_in_a_scan(block, mesh, spec, options):
    """A value is held for the next part, before the first part no inner loop runs for it."""
    torch.manual_seed(0)
    mesh = gspmd.Mesh(**{k: int(n) for k, n in (axis.split("=") for axis in mesh.split(","))})
    inner = _in_stages(mesh, **options) if options else gspmd.stack
    blocks = [block(4) for _ in range(mesh.count(("stage",)) * options.get("repeats", 1))]
    model = ScanOfLoops(blocks, inner, True).double()
    x = torch.randn(12, 6, 4).double()
    plan = gspmd.plan(model, x, mesh=mesh, in_specs=spec, grad=True)
    found, gradients = plan.simulate(x, _poison=True)
    model.looped = False
    expected = model(x)
    expected.backward()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-10, atol=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)
