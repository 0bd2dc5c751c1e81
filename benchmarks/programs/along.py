"""Operations along a sharded dimension: no device needs more than its part, though each result may
depend on all elements.

    ALONG["sort of a vector"]      the Program of that name

`python benchmarks/bounds.py` prints what a device sends beside a proven lower bound. The comments
have the bytes that are known to suffice, in those of the part of a device, with n devices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from torchgspmd import Mesh

from .draw import Program

N = 8
MESH = Mesh(x=N)
IMAGE = Mesh(y=2, x=4)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


def with_gradient(function: Callable) -> Callable:
    """y and the gradient of x, for x and the cotangent of y."""

    def step(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        y = function(leaf)
        return y.detach(), torch.autograd.grad(y, leaf, dy)[0]

    return step


def loss_and_best(x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Loss, gradient, and the best tokens, of one softmax over a vocabulary."""
    leaf = x.detach().requires_grad_()
    odds = F.log_softmax(leaf, -1)
    loss = F.nll_loss(odds, labels)
    best = odds.detach().topk(5)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], best.values, best.indices


def distinct(x: Tensor, size: int) -> Tensor:
    """At most `size` distinct numbers of each row, ascending; the largest fills the rest."""
    values = x.sort(-1).values
    first = F.pad(values[..., 1:] != values[..., :-1], (1, 0), value=True)
    place = torch.where(first, first.cumsum(-1) - 1, size).clamp_max(size)
    filled = values[..., -1:].expand(*values.shape[:-1], size + 1)
    return filled.scatter(-1, place, values)[..., :size]


def distinct_of_blocks(x: Tensor, size: int = 32) -> Tensor:
    """The same of a vector, by the distinct numbers of its blocks: `unique` with a bound."""
    return distinct(distinct(x.unflatten(0, (N, -1)), size).flatten(), size)


def convolved(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (x, w)]
    y = F.conv2d(leaves[0], leaves[1], padding=1)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def program(name: str, function: Callable, ins: dict, outs: str | tuple, mesh: Mesh = MESH) -> None:
    """Add a program. ins: layout of each argument; spaces at its end tell equal ones apart."""
    specs = tuple(spec.rstrip() for spec in ins)
    ALONG[name] = Program(name, mesh, function, tuple(ins.values()), specs, outs)


ALONG: dict[str, Program] = {}

ROWS, C64 = numbers(64, 32), torch.complex64
for _name, _scan in {
    # One number a block and column, which each device gathers, though a prefix is enough.
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "cumsum from behind": lambda x: x.flip(0).cumsum(0).flip(0),
    # The gradient of a row goes to the row of the extreme: it moves, with its place.
    "cummax": lambda x: x.cummax(0).values,
}.items():
    program(_name, with_gradient(_scan), {"x _": ROWS, "x _ ": ROWS}, ("x _", "x _"))
# Every element may go anywhere: (n-1)/n of the part, and once more to be back in the layout.
program("sort beside a free dimension", lambda x: x.sort(0).values, {"x _": ROWS}, "x _")
# Columnsort: two transpositions of (n-1)/n, two shifts of 1/2.
program("sort of a vector", lambda x: x.sort().values, {"x": numbers(1024)}, "x")
program("places of a vector", lambda x: x.argsort(), {"x": numbers(1024)}, "x")
# k numbers and places of each device.
program("top-k", lambda x: x.topk(4, 0).values, {"x _": ROWS}, "_ _")
program("argmax", lambda x: x.argmax(0), {"x _": ROWS}, "_")
# As many numbers of each block as there may be in all.
FEW = numbers(1024).mul(4).round()
program("distinct numbers, at most 32", distinct_of_blocks, {"x": FEW}, "_")
# A sum of counts: 2 (n-1)/n of the result.
program("histogram", lambda x: torch.histc(x, 16, -3, 3), {"x _": ROWS}, "_")
# Each device knows its rows and columns.
program("triangle", torch.tril, {"x _": numbers(32, 32)}, "x _")
# The rows of a neighbor.
program("roll of a vector", lambda x: x.roll(3), {"x": numbers(1024)}, "x")
program("overlapping blocks", lambda x: x.unfold(0, 16, 4), {"x": numbers(1024)}, "x _")
program("places in borders", torch.searchsorted, {"x": numbers(512).sort()[0], "_": ROWS[0]}, "_")
# Transpositions of (n-1)/n: one for each dimension but the first; three for a vector.
program("2-D transform", torch.fft.fft2, {"x _": numbers(16, 16, dtype=C64)}, "_ x")
program("2-D transform and back", torch.fft.fft2, {"x _": numbers(16, 16, dtype=C64)}, "x _")
program("transform of a vector", torch.fft.fft, {"x": numbers(256, dtype=C64)}, "x")
# Two sums of one number a token, its label's, and k numbers and places of each device.
program(
    "loss and top-k of a vocabulary",
    loss_and_best,
    {"_ x": numbers(16, 128), "_": torch.arange(16) * 7},
    ("", "_ x", "_ _", "_ _"),
)
# Rows and columns of neighbors, forward and backward, and the sum of the gradient of w.
PICTURES = numbers(2, 4, 16, 16)
program(
    "convolution of H x W",
    convolved,
    {"_ _ y x": PICTURES, "_ _ _ _": numbers(4, 4, 3, 3), "_ _ y x ": PICTURES},
    ("_ _ y x", "_ _ y x", "_ _ _ _"),
    IMAGE,
)
