"""Where collectives begin and are waited for; buckets; the memory that it may cost; what must not
touch memory in flight.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import models
import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from helpers import assert_same, eager
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Mesh
from torchgspmd.comm import hardware
from torchgspmd.comm.collective import start, wait
from torchgspmd.comm.kinds import all_gather, all_reduce, collective_kinds, reduce_scatter
from torchgspmd.compat.operators import aten, c10d
from torchgspmd.fx_passes.lower.verify_in_flight import verify_in_flight
from torchgspmd.fx_passes.printer import program_text
from torchgspmd.fx_passes.schedule import bucket as buckets
from torchgspmd.fx_passes.schedule.bucket import start_wait
from torchgspmd.fx_passes.schedule.liveness import peak
from torchgspmd.fx_passes.schedule.overlap import EXTRA, overlap

DATA = Mesh(data=2)
LAYOUTS = {"tp": (Mesh(model=2), None), "sp": (Mesh(model=2), None), "fsdp": (DATA, "data _ _")}


class Layers(nn.Module):
    def __init__(self, count: int, width: int = 8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


def sharded_layers(
    count=3, width=8, rows=64, **options
) -> tuple[gspmd.Plan, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Layers(count, width), torch.randn(rows, width)
    for layer in model.layers:
        gspmd.mark_sharding(layer.weight, DATA, "data _")
    return (
        gspmd.plan(
            model, x, mesh=DATA, grad=True, in_specs="data _", out_specs="data _", **options
        ),
        model,
        x,
    )


def block(layout: str, **options) -> tuple[gspmd.Plan, nn.Module, torch.Tensor]:
    mesh, spec = LAYOUTS[layout]
    model = models.block(mesh, layout)
    x = torch.randn(*models.MANY, models.WIDTH, generator=torch.Generator().manual_seed(0))
    return (
        gspmd.plan(model, x, mesh=mesh, grad=True, in_specs=spec, out_specs=spec, **options),
        model,
        x,
    )


def text_of(plan: gspmd.Plan) -> str:
    """The program without the names that PyTorch gives to its operations' variants."""
    return (
        program_text(plan.program.graph)
        .replace("einsum_default", "einsum")
        .replace("_backward_default", "_back")
    )


def order_of(plan: gspmd.Plan) -> dict:
    return {node: i for i, node in enumerate(plan.program.graph.nodes)}


def starts(plan: gspmd.Plan) -> list:
    return [n for n in plan.program.graph.nodes if n.target is start]


class TestGolden(TestCase):
    maxDiff = None

    def test_sharded_weights(self):
        plan, _, _ = sharded_layers(advanced={"skip_passes": ("bucket",)})
        self.assertExpectedInline(
            text_of(plan),
            """\
one device
  %coordinate_data              :            = input
  %layers_0_weight              : f32[4, 8]  = input
  %layers_1_weight              : f32[4, 8]  = input
  %layers_2_weight              : f32[4, 8]  = input
  %x                            : f32[32, 8] = input
  %tangent_0                    : f32[32, 8] = input
  %all_gather_start             :            = start(all_gather, [%layers_0_weight], [[0, data]])
  %all_gather                   : f32[8, 8]  = wait(%all_gather_start, 0)
  %all_gather_1_start           :            = start(all_gather, [%layers_1_weight], [[0, data]])
  %einsum               : f32[32, 8] = einsum(cb,ab->ca, %x, %all_gather)
  %relu_default                 : f32[32, 8] = relu(%einsum)
  %all_gather_1                 : f32[8, 8]  = wait(%all_gather_1_start, 0)
  %all_gather_2_start           :            = start(all_gather, [%layers_2_weight], [[0, data]])
  %einsum_1             : f32[32, 8] = einsum(cb,ab->ca, %relu_default, %all_gather_1)
  %relu_default_1               : f32[32, 8] = relu(%einsum_1)
  %all_gather_2                 : f32[8, 8]  = wait(%all_gather_2_start, 0)
  %einsum_2             : f32[32, 8] = einsum(cb,ab->ca, %relu_default_1, %all_gather_2)
  %relu_default_2               : f32[32, 8] = relu(%einsum_2)
  %threshold_back   : f32[32, 8] = threshold_backward(%tangent_0, %relu_default_2, 0)
  %einsum_3             : f32[32, 8] = einsum(ca,ab->cb, %threshold_back, %all_gather_2)
  %einsum_4             : f32[8, 8]  = einsum(ca,cb->ab, %threshold_back, %relu_default_1)
  %reduce_scatter_2_start       :            = start(reduce_scatter, [%einsum_4], [[sum, 0, data]])
  %threshold_back_1 : f32[32, 8] = threshold_backward(%einsum_3, %relu_default_1, 0)
  %einsum_5             : f32[32, 8] = einsum(ca,ab->cb, %threshold_back_1, %all_gather_1)
  %einsum_6             : f32[8, 8]  = einsum(ca,cb->ab, %threshold_back_1, %relu_default)
  %reduce_scatter_1_start       :            = start(reduce_scatter, [%einsum_6], [[sum, 0, data]])
  %threshold_back_2 : f32[32, 8] = threshold_backward(%einsum_5, %relu_default, 0)
  %einsum_7             : f32[8, 8]  = einsum(ca,cb->ab, %threshold_back_2, %x)
  %reduce_scatter_start         :            = start(reduce_scatter, [%einsum_7], [[sum, 0, data]])
  %reduce_scatter               : f32[4, 8]  = wait(%reduce_scatter_start, 0)
  %reduce_scatter_1             : f32[4, 8]  = wait(%reduce_scatter_1_start, 0)
  %reduce_scatter_2             : f32[4, 8]  = wait(%reduce_scatter_2_start, 0)
  return %relu_default_2, %reduce_scatter, %reduce_scatter_1, %reduce_scatter_2""",
        )

    def test_in_buckets(self):
        plan, _, _ = sharded_layers(2)
        self.assertExpectedInline(
            text_of(plan),
            """\
one device
  %coordinate_data              :            = input
  %layers_0_weight              : f32[4, 8]  = input
  %layers_1_weight              : f32[4, 8]  = input
  %x                            : f32[32, 8] = input
  %tangent_0                    : f32[32, 8] = input
  %all_gather_start             :            = start(all_gather, [%layers_0_weight, %layers_1_weight], [[0, data], [0, data]])
  %all_gather                   : f32[8, 8]  = wait(%all_gather_start, 0)
  %einsum               : f32[32, 8] = einsum(cb,ab->ca, %x, %all_gather)
  %relu_default                 : f32[32, 8] = relu(%einsum)
  %all_gather_1                 : f32[8, 8]  = wait(%all_gather_start, 1)
  %einsum_1             : f32[32, 8] = einsum(cb,ab->ca, %relu_default, %all_gather_1)
  %relu_default_1               : f32[32, 8] = relu(%einsum_1)
  %threshold_back   : f32[32, 8] = threshold_backward(%tangent_0, %relu_default_1, 0)
  %einsum_2             : f32[32, 8] = einsum(ca,ab->cb, %threshold_back, %all_gather_1)
  %einsum_3             : f32[8, 8]  = einsum(ca,cb->ab, %threshold_back, %relu_default)
  %threshold_back_1 : f32[32, 8] = threshold_backward(%einsum_2, %relu_default, 0)
  %einsum_4             : f32[8, 8]  = einsum(ca,cb->ab, %threshold_back_1, %x)
  %reduce_scatter_1_start       :            = start(reduce_scatter, [%einsum_3, %einsum_4], [[sum, 0, data], [sum, 0, data]])
  %reduce_scatter               : f32[4, 8]  = wait(%reduce_scatter_1_start, 1)
  %reduce_scatter_1             : f32[4, 8]  = wait(%reduce_scatter_1_start, 0)
  return %relu_default_1, %reduce_scatter, %reduce_scatter_1""",
        )

    def test_left_out(self):
        plan, _, _ = sharded_layers(2, advanced={"skip_passes": ("bucket", "overlap", "prefetch")})
        self.assertExpectedInline(
            text_of(plan),
            """\
one device
  %coordinate_data              :            = input
  %layers_0_weight              : f32[4, 8]  = input
  %layers_1_weight              : f32[4, 8]  = input
  %x                            : f32[32, 8] = input
  %tangent_0                    : f32[32, 8] = input
  %all_gather_start             :            = start(all_gather, [%layers_0_weight], [[0, data]])
  %all_gather                   : f32[8, 8]  = wait(%all_gather_start, 0)
  %einsum               : f32[32, 8] = einsum(cb,ab->ca, %x, %all_gather)
  %relu_default                 : f32[32, 8] = relu(%einsum)
  %all_gather_1_start           :            = start(all_gather, [%layers_1_weight], [[0, data]])
  %all_gather_1                 : f32[8, 8]  = wait(%all_gather_1_start, 0)
  %einsum_1             : f32[32, 8] = einsum(cb,ab->ca, %relu_default, %all_gather_1)
  %relu_default_1               : f32[32, 8] = relu(%einsum_1)
  %threshold_back   : f32[32, 8] = threshold_backward(%tangent_0, %relu_default_1, 0)
  %einsum_2             : f32[32, 8] = einsum(ca,ab->cb, %threshold_back, %all_gather_1)
  %einsum_3             : f32[8, 8]  = einsum(ca,cb->ab, %threshold_back, %relu_default)
  %threshold_back_1 : f32[32, 8] = threshold_backward(%einsum_2, %relu_default, 0)
  %einsum_4             : f32[8, 8]  = einsum(ca,cb->ab, %threshold_back_1, %x)
  %reduce_scatter_start         :            = start(reduce_scatter, [%einsum_4], [[sum, 0, data]])
  %reduce_scatter               : f32[4, 8]  = wait(%reduce_scatter_start, 0)
  %reduce_scatter_1_start       :            = start(reduce_scatter, [%einsum_3], [[sum, 0, data]])
  %reduce_scatter_1             : f32[4, 8]  = wait(%reduce_scatter_1_start, 0)
  return %relu_default_1, %reduce_scatter, %reduce_scatter_1""",
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "skip", [(), ("bucket",), ("overlap",), ("bucket", "overlap", "prefetch")], ids="+".join
)
def test_the_numbers_stay_and_memory_is_bounded(layout, skip):
    plan, model, x = block(layout, advanced={"skip_passes": skip})
    want, grads = eager(model, x)
    got, got_grads = plan.simulate(x)
    assert_same(got, want, terms=512)
    assert_same(got_grads, grads, terms=4096)
    without = block(layout, advanced={"skip_passes": (*skip, "overlap", "prefetch")})[0]
    assert plan.memory.peak <= (1 + EXTRA) * without.memory.peak
    plan.program.graph.lint()
    assert not [n for n in plan.program.graph.nodes if n.target in collective_kinds().values()]


def test_one_layer_ahead():
    """Each gather but the first begins before the computation with what was gathered before it; no
    two ahead.
    """
    plan, _, _ = sharded_layers(6, advanced={"skip_passes": ("bucket",)})
    order, gathers = order_of(plan), [s for s in starts(plan) if s.args[0] == "all_gather"]
    waits = [min(order[w] for w in s.users) for s in gathers]
    for i in range(1, len(gathers)):
        computed = min(order[u] for w in gathers[i - 1].users for u in w.users)
        assert waits[i - 1] < order[gathers[i]] < computed


def test_without_prefetch_weights_are_gathered_where_they_are_needed():
    plan, _, _ = sharded_layers(6, advanced={"skip_passes": ("bucket", "prefetch")})
    order = order_of(plan)
    for begun in (s for s in starts(plan) if s.args[0] == "all_gather"):
        assert min(order[w] for w in begun.users) == order[begun] + 1


def test_weight_gradients_are_computed_while_gradients_are_summed():
    plan, _, _ = block("tp")
    order, nodes = order_of(plan), list(plan.program.graph.nodes)
    backward = [s for s in starts(plan) if s.meta["backward"]]
    assert backward
    for begun in backward[:-1]:
        between = nodes[order[begun] + 1 : min(order[w] for w in begun.users)]
        assert any("einsum" in str(n.target) for n in between), f"{begun} hides nothing"


def test_memory_holds_the_start_back():
    """Outputs of many layers at once are at the limit: then nothing is gathered before it is
    needed.
    """
    plan, _, _ = sharded_layers(4, width=512, rows=2, advanced={"skip_passes": ("bucket",)})
    without, _, _ = sharded_layers(
        4, width=512, rows=2, advanced={"skip_passes": ("bucket", "overlap", "prefetch")}
    )
    assert plan.memory.peak <= (1 + EXTRA) * without.memory.peak
    order = order_of(plan)
    gathers = [s for s in starts(plan) if s.args[0] == "all_gather"]
    assert any(min(order[w] for w in s.users) == order[s] + 1 for s in gathers[1:])


def test_buckets_have_a_size_and_do_not_wait_for_all(monkeypatch):
    monkeypatch.setattr(buckets, "SMALL", 1024)
    monkeypatch.setattr(hardware, "CPU", hardware.GPU)
    plan, model, _ = sharded_layers(8, width=16)  # 8 KiB of weights
    gathers, reductions = (
        [s for s in starts(plan) if s.args[0] == kind] for kind in ("all_gather", "reduce_scatter")
    )
    assert [len(s.args[1]) for s in gathers] == [len(s.args[1]) for s in reductions] == [2, 2, 2, 2]
    order = order_of(plan)
    last = max(order[n] for n in order if "einsum" in str(n.target))
    assert [order[s] < last for s in reductions] == [True, True, True, False]


def test_one_bucket_of_reductions_where_what_computes_also_sends(monkeypatch):
    monkeypatch.setattr(buckets, "SMALL", 1024)
    plan, _, _ = sharded_layers(8, width=16)
    assert [len(s.args[1]) for s in starts(plan)] == [2, 2, 2, 2, 8]
    monkeypatch.setattr(hardware, "UNHIDDEN", 4096)
    plan, _, _ = sharded_layers(8, width=16)
    assert [len(s.args[1]) for s in starts(plan)] == [2, 2, 2, 2, 4, 4]


def test_the_largest_bucket_is_that_of_the_links():
    """It takes four starts: bytes of the plan stay, and slow starts make fewer messages."""
    h100, seen = hardware.Hardware.of("h100"), []
    for axes in ({"data": 2}, {"data": 8}, {"data": 64}, {"data": 4096}):
        size = h100.bucket_bytes(Mesh(**axes), ("data",), "all_gather", True)
        start = h100.transfer_seconds(Mesh(**axes), ("data",), "all_gather", True, 0.0)
        both = h100.transfer_seconds(Mesh(**axes), ("data",), "all_gather", True, size)
        assert both == pytest.approx(5 * start)
        seen.append(size)
    assert seen == sorted(seen) and hardware.BUCKETS[0] < seen[0] and seen[-1] < hardware.BUCKETS[1]
    link, messages = hardware.Link(math.inf, 1e9, 1e-4), []
    for latency in (1e-9, 1e-3, 1e3):
        slow = replace(hardware.GPU, links=(replace(link, latency=latency),))
        with torch.device("meta"):
            plan, _, _ = sharded_layers(8, 1024, 8192, hardware=slow)  # 4 MiB a weight
        messages.append((len(starts(plan)), plan.sent_bytes))
    assert [count for count, _ in messages] == [16, 16, 8]
    assert len({sent for _, sent in messages}) == 1
    measured = replace(hardware.GPU, groups={("all_gather", 2): hardware.Link(2, 1e9, 1e-2)})
    assert measured.bucket_bytes(DATA, ("data",), "all_gather", True) == 4e7
    assert measured.bucket_bytes(DATA, ("data",), "all_reduce", True) == pytest.approx(8e6)


def random_program(seed: int) -> torch.fx.Graph:
    """Thirty values of random size, forward and backward, of one or two others each; every third is
    communicated.
    """
    draw, graph = random.Random(seed), torch.fx.Graph()
    values = [graph.placeholder(f"x{i}") for i in range(4)]
    for _ in range(30):
        operands = draw.sample(values[-8:], draw.choice((1, 2)))
        kind = draw.choice(
            (
                all_reduce,
                all_gather,
                reduce_scatter,
                aten.add.Tensor,
                aten.add.Tensor,
                aten.add.Tensor,
            )
        )
        node = graph.call_function(
            kind, tuple(operands) if kind is aten.add.Tensor else (operands[0], 0, "m")
        )
        values.append(node)
    used = [v for v in values if not v.users]
    graph.output((*used, *draw.sample(values, 2)))
    for i, node in enumerate(values):
        node.meta = {
            "shape": (draw.choice((1, 4, 16, 64)),),
            "dtype": torch.float32,
            "backward": i > 18,
        }
    return graph


def test_a_loss_and_the_count_that_divides_it_are_one_collective():
    model, x, labels = nn.Linear(8, 5), torch.randn(6, 8), torch.tensor([0, -100, 2, 3, -100, 1])
    plan = gspmd.plan(
        lambda x, labels: F.cross_entropy(model(x), labels),
        x,
        labels,
        mesh=DATA,
        in_specs=("data _", "data"),
    )
    assert [(n.args[0], len(n.args[1])) for n in starts(plan)] == [("all_reduce", 2)]
    assert_same(plan.simulate(x, labels, _poison=True), F.cross_entropy(model(x), labels))


@pytest.mark.parametrize("seeds", [range(100), range(100, 200)], ids=str)
@pytest.mark.parametrize(
    "early, ahead", [(True, True), (True, False), (False, True), (False, False)]
)
def test_random_programs_stay_legal_and_within_their_memory(seeds, early, ahead):
    for seed in seeds:
        graph = start_wait(random_program(seed))
        before, arguments = peak(graph), {n.name: n.args for n in graph.nodes}
        overlap(graph, early, ahead)
        graph.lint()
        assert {n.name: n.args for n in graph.nodes} == arguments
        assert [n.op for n in graph.nodes][:4] == ["placeholder"] * 4
        assert peak(graph) <= (1 + EXTRA) * before, seed
        if not early and not ahead:
            assert peak(graph) == before


def test_random_numbers_are_drawn_in_order():
    """What is moved does not change which dropout draws first."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            early, late = F.dropout(self.a(x)), self.b(x)
            return F.dropout(self.c(late)) + early

    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 8)
    gspmd.annotate(model, DATA, {"b.weight": "_ data", "c.weight": "_ data"})
    results = []
    for skip in ((), ("overlap", "bucket", "prefetch")):
        plan = gspmd.plan(model, x, mesh=DATA, advanced={"skip_passes": skip})
        torch.manual_seed(1)
        results.append(plan.simulate(x))
    assert_same(*results)


def test_unknown_pass():
    known = (
        "'attention_rings', 'balance_attention', 'bucket', 'collective_matmul', 'join_stages', "
        "'overlap'"
    )
    with pytest.raises(gspmd.ShardingError, match=f"there is no pass 'buckets'; there are {known}"):
        sharded_layers(advanced={"skip_passes": ("buckets",)})


# --------------------------------------------------------------------------------- memory in flight


def reduced(in_place=True, waits=1, late=False, view=False, used=False) -> torch.fx.Graph:
    """y = all_reduce(sin(x)), with one thing wrong."""
    graph = torch.fx.Graph()
    value = graph.call_function(aten.sin.default, (graph.placeholder("x"),))
    seen = graph.call_function(aten.view.default, (value, [-1])) if view else value
    begun = graph.call_function(
        c10d.all_reduce_.default if in_place else c10d.all_reduce.default, (value, "sum", "0")
    )
    others = (
        [graph.call_function(aten.cos.default, (seen if late else begun,))] if late or used else []
    )
    done = [graph.call_function(c10d.wait_tensor.default, (begun,)) for _ in range(waits)]
    graph.output((*done, *others))
    return graph


@pytest.mark.parametrize(
    "wrong, fault",
    [
        ({"waits": 0}, "%all_reduce__default is waited for 0 times"),
        ({"waits": 2}, "%all_reduce__default is waited for 2 times"),
        ({"used": True}, "%cos_default uses %all_reduce__default, which is in flight"),
        ({"late": True}, "%cos_default reads %sin_default, which %all_reduce__default writes over"),
        (
            {"late": True, "view": True},
            "%cos_default reads %view_default, which %all_reduce__default writes over",
        ),
    ],
)
def test_faults_of_memory_in_flight(wrong, fault):
    with pytest.raises(AssertionError) as error:
        verify_in_flight(reduced(**wrong))
    assert str(error.value).splitlines()[1:] == [f"  {fault}"]


def test_a_collective_that_still_reads_what_another_one_writes():
    graph = torch.fx.Graph()
    value = graph.call_function(aten.sin.default, (graph.placeholder("x"),))
    reading = graph.call_function(c10d.all_gather_into_tensor.default, (value, 2, "0"))
    writing = graph.call_function(c10d.all_reduce_.default, (value, "sum", "0"))
    graph.output(
        tuple(graph.call_function(c10d.wait_tensor.default, (n,)) for n in (reading, writing))
    )
    with pytest.raises(
        AssertionError, match="reads %sin_default, which %all_reduce__default writes over"
    ):
        verify_in_flight(graph)


def test_legal_programs():
    for graph in (
        reduced(),
        reduced(in_place=False),
        reduced(in_place=False, late=True),
        reduced(view=True),
    ):
        assert verify_in_flight(graph) is graph


def test_what_a_start_reads_lives_until_the_wait():
    """64 bytes are read and 64 received; a temporary of 64 between is there at the same time, one
    behind the wait is not.
    """

    def program(between: bool) -> int:
        graph, meta = torch.fx.Graph(), {"shape": (16,), "dtype": torch.float32}
        value = graph.call_function(aten.sin.default, (graph.placeholder("x"),))
        begun = graph.call_function(start, ("all_reduce", (value,), (("sum", "m"),)))
        other = graph.call_function(aten.ones.default, ([16],)) if between else None
        done = graph.call_function(wait, (begun, 0))
        other = other or graph.call_function(aten.ones.default, ([16],))
        graph.output((done, other))
        for node in (value, other, done):
            node.meta = dict(meta)
        begun.meta = {"bytes": 64}
        return peak(graph)

    assert (program(True), program(False)) == (192, 128)
