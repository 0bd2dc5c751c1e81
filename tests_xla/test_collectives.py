"""What XLA's partitioner sends for the annotated programs, as golden text; ours never sends more.

EXPECTTEST_ACCEPT=1 writes collectives.txt anew.
"""

import os
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from programs import (
    DIGITS,
    EVEN,
    LAYOUTS,
    MESH,
    UNEVEN,
    UNEVEN_DIGITS,
    ConvNet,
    MoE,
    gpt,
    groups,
    images,
    pictures,
    texts,
    vit,
)
from vit.model import LAYOUTS as VIT_LAYOUTS

import torchgspmd as gspmd
from torchgspmd.layout.mark import raw_mark

GOLDEN = Path(__file__).with_name("collectives.txt")
FIRST = (torch.float32, 1)
TOKENS, PIXELS, GROUPS = ("data _", "data _"), ("data _ model _", "data"), ("data _ _",)


def transformer(layout: str, sizes: tuple[int, int]) -> tuple:
    specs = VIT_LAYOUTS[layout].on(MESH).spec(("batch _ rows _", "batch"))
    return vit(layout, sizes), next(pictures(sizes, 1)), specs


CASES = {
    **{
        f"gpt {layout}": lambda layout=layout: (gpt(layout, EVEN), next(texts(EVEN, 1)), TOKENS)
        for layout in LAYOUTS
    },
    **{
        f"gpt {layout} uneven": lambda layout=layout: (
            gpt(layout, UNEVEN),
            next(texts(UNEVEN, 1)),
            TOKENS,
        )
        for layout in LAYOUTS
    },
    **{
        f"vit {layout}": lambda layout=layout: transformer(layout, DIGITS) for layout in VIT_LAYOUTS
    },
    **{
        f"vit {layout} uneven": lambda layout=layout: transformer(layout, UNEVEN_DIGITS)
        for layout in VIT_LAYOUTS
    },
    "conv net": lambda: (ConvNet(MESH), next(images(*FIRST)), PIXELS),
    "conv net uneven": lambda: (ConvNet(MESH), next(images(*FIRST, (13, 10))), PIXELS),
    "moe": lambda: (MoE(MESH), next(groups(*FIRST)), GROUPS),
    "moe uneven": lambda: (MoE(MESH), next(groups(*FIRST, 6)), GROUPS),
}


def planned(name: str) -> gspmd.Plan:
    """No input is left open, as in parallelize: XLA is given those of the plan, and what it sends
    should not depend on ours.
    """
    module, arguments, specs = CASES[name]()
    for parameter in module.parameters():
        if raw_mark(parameter) is None:
            gspmd.mark_sharding(parameter, MESH, "_ " * parameter.dim())
    return gspmd.plan(module, *arguments, mesh=MESH, in_specs=specs, grad=True)


def golden() -> dict[str, str]:
    parts = GOLDEN.read_text().split("== ")[1:] if GOLDEN.exists() else []
    return {head: body.strip("\n") for head, _, body in (part.partition("\n") for part in parts)}


def check(name: str, text: str) -> None:
    found = golden()
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        found[name] = text
        GOLDEN.write_text(
            "".join(f"== {case}\n{found[case]}\n\n" for case in CASES if case in found)
        )
    assert text == found[name]


def rows(collectives) -> str:
    totals: dict[tuple[str, str, str], list[float]] = {}
    for c in collectives:
        total = totals.setdefault((c.kind, "+".join(c.axes), c.dtype), [0, 0.0])
        total[0] += c.count
        total[1] += c.sent_bytes
    return "\n".join(
        f"{kind:14} {axes:10} {dtype:4} {count:3} x {size:8.0f} B"
        for (kind, axes, dtype), (count, size) in sorted(totals.items())
    )


@pytest.mark.parametrize("name", CASES)
def test_what_xla_sends(name):
    found = gspmd.compare_with_xla(planned(name))
    check(name, rows(found.xla))
    ours, xla = found.bytes
    assert ours <= xla, found


def test_no_all_gather_in_tensor_parallelism():
    """The captured graph decides: with flattened matmuls or fused norms XLA gathers activations."""
    assert {c.kind for c in gspmd.compare_with_xla(planned("gpt tp")).xla} == {"all_reduce"}


@pytest.mark.parametrize("name", ["gpt 2d", "moe"])
def test_pinned_to_our_decisions(name):
    """With pin "all" XLA sends less than left to itself, and still finds nothing to save."""
    plan = planned(name)
    pinned, alone = (gspmd.compare_with_xla(plan, pin).bytes[1] for pin in ("all", "user"))
    assert plan.sent_bytes <= pinned < alone


def test_the_table():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = (
                torch.nn.Linear(16, 32, bias=False),
                torch.nn.Linear(32, 16, bias=False),
            )
            gspmd.mark_sharding(self.up.weight, MESH, "model _")
            gspmd.mark_sharding(self.down.weight, MESH, "_ model")

        def forward(self, x):
            return self.down(self.up(x).relu())

    plan = gspmd.plan(Net(), torch.zeros(8, 16), mesh=MESH, in_specs="data _", out_specs="data _")
    assert_expected_inline(
        str(gspmd.compare_with_xla(plan)),
        """\
mesh data=4,model=2, pin user: bytes sent by a device
  collective  over   ours  bytes  XLA  bytes
  all_reduce  model  1     128    1    128
  all                1     128    1    128

0 values laid out otherwise""",
    )
