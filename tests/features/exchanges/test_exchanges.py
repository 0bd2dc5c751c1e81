"""Chains of exchanges in parts: the numbers of one device, the same bytes, less time."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, eager
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import Hardware, Mesh
from torchgspmd.comm.collective import start
from torchgspmd.comm.hardware import Link

# Small programs take as long as large ones do elsewhere, and exchanges about as long as products.
SLOW = Hardware("slow", {8: 1e6}, 1e9, 64e9, (Link(math.inf, 2e5, 0.0),), launch=0.0)


class Experts(nn.Module):
    """x [g, s, m] -> [g, s, m]: a fixed number of places in each expert, as in GShard."""

    def __init__(self, experts: int, room: int, width: int, hidden: int, shared: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.room = room
        self.router = nn.Parameter(torch.randn(width, experts))
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / 4)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / 4)
        self.shared = nn.Linear(width, width, bias=False) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        n = len(self.up)
        odds = (x @ self.router).softmax(-1)
        weights, chosen = odds.max(-1)  # [g, s]
        taken = F.one_hot(chosen, n)  # [g, s, e]
        before = taken.cumsum(1) - taken
        places = (before[..., None] == torch.arange(self.room)) & (taken[..., None] > 0)
        places = places.to(x.dtype)  # [g, s, e, c]
        y = torch.einsum("gsec,gsm->egcm", places, x)
        y = torch.einsum("egcm,emh->egch", y, self.up).relu()
        y = torch.einsum("egch,ehm->egcm", y, self.down)
        y = torch.einsum("gsec,gs,egcm->gsm", places, weights, y)
        return y if self.shared is None else y + self.shared(x).relu()


class HeadsOrTokens(nn.Module):
    """x [b, s, m], sharded along s -> the same: heads are sharded where tokens meet (Ulysses)."""

    def __init__(self, mesh: Mesh, width: int):
        super().__init__()
        torch.manual_seed(0)
        self.mesh, self.w = mesh, nn.Parameter(torch.randn(width, width) / 4)

    def forward(self, x: Tensor) -> Tensor:
        heads = gspmd.mark_sharding(x.unflatten(2, (4, -1)), self.mesh, "_ _ seq _")
        scores = torch.einsum("bshd,bthd->bhst", heads, heads).softmax(-1)
        y = torch.einsum("bhst,bthd->bshd", scores, heads)
        return gspmd.mark_sharding(y, self.mesh, "_ seq _ _").flatten(2) @ self.w


def experts(mesh: Mesh, rows: str, sizes: tuple[int, ...], groups: int, **options: bool):
    model = Experts(*sizes, **options).double()
    weights = "expert _ model" if "model" in mesh.names else "expert _ _"
    gspmd.annotate(model, mesh, {"up": weights})
    down = "expert model _" if "model" in mesh.names else "expert _ _"
    gspmd.annotate(model, mesh, {"down": down})
    x = torch.randn(groups, 16, sizes[2], dtype=torch.float64, requires_grad=True)
    return model, mesh, rows, x


def heads(batch: int):
    mesh = Mesh(seq=2)
    x = torch.randn(batch, 16, 16, dtype=torch.float64, requires_grad=True)
    return HeadsOrTokens(mesh, 16).double(), mesh, "_ seq _", x


CASES = {
    "even": lambda: experts(Mesh(expert=4), "expert _ _", (8, 2, 8, 32), 8),
    "shared": lambda: experts(Mesh(expert=4), "expert _ _", (8, 2, 8, 32), 8, shared=True),
    "uneven places": lambda: experts(Mesh(expert=2), "expert _ _", (4, 5, 8, 32), 4),
    "uneven experts": lambda: experts(Mesh(expert=3), "expert _ _", (8, 2, 8, 32), 6),
    "uneven groups": lambda: experts(Mesh(expert=3), "expert _ _", (6, 3, 8, 32), 7),
    "two axes": lambda: experts(Mesh(data=2, expert=2), "data+expert _ _", (4, 2, 8, 32), 8),
    "hidden units": lambda: experts(Mesh(expert=2, model=2), "expert _ _", (4, 4, 8, 32), 4),
    "heads": lambda: heads(4),
    "uneven batch": lambda: heads(5),
}


def planned(case, *skip: str, hardware: Hardware = SLOW, **options) -> gspmd.Plan:
    model, mesh, rows, x = case
    advanced = {"skip_passes": skip}
    return gspmd.plan(
        model,
        x,
        mesh=mesh,
        in_specs=rows,
        out_specs=rows,
        grad=True,
        hardware=hardware,
        advanced=advanced,
        **options,
    )


def exchanges(plan: gspmd.Plan) -> int:
    nodes = plan.program_graph.nodes
    return sum(n.target is start and n.args[0] == "all_to_all" for n in nodes)


@pytest.mark.parametrize("name", CASES)
def test_numbers_and_bytes_are_those_without_parts(name: str) -> None:
    case = CASES[name]()
    model, *_, x = case
    plan, without = planned(case), planned(case, "split_exchanges")
    assert exchanges(plan) > exchanges(without)
    assert plan.sent_bytes == without.sent_bytes
    sent = [
        sum(
            u.meta["step"].sent for n in p.program_graph.nodes if n.target is start for u in n.users
        )
        for p in (plan, without)
    ]
    assert sent[0] == pytest.approx(sent[1])
    assert plan.estimate(SLOW).seconds < without.estimate(SLOW).seconds
    result, gradients = eager(model, x)
    (gradients["x"],) = torch.autograd.grad(model(x).sum(), x)
    assert_same(plan.simulate(x, _poison=True), (result, gradients), terms=1000)
    plan.verify()
