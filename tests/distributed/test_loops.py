"""Loops on real processes: layers in a loop, in a loop over microbatches."""

import torch
from ranks import distributed
from tied_model import close
from torch import nn
from torch._higher_order_ops import scan
from torch.nn import functional as F

import torchgspmd as gspmd

LAYERS, WIDTH = 3, 6


def layer(h, weights):
    up, down = weights
    return h + F.gelu(F.layer_norm(h, (WIDTH,)) @ up) @ down, h.sum()


class Layers(nn.Module):
    """The loss of microbatches x [m, b, s, d], one after the other."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(LAYERS, WIDTH, 2 * WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(LAYERS, 2 * WIDTH, WIDTH) / 3)

    def forward(self, x):
        def microbatch(total, rows):
            h, _ = scan(layer, rows, (self.up, self.down))
            return total + h.square().mean(), h.sum()

        return scan(microbatch, x.new_zeros(()), x)[0]

    def by_hand(self, x):
        """The same by loops of Python."""
        total = x.new_zeros(())
        for h in x:
            for weights in zip(self.up, self.down):
                h, _ = layer(h, weights)
            total = total + h.square().mean()
        return total


@distributed("data=2", "data=2,model=2")
def test_layers_in_microbatches(mesh):
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(4, 6, 5, WIDTH)
    expected = model.by_hand(x)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    if "model" in mesh.names:
        gspmd.annotate(model, mesh, {"up": "_ _ model", "down": "_ model _"})
    else:
        gspmd.annotate(model, mesh, {"up": "_ data _", "down": "_ _ data"})
    model = gspmd.parallelize(model, mesh, in_specs=("_ data _ _",))
    for _ in range(2):
        model.zero_grad()
        loss = model(x)
        close(loss, expected)
        loss.backward()
        for name, p in model.named_parameters():
            close(p.grad, gradients[name])
