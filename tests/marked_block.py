"""A residual block, whose weights are sharded over `model` if it is given a mesh."""

import torch
from torch import nn

import torchgspmd as gspmd


class Block(nn.Module):
    def __init__(self, mesh=None):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        if mesh is not None:
            gspmd.mark_sharding(self.up.weight, mesh, "model _")
            gspmd.mark_sharding(self.down.weight, mesh, "_ model")

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))
