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


class Normed(nn.Module):
    """Norms over a sharded batch and sharded channels, and a signal in windows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.batch = nn.Conv1d(4, 6, 3, padding=2, dilation=2), nn.BatchNorm1d(6)
        self.group, self.bound = nn.GroupNorm(3, 6), nn.Parameter(torch.ones(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.group(self.batch(self.conv(x)).clamp(max=1)) * self.bound
        return F.instance_norm(y.roll(2, -1)).log_softmax(1).amin(-1).logsumexp(0).sum()


def _normed() -> Plan:
    x, mesh = torch.randn(4, 4, 9), Mesh(data=2, length=2)
    return gspmd.plan(Normed(), x, mesh=mesh, in_specs=("data _ length",), grad=True)


def _distance(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.smooth_l1_loss(model(x), y)


def _adam() -> Plan:
    """A step of AdamW with clipping, whose states are sharded."""
    mesh, model = Mesh(data=2, model=2), nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    gspmd.annotate(model, mesh, {"0.weight": "model _", "2.weight": "_ model"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = gspmd.train_step(model, optimizer, _distance, clip=1.0)
    x = torch.randn(6, 6)
    return gspmd.plan(step, x, x.sin(), mesh=mesh, in_specs=("data _", "data _"))


def _lookup() -> Plan:
    """Scores of sharded words, their cross entropy, and the best ones."""

    def run(x: Tensor, table: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        table = table.detach().requires_grad_()
        scores = torch.where(x.sum(1, True) > 0, x, -x) @ table.T
        loss = F.cross_entropy(scores, at, label_smoothing=0.1)
        best = scores.detach().topk(2).values.prod(1).cummax(0).values
        return loss, torch.autograd.grad(loss, table)[0], best, scores.detach().argmax(1)

    x, table, at = torch.randn(6, 4), torch.randn(10, 4), torch.arange(6)
    specs = ("data _", "words _", "data")
    return gspmd.plan(run, x, table, at, mesh=Mesh(data=2, words=2), in_specs=specs)


PROGRAMS: dict[str, Callable[[], Plan]] = {
    "transposed": _transposed,
    "recurrent": _recurrent,
    "bags": _bags,
    "along": _along,
    "branches": _branches,
    "normed": _normed,
    "adam": _adam,
    "lookup": _lookup,
}
MODELS = *SETS, *PROGRAMS


def planned(name: str) -> Plan:
    """Return the plan of a program, or of a set of features."""
    if name in PROGRAMS:
        torch.manual_seed(0)
        return PROGRAMS[name]()
    return compiled(setup_of(tuple(name.split("+"))))[0]
