"""Plan.explain(costs=True): golden tables, and a table for every value of a program."""

from __future__ import annotations

import gc
import re
from dataclasses import fields
from pathlib import Path

import models
import pytest
import torch
from expecttest import TestCase

import torchgspmd as gspmd
from torchgspmd import Mesh
from torchgspmd.fx_passes.partition.cost_constants import CostConstants
from torchgspmd.fx_passes.partition.search_memory import SearchMemory

UNITS = (
    "cost on one device, in bytes sent or worth as much "
    "(10 operations or 128 bytes of memory are worth 1 byte sent):"
)


def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (x @ up).relu() @ down


def table(plan: gspmd.Plan, name: str) -> str:
    """What costs=True adds to the explanation of a value."""
    plain, whole = plan.explain(name), plan.explain(name, costs=True)
    assert whole.startswith(plain + "\n\n")
    return whole.removeprefix(plain + "\n\n").replace(UNITS, "UNITS")


class TestGolden(TestCase):
    maxDiff = None

    def test_a_product(self) -> None:
        plan = gspmd.plan(
            torch.matmul,
            torch.ones(4, 8),
            torch.ones(8, 16),
            mesh=Mesh(data=2, model=4),
            in_specs=("data model", "model _"),
        )
        self.assertExpectedInline(
            table(plan, "einsum"),
            """\
%einsum <- einsum: m k, k n -> m n
UNITS
  strategy           result              arithmetic  memory  operands  results  total
* m: data, k: model  [data _ sum@model]        12.8     2.1       0.0    200.0  214.9
  k: model           [_ _ sum@model]           25.6     3.2      24.0    200.0  252.8
  m: data, n: model  [data model]              12.8     1.8     160.0    104.0  278.6
  n: model           [_ model]                 25.6     2.5     228.0    104.0  360.1
  m: data            [data _]                  51.2     5.5     448.0      0.0  504.7
  m: model           [model _]                 25.6     4.8     436.0    140.0  606.4
  whole              [_ _]                    102.4     7.0     516.0      0.0  625.4
chosen: it costs least; the next costs 37.9 more (arithmetic +12.8, memory +1.1, operands +24.0)""",
        )

    def test_a_pointwise_operation_an_input_and_a_mark(self) -> None:
        mesh = Mesh(model=4)
        plan = gspmd.plan(
            lambda x, up, down: gspmd.mark_sharding(mlp(x, up, down), mesh, "_ _"),
            *(torch.ones(s) for s in ((64, 32), (32, 64), (64, 16))),
            mesh=mesh,
            in_specs=(None, "_ model", "_ _"),
        )
        text = "\n\n".join(
            table(plan, n) for n in ("relu", "einsum_1", "mark_sharding", "%x", "down")
        )
        self.assertExpectedInline(
            text,
            """\
%relu <- relu: d0 d1 -> d0 d1
UNITS
  strategy   result     arithmetic  memory  operands  results     total
* d1: model  [_ model]         0.0    64.0       0.0      0.0      64.0
  whole      [_ _]             0.0   256.0  12,296.0      0.0  12,552.0
chosen: it costs least; the next costs 12,488.0 more (memory +192.0, operands +12,296.0)

%einsum_1 <- einsum_1: m k, k n -> m n
UNITS
  strategy  result           arithmetic  memory  operands  results     total
* k: model  [_ _ sum@model]     3,276.8    72.0       0.0  6,152.0   9,500.8
  m: model  [model _]           3,276.8    72.0   3,080.0  3,080.0   9,508.8
  n: model  [_ model]           3,276.8   144.0  12,296.0  3,080.0  18,796.8
  whole     [_ _]              13,107.2   192.0  12,296.0      0.0  25,595.2
chosen: it costs least; the next costs 8.0 more (operands +3,080.0, results -3,072.0)

%mark_sharding <- mark_sharding: d0 d1 -> d0 d1
UNITS
  strategy  result  arithmetic  memory  operands  results    total
* marked    [_ _]          0.0     0.0   6,152.0      0.0  6,152.0
chosen: the layout is marked

%x: an input; bytes to send it to its users, by layout:
* [_ _]  0.0

%down: an input; bytes to send it to its users, by layout:
* [_ _]  0.0
  [model _]  0.0""",
        )


PROGRAMS = {
    "sp": lambda mesh: (models.block(mesh, "sp"), torch.zeros(*models.TOKENS, models.WIDTH)),
    "fsdp": lambda mesh: (models.block(mesh, "fsdp"), torch.zeros(*models.TOKENS, models.WIDTH)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_value_has_a_table_with_what_the_program_does(name: str) -> None:
    """The chosen row has the result's layout in the program, and the totals add up."""
    mesh = Mesh(data=2, model=2)
    model, x = PROGRAMS[name](mesh)
    plan = gspmd.plan(model, x, mesh=mesh, grad=True)
    layouts = {n.name: n.meta["spec"] for n in plan.sharded.nodes if "spec" in n.meta}
    reasons = set()
    for value in plan.layouts.spec:
        text = table(plan, value.name)
        rows = [line for line in text.splitlines() if re.match(r"[* ] .*\[", line)]
        chosen = [row for row in rows if row[0] == "*"]
        assert len(chosen) == 1 and f"[{layouts[value.name]}]" in chosen[0], text
        for row in rows:
            *costs, total = (float(c.replace(",", "")) for c in re.findall(r"[\d,]+\.\d", row))
            assert not costs or abs(sum(costs) - total) < 0.3
        reasons |= set(re.findall("^chosen: ([a-z ]+)", text, re.M))
    assert {"it costs least", "the layout is marked"} <= reasons


def test_parts_of_an_axis() -> None:
    plan = gspmd.plan(
        lambda x: x.reshape(4, 2, 6, 5),
        torch.randn(4, 12, 5),
        mesh=Mesh(x=4),
        in_specs="_ x _",
        out_specs="_ _ x _",
    )
    assert "* f2: x:(1)2, f1: x:(2)2" in table(plan, "view")


def test_a_plan_does_not_hold_the_memory_of_the_search() -> None:
    def memories() -> int:
        gc.collect()
        return sum(isinstance(thing, SearchMemory) for thing in gc.get_objects())

    x, before = torch.ones(4, 4), memories()
    plan = gspmd.plan(torch.matmul, x, x, mesh=Mesh(x=2), in_specs=("x _", None))
    plan.explain("einsum", costs=True)
    assert memories() == before


def test_a_constant_decides() -> None:
    """Where arithmetic costs less, the product is computed whole, and nothing is gathered."""
    options = {"mesh": Mesh(model=4), "in_specs": ("_ model", "_ _"), "out_specs": "_ _"}
    x = torch.ones(64, 64)
    sent = [
        gspmd.plan(torch.matmul, x, x, **options, advanced={"costs": costs}).sent_bytes
        for costs in (None, {"flops_per_byte": 500.0})
    ]
    assert sent == [15 * 2**10, 12 * 2**10]


def test_every_constant_has_a_reason_and_stands_in_the_documentation() -> None:
    root = Path(gspmd.__file__).resolve().parent.parent
    rows = re.findall(
        r"^\| `\w+` \| [\d.e+-]+ .*", (root / "docs/debugging_a_layout.md").read_text(), re.M
    )
    assert rows == [
        f"| `{f.name}` | {f.default:g} | {f.metadata['unit']} | {f.metadata['reason']} |"
        for f in fields(CostConstants)
    ]
    assert all(f.metadata["source"] for f in fields(CostConstants))
