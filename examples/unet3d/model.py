"""A 3-D U-Net written for one device. Its volumes have named dimensions; a layout says how these
lie on a mesh.

Letters in the comments: b batch, c channels, x y z rows of the volume, t tissues. Every level down
has half of the rows, which need not divide: 65 become 32, and these 64 again, with one row of zeros
behind them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgspmd import Layout, Mesh, annotate

# ------------------------------------------------------------------------------------------ layouts

DP = Layout({"batch": "data", "x": None, "y": None})  # every device has whole volumes of its own
LAYOUTS = {
    "dp": DP,
    # a slab of each volume: convolutions read some rows of the neighbours
    "spatial": DP | Layout({"x": "space"}),
    "spatial2d": DP | Layout({"x": "space", "y": "rows"}),  # a beam: in two dimensions at once
}


# -------------------------------------------------------------------------------------------- model


@dataclass(frozen=True)
class Config:
    tissues: int = 3
    levels: int = 3  # of resolution
    width: int = 8  # channels of the first level; every further one has twice as many
    up: str = "transposed"  # convolution, or trilinear interpolation


class Block(nn.Module):
    """Two convolutions, each with a norm and a ReLU."""

    def __init__(self, inner: int, outer: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(inner, outer, 3, padding=1, bias=False),
            nn.InstanceNorm3d(outer, affine=True),
            nn.ReLU(),
            nn.Conv3d(outer, outer, 3, padding=1, bias=False),
            nn.InstanceNorm3d(outer, affine=True),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:  # [b, c, x, y, z]
        return self.layers(x)


class Up(nn.Module):
    """To the next finer level: twice as many rows, cut or filled to those of the skip connection,
    which is put beside.
    """

    def __init__(self, config: Config, inner: int, outer: int):
        super().__init__()
        self.trilinear = config.up == "trilinear"
        self.move = (
            nn.Conv3d(inner, outer, 1)
            if self.trilinear
            else nn.ConvTranspose3d(inner, outer, 2, stride=2)
        )

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:  # [b, 2c, x/2, ...], [b, c, x, ...]
        x, rows = self.move(x), skip.shape[2:]
        if self.trilinear:
            x = F.interpolate(
                x, size=rows, mode="trilinear", align_corners=False
            )  # [b, c, x, y, z]
        else:
            x = F.pad(
                x, [n for have, want in zip(x.shape[:1:-1], rows[::-1]) for n in (0, want - have)]
            )
        return torch.cat([skip, x], dim=1)  # [b, 2c, x, y, z]


class UNet(nn.Module):
    """image [b, 1, x, y, z] -> logits [b, t, x, y, z], or with labels [b, x, y, z] the loss."""

    def __init__(self, config: Config):
        super().__init__()
        widths = [config.width * 2**i for i in range(config.levels)]
        self.down = nn.ModuleList(Block(i, o) for i, o in zip([1, *widths], widths))
        self.up = nn.ModuleList(Up(config, 2 * w, w) for w in widths[:-1])
        self.merge = nn.ModuleList(Block(2 * w, w) for w in widths[:-1])
        self.head = nn.Conv3d(config.width, config.tissues, 1)
        volumes = (
            "down.*.layers.*",
            "up.*",
            "merge.*.layers.*",
            "head",
        )  # what every layer returns
        annotate(self, dict.fromkeys(volumes, "batch _ x y _"))

    def forward(self, image: Tensor, labels: Tensor | None = None) -> Tensor:
        x, skips = image, []
        for block in self.down[:-1]:
            skips.append(block(x))  # [b, c, x, y, z]
            x = F.max_pool3d(skips[-1], 2)  # [b, c, x/2, y/2, z/2]
        x = self.down[-1](x)
        for up, merge, skip in reversed(list(zip(self.up, self.merge, skips))):
            x = merge(up(x, skip))
        logits = self.head(x)  # [b, t, x, y, z]
        if labels is None:
            return logits
        return (
            F.cross_entropy(logits, labels) + 1 - overlap(logits.softmax(1), labels).mean()
        )  # a scalar


def overlap(found: Tensor, labels: Tensor) -> Tensor:
    """Dice of every tissue, [t]: 2 |A B| / (|A| + |B|) of what was found, [b, t, x, y, z], and what
    is there, [b, x, y, z].
    """
    truth = F.one_hot(labels, found.shape[1]).movedim(-1, 1).to(found.dtype)  # [b, t, x, y, z]
    dims = [0, 2, 3, 4]
    return (2 * (found * truth).sum(dims) + 1e-6) / ((found + truth).sum(dims) + 1e-6)


def example(
    mesh: Mesh,
    layout: str = "spatial",
    batch: int = 8,
    size: int = 256,
    levels: int = 4,
    width: int = 32,
    up: str = "transposed",
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and a batch for `python -m torchgspmd plan`, in bfloat16."""
    model = annotate(UNet(Config(3, levels, width, up)).bfloat16(), LAYOUTS[layout].on(mesh))
    image = torch.zeros(batch, 1, size, size, size, dtype=torch.bfloat16)
    return model, (image, torch.zeros(batch, size, size, size, dtype=torch.long))
