"""Regions whose communication is the user's own: numbers, gradients, bytes, types."""

import pytest
import torch
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardingError, collectives, manual

MESH = Mesh(data=2, model=4)
DOUBLE = torch.double


def row_parallel(x, w):
    return collectives.all_reduce(x @ w, "model")


def scattered(x, w):
    return collectives.reduce_scatter(x @ w, "model", 1)


def gathered(x, w):
    return collectives.all_gather(x, "model", 1) @ w


def ring(x, w):
    """Collective matmul by hand: w's rows in turn, x travels round the ring."""
    rows, me = w.shape[0] // 4, collectives.axis_index("model")
    total = torch.zeros(x.shape[0], w.shape[1], dtype=x.dtype)
    for step in range(4):
        place = (me - step).remainder(4).reshape(1)  # torch 2.9 takes no number for an index
        total = total + x @ w.unflatten(0, (4, rows))[place][0]
        x = collectives.permute(x, "model", 1)
    return total


def ulysses(x, w):
    """From rows to columns, and back."""
    columns = collectives.all_to_all(x, "model", 1, 0)
    return collectives.all_to_all(columns.tanh(), "model", 0, 1) @ w


PROGRAMS = {  # region, specs of x and w, spec of the result, the same on one device
    "all_reduce": (row_parallel, ("_ model", "model _"), "_ _", torch.matmul),
    "reduce_scatter": (scattered, ("_ model", "model _"), "_ model", torch.matmul),
    "all_gather": (gathered, ("_ model", "_ model"), "_ model", torch.matmul),
    "permute": (ring, ("_ model", "_ model"), "_ model", torch.matmul),
    "all_to_all": (ulysses, ("model _", "_ _"), "model _", lambda x, w: x.tanh() @ w),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_and_gradients(name):
    """Eager, and simulated with the batch along another axis, forward and backward."""
    region, in_specs, out_spec, same = PROGRAMS[name]
    run = manual(region, MESH, in_specs, out_spec, axes=("model",))
    torch.manual_seed(0)
    x = torch.randn(8, 16, dtype=DOUBLE, requires_grad=True)
    w = torch.randn(16, 8, dtype=DOUBLE, requires_grad=True)
    expected = same(x, w)
    torch.testing.assert_close(run(x, w), expected, rtol=1e-10, atol=1e-10)

    def step(x, w):
        y = run(x, w)
        return y, *torch.autograd.grad(y.square().sum(), (x, w))

    gradients = torch.autograd.grad(expected.square().sum(), (x, w))
    torch.testing.assert_close(step(x, w)[1:], gradients, rtol=1e-10, atol=1e-10)

    def leaves(x, w):
        return step(x.requires_grad_(), w.requires_grad_())

    x, w = x.detach(), w.detach()
    result = gspmd.plan(leaves, x, w, mesh=MESH, in_specs=("data _", "_ _"))
    got = result.simulate(x, w)
    torch.testing.assert_close(got, (expected, *gradients), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("all_reduce", 2 * 3 / 4 * 8 * 8 * 8),  # the sum [8, 8] of float64
        ("reduce_scatter", 3 / 4 * 8 * 8 * 8),
        ("all_gather", 3 / 4 * 8 * 16 * 8),  # x [8, 16]
        ("permute", 3 * 8 * 4 * 8),  # three passes of a quarter of x; the last one is not needed
        ("all_to_all", 2 * 3 / 4 * 8 * 16 / 4 * 8),
    ],
)
def test_bytes_are_no_more_than_those_of_the_collective(name, sent):
    region, in_specs, out_spec, _ = PROGRAMS[name]
    run = manual(region, Mesh(model=4), in_specs, out_spec, axes=("model",))
    x, w = torch.randn(8, 16, dtype=DOUBLE), torch.randn(16, 8, dtype=DOUBLE)
    result = gspmd.plan(run, x, w, mesh=Mesh(model=4), in_specs=in_specs, out_specs=out_spec)
    assert result.sent_bytes <= sent


def test_two_axes_and_one_that_is_propagated():
    mesh = Mesh(data=2, model=2, other=2)

    def region(x, w):
        y = collectives.reduce_scatter(x @ w, "model", 1)
        places = 10 * collectives.axis_index("data") + collectives.axis_index("model")
        return collectives.permute(y, "data", 1), places.reshape(1, 1)

    specs = ("data model", "model _")
    run = manual(region, mesh, specs, ("data model", "data model"), axes=("model", "data"))
    x, w = torch.randn(8, 16, dtype=DOUBLE), torch.randn(16, 8, dtype=DOUBLE)
    y, places = run(x, w)
    torch.testing.assert_close(y, (x @ w).roll(4, 0), rtol=1e-10, atol=1e-10)
    assert places.tolist() == [[0, 1], [10, 11]]
    result = gspmd.plan(run, x, w, mesh=mesh, in_specs=("data+other model", "model _"))
    torch.testing.assert_close(result.simulate(x, w), (y, places), rtol=1e-10, atol=1e-10)


def test_a_region_within_a_region():
    mesh = Mesh(data=2, model=2)

    def inner(x):
        return collectives.all_reduce(x.sum(1), "model")

    def outer(x):
        part = manual(inner, mesh, "_ model", "_", axes=("model",))(x)
        return collectives.all_reduce(part.sum(), "data")

    run = manual(outer, mesh, "data _", "", axes=("data",))
    x = torch.randn(4, 6, dtype=DOUBLE)
    torch.testing.assert_close(run(x), x.sum())
    torch.testing.assert_close(gspmd.plan(run, x, mesh=mesh).simulate(x), x.sum())


def test_what_no_collective_made_equal_is_not_replicated():
    """The types: a shard varies, a collective's result does not, nor what comes of it alone."""
    x, w = torch.ones(8, 16), torch.ones(16, 8)
    forgotten = manual(torch.matmul, MESH, ("_ model", "model _"), "_ _", axes=("model",))
    with pytest.raises(ShardingError, match="result 0 of a manual region may differ along 'model'"):
        forgotten(x, w)
    shared = manual(lambda x, w: (x @ w).relu(), MESH, ("_ _", "_ _"), "_ _", axes=("model",))
    assert shared(x, w).equal(x @ w)


def test_a_replicated_value_is_reduced_as_often_as_there_are_devices():
    run = manual(lambda x: collectives.all_reduce(x, "model"), MESH, "_", "_", axes=("model",))
    assert run(torch.ones(3)).tolist() == [4, 4, 4]


def test_errors_say_what_to_do():
    x = torch.ones(6, 6)
    for call, words in (
        (lambda: collectives.all_reduce(x, "model"), "outside of a region"),
        (
            lambda: manual(lambda x: x, MESH, "model _", "model _", axes=("model",))(x),
            "not divided",
        ),
        (lambda: manual(lambda x: x, MESH, "data _", "_ _", axes=("model",))(x), "names 'data'"),
        (lambda: manual(lambda x: x, MESH, "_ _", "_ _", axes=("modle",)), "modle"),
        (
            lambda: manual(
                lambda x: collectives.all_gather(x, "data"), MESH, "_ _", "_ _", axes=("model",)
            )(x),
            "outside of a region that has it",
        ),
        (
            lambda: manual(
                lambda x: collectives.reduce_scatter(x, "model", 0),
                MESH,
                "_ _",
                "model _",
                ("model",),
            )(x),
            "divides dimension 0",
        ),
    ):
        with pytest.raises(ShardingError, match=words):
            call()


def test_in_a_module_with_random_numbers():
    """Dropout inside of a region; the module is planned with its backward."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

        def forward(self, x):
            def region(x, up, bias, down):
                hidden = torch.nn.functional.linear(x, up, bias).relu()
                return collectives.all_reduce(torch.nn.functional.linear(hidden, down), "model")

            run = manual(
                region, MESH, ("_ _", "model _", "model", "_ model"), "_ _", axes=("model",)
            )
            return run(x, self.up.weight, self.up.bias, self.down.weight).square().mean()

    torch.manual_seed(0)
    model, x = Layer().double(), torch.randn(64, 8, dtype=DOUBLE)
    gspmd.annotate(model, MESH, {"up.weight": "model _", "down.weight": "_ model"})
    result = gspmd.plan(model, x, mesh=MESH, in_specs=("data _",), grad=True)
    loss, gradients = result.simulate(x)
    down = model.down(model.up(x).relu()).square().mean()
    down.backward()
    torch.testing.assert_close(loss, down, rtol=1e-10, atol=1e-10)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-10)
    assert {c.kind for c in result.collectives} == {"all_reduce"}


def test_a_place_behind_the_last_row_is_an_error_and_a_negative_one_is_not():
    """Indexing by a place of each device is a gather, which keeps to the rows that there are."""

    def row(x, shift):
        place = (collectives.axis_index("model") + shift).reshape(1)
        return x[place]

    run = manual(row, MESH, ("_ _", ""), "model _", axes=("model",))
    x = torch.randn(4, 3)
    result = gspmd.plan(run, x, torch.tensor(-2), mesh=MESH)
    assert result.simulate(x, torch.tensor(-2)).equal(x[[2, 3, 0, 1]])
    with pytest.raises(gspmd.ShardingError, match="index 4 is outside of 4 rows"):
        result.simulate(x, torch.tensor(2))
