"""Plans as files: what is read says what was written, and computes the same."""

import json
import os
import re

import pytest
import torch
from helpers import message
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Mesh, Plan
from torchgspmd.compiler.plan_cache.plan_files import with_checksum


class Net(nn.Module):
    def __init__(self, mesh: Mesh):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        gspmd.mark_sharding(self.up.weight, mesh, "model _")

    def forward(self, x, scale=1.0):
        return self.down(self.up(x).relu() * scale)


class Cached(nn.Module):
    def forward(self, x):
        self.last = x * 2
        return self.last.sum()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "plan.json"


def test_a_plan_that_was_saved_says_and_computes_the_same(path):
    mesh, x = Mesh(data=2, model=2), torch.randn(3, 6)
    model = Net(mesh)
    plan = gspmd.plan(model, x, mesh=mesh, in_specs=("data _",), grad=True)
    plan.save(path)
    again = Plan.load(path, model)
    assert again.text(full=True) == plan.text(full=True) and again.program.code == plan.program.code
    assert str(again.report()) == str(plan.report()) and again.trace() == plan.trace()
    assert [again.explain(v.name) for v in again.layouts.spec] == [
        plan.explain(v.name) for v in plan.layouts.spec
    ]
    assert not again.diff(plan).changes and "no costs" in again.explain("up.weight", costs=True)
    (one, gradients), (other, others) = plan.simulate(x), again.simulate(x)
    assert one.equal(other) and all(gradients[k].equal(others[k]) for k in gradients)
    again.html(path.with_suffix(".html"))


def test_without_its_model_a_plan_is_looked_at_alone(path):
    mesh, x = Mesh(model=2), torch.randn(3, 6)
    plan = gspmd.plan(Net(mesh), x, mesh=mesh)
    plan.save(path)
    again = Plan.load(path)
    assert str(again.report()) == str(plan.report())
    with pytest.raises(gspmd.ShardingError, match=r"no parameters: Plan.load\(path, model\)"):
        again.simulate(x)
    again.save(path)
    assert Plan.load(path).text(full=True) == plan.text(full=True)


def test_a_program_that_keeps_values_can_be_looked_at(path):
    plan = gspmd.plan(Cached(), torch.ones(4), mesh=Mesh(data=2), in_specs=("data",))
    plan.save(path)
    again = Plan.load(path, Cached())
    assert again.text(full=True) == plan.text(full=True)
    with pytest.raises(gspmd.ShardingError, match="it has a Write"):
        again.simulate(torch.ones(4))


def test_what_is_no_plan(path):
    plan = gspmd.plan(torch.matmul, torch.ones(2, 4), torch.ones(4, 2), mesh=Mesh(data=2))
    plan.save(path)
    text = json.loads(path.read_text())
    for wrong in ({**text, "format": 0}, {**text, "sharded": [["no"]]}, [], {}):
        path.write_text(json.dumps(wrong))
        with pytest.raises(gspmd.ShardingError, match=r"plan.json is no plan for this program"):
            Plan.load(path)
    plan.save(path)
    with pytest.raises(gspmd.ShardingError, match="other parameters or buffers"):
        Plan.load(path, nn.Linear(2, 2))


def place(part, op, key):
    """What changes a value in the last row of an operation in a part of a file."""

    def change(text, value):
        row = [row for row in text[part] if row[0] == op][-1]
        row[key] = value

    return change


CODE = "a = __import__('os').abort()"
REFUSED = {
    "a target that is code": (place("program", "placeholder", 2), CODE, "program[2][2]"),
    "a name that is code": (place("source", "placeholder", 1), CODE, "source[1][1]"),
    "a keyword": (place("sharded", "placeholder", 2), "lambda", "sharded[1][2]"),
    "a method": (place("program", "call_function", 0), "call_method", "program[3][0]"),
    "a function": (
        place("program", "call_function", 2),
        ["function", "os", "system"],
        "program[3][2]",
    ),
    "an operator that reads": (
        place("program", "call_function", 2),
        ["operator", "aten.from_file.default"],
        "program[3][2]",
    ),
    "too few arguments": (place("source", "call_function", 3), ["tuple"], "source[2][3]"),
    "a later operand": (
        place("source", "call_function", 3),
        ["tuple", ["node", 0], ["node", 2]],
        "source[2][3][2][1]",
    ),
    "a keyword argument that is code": (
        place("source", "call_function", 4),
        ["dict", [CODE, 1]],
        "source[2][4]",
    ),
    "metadata of no pass": (place("program", "placeholder", 5), {"code": CODE}, "program[2][5]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_is_refused_at_its_place(path, name):
    x, w = torch.ones(4, 8), torch.ones(8, 16)
    mesh = Mesh(data=2)
    gspmd.plan(torch.matmul, x, w, mesh=mesh, in_specs=("data _", None)).save(path)
    text = json.loads(path.read_text())
    change, value, where = REFUSED[name]
    change(text, value)
    path.write_text(json.dumps(text))
    with pytest.raises(gspmd.ShardingError, match="another checksum"):
        Plan.load(path)
    del text["format"], text["sha256"]
    path.write_bytes(with_checksum(json.dumps(text).encode()))
    with pytest.raises(gspmd.ShardingError, match=rf"why   at {re.escape(where)} there is "):
        Plan.load(path)


def test_what_a_refusal_says(path):
    x = torch.ones(4, 8)
    gspmd.plan(torch.relu, x, mesh=Mesh(data=2), in_specs=("data _",)).save(path)
    body = json.loads(path.read_text())
    del body["format"], body["sha256"]
    body["program"][1][2] = CODE
    path.write_bytes(with_checksum(json.dumps(body).encode()))
    assert message(lambda: Plan.load(path)).replace(str(path), "plan.json") == (
        "plan.json is no plan for this program\n"
        "  where test_plan_files.py:N\n"
        "  why   at program[1][2] there is \"a = __import__('os').abort()\", "
        "not an identifier of Python\n"
        "  fix   plan it again, and save it"
    )


def test_a_program_that_is_not_that_of_its_source_is_not_run(path):
    x = torch.ones(4, 8)
    gspmd.plan(torch.relu, x, mesh=Mesh(data=2), in_specs=("data _",)).save(path)
    body = json.loads(path.read_text())
    del body["format"], body["sha256"]
    text = json.dumps(body)
    at = text.rindex("aten.relu.default")
    changed = text[:at] + "aten.sign.default" + text[at + len("aten.relu.default") :]
    path.write_bytes(with_checksum(changed.encode()))
    again = Plan.load(path)
    with pytest.raises(gspmd.ShardingError, match="whose program is not that of its source"):
        again.simulate(x)


@pytest.mark.parametrize("version", [b'{"format": 2, "mesh": "data=2"}', b'{"format": 9, "a": 1}'])
def test_another_format_is_named(path, version):
    path.write_bytes(version)
    with pytest.raises(gspmd.ShardingError, match="its format is [29], that of this version 8"):
        Plan.load(path)


def test_a_pipe_is_no_plan(path):
    os.mkfifo(path)
    with pytest.raises(gspmd.ShardingError, match="it is no regular file"):
        Plan.load(path)


def test_large_constants_are_refused(path):
    table = torch.ones(1 << 21)
    plan = gspmd.plan(lambda x: x * table, torch.ones(1 << 21), mesh=Mesh(data=2))
    with pytest.raises(gspmd.ShardingError, match="(?s)is large.*buffers"):
        plan.save(path)


def test_a_tensor_of_many_dimensions_is_read(tmp_path):
    x = torch.randn(2, 1, 1, 32, 3, 4, 8)
    made = gspmd.plan(torch.neg, x, mesh=Mesh(data=2), in_specs="data _ _ _ _ _ _")
    made.save(tmp_path / "plan.json")
    assert torch.equal(Plan.load(tmp_path / "plan.json").simulate(x), -x)
