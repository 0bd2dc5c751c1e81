"""CPU seconds to plan a U-Net with the sizes of Stable Diffusion 1.5, beside the bare capture.

    python benchmarks/unet.py [--mesh data=8,model=4]

860 million parameters, in hardly two equal layers. Its weights are marked on no axis, on `data`, or
each on both axes.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchgspmd as gspmd

WIDTHS = 320, 640, 1280, 1280
TIME, TEXT, HEADS, GROUPS, LATENTS = 1280, 768, 8, 32, 4


class Residual(nn.Module):
    """Two convolutions, with the time in between."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(GROUPS, inner), nn.GroupNorm(GROUPS, outer)])
        self.first = nn.Conv2d(inner, outer, 3, padding=1)
        self.second = nn.Conv2d(outer, outer, 3, padding=1)
        self.time = nn.Linear(TIME, outer)
        self.skip = nn.Identity() if inner == outer else nn.Conv2d(inner, outer, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:  # [b, c, h, w], [b, m]
        y = self.first(F.silu(self.norms[0](x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.second(F.silu(self.norms[1](y)))


class Attention(nn.Module):
    """Attention to the image itself, or to a text."""

    def __init__(self, width: int, keys: int) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(keys, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:  # [b, s, m], [b, t, k]
        heads = [f(y).unflatten(2, (HEADS, -1)).transpose(1, 2) for f, y in self.of(x, keys)]
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))

    def of(self, x: Tensor, keys: Tensor) -> list[tuple[nn.Module, Tensor]]:
        return [(self.q, x), (self.k, keys), (self.v, keys)]


class Transformer(nn.Module):
    """Attention to the image and to the text, and a gated product, at each pixel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, width)
        self.enter, self.leave = (nn.Conv2d(width, width, 1) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.cross = Attention(width, width), Attention(width, TEXT)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:  # [b, c, h, w], [b, t, k]
        x = self.enter(self.norm(image)).flatten(2).transpose(1, 2)
        y = self.norms[0](x)
        x = x + self.own(y, y)
        x = x + self.cross(self.norms[1](x), text)
        y, gate = self.up(self.norms[2](x)).chunk(2, -1)
        x = x + self.down(y * F.gelu(gate))
        return image + self.leave(x.transpose(1, 2).unflatten(2, image.shape[2:]))


class Level(nn.Module):
    """The layers at one resolution: Residual and Transformer, one for each number of channels."""

    def __init__(self, inner: list[int], outer: int, attends: bool) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(Residual(width, outer) for width in inner)
        self.attention = nn.ModuleList(
            Transformer(outer) if attends else nn.Identity() for _ in inner
        )


class UNet(nn.Module):
    """Predicts the noise in latents [b, 4, h, w]; returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(WIDTHS[0], TIME), nn.SiLU(), nn.Linear(TIME, TIME))
        self.enter = nn.Conv2d(LATENTS, WIDTHS[0], 3, padding=1)
        last, skips, width = len(WIDTHS) - 1, [WIDTHS[0]], WIDTHS[0]
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        for i, outer in enumerate(WIDTHS):
            self.down.append(Level([width, outer], outer, attends=i < last))
            skips += [outer, outer]
            if i < last:
                self.shrink.append(nn.Conv2d(outer, outer, 3, stride=2, padding=1))
                skips.append(outer)
            width = outer
        self.middle = nn.ModuleList([Residual(width, width) for _ in range(2)])
        self.between = Transformer(width)
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        for i, outer in enumerate(reversed(WIDTHS)):
            inner = [w + skips.pop() for w in (width, outer, outer)]
            self.up.append(Level(inner, outer, attends=i > 0))
            if i < last:
                self.grow.append(nn.Conv2d(outer, outer, 3, padding=1))
            width = outer
        self.norm = nn.GroupNorm(GROUPS, width)
        self.leave = nn.Conv2d(width, LATENTS, 3, padding=1)

    def forward(self, latents: Tensor, times: Tensor, text: Tensor, noise: Tensor) -> Tensor:
        rates = torch.exp(-9.2 * torch.arange(WIDTHS[0] // 2, device=times.device) / 160)
        angles = times[:, None] * rates
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1))
        x = self.enter(latents)
        skips = [x]
        for i, level in enumerate(self.down):
            for convolution, attention in zip(level.convolutions, level.attention):
                x = convolution(x, time)
                x = attention(x, text) if isinstance(attention, Transformer) else x
                skips.append(x)
            if i < len(self.shrink):
                x = self.shrink[i](x)
                skips.append(x)
        x = self.middle[1](self.between(self.middle[0](x, time), text), time)
        for i, level in enumerate(self.up):
            for convolution, attention in zip(level.convolutions, level.attention):
                x = convolution(torch.cat([x, skips.pop()], 1), time)
                x = attention(x, text) if isinstance(attention, Transformer) else x
            if i < len(self.grow):
                x = self.grow[i](F.interpolate(x, scale_factor=2.0))
        return F.mse_loss(self.leave(F.silu(self.norm(x))), noise)


def inputs(batch: int, size: int = 64, words: int = 77) -> tuple[Tensor, ...]:
    """Return latents, times, a text and noise."""
    latents = torch.zeros(batch, LATENTS, size, size)
    return latents, torch.zeros(batch), torch.zeros(batch, words, TEXT), latents.clone()


MARKS = {"none": "", "data": "_ data", "both": "model data"}


def planned(mesh: gspmd.Mesh, marks: str) -> tuple[float, float]:
    """Return the CPU seconds to plan forward and backward, and of the capture in them."""
    with torch.device("meta"):
        model, args = UNet(), inputs(2 * mesh.count(("data",)))
    specs = {
        name: marks + " _" * (weight.dim() - 2)
        for name, weight in model.named_parameters()
        if weight.dim() > 1 and weight.shape[0] % 64 == weight.shape[1] % 64 == 0
    }
    gspmd.annotate(model, mesh, specs if marks else {})
    layouts = "data _ _ _", "data", "data _ _", "data _ _ _"
    begin = time.process_time()
    plan = gspmd.plan(model, *args, mesh=mesh, in_specs=layouts, grad=True)
    return time.process_time() - begin, plan.seconds["capture"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mesh", default="data=8,model=4")
    mesh = gspmd.Mesh.parse(parser.parse_args().mesh)
    # A plan's seconds are those of this clock: CPU time, so that other processes matter less.
    time.perf_counter = time.process_time
    for name, marks in MARKS.items():
        seconds, capture = planned(mesh, marks)
        print(f"{name:5} {seconds:6.1f} s, the capture {capture:5.1f} s: {seconds / capture:.2f}")


if __name__ == "__main__":
    main()
