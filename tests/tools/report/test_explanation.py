"""Plan.explain answers each name that a plan prints, and says who needs a step."""

import re
from collections.abc import Callable

import models
import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Mesh, Plan


class Head(nn.Module):
    """Layers in a loop, a cross entropy, and a pipeline if there is an axis for it."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        blocks = [models.MLP() for _ in range(4)]
        staged = "stage" in mesh.names
        self.layers = (
            gspmd.pipeline(blocks, mesh, microbatches=4) if staged else gspmd.stack(blocks)
        )
        self.table = nn.Parameter(torch.randn(16, models.WIDTH))
        gspmd.mark_sharding(self.table, mesh, "model _" if "model" in mesh.names else "_ _")

    def forward(self, x):
        return F.cross_entropy(self.layers(x) @ self.table.t(), torch.arange(len(x)))


def image(x, w):
    return F.max_pool2d(F.conv2d(x, w, padding=1), 2).flip(2).cumsum(1).sort(1).values


def block(layout: str, mesh: Mesh, **options) -> Plan:
    x = torch.zeros(*models.TOKENS, models.WIDTH)
    return gspmd.plan(models.block(mesh, layout), x, mesh=mesh, grad=True, **options)


def layers(mesh: Mesh) -> Plan:
    x = torch.zeros(8, models.WIDTH)
    rows = "data _" if "data" in mesh.names else "_ _"
    return gspmd.plan(Head(mesh), x, mesh=mesh, in_specs=rows, grad=True)


PLANS: dict[str, Callable[[], Plan]] = {
    "tensor": lambda: block("sp", Mesh(data=2, model=2)),
    "open": lambda: block("sp", Mesh(data=2, model=2), dynamic={"x": {0}}),
    "loop": lambda: layers(Mesh(data=2, model=2)),
    "pipeline": lambda: layers(Mesh(stage=2, model=2)),
    "image": lambda: gspmd.plan(
        image,
        torch.zeros(2, 4, 8, 8),
        torch.zeros(4, 4, 3, 3),
        mesh=Mesh(rows=2, columns=2),
        in_specs=("_ _ rows columns", "_ _ _ _"),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_all_names(name):
    """Of each name that is printed: a value has a reason, a step moves a value for somebody."""
    plan = PLANS[name]()
    steps = {n.name for n in plan.sharded.nodes if "step" in n.meta}
    printed = re.findall(r"%(\w+)", plan.text(full=True).split("\n\n")[0])
    asked = dict.fromkeys([*printed, *(n.name for n in plan.sharded.nodes if n.op != "output")])
    assert steps and steps <= {*asked}
    for each in asked:
        text = plan.explain(each)
        assert f"%{each}" in text.splitlines()[0] or each not in steps
        if each in steps:
            assert " moves %" in text and " needs %" in text and "\n* " in text, text
        else:
            assert re.search("<-|no mark reaches it", text), text


def test_of_a_reduction():
    """It says who needs the sum, the other ways, and the mark behind the sum and the need."""
    mesh = Mesh(data=2, model=2)
    plan = gspmd.plan(
        lambda x, up, down: F.gelu(x @ up) @ down,
        *(torch.ones(8, 64), torch.ones(64, 256), torch.ones(256, 64)),
        mesh=mesh,
        in_specs=("data _", "_ model", "model _"),
        out_specs="data model",
    )
    (step,) = (n.name for n in plan.sharded.nodes if "step" in n.meta)
    assert_expected_inline(
        plan.explain(step),
        """\
%einsum_1_rs moves %einsum_1 from [data _ sum@model] to [data model]
result 0 of the program needs %einsum_1 in [data model]
  ways there                                                                sent  time on h100
* reduce_scatter sum 1 model                                               512 B        5.0 us
  reduce_scatter sum 0 model, all_to_all 0 1 model                         768 B       10.0 us
  all_reduce sum model, shard 1 model                                   1.00 KiB        5.0 us
  all_gather 0 data, shard 0 data, reduce_scatter sum 1 model           1.50 KiB       10.0 us
  all_to_all 0 1 data, all_to_all 1 0 data, reduce_scatter sum 1 model  1.50 KiB       15.0 us
model: %einsum_1 sums over it: m k, k n -> m n
model: %gelu [data model] <- gelu: d0 d1 -> d0 d1
model: %einsum [data model] <- einsum: m k, k n -> m n
model: %up [_ model] <- in_specs
model: %down [model _] <- in_specs""",
    )
