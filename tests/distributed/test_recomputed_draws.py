"""Recomputed dropout on processes: gradients are those of the same masks, drawn once."""

import torch
import torch.nn.functional as F
from ranks import distributed
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgspmd as gspmd


class Net(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8).double() for _ in range(2))
        self.recompute = recompute

    def block(self, layer, x):
        q = layer(x).unflatten(-1, (2, 4)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).transpose(1, 2).flatten(2)
        return x + F.dropout(y, 0.5)

    def forward(self, x):
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(self.block, layer, x, use_reentrant=False)
            else:
                x = self.block(layer, x)
        return x.square().sum()


@distributed("data=2")
def test_gradients_of_recomputed_dropout(mesh):
    """By backward() and by train_step, with both kinds of random numbers."""
    x = torch.randn(4, 8, 8, dtype=torch.double, generator=torch.Generator().manual_seed(3))
    for rng in ("global", "native"):
        found, trained = [], []
        for recompute in (False, True):
            model = gspmd.parallelize(
                Net(recompute), mesh, in_specs="data _ _", advanced={"rng": rng}
            )
            torch.manual_seed(5)
            model(x).backward()
            found.append([p.grad.full_tensor() for p in model.parameters()])
            model.zero_grad()
            step = gspmd.train_step(model, torch.optim.SGD(model.parameters(), 0.1))
            torch.manual_seed(5)
            step(x)
            trained.append([p.full_tensor() for p in model.parameters()])
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(*trained, rtol=1e-9, atol=1e-9)
