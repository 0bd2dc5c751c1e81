"""Values that the backward computes again, so that the peak of a device keeps to a budget."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import assert_same
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardingError
from torchgspmd.fx_passes.units import parse_size, size_text

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from long_step import peak_of  # noqa: E402

MESH = Mesh(data=2, model=2)
WIDTH, HEADS, LAYERS = 32, 2, 2
MARKS = {"blocks.*.up.weight": "model _", "blocks.*.down.weight": "_ model"}


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x):
        heads = (t.unflatten(-1, (HEADS, -1)) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in heads), is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


class GPT(nn.Module):
    """Like layers, one after the other or as a loop."""

    def __init__(self, stacked=False, dropout=0.0):
        super().__init__()
        blocks = [Block(dropout) for _ in range(LAYERS)]
        self.blocks = gspmd.stack(blocks) if stacked else nn.Sequential(*blocks)

    def forward(self, x):
        return self.blocks(x).square().mean()


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [WIDTH, *[64, 96] * 3, WIDTH]
        layers = [nn.Linear(a, b) for a, b in zip(widths, widths[1:])]
        self.layers = nn.Sequential(*(part for each in layers for part in (each, nn.GELU())))

    def forward(self, x):
        return self.layers(x).square().mean()


def planned(model, x, mesh=MESH, **options):
    if isinstance(model, GPT):
        gspmd.annotate(model, mesh, MARKS)
    chosen = {"in_specs": "auto", "grad": True, **options}
    chosen["advanced"] = {"unmarked": "replicated", **options.get("advanced", {})}
    return gspmd.plan(model, x, mesh=mesh, **chosen)


def budget_between(plan, share):
    """The weights, and a share of all else."""
    return int(plan.memory.parameters + share * (plan.memory.peak - plan.memory.parameters))


def simulated(plan, x):
    torch.manual_seed(3)
    return plan.simulate(x)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_gpt_keeps_to_its_budget_with_the_same_dropout(stacked):
    model, x = GPT(stacked, dropout=0.1), torch.randn(8, 32, WIDTH)
    plain = planned(model, x)
    budget = budget_between(plain, 0.6)
    plan = planned(model, x, memory=budget)
    assert plan.memory.peak <= budget < plain.memory.peak
    assert_same(simulated(plan, x), simulated(plain, x))
    assert "recomputed in the backward" not in plain.summary()
    line = next(t for t in plan.summary().splitlines() if t.startswith("recomputed"))
    assert f"; peak {size_text(plain.memory.peak)} without, time " in line
    assert line in str(plan.report())


def test_less_memory_takes_more_time_and_gives_the_numbers_of_eager():
    model, x = MLP(), torch.randn(64, 32, WIDTH)
    plain = planned(model, x)
    loss = model(x)
    gradients = torch.autograd.grad(loss, [*model.parameters()])
    want = loss, dict(zip(dict(model.named_parameters()), gradients))
    seconds = [0]
    for share in (0.9, 0.65):
        budget = budget_between(plain, share)
        plan = planned(model, x, memory=budget)
        assert plan.memory.peak <= budget
        assert_same(simulated(plan, x), want)
        seconds.append(plan.counts["recomputed_nanoseconds"])
    assert seconds == sorted(seconds) and seconds[1] < seconds[-1]


def test_what_fits_stays():
    model, x = MLP(), torch.randn(8, 4, WIDTH)
    plain = planned(model, x)
    plan = planned(model, x, memory="1 GiB")
    assert str(plan) == str(plain)


def test_a_budget_that_no_choice_reaches_names_the_least():
    model, x = MLP(), torch.randn(64, 32, WIDTH)
    with pytest.raises(ShardingError) as error:
        planned(model, x, memory="100 KiB")
    text = str(error.value)
    assert "more than the memory budget of 100.00 KiB" in text
    least = int(re.search(r"set a budget of (\d+)", text)[1])
    assert planned(model, x, memory=least).memory.peak <= least


def test_a_gather_that_is_recomputed_is_counted():
    model, x, mesh = MLP(), torch.randn(16, 2, WIDTH), Mesh(data=4)
    gspmd.annotate(model, mesh, {"layers.*.weight": "data _"})
    plain = planned(model, x, mesh, advanced={"regather": "never"})
    budget = int(0.8 * plain.memory.peak)
    again = planned(model, x, mesh, advanced={"regather": "never"}, memory=budget)
    gathers = [sum(c.kind == "all_gather" for c in p.collectives) for p in (plain, again)]
    assert gathers[0] < gathers[1] and plain.sent_bytes < again.sent_bytes
    assert_same(simulated(again, x), simulated(plain, x))


@pytest.fixture
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("stacked", [False, True])
def test_a_step_allocates_what_the_plan_says(world_of_one, monkeypatch, stacked):
    monkeypatch.delenv("TORCHGSPMD_CHECK", raising=False)  # it holds the saved values
    x, mesh, measured, peaks = torch.randn(16, 64, WIDTH), Mesh(data=1), [], []
    budget = None
    for options in ({}, {"memory": {"recompute": "auto"}}):
        if options:
            options["memory"]["budget"] = budget = int(0.65 * peaks[0])
        model = gspmd.parallelize(GPT(stacked, dropout=0.1), mesh, in_specs="auto", **options)
        model(x).backward()  # plans
        model.zero_grad()
        memory = model.plan.memory
        peaks.append(memory.peak)
        step = peak_of(lambda model=model: model(x).backward())
        measured.append(step + memory.parameters + memory.inputs)
    assert peaks[1] <= budget
    assert measured[1] < measured[0]
    assert measured[1] == pytest.approx(peaks[1], rel=0.1)


@pytest.mark.parametrize(
    "text, size",
    [("8GiB", 8 << 30), ("500 MB", 500_000_000), ("1.5kib", 1536), ("12", 12), (7, 7), (2.0, 2)],
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("budget", ["8 GiBs", "much", 0, -1, "", float("inf"), True, [8]])
def test_what_is_no_size_is_refused(budget):
    with pytest.raises(ShardingError, match="the memory budget is|memory is"):
        planned(MLP(), torch.randn(4, 2, WIDTH), memory=budget)


def test_a_budget_without_recompute_is_refused():
    with pytest.raises(ShardingError, match="nothing keeps to it"):
        planned(MLP(), torch.randn(4, 2, WIDTH), memory={"budget": "1 GiB"})


def test_stages_of_a_pipeline_keep_their_values():
    mesh = Mesh(stage=2)
    model = nn.Sequential(gspmd.pipeline([Layer() for _ in range(2)], mesh, microbatches=2))
    x = torch.randn(8, 4, WIDTH)
    options = {"in_specs": "_ _ _"}
    plain = planned(model, x, mesh, in_specs="_ _ _")
    with pytest.raises(ShardingError, match="more than the memory budget"):
        planned(model, x, mesh, memory=plain.memory.peak // 2, **options)
    plan = planned(model, x, mesh, memory=plain.memory.peak, **options)
    assert_same(simulated(plan, x), simulated(plain, x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x))


# ---------------------------------------------------------------------------------------- offload


def on_host(plan):
    """The values that wait in the memory of the host, by the summary."""
    found = re.search(r"(\d+) values wait in the memory of the host", plan.summary())
    return int(found[1]) if found else 0


def test_values_wait_on_the_host():
    model, x = GPT(stacked=True, dropout=0.1), torch.randn(8, 32, WIDTH)
    plain = planned(model, x)
    budget = budget_between(plain, 0.6)
    plan = planned(model, x, memory={"offload": "activations", "budget": budget})
    assert plan.memory.peak <= budget
    assert on_host(plan) >= LAYERS and "recomputed in the backward: nothing;" in plan.summary()
    assert_same(simulated(plan, x), simulated(plain, x))


@pytest.mark.parametrize("host, moves", [(1e6, False), (1e15, True)])
def test_the_faster_way_is_taken(host, moves):
    model, x = GPT(stacked=True), torch.randn(8, 32, WIDTH)
    budget = budget_between(planned(model, x), 0.7)
    hardware = replace(gspmd.Hardware.of("cpu"), host_bandwidth=host, launch=0.0)
    ways = {"recompute": "auto", "offload": "activations", "budget": budget}
    plan = planned(model, x, hardware=hardware, memory=ways)
    assert (on_host(plan) > 0) is moves


def test_a_step_with_values_on_the_host(world_of_one):
    model, x, mesh = MLP(), torch.randn(16, 8, WIDTH), Mesh(data=1)
    loss = model(x)
    want = torch.autograd.grad(loss, [*model.parameters()])
    budget = int(0.8 * planned(model, x, mesh).memory.peak)
    ways = {"memory": {"offload": "activations", "budget": budget}}
    model = gspmd.parallelize(model, mesh, in_specs="auto", **ways)
    model(x).backward()
    assert on_host(model.plan)
    assert_same([p.grad.full_tensor() for p in model.parameters()], [*want])


def test_inductor_offloads_nothing():
    with pytest.raises(ShardingError, match="backend 'inductor' cannot offload"):
        gspmd.parallelize(
            MLP(), Mesh(data=1), backend="inductor", memory={"offload": "activations"}
        )
