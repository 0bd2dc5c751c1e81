"""Sizes that only a run knows are no numbers: no layout divides one, and no step leads over one."""

import itertools

import pytest
import torch
from helpers import assert_same, layouts
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardSpec
from torchgspmd.fx_passes.localize.localize_graph import localize_graph
from torchgspmd.fx_passes.partition.reshard import Resharder
from torchgspmd.layout.open_sizes import OpenSize, nests


def test_an_open_size_is_no_number():
    assert OpenSize(496) == OpenSize(496) != OpenSize(592)
    assert 496 not in {OpenSize(496)} and OpenSize(496) != 496
    assert nests(OpenSize(496), (), (), Mesh(m=4)) and not nests(
        OpenSize(496), (), ("m",), Mesh(m=4)
    )


@pytest.mark.parametrize("mesh", (Mesh(m=4), Mesh(a=2, m=3)))
def test_no_path_leads_over_an_open_size(mesh):
    """All pairs of layouts, 496 of which 4 devices would divide, and 5 rows that they do not."""
    resharder = Resharder(mesh)
    shape = OpenSize(496), 5, 6
    specs = [s for s in layouts(3, mesh.names, pending=True) if not s.dims[0]]
    for before, after in itertools.product(specs, specs):
        if set(after.pending) <= set(before.pending):
            for step in resharder.steps(shape, 4, before, after):
                assert not step.spec.dims[0], (before, after, step)
    sharded = ShardSpec.parse(f"{mesh.names[0]} _ _")
    assert resharder.cost(shape, 4, sharded, specs[0]) == float("inf")


@pytest.mark.parametrize("m, length", ((2, 5), (4, 5), (4, 6), (3, 4)))
def test_rows_are_those_of_the_batch(m, length):
    plan = gspmd.plan(
        lambda x: x.sin(),
        torch.randn(8, length, 6),
        mesh=Mesh(m=m),
        in_specs="_ m _",
        out_specs="_ _ _",
        dynamic={"x": {0}},
    )
    for rows in (8, 7, 3, 9, 2):
        x = torch.randn(rows, length, 6)
        assert_same(plan.simulate(x, _poison=True), x.sin())


def test_an_exchange_of_other_sizes():
    def f(x):
        return x.softmax(1) * x.softmax(2)

    plan = gspmd.plan(
        f,
        torch.randn(8, 7, 9),
        mesh=Mesh(d=2, m=4),
        in_specs="_ m d",
        out_specs="_ _ _",
        dynamic={"*": {0}},
    )
    assert "permute" in {c.kind for c in plan.collectives}
    for rows in (8, 7, 2, 31):
        x = torch.randn(rows, 7, 9)
        assert_same(plan.simulate(x, _poison=True), f(x))


class Words(nn.Module):
    """An embedding, a block of hidden units and a head."""

    def __init__(self):
        super().__init__()
        self.embed, self.up = nn.Embedding(10, 6), nn.Linear(6, 12)
        self.down, self.head = nn.Linear(12, 6), nn.Linear(6, 10)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.down(self.up(x).relu()))


def test_batches_of_a_marked_model():
    torch.manual_seed(0)
    mesh, model = Mesh(m=4), Words()
    marks = {"embed": "_ m", "up": "m _", "down": "_ m", "head": "m _"}
    gspmd.annotate(model, mesh, {f"{name}.weight": spec for name, spec in marks.items()})
    tokens = torch.randint(10, (8, 5))
    plan = gspmd.plan(model, tokens, mesh=mesh, out_specs="_ _ _", dynamic={"tokens": {0}})
    for rows in (8, 7, 3, 8, 7):
        tokens = torch.randint(10, (rows, 5))
        assert_same(plan.simulate(tokens), model(tokens).detach())


def test_a_program_with_shards_of_an_open_size_is_refused():
    """Whatever pass makes it, and without TORCHGSPMD_CHECK too."""
    x = torch.randn(8, 4)
    plan = gspmd.plan(lambda x: x[x[:, 0] > 0].sin(), x, mesh=Mesh(m=2))
    (node,) = (n for n in plan.sharded.nodes if n.name == "sin")
    node.meta["spec"] = ShardSpec.parse("m _")
    with pytest.raises(gspmd.ShardingError, match=r"(?s)%sin is .m _., .* values.* fix  "):
        localize_graph(plan.sharded, plan.mesh)


@pytest.mark.parametrize("rows", (0, 1))
def test_steps_between_layouts_of_no_rows(rows):
    x = torch.randn(rows, 6)
    plan = gspmd.plan(lambda x: x.T @ x, x, mesh=Mesh(m=2), in_specs="_ m", out_specs="m _")
    assert_same(plan.simulate(x), x.T @ x)


DRAWS = {
    "dropout": lambda x: nn.functional.dropout(x.cos(), 0.5),
    "uniform": lambda x: x + torch.rand_like(x),
    "normal": lambda x: x * torch.randn(x.shape),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("spec", ("m _ _", "_ _ m"))
def test_random_numbers_are_those_of_one_device(name, spec):
    """They are drawn by the place of an element, which follows from the sizes of the run."""
    plans = [
        gspmd.plan(DRAWS[name], torch.ones(4, 7, 6), mesh=mesh, in_specs=spec, dynamic={"x": {1}})
        for mesh in (Mesh(m=1), Mesh(m=3))
    ]
    for rows in (7, 3, 12):
        x, results = torch.randn(4, rows, 6), []
        for plan in plans:
            torch.manual_seed(5)
            results.append(plan.simulate(x))
        assert_same(*results)


def test_attention_with_dropout_of_sharded_heads_and_an_open_length():
    """Its numbers depend on the length, which is an input of the program."""

    def f(x):
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    x = torch.randn(2, 4, 7, 6)
    plans = [
        gspmd.plan(f, x, mesh=Mesh(m=m), in_specs=spec, dynamic={"x": {2}})
        for m, spec in ((1, "_ m _ _"), (2, "_ m _ _"), (3, "_ _ m _"))
    ]
    for rows in (7, 2, 12):
        x, results = torch.randn(2, 4, rows, 6), []
        for plan in plans:
            torch.manual_seed(5)
            results.append(plan.simulate(x, _poison=True))
        assert_same(*results[:2])
        assert_same(*results[1:])
