"""A region of one's own on real processes: a ring of products, forward and backward."""

import torch
from ranks import distributed
from tied_model import close
from torch import nn

import torchgspmd as gspmd
from torchgspmd import collectives


class Ring(nn.Module):
    """x travels round the ring of `model`, past the columns of a weight that each device holds."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh, self.weight = mesh, nn.Parameter(torch.randn(8, 12))

    def forward(self, x):
        size = self.mesh.count(("model",))

        def region(x, weight):
            me, total = collectives.axis_index("model"), 0
            for step in range(size):
                place = (me - step).remainder(size).reshape(1)
                total = total + x @ weight.unflatten(0, (size, -1))[place][0]
                x = collectives.permute(x, "model", 1)
            return total, collectives.all_reduce(total.square().sum(), "model")

        specs = ("_ model", "_ model"), ("_ model", "")
        return gspmd.manual(region, self.mesh, *specs, axes=("model",))(x, self.weight)


@distributed("data=2,model=2")
def test_a_ring_by_hand(mesh):
    torch.manual_seed(0)
    model, x = Ring(mesh), torch.randn(4, 8)
    expected = x @ model.weight.detach()
    weight = model.weight.detach().clone().requires_grad_()
    (x @ weight).square().sum().backward()
    gspmd.mark_sharding(model.weight, mesh, "_ model")
    model = gspmd.parallelize(model, mesh, in_specs=("data _",))
    y, total = model(x)
    close(y, expected)
    close(total, expected.square().sum())
    total.backward()
    close(model.weight.grad, weight.grad)
