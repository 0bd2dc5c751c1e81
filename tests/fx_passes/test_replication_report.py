"""replicated_ops and strict: what a plan gathers or computes alike everywhere though nobody asked
for it.
"""

from __future__ import annotations

import pytest
import torch
from helpers import message
from torch import nn

import torchgspmd as gspmd
from torchgspmd.fx_passes.replication_report import ReplicatedOp
from torchgspmd.runtime.mesh_module import unasked_text

MESH = gspmd.Mesh(a=2, m=2)
X = torch.randn(8, 6)


def listed(f, *args, **options) -> list[tuple[str, int, str]]:
    return [
        (r.op, r.bytes, r.why) for r in gspmd.plan(f, *args, mesh=MESH, **options).replicated_ops
    ]


def test_an_operand_that_has_to_be_whole():
    assert listed(lambda x: x.sort(0)[0], X[:7, 0], in_specs="m") == [
        (
            "aten.sort.default",
            28,
            "dimension 0 of %x is gathered over m: it has to be whole in 'd0 -> d0, d0'".replace(
                "d0", "w0_0", 1
            ).replace("d0, d0", "w1_0, w2_0"),
        )
    ]


def test_an_operation_without_a_rule():
    assert ("aten._pdist_forward.default", 112, "no rule and no decomposition") in listed(
        torch.pdist, X, in_specs="m _"
    )


def test_what_is_asked_for_is_not_listed():
    assert listed(lambda x: x.sin(), X, in_specs="a m", out_specs="_ _") == []
    assert (
        listed(lambda x: gspmd.mark_sharding(x.sin(), MESH, "_ _").sort(0)[0], X, in_specs="a m")
        == []
    )


def test_weights_gathered_where_their_axis_divides_the_batch_are_not_listed():
    net = gspmd.annotate(
        nn.Sequential(nn.Linear(6, 64), nn.LayerNorm(64)),
        MESH,
        {"1.weight": "a", "0.weight": "a _"},
    )
    plan = gspmd.plan(
        net, torch.randn(4096, 6), mesh=MESH, in_specs="a _", out_specs="a _", strict=True
    )
    assert any(c.kind == "all_gather" for c in plan.collectives) and plan.replicated_ops == ()


def test_strict():
    text = message(
        lambda: gspmd.plan(lambda x: x.sort(0)[0], X, mesh=MESH, in_specs="m _", strict=True)
    )
    assert (
        text.splitlines()[0]
        == "aten.sort.default replicates or gathers 192 bytes on every device, which strict does "
        "not allow"
    )
    assert text.splitlines()[1] == "  where test_replication_report.py:N"
    gspmd.plan(lambda x: x.sort(1)[0], X, mesh=MESH, in_specs="m _", strict=True)


def test_a_cure_that_was_tried():
    mesh = gspmd.Mesh(data=2, model=2)

    def program(cure):
        def f(x, y):
            a = gspmd.mark_sharding(x * 2, mesh, "_ model _")
            return torch.linalg.inv(gspmd.mark_sharding(a, mesh, "model _ _") if cure else a) @ y

        x, y = torch.randn(4, 8, 8), torch.randn(4, 8, 8)
        return lambda: gspmd.plan(f, x, y, mesh=mesh, in_specs=(None, "_ _ _"), strict=True)

    assert message(program(cure=False)).splitlines()[3:] == [
        '  fix   call mark_sharding(%mark_sharding, mesh, "model _ _") before it',
        "  tried 1 all_to_all, 256 bytes sent, nothing replicated or gathered unasked",
    ]
    plan = program(cure=True)()
    assert [c.kind for c in plan.collectives] == ["all_to_all"] and plan.sent_bytes == 256


def test_no_cure_is_told_that_does_not_help():
    text = message(lambda: gspmd.plan(torch.pdist, X, mesh=MESH, in_specs="m _", strict=True))
    assert "see plan.replicated_ops without strict" in text and "tried" not in text


@pytest.mark.parametrize("strict", [False, True])
def test_the_largest_is_listed_first(strict):
    def f(x):
        return x.sort(0)[0] @ torch.pdist(x.sort(0)[0])[:6]

    if strict:
        text = message(lambda: gspmd.plan(f, X, mesh=MESH, in_specs="m _", strict=True))
        assert (
            text.startswith("aten.sort.default replicates or gathers 192 bytes") and "more" in text
        )
    else:
        assert [size for _, size, _ in listed(f, X, in_specs="m _")] == [192, 112]


def layers(spec="m _"):
    """Products that are cheaper by rows than by the columns that marks name."""
    blocks = (nn.Linear(64, 64, bias=False), nn.LayerNorm(64), nn.Linear(64, 64, bias=False))
    return gspmd.annotate(nn.Sequential(*blocks), MESH, {"0.weight": spec, "2.weight": spec})


ROWS = torch.zeros(16384, 64)


def test_weights_gathered_against_their_marks():
    plan = gspmd.plan(layers(), ROWS, mesh=MESH, grad=True, out_specs="m _")
    assert [(each.weight, each.bytes) for each in plan.replicated_ops] == [("0.weight", 16384)]
    assert plan.replicated_ops[0].why == (
        "dimension 0 of %_0_weight is gathered over m: it is cheaper to divide c by it, "
        "in 'c b, a b -> c a'"
    )
    assert "gathered against its mark: '0.weight', 16.00 KiB" in plan.summary().splitlines()


@pytest.mark.parametrize(
    "rows, spec, names",
    [(16, "m _", ("0.weight",)), (160, "m _", ()), (16, "m:p1 _", ()), (65536, "m _", ())],
)
def test_marks_that_few_rows_overrule(rows, spec, names):
    """With one sentence that says why; 160 rows would save less than half of the bytes."""
    model = gspmd.annotate(nn.Sequential(nn.Linear(64, 256)), MESH, {"0.weight": spec})
    x = torch.zeros(rows, 64, device="meta", requires_grad=True)
    plan = gspmd.plan(model, x, mesh=MESH, grad=True, in_specs="m _", out_specs="same")
    assert plan.overruled_marks == ((("m", names),) if names else ())
    said = [line for line in plan.summary().splitlines() if line.startswith("few rows")]
    assert said == [
        "few rows: gathering the batch over 'm' sends less than '0.weight', which it divides too; "
        "'m:p1' in the marks, or a larger batch, keeps the batch divided"
    ] * len(names)


def test_weights_of_fsdp_are_gathered_as_meant():
    for options in ({"in_specs": "m _"}, {"in_specs": "a+m _"}):
        plan = gspmd.plan(layers(), ROWS, mesh=MESH, grad=True, strict=True, **options)
        assert any(c.kind == "all_gather" for c in plan.collectives)
    plan = gspmd.plan(
        lambda net, x: net(gspmd.mark_sharding(x, MESH, "m _")), layers(), ROWS, mesh=MESH
    )
    assert plan.replicated_ops == ()
    tangled = layers("m a")
    plan = gspmd.plan(tangled, ROWS, mesh=MESH, grad=True, in_specs="m _")
    assert all("over a" in each.why for each in plan.replicated_ops)


def test_the_warning_names_the_three_largest():
    ops = [ReplicatedOp(f"op{i}", "model.py:1", i << 20, "no rule") for i in range(5, 0, -1)]
    ops += [ReplicatedOp("mm", None, 1 << 16, "", "w", 0, "w"), ReplicatedOp("small", None, 9, "")]
    assert not [*unasked_text(ops[-1:])]
    (text,) = unasked_text(ops)
    assert [line for line in text.splitlines() if "MiB" in line] == [
        "  5.00 MiB  op5 at model.py:1: no rule",
        "  4.00 MiB  op4 at model.py:1: no rule",
        "  3.00 MiB  op3 at model.py:1: no rule",
    ]
    assert "6 operations and weights" in text and "model.plan.replicated_ops" in text
