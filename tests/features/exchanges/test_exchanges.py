"""Chains of exchanges in parts: the numbers of one device, the same bytes, less time."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, eager
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import Hardware, Mesh
from torchgspmd.comm.collective import start
from torchgspmd.comm.hardware import Link
from torchgspmd.fx_passes.loop_call import loop_calls
from torchgspmd.fx_passes.pass_types import FEATURE_PASSES
from torchgspmd.fx_passes.schedule.arithmetic import flops

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


class Drawn(nn.Module):
    """x [b, s, h, d] -> the same, sharded along s and h in turn; all sizes but b are equal.

    A backward's product may read a value along another dimension than the forward cut it.
    """

    KINDS = ("attend", "swap", "mix", "weigh", "compare")

    def __init__(self, mesh: Mesh, kinds: list[str]):
        super().__init__()
        self.mesh, self.kinds = mesh, kinds
        self.w = nn.ParameterList(torch.randn(8, 8, dtype=torch.float64) / 3 for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for i, kind in enumerate(self.kinds):
            w = self.w[i % 3]
            h = gspmd.mark_sharding(x, self.mesh, ["_ _ seq _", "_ seq _ _"][i % 2])
            if kind == "attend":
                scores = torch.einsum("bshd,bthd->bhst", h @ w, h).softmax(-1)
                x = torch.einsum("bhst,bthd->bshd", scores, h)
            elif kind == "swap":
                x = (h @ w).transpose(1, 2).sin()
            elif kind == "mix":
                x = torch.einsum("bshd,hk->bskd", h, w).tanh()
            elif kind == "weigh":
                x = (h.transpose(1, 2) @ w).softmax(-1).transpose(1, 2) * h
            else:
                x = torch.einsum("bshd,bthd->bsth", h, h).softmax(2) @ w
        return gspmd.mark_sharding(x, self.mesh, "_ seq _ _")


@pytest.mark.parametrize("seed", [122, *range(24), 34])  # the first and last were errors
def test_drawn_programs_have_the_numbers_of_one_device(seed: int) -> None:
    torch.manual_seed(seed)
    draw, mesh = random.Random(seed), Mesh(seq=2)
    kinds = [draw.choice(Drawn.KINDS) for _ in range(draw.randint(2, 4))]
    model = Drawn(mesh, kinds)
    x = torch.randn(draw.choice([2, 4]), 8, 8, 8, dtype=torch.float64, requires_grad=True)
    plan = planned((model, mesh, "_ seq _ _", x))
    result, gradients = eager(model, x)
    (gradients["x"],) = torch.autograd.grad(model(x).sum(), x)
    assert_same(plan.simulate(x, _poison=True), (result, gradients), terms=1000)


class Layers(nn.Module):
    """A loop over layers of experts."""

    def __init__(self, mesh: Mesh):
        super().__init__()
        layers = [Experts(4, 5, 8, 32).double() for _ in range(3)]
        for layer in layers:
            gspmd.annotate(layer, mesh, {"up": "expert _ _", "down": "expert _ _"})
        self.layers = gspmd.stack(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_layers_in_a_loop() -> None:
    mesh = Mesh(expert=2)
    x = torch.randn(4, 16, 8, dtype=torch.float64, requires_grad=True)
    case = Layers(mesh), mesh, "expert _ _", x
    plan, without = planned(case), planned(case, "split_exchanges")
    bodies = [
        sum(n.target is start for n in body.graph.nodes)
        for p in (plan, without)
        for _, call in loop_calls(p.program_graph)
        for body in call.bodies
    ]
    assert bodies[0] > bodies[2]  # of the forward
    assert plan.sent_bytes == without.sent_bytes
    result, gradients = eager(case[0], x)
    (gradients["x"],) = torch.autograd.grad(case[0](x).sum(), x)
    assert_same(plan.simulate(x, _poison=True), (result, gradients), terms=1000)
    plan.verify()


class Dropped(Experts):
    """Half of the experts' results are dropped at random: parts would draw other numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5)


def test_random_numbers_keep_their_order() -> None:
    mesh = Mesh(expert=2)
    model = Dropped(4, 5, 8, 32).double()
    gspmd.annotate(model, mesh, {"up": "expert _ _", "down": "expert _ _"})
    x = torch.randn(4, 16, 8, dtype=torch.float64, requires_grad=True)
    results = []
    for skip in ((), ("split_exchanges",)):
        plan = planned((model, mesh, "expert _ _", x), *skip)
        torch.manual_seed(1)
        results.append((exchanges(plan), plan.simulate(x)))
    assert results[0][0] > results[1][0]
    assert_same(results[0][1], results[1][1], terms=1000)


def products_in_flight(plan: gspmd.Plan) -> list[int]:
    """Return for each exchange how many products run until it is waited for."""
    order = [*plan.program_graph.nodes]
    place = {node: i for i, node in enumerate(order)}
    sends = [n for n in order if n.target is start and n.args[0] == "all_to_all"]
    ends = (min(map(place.__getitem__, n.users)) for n in sends)
    return [sum(bool(flops(n)) for n in order[place[n] : end]) for n, end in zip(sends, ends)]


class Sent(nn.Module):
    """x [t, m]: rows are sent to their experts; all tokens share another one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.shared = nn.Linear(8, 4), nn.Linear(8, 8, bias=False)
        self.up = nn.Parameter(torch.randn(4, 8, 32))
        self.down = nn.Parameter(torch.randn(4, 32, 8))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        routed = gspmd.moe.dispatch(x, chosen, 4, shards=2, capacity=2)
        h = F.gelu(gspmd.moe.grouped_mm(routed.rows, self.up, routed.ends))
        y = gspmd.moe.grouped_mm(h, self.down, routed.ends)
        return gspmd.moe.combine(y, routed, weights) + self.shared(x)


def test_a_shared_expert_runs_while_rows_are_sent() -> None:
    mesh, model = Mesh(expert=2), Sent().double()
    gspmd.annotate(model, mesh, {"up": "expert _ _", "down": "expert _ _"})
    x = torch.randn(32, 8, dtype=torch.float64)
    in_flight = []
    for skip in ((), ("split_exchanges",)):
        plan = gspmd.plan(
            model,
            x,
            mesh=mesh,
            in_specs="expert _",
            out_specs="expert _",
            hardware=SLOW,
            advanced={"skip_passes": skip},
        )
        in_flight.append(products_in_flight(plan))
        assert_same(plan.simulate(x, _poison=True), model(x), terms=1000)
    assert [counts[0] for counts in in_flight] == [1, 0]  # to the experts


def test_a_step_takes_little_more_than_computation_or_messages() -> None:
    """Without parts a step takes 1.3 to 1.6 times as long as the longer of the two.

    Where both are equal, a forward has more messages than products, and a backward fewer.
    """
    mesh, model = Mesh(expert=4), Experts(8, 64, 256, 1024)
    gspmd.annotate(model, mesh, {"up": "expert _ _", "down": "expert _ _"})
    x = torch.ones(16, 256, 256, requires_grad=True)
    case = model, mesh, "expert _ _", x
    fast = replace(SLOW, flops={4: 1e12}, memory_bandwidth=1e13)
    whole = planned(case, "split_exchanges", hardware=fast)
    compute = whole.estimate(fast).busy("compute")
    for share, most in ((0.5, 1.02), (1.0, 1.17), (2.0, 1.04)):
        link = Link(math.inf, whole.sent_bytes / (share * compute), 0.0)
        linked = replace(fast, links=(link,))
        bound = compute * max(share, 1.0)
        assert whole.estimate(linked).seconds > 1.25 * bound
        assert planned(case, hardware=linked).estimate(linked).seconds < most * bound


def test_programs_without_exchanges_run_no_file_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    row = FEATURE_PASSES["split_exchanges"]._replace(run=None)  # a call is a TypeError
    monkeypatch.setitem(FEATURE_PASSES, "split_exchanges", row)
    mesh, w = Mesh(data=2, model=2), torch.ones(8, 8)
    gspmd.plan(
        lambda x, w: (x @ w).relu() @ w.T,
        torch.ones(8, 8),
        w,
        mesh=mesh,
        in_specs=("data _", "_ model"),
        hardware=SLOW,
    )


def test_nothing_changes_where_nothing_is_sent_beside_computation() -> None:
    case = CASES["even"]()
    cpu = Hardware.of("cpu")
    assert exchanges(planned(case, hardware=cpu)) == 4
