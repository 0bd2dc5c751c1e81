"""Layout: logical names of dimensions, bound to axes by one table."""

import warnings

import pytest
import torch
import torch.distributed as dist
from helpers import assert_same, rand
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Layout, Mesh, ShardingError

MESH = Mesh(data=2, model=4)
TP = Layout({"batch": "data", "heads": "model", "mlp": "model", "length": "model", "embed": None})


@pytest.mark.parametrize(
    "names, spec",
    [
        ("batch length embed", "data model _"),
        ("batch length heads _", "data _ model _"),  # heads come before length in the table
        ("batch ? mlp", "data ? model"),
        ("batch+mlp _", "data+model _"),
        ("mlp heads", "_ model"),
        ("", ""),
    ],
)
def test_specs(names, spec):
    assert TP.on(MESH).spec(names) == spec


def test_containers_are_translated_leaf_by_leaf():
    layout = TP.on(MESH)
    assert layout.spec(({"x": "batch _"}, ["mlp"], None)) == ({"x": "data _"}, ["model"], None)


def test_alternatives_and_what_is_passed_over():
    layout = Layout({"batch": "data", "expert": ("expert", "data", "model")})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bound = layout.on(MESH)
    assert bound.spec("expert _") == "data _"
    assert bound.explain("batch expert") == (
        "data model ('expert' not on expert: the mesh has no expert; "
        "'expert' not on data: taken by 'batch')"
    )
    assert (
        str(bound) == "batch   data\nexpert  data ('expert' not on expert: the mesh has no expert)"
    )
    assert str(layout) == "batch   data\nexpert  expert or data or model"


def test_names_without_an_axis_are_said_once():
    with pytest.warns(UserWarning, match="'heads' and 'mlp' and 'length': whole on every device"):
        bound = TP.on(Mesh(data=2))
    assert bound.spec("batch length embed") == "data _ _"


def test_layouts_combine():
    zero = Layout({"embed": "data"})
    both = TP | zero
    assert both.on(MESH).spec("mlp embed") == "model data"
    assert TP.on(MESH).spec("mlp embed") == "model _"
    assert both == TP | zero and hash(both) == hash(TP | zero) and both != TP


@pytest.mark.parametrize(
    "act, message",
    [
        (lambda: TP.on(MESH).spec("batch head"), "no rule for 'head'.*did you mean 'heads'"),
        (lambda: Layout({"a b": "data"}), "'a b' is no name"),
        (lambda: Layout({"a": 3}), "is no name|not iterable"),
        (lambda: Layout({"a": ["x y"]}), "'x y' is no name"),
    ],
)
def test_errors(act, message):
    with pytest.raises((ShardingError, TypeError), match=f"(?s){message}"):
        act()


class Net(nn.Module):
    def __init__(self, layout):
        super().__init__()
        self.layout, self.up, self.down = layout, nn.Linear(4, 8), nn.Linear(8, 4)
        gspmd.annotate(
            self,
            layout,
            {"up.weight": "mlp embed", "up.bias": "mlp", "down.weight": "embed mlp"},
        )

    def forward(self, x):  # [b, m]
        hidden = gspmd.mark_sharding(self.up(x).relu(), self.layout, "batch mlp")
        return self.down(hidden)


TABLES = {
    "dp": (Layout({"batch": "data", "mlp": None, "embed": None}), {"all_reduce"}),
    "tp": (Layout({"batch": None, "mlp": "model", "embed": None}), {"all_reduce"}),
    "fsdp": (
        Layout({"batch": "data", "mlp": None, "embed": "data"}),
        {"all_gather", "reduce_scatter", "all_reduce"},
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_one_table_switches_a_model(name):
    table, kinds = TABLES[name]
    layout = table.on(Mesh(data=2, model=2))
    torch.manual_seed(0)
    model, x = Net(layout), rand(64, 4)
    plan = gspmd.plan(model, x, mesh=layout, in_specs="batch _", out_specs="batch _", grad=True)
    assert {c.kind for c in plan.collectives} <= kinds
    assert_same_step(plan, model, x)


def assert_same_step(plan, model, x):
    got, gradients = plan.simulate(x)
    want = model(x)
    want.sum().backward()
    assert_same(got, want.detach())
    for name, parameter in model.named_parameters():
        assert_same(gradients[name], parameter.grad, name)


@pytest.mark.parametrize("rule, counts", [("data", (2, 1, 0)), ("data:p1", (2, 2, 2))])
def test_weights_of_a_later_round_are_gathered(rule, counts):
    """By bytes the rows, which are few, would go to the weights: Megatron's layout, not ZeRO's."""
    layout = Layout({"mlp": rule, "batch": "data", "embed": None}).on(Mesh(data=4))
    model, x = Net(layout), rand(4, 4)
    model.up, model.down = nn.Linear(4, 32), nn.Linear(32, 4)
    gspmd.annotate(model, layout, {"up.weight": "mlp embed", "down.weight": "embed mlp"})
    options = {"in_specs": "batch _", "out_specs": "batch _"}
    plan = gspmd.plan(model, x, mesh=layout, grad=True, **options)
    kinds = [c.kind for c in plan.collectives]
    assert tuple(map(kinds.count, ("all_gather", "reduce_scatter", "all_reduce"))) == counts
    assert str(plan.in_specs[0]) == "data _"
    assert_same_step(plan, model, x)
    if rule == "data:p1":
        assert all(line.endswith("(p0)") for line in plan.explain("einsum").splitlines())
        assert plan.explain("up.weight").endswith("(p1)")
        assert "bind data to c" in plan.explain("einsum", costs=True)


def test_priorities_of_rules():
    layout = Layout({"embed": ("model:p2", "data:p1"), "batch": "data"}).on(Mesh(data=2))
    assert str(layout.layout) == "embed  model:p2 or data:p1\nbatch  data"
    assert str(layout) == (
        "embed  data:p1 ('embed' not on model: the mesh has no model)\nbatch  data"
    )
    assert layout.spec("embed batch _") == "_ data _"  # by priority before the table's order
    wider = layout.layout.on(Mesh(data=2, stage=2))
    assert str(wider).splitlines()[-1] == "       no rule names axis 'stage'"
    assert layout.spec("embed _") == "data:p1 _" and layout.spec("batch+embed") == "data"


def test_a_rule_that_no_mark_uses_is_an_error():
    layout = Layout({"batch": "data", "mpl": "model", "mlp": "model", "embed": None}).on(MESH)
    with pytest.raises(ShardingError, match="rule for 'mpl', which no mark uses") as error:
        gspmd.plan(Net(layout), rand(8, 4), mesh=layout, in_specs="batch _")
    assert "did you mean 'mlp'?" in str(error.value)


def test_parallelize_takes_a_layout():
    """One process; what a layout remembers of its use makes no other program."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layout = Layout({"batch": "data", "mlp": None, "embed": None}).on(Mesh(data=1))
        module = gspmd.parallelize(Net(layout), layout, in_specs="batch _")
        plans = []
        for _ in range(2):
            module(rand(8, 4)).sum().backward()
            plans.append(module.plan)
        assert plans[0] is plans[1]
        unused = Layout({"batch": "data", "mlp": None, "embed": None, "head": None})
        layout = unused.on(Mesh(data=1))
        module = gspmd.parallelize(Net(layout), layout, in_specs="batch _")
        with pytest.raises(ShardingError, match="rule for 'head', which no mark uses"):
            module(rand(8, 4))
    finally:
        dist.destroy_process_group()


class Named(nn.Module):
    """Net without a mesh: its marks are names alone."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        gspmd.annotate(self, {"up.weight": "mlp embed", "up": "batch mlp"})
        gspmd.mark_sharding(self.down.weight, "embed mlp")

    def forward(self, x):  # [b, m]
        return self.down(gspmd.mark_sharding(self.up(x).relu(), "batch mlp"))


def test_a_model_without_a_mesh_has_the_layout_of_each_plan():
    torch.manual_seed(0)
    model, x = Named(), rand(64, 4)
    want = model(x)  # on one device names are checked only
    texts = []
    for table, kinds in TABLES.values():
        layout = table.on(Mesh(data=2, model=2))
        layouts = {"mesh": layout, "in_specs": "batch _", "out_specs": "same"}
        plan = gspmd.plan(model, x, grad=True, **layouts)
        assert {c.kind for c in plan.collectives} <= kinds
        assert_same(plan.simulate(x)[0], want.detach())
        texts.append(str(plan.program.code))
        marked = Net(layout)
        marked.load_state_dict(model.state_dict())
        again = gspmd.plan(marked, x, grad=True, **layouts)
        assert [str(s) for s in again.in_specs] == [str(s) for s in plan.in_specs]
    assert len(set(texts)) == len(texts)


def test_annotate_makes_a_layout_the_models_own():
    layout = TABLES["tp"][0].on(Mesh(data=2, model=2))
    model = gspmd.annotate(Named(), layout)
    plan = gspmd.plan(model, rand(8, 4), mesh=layout.mesh)
    assert str(plan.in_specs[0]) == "model _"
    with pytest.raises(ShardingError, match="layout is on mesh data=2,model=2, but"):
        gspmd.plan(model, rand(8, 4), mesh=Mesh(data=4))


def test_what_was_passed_over_is_reported_of_every_tensor():
    layout = TP.on(MESH)
    layout.spec(("batch length heads _", "batch length embed"))
    assert str(layout).splitlines()[-1] == (
        "[batch length heads _]  data _ model _ ('length' not on model: taken by 'heads')"
    )
    assert len(str(layout).splitlines()) == len(TP.rules) + 1


@pytest.mark.parametrize(
    "act, message",
    [
        (lambda: gspmd.plan(Named(), rand(8, 4), mesh=MESH), "'mlp embed', and no layout says"),
        (
            lambda: gspmd.plan(lambda x: gspmd.mark_sharding(x * 2, "a b"), rand(8, 4), mesh=MESH),
            "'a b', and no layout says how.*fix   pass mesh=Layout",
        ),
        (lambda: gspmd.mark_sharding(rand(2, 3), "a b c"), "3 names, but the tensor has 2 dim"),
        (lambda: gspmd.plan(Named(), rand(8, 4), mesh=Layout({"mpl": None}).on(MESH)), "for 'mlp'"),
    ],
)
def test_errors_of_names(act, message):
    with pytest.raises(ShardingError, match=f"(?s){message}"):
        act()


def test_names_on_processes():
    """One process: also a submodule called directly, whose marks are a part of the names."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layout = TABLES["dp"][0].on(Mesh(data=1))
        module, x = gspmd.parallelize(Named(), layout, in_specs="batch _"), rand(8, 4)
        module(x).sum().backward()
        assert module.up(x).shape == (8, 8)
        with pytest.raises(ShardingError, match="no layout says"):
            gspmd.parallelize(Named(), Mesh(data=1))
    finally:
        dist.destroy_process_group()
