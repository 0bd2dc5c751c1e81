"""A forecast of the next map, in the manner of MetNet, written for one device. Its marks name
dimensions; a layout says how these lie on a mesh.

Letters in the comments: b batch, c channels, y x rows and columns of a map, n heads, d width of a
head. Each level has half of the rows and columns, which need not divide: 145 become 73, and 37.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgspmd import Layout, Mesh, annotate, mark_sharding

# ------------------------------------------------------------------------------------------ layouts

DP = Layout(  # every device has whole maps of its own
    {
        "batch": "data",
        "rows": None,
        "columns": None,
        # The same where attention runs along the others, which are whole.
        "rows_alone": None,
        "columns_alone": None,
    }
)
# Each device has some rows of every map. Attention along columns has some columns instead.
ROWS = DP | Layout({"rows": "rows", "rows_alone": "rows", "columns_alone": "rows"})
# A rectangle of every map.
GRID = ROWS | Layout(
    {"columns": "columns", "rows_alone": "rows+columns", "columns_alone": "columns+rows"}
)
LAYOUTS = {"dp": DP, "rows": ROWS, "grid": GRID}


# -------------------------------------------------------------------------------------------- model


@dataclass(frozen=True)
class Config:
    rows: int = 145
    history: int = 2  # maps that a forecast is made of
    months: int = 6  # that can be asked for
    width: int = 16  # channels of the first level; the next has twice as many, the last four times
    heads: int = 4
    dilations: tuple[int, ...] = (1, 2, 4, 8)  # of the convolutions of the last level
    attentions: int = 1  # along rows and columns each


class Convolution(nn.Module):
    """A convolution, a norm of the channels of each point and a GELU."""

    def __init__(self, inner: int, outer: int, stride: int = 1, dilation: int = 1):
        super().__init__()
        self.convolution = nn.Conv2d(
            inner, outer, 3, stride, padding=dilation, dilation=dilation, bias=False
        )
        self.scale, self.shift = (nn.Parameter(f(outer, 1, 1)) for f in (torch.ones, torch.zeros))

    def forward(self, x: Tensor) -> Tensor:  # [b, c, y, x]
        x = mark_sharding(self.convolution(x), "batch _ rows columns")
        x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6)
        return F.gelu(x * self.scale + self.shift)


class Axial(nn.Module):
    """Attention of each point to those of its row, then to those of its column."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # [b, y, x, c]
        x = mark_sharding(x, "batch rows_alone _ _")
        x = x + self.along(0, x)
        x = mark_sharding(x, "batch _ columns_alone _").transpose(1, 2)  # [b, x, y, c]
        x = x + self.along(1, x)
        return mark_sharding(x.transpose(1, 2), "batch rows columns _")

    def along(self, i: int, x: Tensor) -> Tensor:  # [b, l, s, c], attends along s
        qkv = self.qkv[i](self.norms[i](x)).unflatten(-1, (3, self.heads, -1))  # [b, l, s, 3, n, d]
        q, k, v = (part.transpose(2, 3) for part in qkv.unbind(3))  # [b, l, n, s, d] each
        y = F.scaled_dot_product_attention(q, k, v)  # [b, l, n, s, d]
        return self.out[i](y.transpose(2, 3).flatten(3))  # [b, l, s, c]


class Weather(nn.Module):
    """maps [b, history, y, x], month [b] -> the next map [b, y, x], or with it the mean square."""

    def __init__(self, config: Config):
        super().__init__()
        self.config, w = config, config.width
        self.latitude = nn.Parameter(torch.zeros(w, config.rows, 1))  # [c, y, 1]
        self.month = nn.Embedding(config.months, 4 * w)
        self.first = Convolution(config.history, w)
        self.down = nn.ModuleList(Convolution(c, 2 * c, stride=2) for c in (w, 2 * w))
        self.wide = nn.ModuleList(Convolution(4 * w, 4 * w, 1, d) for d in config.dilations)
        self.attentions = nn.ModuleList(
            Axial(4 * w, config.heads) for _ in range(config.attentions)
        )
        self.up = nn.ModuleList(Convolution(6 * c, 2 * c) for c in (w, w // 2))
        self.head = nn.Conv2d(w, 1, 1)
        mark_sharding(self.latitude, "_ rows _")
        nn.init.zeros_(self.head.weight)  # begins with "as the month before"

    def forward(self, maps: Tensor, month: Tensor, target: Tensor | None = None) -> Tensor:
        maps = mark_sharding(maps, "batch _ rows columns")
        x = self.first(maps) + self.latitude  # [b, c, y, x]
        levels = []
        for convolution in self.down:
            levels.append(x)
            x = convolution(x)  # [b, 2c, y/2, x/2]
        x = x + self.month(month)[:, :, None, None]  # [b, 4c, y/4, x/4]
        for convolution in self.wide:
            x = x + convolution(x)
        x = x.movedim(1, -1)  # [b, y/4, x/4, 4c]
        for attention in self.attentions:
            x = attention(x)
        x = x.movedim(-1, 1)
        for convolution, finer in zip(self.up, reversed(levels)):
            x = F.interpolate(x, size=finer.shape[2:], mode="bilinear", align_corners=False)
            x = convolution(torch.cat([x, finer], dim=1))  # [b, 2c, y/2, x/2], [b, c, y, x]
        forecast = maps[:, -1] + self.head(x)[:, 0]  # [b, y, x]
        if target is None:
            return mark_sharding(forecast, "batch rows columns")
        return self.error(forecast, mark_sharding(target, "batch rows columns"))

    def error(self, forecast: Tensor, target: Tensor) -> Tensor:
        """The mean square; a point counts as much as it has area. [b, y, x] each."""
        area = areas(forecast)  # [y]
        return ((forecast - target).square().mean((0, 2)) * area).sum() / area.sum()


def areas(maps: Tensor) -> Tensor:
    """Cosines of latitudes from pole to pole, [b, y, x] -> [y]."""
    half, rows = torch.pi / 2, maps.shape[1]
    return torch.linspace(-half, half, rows, dtype=maps.dtype, device=maps.device).cos()


def example(
    mesh: Mesh, layout: str = "grid", batch: int = 16, rows: int = 721, columns: int = 1440
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and a batch for `python -m torchgspmd plan`, in bfloat16: quarters of a degree."""
    config = Config(rows, history=8, width=128, attentions=4, dilations=(1, 2, 4, 8, 16, 32))
    maps = torch.zeros(batch, 8, rows, columns, dtype=torch.bfloat16)
    model = annotate(Weather(config).bfloat16(), LAYOUTS[layout].on(mesh))
    return model, (maps, torch.zeros(batch, dtype=torch.long), maps[:, 0])
