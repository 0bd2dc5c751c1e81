"""Values with sizes that depend on values: they are sharded along their other dimensions, and
operations that pad, shift or resample them run.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, message
from torch.nn.utils.rnn import pad_sequence

import torchgspmd as gspmd

if torch.__version__ < "2.10":
    pytest.skip("torch 2.9 cannot trace slices by numbers", allow_module_level=True)

MESH = gspmd.Mesh(a=2, m=2)
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.double)
LENGTHS = torch.tensor([1, 3, 2])
W = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.double)
GROUPS = torch.tensor([0, 1, 1, 2, 3, 3])


def rows(x, n):
    """The first rows, as many as a number of lengths says, as columns of a batch of one."""
    return x[None, :, : n[1].item()]


# each with the dimension of x that is never whole
PROGRAMS = {
    "split": (1, lambda x, n: torch.cat([c.softmax(0) for c in x.split(n.tolist())])),
    "pieces of a size": (1, lambda x, n: x.split(n.tolist())[1] * x.split(n.tolist())[1]),
    "pad": (1, lambda x, n: F.pad(x, (0, 0, 0, n.max().item()), value=2.0).sum(0)),
    "pad and cut": (0, lambda x, n: F.pad(rows(x, n), (-1, 2)).cos()),
    "reflect": (0, lambda x, n: F.pad(rows(x, n), (1, 1), mode="reflect").cos()),
    "replicate": (0, lambda x, n: F.pad(rows(x, n), (2, 1), mode="replicate").cos()),
    "circular": (0, lambda x, n: F.pad(rows(x, n), (2, 1), mode="circular").cos()),
    "pad_sequence": (1, lambda x, n: pad_sequence(x.split(n.tolist()), padding_side="left")),
    "diff": (1, lambda x, n: x[: n[1].item()].diff(dim=0)),
    "diff twice": (1, lambda x, n: x[: n[1].item()].diff(2, 0, prepend=x[4:])),
    "roll": (1, lambda x, n: x[: n[1].item()].roll(1, 0)),
    "roll by a number": (1, lambda x, n: x.roll(n[1].item(), 0)),
    "repeat": (1, lambda x, n: x.repeat(int(n[1]), 1)),
    "nearest": (0, lambda x, n: F.interpolate(rows(x, n), scale_factor=2)),
    "to a size": (0, lambda x, n: F.interpolate(x[None], size=n[1].item(), mode="nearest-exact")),
    "linear": (0, lambda x, n: F.interpolate(rows(x, n), size=5, mode="linear")),
    "corners": (0, lambda x, n: F.interpolate(rows(x, n), 5, mode="linear", align_corners=True)),
    "bicubic": (
        None,
        lambda x, n: F.interpolate(x[None, None, : n[1].item()], size=(5, 3), mode="bicubic"),
    ),
    "by a number": (1, lambda x, n: F.interpolate(x.T[None], scale_factor=n[1].item())),
    "by a fraction": (
        1,
        lambda x, n: F.interpolate(x.T[None], None, (n[1].item() + 0.1) / 4, mode="linear"),
    ),
    "by a fraction, in two dimensions": (
        None,
        lambda x, n: F.interpolate(
            x[None, None], None, ((n[1].item() + 0.1) / 4, 1.5), mode="bilinear"
        ),
    ),
    "area": (0, lambda x, n: F.interpolate(rows(x, n), size=2, mode="area")),
    "average pool": (0, lambda x, n: F.avg_pool1d(rows(x, n), 2)),
    "maximum pool": (0, lambda x, n: F.max_pool1d(rows(x, n), 2, 1, padding=1)),
    "adaptive average": (0, lambda x, n: F.adaptive_avg_pool1d(rows(x, n), 2)),
    "adaptive maximum": (0, lambda x, n: F.adaptive_max_pool1d(rows(x, n), 2)),
    "mean": (1, lambda x, n: x[: n[1]].mean(0)),
    "sum by groups": (
        1,
        lambda x, n: x.new_zeros(int(GROUPS.max()) + 1, 4).index_add(0, GROUPS, x),
    ),
    "a branch on an empty one": (1, lambda x, n: x[: n[1]] if len(x[: n[1]]) else x),
    "product": (None, lambda x, n: (x[: n[1]] @ W).relu() @ W),
    "norm": (None, lambda x, n: F.layer_norm(x[: n[1]], (4,))),
    "view": (None, lambda x, n: (x[: n[1]] * 2).reshape(n[1] * 2, 2).T @ x.new_ones(n[1] * 2, 3)),
}


def with_gradient(f):
    def run(x, n):
        y = f(x, n)
        return y, torch.autograd.grad(y.square().sum(), x)

    return run


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_and_gradients(name):
    _, f = PROGRAMS[name]
    f, x = with_gradient(f), X.clone().requires_grad_()
    for spec in ("a m", "_ m+a"):
        plan = gspmd.plan(f, x, LENGTHS, mesh=MESH, in_specs=(spec, None))
        for lengths in (LENGTHS, torch.tensor([1, 2, 3])):
            assert_same(plan.simulate(x, lengths, _poison=True), f(x, lengths), name)


@pytest.mark.parametrize("name", [name for name, (dim, _) in PROGRAMS.items() if dim is not None])
def test_dimensions_of_a_known_size_stay_sharded(name):
    dim, f = PROGRAMS[name]
    x, spec = X.clone().requires_grad_(), ("m _", "_ m")[dim]
    plan = gspmd.plan(with_gradient(f), x, LENGTHS, mesh=MESH, in_specs=(spec, None))
    gathered = [c for c in plan.collectives if c.payload_bytes > 8]  # but for a sum of squares
    assert not gathered and not plan.replicated_ops


def test_a_product_with_a_sharded_weight_sends_its_result():
    def f(x, n, v, w):
        return (x[: n[1]] @ v).relu() @ w

    specs = (None, None, "_ m", "m _")
    args = X, LENGTHS, torch.randn(4, 4096).double(), torch.randn(4096, 4).double()
    plan = gspmd.plan(f, *args, mesh=MESH, in_specs=specs, out_specs="_ _")
    assert [c.kind for c in plan.collectives] == ["all_reduce"]
    assert_same(plan.simulate(*args), f(*args))
    assert "f64[u" in plan.text(full=True) and ", 4096@" in plan.text(full=True)


LOOKUPS = {
    "rows of a table": lambda x, n, v: F.embedding(GROUPS[GROUPS > n[0]], v).cos(),
    "indexed rows": lambda x, n, v: v[GROUPS[GROUPS > n[0]]].cos(),
    "added rows": lambda x, n, v: v.index_add(0, GROUPS[GROUPS > n[0]], x[GROUPS > n[0]]).cos(),
    "written rows": lambda x, n, v: v.index_put((GROUPS[GROUPS > n[0]],), x[0]).cos(),
    "channels": lambda x, n, v: F.conv1d(rows(x, n)[:, :4], v[..., None]).cos(),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_tables_stay_sharded(name):
    """Their rows are of a known number; how many of them are looked up, only a run knows."""

    def f(x, n, v):
        y = LOOKUPS[name](x, n, v)
        return y, torch.autograd.grad(y.square().sum(), v)

    table = torch.randn(4096, 4, dtype=torch.double, requires_grad=True)
    plan = gspmd.plan(f, X, LENGTHS, table, mesh=MESH, in_specs=(None, None, "m _"))
    for lengths in (LENGTHS, torch.tensor([0, 2, 3])):
        assert_same(plan.simulate(X, lengths, table, _poison=True), f(X, lengths, table), name)
    assert "%v" not in [f"%{r.value}" for r in plan.replicated_ops]


def test_a_branch_on_a_size_with_two_outcomes_for_many_rows():
    branch = message(lambda: gspmd.plan(lambda x: x if len(x[x > 0]) > 7 else -x, X, mesh=MESH))
    assert branch.startswith("the program depends on values: an `if` or a loop needs numbers")


def test_smoothed_rows_by_a_number_that_only_a_run_knows():
    def f(x, n):
        by = (n[1].item() + 0.1) / 4
        return F.interpolate(x[None, None], None, (by, 1.5), mode="bilinear", antialias=True)

    assert message(lambda: gspmd.plan(f, X, LENGTHS.double(), mesh=MESH)).startswith(
        "F.interpolate(antialias=True) scales by a number that depends on values\n  where test_"
    )


def test_as_many_tensors_as_values_say():
    def f(x, n):
        return torch.cat([y.softmax(0) for y in x.split(n[n > 0].long().tolist())])

    assert message(lambda: gspmd.plan(f, X, LENGTHS.double(), mesh=MESH)).startswith(
        "the program makes a list of as many numbers as values say\n  where test_unknown_sizes.py"
    )

    def of_lists(x, n):
        return f(x, torch.tensor(n))

    plan = gspmd.plan(of_lists, X, [1, 3, 2], mesh=MESH)
    assert_same(plan.simulate(X, [1, 3, 2]), f(X, LENGTHS))
    plan = gspmd.plan(f, X, LENGTHS, mesh=MESH)  # whole numbers of an argument
    assert_same(plan.simulate(X, LENGTHS), f(X, LENGTHS))


def test_marks_of_a_dimension_of_unknown_size():
    def f(x):
        return gspmd.mark_sharding(x[x[:, 0] > 0], MESH, "m _") * 2

    assert message(lambda: gspmd.plan(f, X, mesh=MESH)).startswith(
        "dimension 0 of a value with layout 'm _' has a size that depends on values"
    )


@pytest.mark.parametrize("count", [15, 16, 40])
def test_no_number_of_sizes_makes_one_a_constant(count):
    """Two numbers stand for a size, from two rows of primes. The second row begins in the first."""

    def program(x, w):
        out = torch.zeros(6, dtype=torch.double)
        for i in range(count):
            places = (x[i] > 0).nonzero().view(1, -1)
            out = out + (places == torch.arange(6)[:, None]).sum(1) * w[i]
        return out

    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    w = x.sum(1)
    plan = gspmd.plan(program, x, w, mesh=gspmd.Mesh(a=2), in_specs=("_ a", "_"))
    for each in (x, -x):
        assert_same(plan.simulate(each, w), program(each, w), "counts", terms=8 * count)
