"""A checkpoint inside of a block of a stack, on torch 2.9 too: it failed there, and on 2.11."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgspmd as gspmd


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x):
        y = checkpoint(lambda x: torch.tanh(self.up(x)), x, use_reentrant=False)
        return x + self.down(y)


class Model(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x):
        return self.blocks(x).square().sum()


def test_gradients_of_a_stack_with_a_checkpoint_inside():
    torch.manual_seed(0)
    blocks = [Block().double() for _ in range(2)]
    x = torch.randn(4, 4, dtype=torch.float64)
    loss = Model(nn.Sequential(*blocks))(x)
    weights = [block.up.weight for block in blocks]
    expected = torch.stack(torch.autograd.grad(loss, weights))
    model = Model(gspmd.stack(blocks))
    plan = gspmd.plan(model, x, mesh=gspmd.Mesh(data=2), in_specs="data _", grad=True)
    found, gradients = plan.simulate(x, _poison=True)
    torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=1e-12)
    (up,) = [gradient for name, gradient in gradients.items() if name.endswith("up.weight")]
    torch.testing.assert_close(up, expected, rtol=1e-12, atol=1e-12)
