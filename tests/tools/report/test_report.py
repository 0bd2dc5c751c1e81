"""Estimates and reports: exact where they count, consistent where they guess."""

import json
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Hardware, Mesh
from torchgspmd.comm.hardware import Link
from torchgspmd.tools import plan_command
from torchgspmd.tools.command_line import run as run_command

GPT = Path(__file__).resolve().parents[3] / "examples" / "gpt" / "model.py"
FAST_LINKS = Hardware("links", {2: 1e12, 4: 1e12}, 1e12, 1e9, (Link(8, 1e30, 0.0),), launch=0.0)
SMALL = dict(batch=16, context=64, layers=3, heads=8, width=64, vocabulary=128)


@pytest.fixture(scope="module", params=["dp", "tp", "sp", "fsdp", "2d"])
def planned(request):
    mesh = Mesh(data=4, model=8)
    with torch.device("meta"):
        model, batch = runpy.run_path(str(GPT))["example"](mesh, request.param, **SMALL)
    return gspmd.plan(model, *batch, mesh=mesh, grad=True)


def test_the_report_counts_every_byte_and_no_more(planned):
    rows = planned.report().collectives
    assert sum(row.sent_bytes for row in rows) == pytest.approx(planned.sent_bytes)
    assert sum(row.count for row in rows) == len(planned.collectives)
    assert planned.report().memory.parameters == planned.memory.parameters
    assert planned.report().memory.peak <= planned.memory.peak


def test_operations_are_those_of_the_program(planned):
    """The devices together do what the model does, where its layout divides all products."""
    times = planned.estimate()
    axes = {
        a for node in planned.sharded.nodes for a in (node.meta.get("assignment") or {}).values()
    }
    devices = planned.mesh.size if ("model",) in axes else planned.mesh.count(("data",))
    assert times.flops * devices == pytest.approx(times.model_flops, rel=0.05)


def test_streams(planned):
    """A stream has one event at a time; a device waits no longer than the links are busy."""
    times = planned.estimate("h100")
    for stream in (("compute", "exposed"), ("communication",)):
        ends = 0.0
        for event in (e for e in times.events if e.stream in stream):
            assert event.begin >= ends - 1e-12
            ends = event.begin + event.seconds
    assert times.busy("exposed") <= times.busy("communication")
    assert times.seconds == pytest.approx(times.busy("compute") + times.busy("exposed"))
    assert 0 < times.mfu <= times.hfu < 1


def test_links_without_cost_hide_all(planned):
    times = planned.estimate(FAST_LINKS)
    assert times.busy("exposed") == pytest.approx(0.0, abs=1e-12)


def test_the_time_of_one_product_and_its_reduction():
    x, w = torch.ones(64, 32), torch.ones(32, 16)
    mesh = Mesh(model=4)
    result = gspmd.plan(torch.matmul, x, w, mesh=mesh, in_specs=("_ model", "model _"))
    hardware = Hardware("one", {4: 1e9}, 1e15, 1e9, (Link(4, 1e6, 1e-3),), launch=0, efficiency=0.5)
    compute, sent, exposed = result.estimate(hardware).events
    assert compute.seconds == pytest.approx(2 * 64 * 8 * 16 / 0.5e9)
    assert sent.seconds == pytest.approx(2e-3 + 2 * 3 / 4 * 64 * 16 * 4 / 1e6)
    assert exposed.seconds == pytest.approx(sent.seconds)


def test_a_group_across_hosts_shares_their_links():
    mesh, h100 = Mesh(data=4, model=16), Hardware.of("h100")
    assert h100.link(mesh, ("model",), relayed=True).bandwidth == 8 * 50e9
    assert h100.link(mesh, ("model",), relayed=False).bandwidth == 50e9
    assert h100.link(mesh, ("data",), relayed=True).bandwidth == 50e9
    assert h100.link(Mesh(data=4, model=8), ("model",), relayed=True).bandwidth == 450e9


def test_the_trace_is_what_perfetto_reads(planned):
    events = json.loads(planned.trace("h100"))["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C"}
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in events if e["ph"] == "X")


def test_like_layers_are_one_row():
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

        def forward(self, x):
            for layer in self.layers:
                x = F.relu(layer(x))
            return x

    result = gspmd.plan(
        Layers(), torch.ones(4, 8), mesh=Mesh(data=4), in_specs=("data _",), grad=True
    )
    report = result.report()
    assert [(t.name, t.count, t.mark) for t in report.whole] == [
        ("layers.*.weight", 5, "data _"),
        ("layers.*.bias", 5, "data"),
    ]
    assert "5 x" in str(report)


def test_marks_of_a_report_are_tried():
    """What the mark of a report changes is what the plan with that mark says."""
    mesh, x = Mesh(data=2, model=4), torch.empty(64, 512, device="meta")
    model = nn.Sequential(nn.Linear(512, 2048, device="meta"), nn.Linear(2048, 16, device="meta"))
    alone = gspmd.plan(model, x, mesh=mesh, in_specs=("data _",), grad=True)
    report = alone.report("h100")
    (tensor,) = [each for each in report.whole if each.tried]
    assert tensor.name == "0.weight" and tensor.mark in ("data _", "model _")
    gspmd.annotate(model, mesh, {tensor.name: tensor.mark})
    marked = gspmd.plan(model, x, mesh=mesh, in_specs=("data _",), grad=True)
    changes = marked.report("h100")
    assert tensor.tried.seconds == changes.estimate.seconds - report.estimate.seconds
    assert tensor.tried.sent_bytes == marked.sent_bytes - alone.sent_bytes
    assert tensor.tried.memory < 0 and str(tensor.tried) in str(report)
    assert not any(each.tried for each in alone.report("h100", tried=False).whole)


def test_unknown_hardware():
    with pytest.raises(gspmd.ShardingError, match="(?s)no hardware 'h101'.*h100"):
        Hardware.of("h101")


def test_the_command(tmp_path, capsys):
    command = ["plan", str(GPT), "layout=tp", "layers=2"]
    trace = tmp_path / "trace.json"
    options = ["width=64", "heads=8", "--mesh", "data=2,model=4", "--trace", str(trace)]
    assert run_command([*command, *options]) == 0
    assert "8 devices (data=2 model=4) of h100: step" in capsys.readouterr().out
    assert json.loads(trace.read_text())["traceEvents"]
    assert run_command([*command[:-2], "x", "--mesh", "data=2"]) == 1
    assert "'x' is no option of example" in capsys.readouterr().err


SMALL_EXAMPLES = {
    "vit": (dict(layers=1, size=32, batch=8, width=48, heads=4), ["dp", "dp_tp", "spatial"]),
    "unet3d": (dict(levels=2, size=17, batch=4, width=4), ["dp", "spatial", "spatial2d"]),
}


@pytest.mark.parametrize(
    "name, layout",
    [(name, layout) for name, (_, each) in SMALL_EXAMPLES.items() for layout in each],
)
def test_the_command_opens_the_other_examples(name, layout):
    file, options = GPT.parents[1] / name / "model.py", SMALL_EXAMPLES[name][0]
    mesh = "data=2,model=2" if name == "vit" else "data=2,space=2,rows=2"
    texts = [f"layout={layout}", *(f"{key}={value}" for key, value in options.items())]
    result = plan_command.plan_file(file, mesh, texts)
    assert result.report("a100").estimate.seconds > 0
    for node in result.program.graph.nodes:  # a tensor has a shape: its memory is counted
        if isinstance(node.target, torch._ops.OpOverload) and node.users:
            several = all("getitem" in str(user.target) for user in node.users)
            assert several or node.meta.get("shape") is not None, node.format_node()


def test_the_difference_of_two_plans():
    x, w, mesh = torch.ones(8, 16), torch.ones(16, 8), Mesh(data=2, model=4)
    one, two = (
        gspmd.plan(torch.matmul, x, w, mesh=mesh, in_specs=specs)
        for specs in (("data model", "model _"), ("data _", "_ model"))
    )
    assert [(c.before, c.after) for c in one.diff(two).changes] == [
        ("data model", "data _"),
        ("model _", "_ model"),
        ("data _ sum@model", "data model"),
    ]
    text = str(one.diff(two))
    assert "all_reduce  model  1 x 192 B" in text and "0 x 0 B" in text
    assert str(one.diff(one)).endswith("the same communication")


def test_a_plan_in_a_notebook_is_its_page(planned):
    assert planned._repr_html_().startswith("<iframe srcdoc=")
