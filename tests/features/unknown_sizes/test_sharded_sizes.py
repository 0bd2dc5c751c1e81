"""Sizes of arguments on sharded dimensions: one program has the numbers of one device at all."""

import itertools

import pytest
import torch
from composition.features import parse, setup_of
from composition.judge import planned, run_difference
from composition.program import batch, build
from helpers import assert_same, layouts
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Mesh
from torchgspmd.fx_passes.printer import program_text
from torchgspmd.layout.open_sizes import OpenSize, is_whole, nests, open_size, product_of

MESH = Mesh(a=2, b=2)


def test_products_of_sizes_are_seen_by_two_numbers():
    n, m = (496, 3 * 496), (592, 5 * 592)
    assert [open_size(*size).leading for size in (n, m)] == [0, 1]
    assert open_size(496 * 592 * 2, 496 * 592 * 2 * 15).leading == 0
    product = product_of(496 * 592 * 2, 496 * 592 * 2 * 15, (496, 592))
    assert product is not None and product.number((5, 7)) == 70
    for other in ((497, 3 * 496 + 1), (248, 744), (496 + 592, 3 * 496 + 5 * 592)):
        assert is_whole(open_size(*other)) and product_of(*other, (496, 592)) is None


def test_blocks_of_an_open_size_do_not_nest():
    """Of 5 rows, 2 devices have 3 and 4 have 2: two of these are more than one of those."""
    size = OpenSize(496, 0)
    assert nests(size, (), ("a",), MESH) and nests(size, ("a",), ("a",), MESH)
    assert not nests(size, ("a",), ("a", "b"), MESH)


SPECS = layouts(2, MESH.names, pending=False)


@pytest.mark.parametrize("group", (1, 3))
def test_steps_between_all_layouts(group):
    """With groups of rows too, which stay whole: n rows and three of each, flattened."""

    def f(x):
        y = x.sin().flatten(0, 1) if group > 1 else x.sin()
        return y.cos()

    shape = [group, 3] if group > 1 else [3]
    pairs = [*itertools.product(SPECS, SPECS)]
    for before, after in pairs[group > 1 :: 2]:
        spec = gspmd.ShardSpec((before.dims[0], *[()] * (group > 1), before.dims[1]))
        x, dynamic = torch.randn(8, *shape), {"x": {0}}
        plan = gspmd.plan(f, x, mesh=MESH, in_specs=spec, out_specs=after, dynamic=dynamic)
        for rows in (5, 2):
            x = torch.randn(rows, *shape)
            assert_same(plan.simulate(x, _poison=True), f(x), f"{before} to {after}")


PAIRS = """data+any_batch zero3+any_batch zero1+any_batch dropless+any_batch capacity+any_batch
sequence+any_length context+any_length ring+any_length""".split()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", PAIRS)
def test_one_program_has_all_sizes(text):
    """Fewer rows than devices, rows that they do not divide and rows that they do; 1 apart."""
    setup = setup_of(parse(text))
    setup.layers, setup.mesh = 1, dict.fromkeys(setup.mesh, 3)
    plan, model = planned(setup)
    assert "size_" in str(plan.program_graph)
    alone = build(setup.plain())
    for size in (2, 7, 6) if setup.step else (2, 7, 6, 1):
        tokens = batch(setup, size, **dict.fromkeys(setup.dynamic, size))
        assert not run_difference(setup, plan, model, alone, tokens), size
    assert len(plan._other_sizes.plans) == (0 if setup.step else 1)


def test_shards_of_twice_as_many_rows_are_not_taken_for_all_rows():
    """Of 2 n rows on two devices each has 2 ceil(n / 2): by its numbers that is n."""

    def f(x, rows, values):  # [n, 4], [n, 2], [n, 2, 4]
        return x.index_put((rows.flatten(),), values.flatten(0, 1), accumulate=True)

    def inputs(n):
        return torch.randn(n, 4), torch.randint(n, (n, 2)), torch.randn(n, 2, 4)

    options = {
        "mesh": Mesh(data=2),
        "in_specs": ("_ _", "data _", "data _ _"),
        "dynamic": {name: {0: "n"} for name in ("x", "rows", "values")},
    }
    plan = gspmd.plan(f, *inputs(6), **options)
    for n in (6, 5, 2):
        args = inputs(n)
        assert_same(plan.simulate(*args, _poison=True), f(*args), n)


PROGRAM = """\
one device
  %coordinate_data    :              = input
  %size_rows          :              = input
  %x                  : f32[u124, 3] = input
  %cos_default        : f32[u124, 3] = cos(%x)
  %all_gather_start   :              = start(all_gather, [%cos_default], [[0, data]])
  %all_gather         : f32[u496, 3] = wait(%all_gather_start, 0)
  %mask_padding       : f32[u124, 3] = mask_padding(%x, 0, %coordinate_data, %size_rows, 0.0)
  %sum_dim_int_list   : f32[3]       = sum(%mask_padding, [0])
  %all_reduce_start   :              = start(all_reduce, [%sum_dim_int_list], [[sum, data]])
  %narrow_default     : f32[u496, 3] = narrow(%all_gather, 0, 0, %size_rows)
  %contiguous_default : f32[u496, 3] = contiguous(%narrow_default)
  %all_reduce         : f32[3]       = wait(%all_reduce_start, 0)
  return %all_reduce, %contiguous_default"""


def test_the_program_of_a_device():
    """The size is an input; shards, masks and the cut behind a gather are computed from it."""
    plan = gspmd.plan(
        lambda x: (x.sum(0), x.cos()),
        torch.ones(8, 3),
        mesh=Mesh(data=4),
        in_specs="data _",
        out_specs=("_", "_ _"),
        dynamic={"x": {0: "rows"}},
    )
    assert program_text(plan.program_graph) == PROGRAM


def test_a_mark_of_another_function_of_a_size_is_refused():
    mesh = Mesh(data=2)
    with pytest.raises(gspmd.ShardingError, match="(?s)a size that depends .* fix  "):
        gspmd.plan(
            lambda x: gspmd.mark_sharding(x[1:], mesh, "data _"),
            torch.ones(8, 3),
            mesh=mesh,
            dynamic={"x": {0}},
        )


def microbatches(x, w):
    parts = x.unflatten(0, (-1, 2)).transpose(0, 1)
    of_parts = [(part @ w).square() for part in parts]
    return sum(part.mean() for part in of_parts), torch.cat(of_parts)


@pytest.mark.parametrize("devices", (2, 3))
def test_a_size_that_is_divided_evenly_has_shards_of_whole_parts(devices):
    """Of 10 rows 3 devices have 4, 4 and 2: a microbatch of 5 has 2, 2 and 1 there."""
    x, w = torch.randn(12, 4, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    options = {"in_specs": ("data _", "_ _"), "out_specs": ("", None)}
    options |= {"dynamic": {"x": {0: "rows"}}, "mesh": Mesh(data=devices)}
    plan = gspmd.plan(microbatches, x, w, **options)
    assert "size_rows_by_2" in str(plan.program_graph)
    assert {c.kind for c in plan.collectives} == {"all_reduce", "all_gather"}
    for rows in (12, 10, 4, 2):
        x = torch.randn(rows, 4, dtype=torch.float64)
        for found, expected in zip(plan.simulate(x, w, _poison=True), microbatches(x, w)):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(gspmd.ShardingError, match="(?s)size rows is 7, .* 2 equal parts.* fix"):
        plan.simulate(torch.randn(7, 4, dtype=torch.float64), w)


class Convolved(nn.Module):
    """Halos of two rows, of four, and of none; the gradient of an input is a transposed one."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Conv1d(3, 4, 5, padding=2)
        self.dilated = nn.Conv1d(4, 4, 3, padding=4, dilation=4)
        self.back = nn.ConvTranspose1d(4, 3, 3, padding=1)
        self.alone = nn.Conv1d(3, 2, 1)

    def forward(self, x):
        return self.alone(self.back(self.dilated(self.wide(x).square()))).square().mean()


def test_rows_of_halos_are_exchanged():
    """Of 2 rows on 3 devices, a halo of two rows comes from two neighbors."""
    model = Convolved().double()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    options = {"mesh": Mesh(s=3), "in_specs": "_ _ s", "grad": True}
    plan = gspmd.plan(model, x, dynamic={"x": {2}}, **options)
    assert {c.kind for c in plan.collectives} == {"permute", "all_reduce"}
    for length in (8, 7, 4, 2):
        x = torch.randn(2, 3, length, dtype=torch.float64)
        loss, gradients = plan.simulate(x, _poison=True)
        expected = model(x)
        assert_same(loss, expected.detach())
        for name, gradient in zip(
            gradients, torch.autograd.grad(expected, [*model.parameters()]), strict=True
        ):
            assert_same(gradients[name], gradient, (length, name))


def test_rows_of_halos_of_pools_are_gathered():
    """The gradient of a pool needs the number of rows that a device has with its halo."""
    pool = nn.AvgPool1d(3, stride=1, padding=1)
    x = torch.randn(2, 3, 8)
    plan = gspmd.plan(pool, x, mesh=Mesh(s=3), in_specs="_ _ s", dynamic={"input": {2}})
    assert {c.kind for c in plan.collectives} == {"all_gather"}
    for length in (8, 7, 4):
        x = torch.randn(2, 3, length)
        assert_same(plan.simulate(x, _poison=True), pool(x))


MEANS = {
    "mean": lambda x, y: (x * y).mean(),
    "mse": torch.nn.functional.mse_loss,
    "l1": torch.nn.functional.l1_loss,
    "variance": lambda x, y: (x - y).var(correction=0),
    "rows": lambda x, y: (x - y).mean((0, 2)).square().sum(),
}


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("dims", [{0: "rows"}, {0: "rows", 1: "length"}])
def test_a_mean_over_a_sharded_size_sends_its_sum(name, dims):
    function, mesh = MEANS[name], Mesh(data=3)
    x, y = (torch.randn(8, 8, 5, dtype=torch.float64) for _ in range(2))
    options = {"in_specs": ("data _ _", "data _ _"), "out_specs": None}
    dynamic = {"x": dims, "y": dims}

    def f(x, y):
        return function(x, y)

    plan = gspmd.plan(f, x, y, mesh=mesh, dynamic=dynamic, **options)
    assert {each.kind for each in plan.collectives} == {"all_reduce"}
    assert plan.sent_bytes <= 8 * 4096 * 2
    for rows, length in ((2, 8), (7, 8), (9, 4)):
        length = length if 1 in dims else 8
        x, y = (torch.randn(rows, length, 5, dtype=torch.float64) for _ in range(2))
        torch.testing.assert_close(
            plan.simulate(x, y, _poison=True), f(x, y), rtol=1e-12, atol=1e-12
        )
