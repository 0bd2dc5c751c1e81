"""What the search leaves out changes no plan: strategies above a bound, and some visits."""

import gc
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import torchgspmd as gspmd
from torchgspmd import Mesh, Plan
from torchgspmd.fx_passes.partition.assignment import Assignment
from torchgspmd.fx_passes.partition.cost_model import CostModel
from torchgspmd.fx_passes.partition.search_memory import SearchMemory

MESHES = (Mesh(data=2, model=2), Mesh(data=2, model=3), Mesh(a=2, b=2, c=2))


class Block(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12)
        self.kind = draw.choice(("gated", "softmax", "pooled", "views"))

    def forward(self, x: Tensor) -> Tensor:  # [b, s, 12]
        h = F.gelu(self.up(self.norm(x)))
        if self.kind == "gated":
            h = h * h.sigmoid()
        if self.kind == "softmax":
            h = h.softmax(-1)
        if self.kind == "pooled":
            h = F.avg_pool1d(h.transpose(1, 2), 3, 1, 1).transpose(1, 2)
        if self.kind == "views":
            h = h.reshape(*h.shape[:2], 4, 6).transpose(2, 3).reshape(h.shape)
        return x + self.down(h)


def planned(seed: int) -> Plan:
    """Return the plan for random blocks whose weights and input have random layouts."""
    draw = random.Random(seed)
    mesh = draw.choice(MESHES)
    model = nn.Sequential(*(Block(draw) for _ in range(2)))
    for weight in model.parameters():
        words = ["_"] * weight.dim()
        if weight.dim() > 1 and draw.random() < 0.7:
            words[draw.randrange(2)] = draw.choice(mesh.names)
        gspmd.mark_sharding(weight, mesh, " ".join(words))
    layout = ["_", "_", "_"]
    layout[draw.randrange(2)] = draw.choice(mesh.names)
    x = torch.empty(12, 12, 12)
    return gspmd.plan(model, x, mesh=mesh, in_specs=(" ".join(layout),), grad=True)


@pytest.mark.parametrize("seed", range(8))
def test_a_bound_hides_no_cheaper_strategy(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal strategies the present one is taken, or else the first."""
    cheapest, asked = CostModel.cheapest, 0

    def checked(self, op, strategies, neighborhood, present=None):
        nonlocal asked
        asked += 1
        found = cheapest(self, op, strategies, neighborhood, present)
        order = [*strategies] if present is None else [present, *strategies]
        costs = [self.cost(op, strategy, neighborhood) for strategy in order]
        assert found is (order[costs.index(min(costs))] if order else None)
        return found

    monkeypatch.setattr(CostModel, "cheapest", checked)
    planned(seed)
    assert asked


@pytest.mark.parametrize("seed", range(8))
def test_visits_where_nothing_is_sent_save_nothing(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = planned(seed)
    monkeypatch.setattr(Assignment, "sends_around", lambda self, op: True)
    long = planned(seed)
    assert short.sent_bytes == long.sent_bytes
    assert short.counts["op_candidates"] < long.counts["op_candidates"]


@pytest.mark.parametrize("seed", range(8))
def test_release_touches_all_whose_neighborhood_changed(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial touches nothing until `release`, and then all at once."""
    hold, release = Assignment.hold, Assignment.release
    before: dict[fx.Node, object] = {}
    changed = 0

    def around(at: Assignment) -> dict[fx.Node, object]:
        """The neighborhood of each operation, without the cache."""
        cached, at.neighborhood_cache = at.neighborhood_cache, {}
        found = {node: at.neighborhood(op) for node, op in at.ops.items()}
        at.neighborhood_cache = cached
        return found

    def noted(self: Assignment) -> None:
        before.update(around(self))
        hold(self)

    def checked(self: Assignment) -> None:
        nonlocal changed
        release(self)
        for node, now in around(self).items():
            assert self.neighborhood(self.ops[node]) is now  # nothing old is cached
            if now is not before[node]:
                changed += 1
                assert node in self.worklist and self.stamps[node] == self.version

    monkeypatch.setattr(Assignment, "hold", noted)
    monkeypatch.setattr(Assignment, "release", checked)
    planned(seed)
    assert changed


@pytest.mark.parametrize("seed", range(8))
def test_traffic_in_memory_is_that_of_the_layouts(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = CostModel.traffic

    def checked(self, ops, values=None):
        found, cached = traffic(self, ops, values), self.assignment.view_cache
        self.assignment.view_cache = {}
        assert found == traffic(self, ops, values)
        self.assignment.view_cache = cached
        return found

    monkeypatch.setattr(CostModel, "traffic", checked)
    assert planned(seed).sent_bytes


@pytest.mark.parametrize("seed", range(2))
def test_a_search_leaves_no_cache_to_the_collector(seed: int) -> None:
    """The collector would scan all objects of the process, in the planning of some model."""
    gc.collect()
    gc.disable()
    try:
        plan = planned(seed)
        left = [each for each in gc.get_objects() if isinstance(each, SearchMemory)]
    finally:
        gc.enable()
    assert plan.counts["solver_sweeps"] and not left


class Convolutions(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        pads = (draw.choice((0, 1, 2)) for _ in range(3))
        self.layers = nn.ModuleList(nn.Conv1d(4, 4, draw.choice((2, 3)), 1, pad) for pad in pads)
        self.moves = draw.choice((torch.neg, lambda x: x.flip(2), lambda x: F.pad(x, (1, 2))))

    def forward(self, x: Tensor) -> Tensor:  # [b, 4, w]
        for layer in self.layers:
            x = self.moves(layer(x))
        return F.max_pool1d(x, 2)


@pytest.mark.parametrize("seed", range(8))
def test_a_bound_for_windows_is_below_their_price(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where operands' windows cost less than those of the value."""
    move_cost, windows = CostModel.move_cost, 0

    def checked(self, value, have, need):
        nonlocal windows
        cost = move_cost(self, value, have, need)
        bound = self._move_bound(value, have, need)
        assert bound <= cost
        windows += bool(need.windows and bound)
        return cost

    monkeypatch.setattr(CostModel, "move_cost", checked)
    draw = random.Random(seed)
    mesh = draw.choice(MESHES)
    spec = ["_", draw.choice(("_", mesh.names[0])), mesh.names[1]]
    x = torch.empty(4, 4, 24)
    gspmd.plan(Convolutions(draw), x, mesh=mesh, in_specs=(" ".join(spec),), grad=True)
    assert windows
