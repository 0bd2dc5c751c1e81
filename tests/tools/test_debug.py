"""gspmd.debug: the lines of a step, its stops, and the same numbers as without it."""

import copy
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchgspmd as gspmd

MESH = gspmd.Mesh(data=2, model=2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        h = self.up(x)
        parts = {"gate": h.relu(), "text": "kept"}
        unused = h * 2  # noqa: F841
        breakpoint()
        return self.down(parts["gate"]).sum()


def planned(mesh=MESH):
    torch.manual_seed(0)
    model = Net()
    marks = {"up.weight": "model _", "down.weight": "_ model"}
    gspmd.annotate(model, mesh, marks)
    x = torch.randn(5, 4)
    with pytest.warns(UserWarning, match=r"test_debug.py:\d+: breakpoint\(\) in forward stops in"):
        return gspmd.plan(model, x, mesh=mesh, in_specs="data _", grad=True), model, x


@pytest.fixture
def frames(monkeypatch):
    found = []

    def stop():
        frame = sys._getframe(1)
        found.append((frame.f_code.co_filename, frame.f_lineno, dict(frame.f_locals)))

    monkeypatch.setattr(sys, "breakpointhook", stop)
    return found


def test_a_step_prints_values_of_one_rank_and_computes_the_same(frames, capsys):
    plan, model, x = planned()
    expected = plan.simulate(x)
    frames.clear()
    with gspmd.debug(plan, rank=3):
        found = plan.simulate(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["rank 3 of 4: data=1 model=1", "inputs"]
    assert [line for line in lines if not line.startswith(" ")][1:3] == ["inputs", "forward"]
    with torch.no_grad():
        h = model.up(x)[3:, 3:]  # the third row of this rank's shard is padding
    add = next(line for line in lines if line.strip().startswith("%add "))
    assert " : f32[3, 3] of [5@data, 6@model] = add(%einsum, %" in add
    assert add.endswith(f"  {h.min():.4g} to {h.max():.4g}")
    assert {c.kind for c in plan.collectives} == {"all_reduce"}
    assert sum(" = all_reduce " in line for line in lines) == 5  # three of them in one message
    line = Net.forward.__code__.co_firstlineno + 1
    assert f"  up  tests/tools/test_debug.py:{line}" in lines
    plan.simulate(x)
    assert not capsys.readouterr().out and len(frames) == 1


def test_breakpoint_in_forward_has_the_variables_of_this_rank(frames):
    plan, model, x = planned()
    plan.simulate(x)
    assert not frames  # only debug stops
    with gspmd.debug(plan, rank=1):
        plan.simulate(x)
    (file, line, variables), first = *frames, Net.forward.__code__.co_firstlineno
    assert (file, line) == (__file__, first + 4)
    assert variables["self"] is model and variables["parts"]["text"] == "kept"
    with torch.no_grad():
        torch.testing.assert_close(variables["h"], model.up(x)[:3, 3:])
        torch.testing.assert_close(variables["parts"]["gate"], model.up(x).relu()[:3, 3:])
    assert variables["unused"] == "<the program does not compute it>"
    assert variables["layouts"] == {"x": "data _", "h": "data model"}


def test_stops_by_module_value_and_line(frames):
    plan, model, x = planned()
    line = Net.forward.__code__.co_firstlineno + 2
    with gspmd.debug(plan, stop=("d*n", "%add", f"test_debug.py:{line}")):
        plan.simulate(x)
    names = [variables.get("name", "breakpoint()") for _, _, variables in frames]
    at_line, of_down = ["relu", "threshold_backward.2"], ["add_1.2", "view"]
    assert names == ["add", at_line[0], "breakpoint()", of_down[0], at_line[1], of_down[1]]
    del frames[0]
    with torch.no_grad():
        torch.testing.assert_close(frames[0][2]["value"], model.up(x).relu()[:3, :3])
        torch.testing.assert_close(frames[0][2]["operands"], {"add": model.up(x)[:3, :3]})
    assert frames[0][:2] == ("tests/tools/test_debug.py", line)
    assert frames[0][2]["layout"] == "data model"
    with pytest.raises(gspmd.ShardingError, match="is called 'dwn'\n.*\n.*did you mean 'down'"):
        gspmd.debug(plan, stop="dwn").__enter__()
    with pytest.raises(gspmd.ShardingError, match="debug gets a Net"):
        gspmd.debug(model).__enter__()


@pytest.mark.parametrize("own", [True, False], ids=["prints", "waits"])
def test_a_module_of_parallelize_runs_as_before(frames, capsys, own):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        reference, x = Net(), torch.randn(5, 4)
        module = gspmd.parallelize(copy.deepcopy(reference), gspmd.Mesh(data=1), in_specs="data _")
        reference.up(x).relu()
        with gspmd.debug(module, stop="up", rank=0 if own else 1):
            for _ in range(2):
                module(x).backward()
        lines = capsys.readouterr().out.splitlines()
        assert lines.count("rank 0 of 1: data=0") == 2 * own and lines.count("backward") == 2 * own
        assert len(frames) == 2 * 3 * own  # breakpoint(), and `up` in both directions
        wanted = torch.autograd.grad(
            reference.down(reference.up(x).relu()).sum(), [*reference.parameters()]
        )
        for parameter, gradient in zip(module.parameters(), wanted):
            torch.testing.assert_close(parameter.grad.to_local(), 2 * gradient)
        module(x).backward()
        assert not capsys.readouterr().out
    finally:
        dist.destroy_process_group()
