"""Convolutions that are sharded in space, also where devices compute the same."""

import pytest
import torch
import torch.nn.functional as F
from programs import MESH, on_both
from torch import Tensor, nn

from torchgspmd import mark_sharding
from torchgspmd.xla_backend.state import sync


class Segments(nn.Module):
    """Images to the classes of their pixels: plain, depthwise and transposed convolutions."""

    def __init__(self, layout: str):
        super().__init__()
        self.layout = layout
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.along = nn.Conv2d(8, 8, (5, 1), padding=(2, 0), groups=8)
        self.back = nn.ConvTranspose2d(8, 8, 2, stride=2)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # x [b, 3, h, w], labels [b, h, w]
        for layer in (self.first, self.along, self.back):
            x = mark_sharding(layer(x), MESH, self.layout)  # [b, 8, h/2, w/2]; at last [b, 8, h, w]
        return F.cross_entropy(x, labels)


@pytest.mark.parametrize(
    "layout, count",
    [("_ _ data _", 5), ("_ _ data _", 1), ("model _ data _", 5), ("_ model data _", 5)],
)
def test_gradients(layout, count):
    """XLA would add up equal parts of a weight's gradient, and abort on 26 rows in 4 shards."""
    torch.manual_seed(0)
    model, reference = on_both(Segments(layout).double())
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
