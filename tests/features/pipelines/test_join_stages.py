"""Pairs of DualPipe as one program: numbers, hidden messages, memory, files, certificates."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from pipelined import EXACT, check_gradients
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd.comm.hardware import Link
from torchgspmd.compiler.plan import Plan
from torchgspmd.features.pipelines.list_scheduler import Order
from torchgspmd.features.pipelines.merge_halves import beside
from torchgspmd.features.pipelines.schedule import Times
from torchgspmd.fx_passes.loop_call import LoopCall, loop_calls
from torchgspmd.fx_passes.schedule.liveness import _own_bytes
from torchgspmd.fx_passes.schedule.overlap import EXTRA
from torchgspmd.tools.report.estimate import COMMUNICATION, EXPOSED

# Messages take as long as a dozen operations.
SLOW = replace(gspmd.Hardware.of("a100"), links=(Link(math.inf, 25e9, 50e-6),))
WIDTH = 8


class Block(nn.Module):
    """A product of tokens, and experts with a fixed number of places."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.mix, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.router = nn.Parameter(torch.randn(WIDTH, 4))
        self.up = nn.Parameter(torch.randn(4, WIDTH, 64) / 8)
        self.down = nn.Parameter(torch.randn(4, 64, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:  # [g, s, m]
        x = x + self.dropout(torch.tanh(self.mix(x)))
        weights, chosen = (x @ self.router).softmax(-1).max(-1)
        taken = F.one_hot(chosen, 4)
        places = ((taken.cumsum(1) - taken)[..., None] == torch.arange(3)) & (taken[..., None] > 0)
        sent = places.to(x.dtype)  # [g, s, e, c]
        y = torch.einsum("gsec,gsm->egcm", sent, x)
        y = torch.einsum(
            "egch,ehm->egcm", torch.einsum("egcm,emh->egch", y, self.up).relu(), self.down
        )
        return x + torch.einsum("gsec,gs,egcm->gsm", sent, weights, y)


class Model(nn.Module):
    def __init__(self, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def planned(
    layers: int, mesh: str, skip: tuple[str, ...] = (), dropout: float = 0.0, **options: Any
) -> tuple[Model, Any, Plan, tuple[Tensor, Tensor]]:
    """Return the model, its pipeline, the plan, and a batch."""
    torch.manual_seed(0)
    axes, microbatches = gspmd.Mesh.parse(mesh), options.pop("microbatches", 4)
    alone = Model(layers, dropout).double()
    model = copy.deepcopy(alone)
    gspmd.annotate(model, axes, {"**.up": "expert _ _", "**.down": "expert _ _"})
    options = {"microbatches": microbatches, "schedule": "dualpipev", **options}
    model = gspmd.pipeline_model(model, "blocks", axes, **options)
    rows = "data+expert" if "data" in axes.names else "expert"
    batch = microbatches * axes.count(tuple(rows.split("+")))
    x = torch.randn(batch, 7, WIDTH, dtype=torch.float64)
    args = x, torch.randint(5, (batch, 7))
    plan = gspmd.plan(
        model,
        *args,
        mesh=axes,
        in_specs=(f"{rows} _ _", f"{rows} _"),
        grad=True,
        hardware=SLOW,
        advanced={"skip_passes": skip},
    )
    return alone, model, plan, args


def call_of(plan: Plan) -> Any:
    ((_, call),) = loop_calls(plan.program_graph)
    return call


@pytest.mark.parametrize(
    "layers, mesh, options",
    [
        (4, "stage=2,expert=2", {}),
        (8, "stage=2,expert=2", {"recompute": True}),  # loops over two layers
        (9, "stage=2,expert=2", {"microbatches": 5}),
        (4, "data=2,stage=2,expert=2", {}),
        (8, "stage=4,expert=2", {"microbatches": 9}),
    ],
)
def test_numbers(layers: int, mesh: str, options: Any) -> None:
    alone, model, plan, args = planned(layers, mesh, **options)
    call = call_of(plan)
    assert call.order.joint and len([body for body in call.bodies if body.joins]) == 2
    loops = [c for body in call.bodies if body.joins for _, c in loop_calls(body.graph)]
    turned = [c for c in loops if isinstance(c, LoopCall) and c.turned_rows]
    # A recomputed forward's loop goes the same way.
    assert bool(turned) == (layers > 2 * call.order.devices and "recompute" not in options)
    loss = alone(*args)
    loss.backward()
    found, gradients = plan.simulate(*args, _poison=True)
    torch.testing.assert_close(found, loss.detach(), **EXACT)
    check_gradients(model, gradients, alone)


def bytes_of_bodies(call: Any) -> dict[str, int]:
    return {body.__name__: _own_bytes(body.graph) for body in call.bodies}


@pytest.mark.parametrize("layers", [4, 8])
def test_exchanges_travel_beside_products_of_the_other_half(layers: int) -> None:
    """The device waits less, and a pair needs no more than a forward and a backward at once."""
    *_, plan, _ = planned(layers, "stage=2,expert=2", microbatches=8)
    *_, before, _ = planned(layers, "stage=2,expert=2", ("join_stages",), microbatches=8)
    call, sizes = call_of(plan), bytes_of_bodies(call_of(plan))
    lines = [line for line in plan.summary().splitlines() if "travel beside" in line]
    assert len(lines) == 2
    for body, line in zip([body for body in call.bodies if body.joins], lines, strict=True):
        hidden = [node for node, products in beside(body.graph) if products]
        all_of_them = [node for node, _ in beside(body.graph)]
        assert f"{len(hidden)} of {len(all_of_them)}" in line and body.__name__ in line
        # What a stage exchanges before its first product, or behind its last one, may be alone.
        assert len(all_of_them) - len(hidden) <= 2 < len(all_of_them)
        assert sizes[body.__name__] <= (1 + EXTRA) * sum(sizes[part.name] for part in body.joins)
    one, other = plan.estimate(SLOW), before.estimate(SLOW)
    assert one.busy(EXPOSED) < other.busy(EXPOSED) and one.seconds < other.seconds
    assert one.flops == other.flops and plan.sent_bytes == before.sent_bytes
    names = {node.name for node in hidden}
    sent = [e for e in one.events if e.stream == COMMUNICATION and e.name in names]
    assert any(one.beside(e) for e in sent)


def test_only_where_messages_travel_beside_computation() -> None:
    *_, plan, args = planned(4, "stage=2,expert=2", schedule="zero_bubble", repeats=2)
    assert not call_of(plan).order.joint
    mesh, options = plan.mesh, {"microbatches": 4, "schedule": "dualpipev"}
    model = gspmd.pipeline_model(Model(4), "blocks", mesh, **options)
    specs = "expert _ _", "expert _"
    on_cpus = gspmd.plan(model.double(), *args, mesh=mesh, in_specs=specs, grad=True)
    assert not call_of(on_cpus).order.joint


def test_a_file_and_a_certificate(tmp_path: Path) -> None:
    _, model, plan, _ = planned(4, "stage=2,expert=2")
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", model)
    assert str(call_of(loaded).order) == "dualpipev 2x4 rounds 2 vee joint"
    assert loaded.text() == plan.text()
    assert plan.verify()


def test_a_file_with_loops_over_layers(tmp_path: Path) -> None:
    """A loop in two parts stacks rows, whose layouts have one more dimension."""
    layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8))
    mesh = gspmd.Mesh(stage=2, data=2)
    model = gspmd.pipeline(layers, mesh, microbatches=4, schedule="dualpipev", loss=F.mse_loss)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    plan = gspmd.plan(model, x, target=y, mesh=mesh, grad=True)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json", model).text() == plan.text()


def test_a_schedule_with_pairs() -> None:
    order = Order.parse("dualpipev 2x4 rounds 2 vee joint")
    assert_expected_inline(
        "\n".join(line[:80] for line in str(order.schedule).splitlines()),
        """\
0  F0. F1. F2. F0' B0' W0' F1' F3.+B1'+W1'     F2'+B0.+W0. B2' W2'     F3'+B1.+W
1      F0. F0' F1. F1' F2.+B0'+W0' F2'+B0.+W0. F3.+B1'+W1' F3'+B1.+W1. B2' W2' B""",
    )
    for p in (1, 2, 3, 4, 8):
        for m in (2 * p, 2 * p + 1, 3 * p + 2, 4 * p):
            joint = replace(order, devices=p, microbatches=m)
            apart = replace(joint, joint=False)
            # A pair that takes as long as its pieces: no device waits for itself.
            schedule = joint.timed(Times())
            assert schedule.kept == apart.schedule.kept
            assert joint.timed(Times(joint=1.5)).end < schedule.end
            pairs = [step for row in schedule.rows for step in joint.steps([s.piece for s in row])]
            kinds = {"".join(piece.kind for piece in step) for step in pairs}
            assert kinds <= {*"FBW", "FB", "FBW"} and "FBW" in kinds
            for step in pairs:
                stages = {piece.stage for piece in step if piece.kind != "F"}
                assert len(step) == 1 or len(stages) == 1 and step[0].stage not in stages
