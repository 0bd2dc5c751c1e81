"""gspmd.compare: nothing where there is no difference, else the first one."""

import copy

import pytest
import torch
from torch import fx, nn

import torchgspmd as gspmd
from torchgspmd.comm.local_ops import mask_padding

MESH = gspmd.Mesh(data=2, model=3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 13), nn.Linear(13, 5)
        self.norm = nn.BatchNorm1d(13)

    def forward(self, x, target):
        h = self.norm(self.up(x)).relu()
        return nn.functional.cross_entropy(self.down(h), target)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = gspmd.stack([nn.TransformerEncoderLayer(12, 3, 24, 0.0) for _ in range(2)])
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.blocks(x))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.back = nn.Conv2d(3, 7, 3, padding=1), nn.ConvTranspose2d(7, 2, 2, 2)

    def forward(self, x):
        return self.back(nn.functional.max_pool2d(self.conv(x).relu(), 2))


def planned(build, marks, *args, specs):
    torch.manual_seed(0)
    model = build()
    reference = copy.deepcopy(model)
    gspmd.annotate(model, MESH, marks)
    return gspmd.plan(model, *args, mesh=MESH, in_specs=specs, grad=True), reference


def net():
    batch = torch.randn(7, 6), torch.randint(5, (7,))
    marks = {"up.weight": "model _", "down.weight": "_ model"}
    return *planned(Net, marks, *batch, specs=("data _", "data")), batch


def test_equal_programs_are_equal():
    torch.manual_seed(1)
    plan, reference, batch = net()
    found = gspmd.compare(plan, reference, batch)
    assert found and found.first is None and not found.skipped, found
    assert str(found) == f"all {found.compared} values of the program are equal"
    assert gspmd.compare(plan, reference, *batch) == found
    assert {"%" + n.name for n in plan.captured.graph.nodes} > {"%einsum", "%einsum_1"}
    for build, marks, x, specs in (
        (Attention, {}, torch.randn(6, 5, 12), "model data _"),
        (Images, {}, torch.randn(4, 3, 10, 10), "data _ model _"),
    ):
        plan, reference = planned(build, marks, x, specs=specs)
        found = gspmd.compare(plan, reference, x)
        assert found and found.compared > 8, found


def without(plan, target):
    """Leave out the first node of a kind."""
    graph = plan.program_graph
    node = next(n for n in graph.nodes if n.op == "call_function" and target(n))
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)
    plan.program.recompile()


@pytest.mark.parametrize(
    ("target", "phase", "name"),
    [
        (lambda n: n.target is mask_padding and not n.meta["backward"], "forward", "einsum_1"),
        (lambda n: "relu" in str(n.target), "forward", "relu"),
        (lambda n: "threshold_backward" in str(n.target), "backward", "threshold_backward"),
    ],
    ids=["mask", "relu", "backward"],
)
def test_a_fault_is_named_where_it_is(target, phase, name):
    plan, reference, batch = net()
    without(plan, target)
    found = gspmd.compare(plan, reference, batch)
    first = found.first
    assert not found and (first.phase, first.name) == (phase, f"%{name}"), found
    assert first.line.startswith("tests/tools/test_compare.py:"), found
    text, of = str(found), f" of module '{first.module}'" if first.module else ""
    assert text.startswith(f"{first.name}{of} at {first.line}, {phase}: ")
    assert f"is {first.found:.9} on rank" in text
    assert f"on one device {first.expected:.9}\n" in text
    assert f"  {found.equal_before} values before it are equal; {len(found.others)} behind" in text


def test_eager_results_are_compared_too():
    plan, reference, batch = net()
    reference.forward = lambda x, target: Net.forward(reference, x, target) * 1.01
    found = gspmd.compare(plan, reference, batch)
    assert found.first.phase == "result" and found.first.name == "result 0", found
    assert gspmd.compare(plan, reference, batch, tolerance=0.1)


def test_what_cannot_be_compared_is_an_error():
    plan, _, batch = net()
    with pytest.raises(gspmd.ShardingError, match=r"the reference has no 'up.weight' of shape"):
        gspmd.compare(plan, nn.Linear(2, 2), batch)
    with pytest.raises(gspmd.ShardingError, match="compare gets a Linear"):
        gspmd.compare(nn.Linear(2, 2), nn.Linear(2, 2), batch)


def test_nodes_say_what_they_denote():
    """Whatever passes do, a node's `captured` is a node of the captured graph."""
    plan, _, _ = net()
    names = {n.name for n in plan.captured.graph.nodes}
    denoted = [n.meta["captured"] for n in plan.program_graph.nodes if "captured" in n.meta]
    assert set(denoted) <= names and len(denoted) > 20
    assert isinstance(plan.program_graph, fx.Graph)
