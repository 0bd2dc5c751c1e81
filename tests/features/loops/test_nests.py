"""Loops in loops, in checkpoints, and checkpoints in their bodies: numbers of plain Python loops.

Each program is written once, for a table of loops: those of PyTorch, which stay loops, or Python's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch._higher_order_ops as loops_of_torch
from helpers import assert_same, eager
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torchgspmd as gspmd

MESH, WIDTH = gspmd.Mesh(data=2, model=2), 8


def _scan(body: Callable, h: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
    rows = []
    for x in xs:
        h, row = body(h, x)
        rows.append(row)
    return h, torch.stack(rows)


def _while(goes: Callable, body: Callable, state: tuple) -> tuple:
    while goes(*state):
        state = body(*state)
    return state


PYTHON = SimpleNamespace(
    scan=_scan,
    map=lambda f, xs: torch.stack([f(x) for x in xs]),
    cond=lambda goes, yes, no, operands: (yes if goes else no)(*operands),
    while_loop=_while,
)
TORCH = SimpleNamespace(
    scan=loops_of_torch.scan,
    map=loops_of_torch.map,
    cond=torch.cond,
    while_loop=loops_of_torch.while_loop,
)


def twice(y: Tensor) -> tuple[Tensor, Tensor]:
    """A carry and a row: loops of torch take no value for both."""
    return y, y.clone()


def layer(net: Net, x: Tensor) -> Tensor:
    return net.dropout(torch.tanh(x @ net.weight))


def scanned(run: SimpleNamespace, net: Net, x: Tensor) -> Tensor:
    return run.scan(lambda h, r: twice(layer(net, h) + r), x[0], x)[1]


def mapped(run: SimpleNamespace, net: Net, x: Tensor) -> Tensor:
    return run.map(partial(layer, net), x)


def branched(run: SimpleNamespace, net: Net, x: Tensor) -> Tensor:
    return run.cond(x.sum() > 0, partial(layer, net), lambda x: x @ net.weight, (x,))


def repeated(run: SimpleNamespace, net: Net, x: Tensor) -> Tensor:
    def body(i: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, torch.tanh(h @ net.weight)

    return run.while_loop(lambda i, h: i < 3, body, (torch.zeros((), dtype=torch.int64), x))[1]


def recurrent(run: SimpleNamespace, net: Net, x: Tensor) -> Tensor:
    return net.lstm(x)[0]


def in_a_scan(inner: Callable, run: SimpleNamespace, net: Net, x: Tensor) -> Tensor:
    """The last row of a loop in the body of a loop, which reads a weight that the other reads."""

    def body(h: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        return twice(inner(run, net, torch.stack([h * net.scale, r]))[-1])

    return run.scan(body, x[0], x)[1]


def recomputed(inner: Callable, run: SimpleNamespace, net: Net, x: Tensor) -> Tensor:
    return checkpoint(partial(inner, run, net), x, use_reentrant=False)


INNER = {
    "scan": scanned,
    "map": mapped,
    "cond": branched,
    "while_loop": repeated,
    "lstm": recurrent,
}
PROGRAMS = {
    **INNER,
    # The backward of a while_loop in another loop is a row of docs/limits.md.
    **{
        f"{name} in a scan": partial(in_a_scan, each)
        for name, each in INNER.items()
        if name != "while_loop"
    },
    "three": partial(in_a_scan, partial(in_a_scan, scanned)),
    "checkpoint of a scan in a scan": partial(in_a_scan, partial(recomputed, scanned)),
    "checkpoint of a scan": partial(recomputed, scanned),
    "one after the other": lambda run, net, x: scanned(run, net, mapped(run, net, x)),
}
DRAWING = [name for name in PROGRAMS if "while" not in name and "lstm" not in name]


def _saves(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    saved = "mm" in str(op) or "einsum" in str(op)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


WAYS = {
    "plain": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, _saves),
    },
}


class Net(nn.Module):
    """A loss of a program. way: how a checkpoint encloses it; None: without one."""

    def __init__(self, program: str, run: SimpleNamespace, way: str | None, drop: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.lstm, self.dropout = nn.LSTM(WIDTH, WIDTH), nn.Dropout(drop)
        self.run, self.way = partial(PROGRAMS[program], run), way

    def forward(self, x: Tensor) -> Tensor:
        run = partial(self.run, self)
        x = x * self.scale
        y = run(x) if self.way is None else checkpoint(run, x, **WAYS[self.way])
        return (y * y.cos()).square().sum()


def planned(net: Net, x: Tensor) -> gspmd.Plan:
    return gspmd.plan(net, x, mesh=MESH, in_specs="_ data _", grad=True)


@pytest.mark.parametrize("way", [None, *WAYS])
@pytest.mark.parametrize("program", PROGRAMS)
def test_numbers(program, way):
    x = torch.randn(3, 5, WIDTH)
    got = planned(Net(program, TORCH, way), x).simulate(x)
    assert_same(got, eager(Net(program, PYTHON, None), x), terms=512)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", DRAWING)
def test_a_recomputed_loop_draws_the_same_numbers(program, way):
    x, found = torch.randn(3, 5, WIDTH), []
    for each in (way, None):
        plan = planned(Net(program, TORCH, each, drop=0.3), x)
        torch.manual_seed(1)
        found.append(plan.simulate(x))
    assert_same(*found, terms=512)


def test_the_program_does_not_grow_with_the_sequence():
    lines = [
        len(planned(Net("lstm", TORCH, None), torch.randn(length, 5, WIDTH)).sharded.nodes)
        for length in (4, 64)
    ]
    assert lines[0] == lines[1]
