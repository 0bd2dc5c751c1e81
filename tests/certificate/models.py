"""The programs into which faults are put: sets of features, and small programs by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from composition.features import setup_of
from composition.judge import compiled
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import Mesh, Plan

SETS = (
    *("data", "tensor", "sequence", "zero3", "zero1", "context", "ring", "dropless", "capacity"),
    *("circular", "gpipe", "1f1b", "interleaved", "zero_bubble", "vee", "stack", "recompute"),
    *("checkpoint", "accumulate", "tied", "step", "any_batch", "uneven", "dropout"),
    *("attention_dropout", "flex", "gqa", "adapters", "batch_norm", "manual", "custom", "spatial"),
    *("selective", "shared", "alternate", "nodes", "half", "gpipe_outside", "circular2"),
    *("data+tensor", "any_batch+zero3", "zero3+uneven", "ring+half", "dropless+stack"),
    *("zero_bubble+tied", "spatial+dropout", "sequence+stack", "context+uneven"),
)


class Transposed(nn.Module):
    """Rows of an image on devices: a convolution with a stride, and one back."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 3, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(3, 2, 4, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(F.max_pool2d(self.down(x).tanh(), 3, 1, 1)).square().mean()


class Recurrent(nn.Module):
    """A loop over a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(4, 6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0].square().sum()


class Bags(nn.Module):
    """Sharded rows of a table, looked up, added up and scattered."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(10, 4))
        gspmd.mark_sharding(self.table, mesh, "data _")

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        bags = torch.zeros(6, 4).index_add(0, at % 6, F.embedding(at, self.table) * x)
        return (bags.scatter_add(0, (at % 6)[:, None].expand(-1, 4), x.sin()) ** 2).sum()


def _transposed() -> Plan:
    mesh = Mesh(rows=2, data=2)
    x = torch.randn(2, 2, 9, 6)
    return gspmd.plan(Transposed(), x, mesh=mesh, in_specs=("data _ rows _",), grad=True)


def _recurrent() -> Plan:
    x = torch.randn(3, 4, 4)
    return gspmd.plan(Recurrent(), x, mesh=Mesh(data=2), in_specs=("_ data _",), grad=True)


def _bags() -> Plan:
    mesh, x, at = Mesh(data=2), torch.randn(8, 4), torch.arange(8)
    return gspmd.plan(Bags(mesh), x, at, mesh=mesh, in_specs=("data _", "data"), grad=True)


def _along() -> Plan:
    """Scans, sorts, shifts, windows and Fourier transforms along a sharded dimension."""

    def run(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = (x @ w).cumsum(0) * 0.2
        z = torch.cat([y[1:], y[:1].flip(1)]).roll(1, 0).softmax(0)
        pooled = F.avg_pool1d(F.pad(z.mT, (1, 2)), 3, 2).mT
        chosen = y.gather(0, y.argmax(0, True)).logsumexp(1)
        return torch.fft.rfft(z, dim=0).abs(), pooled, y.sort(0).values.amax(1), chosen

    x, w = torch.randn(7, 5), torch.randn(5, 4)
    mesh = Mesh(a=2, b=2)
    return gspmd.plan(run, x, w, mesh=mesh, in_specs=("a+b _", "_ _"), out_specs=None)


def _branches() -> Plan:
    """A branch and a loop that values end."""

    def run(x: Tensor, w: Tensor) -> Tensor:
        y = torch.cond(x.sum() > 0, lambda a: (a @ w).tanh(), lambda a: (a @ w).sin(), (x,))
        y, _ = torch._higher_order_ops.while_loop(
            lambda y, n: n < 3, lambda y, n: ((y @ w.mT @ w).tanh(), n + 1), (y, torch.tensor(0))
        )
        return y.sum(0)

    x, w = torch.randn(4, 6), torch.randn(6, 4)
    return gspmd.plan(run, x, w, mesh=Mesh(a=2, b=2), in_specs=("a b", "b _"))


PROGRAMS: dict[str, Callable[[], Plan]] = {
    "transposed": _transposed,
    "recurrent": _recurrent,
    "bags": _bags,
    "along": _along,
    "branches": _branches,
}
MODELS = *SETS, *PROGRAMS


def planned(name: str) -> Plan:
    """Return the plan of a program, or of a set of features."""
    if name in PROGRAMS:
        torch.manual_seed(0)
        return PROGRAMS[name]()
    return compiled(setup_of(tuple(name.split("+"))))[0]
