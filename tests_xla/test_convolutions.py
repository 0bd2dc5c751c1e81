"""Convolutions that are sharded in space, also where devices compute the same."""

import copy

import pytest
import torch
import torch.nn.functional as F
from programs import MESH
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import Mesh, mark_sharding
from torchgspmd.xla_backend.runtime import sync


class Segments(nn.Module):
    """Images to the classes of their pixels: plain, depthwise and transposed convolutions."""

    def __init__(self, mesh: Mesh, layout: str):
        super().__init__()
        self.mesh, self.layout = mesh, layout
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.along = nn.Conv2d(8, 8, (5, 1), padding=(2, 0), groups=8)
        self.back = nn.ConvTranspose2d(8, 8, 2, stride=2)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # x [b, 3, h, w], labels [b, h, w]
        batch, _, rows, columns = self.layout.split()
        x = mark_sharding(x, self.mesh, f"{batch} _ {rows} {columns}")
        for layer in (self.first, self.along, self.back):
            x = mark_sharding(
                layer(x), self.mesh, self.layout
            )  # [b, 8, h/2, w/2]; at last [b, 8, h, w]
        return F.cross_entropy(x, labels)


CUBE = Mesh(data=2, rows=2, model=2)


@pytest.mark.parametrize(
    "mesh, layout, count",
    [
        (MESH, "_ _ data _", 5),
        (MESH, "_ _ data _", 1),
        (MESH, "model _ data _", 5),
        (MESH, "_ model data _", 5),
        (CUBE, "data model rows _", 5),
        (CUBE, "_ model rows data", 2),
    ],
)
def test_gradients(mesh, layout, count):
    """XLA would add up equal parts of a weight's gradient, read rows of wrong devices where three
    dimensions are sharded, and abort on 26 rows in 4 shards.
    """
    torch.manual_seed(0)
    reference = Segments(mesh, layout).double()
    model = copy.deepcopy(reference)
    mark_sharding(model.first.weight, mesh, f"{layout.split()[1]} _ _ _")
    model = gspmd.parallelize(model, mesh, backend="xla")
    image, labels = torch.randn(count, 3, 26, 12).double(), torch.randint(8, (count, 26, 12))
    losses = [m(image, labels) for m in (model, reference)]
    for loss in losses:
        loss.backward()
    sync()
    torch.testing.assert_close(losses[0].cpu(), losses[1], rtol=1e-12, atol=1e-12)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            p.grad.cpu(), q.grad, rtol=1e-9, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}"
        )
