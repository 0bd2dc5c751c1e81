"""cond and while_loop: one side is computed, as often as values say; numbers and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops import scan, while_loop
from torch.utils._python_dispatch import TorchDispatchMode

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardingError
from torchgspmd.capture import is_capturing

MESH = Mesh(data=2, model=3)
pytestmark = pytest.mark.filterwarnings("ignore")


def cond(goes, true, false, operands):
    """torch.cond, or the `if` that it stands for: torch compiles a cond in eager mode."""
    if is_capturing():
        return torch.cond(goes, true, false, operands)
    return true(*operands) if goes else false(*operands)


def while_(condition, body, carry):
    if is_capturing():
        return while_loop(condition, body, carry)
    while condition(*carry):
        carry = body(*carry)
    return carry


def scan_(body, carry, rows):
    if is_capturing():
        return scan(body, carry, rows)[0]
    for row in rows:
        carry, _ = body(carry, row)
    return carry


def chosen(x, w):
    """Operands and a weight from outside; results of two shapes."""
    y = x @ w
    a, b = cond(y.sum() > 0, lambda y: (y.sin() @ w, w * 2), lambda y: (y.cos(), w @ w), (y,))
    return (a @ b).square().sum()


def nested(x, w):
    def true(y):
        return cond(y.max() > 1, lambda y: y @ w, lambda y: y.sin(), (y,))

    return (cond(x.sum() > 0, true, lambda y: torch.ones_like(y), (x,)) * w[0]).square().sum()


def passed_on(x, w):
    return cond(x.sum() > 0, lambda y: y, lambda y: (y @ w).tanh(), (x @ w,)).square().sum()


def of_each_row(x, w):
    def body(h, row):
        h = cond(h.sum() > 0, lambda h: torch.tanh(h @ w), lambda h: h * 2 + row @ w, (h,))
        return h, h.sum(1)

    return scan_(body, x[0], x).square().sum()


def halved(x, w):
    """No iteration for small values, some for others; its backward has as many."""
    return while_(lambda y: y.square().sum() > 1, lambda y: (y @ w * 0.5,), (x @ w,))[0].sum()


def fibonacci(x, w):
    """A carry that is another one of the next iteration; the condition is of a counter."""
    body = lambda i, a, b: (i + 1, b, a @ w + b)  # noqa: E731
    _, a, b = while_(lambda i, a, b: i < 5, body, (torch.tensor(0), x, x * 2))
    return (a * b).sum()


def halved_by_sign(x, w):
    def body(y):
        return (cond(y.sum() > 0, lambda y: y @ w * 0.5, lambda y: y * 0.5, (y,)),)

    return while_(lambda y: y.square().sum() > 1, body, (x @ w,))[0].square().sum()


class Program(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run, self.weight = run, nn.Parameter(torch.randn(5, 5, dtype=torch.double) / 3)

    def forward(self, x):
        return self.run(x, self.weight)


RUNS = (chosen, nested, passed_on, of_each_row, halved, fibonacci, halved_by_sign)


@pytest.mark.parametrize("run", RUNS, ids=lambda f: f.__name__)
def test_numbers_and_gradients(run):
    """One program for values that take either side. Sizes are uneven."""
    torch.manual_seed(0)
    model, x = Program(run), torch.randn(4, 3, 5, dtype=torch.double)
    gspmd.mark_sharding(model.weight, MESH, "_ model")
    result = gspmd.plan(model, x, mesh=MESH, in_specs="_ data _", grad=True)
    for scale in (1, -1, 0.01):
        model.zero_grad()
        expected = model(x * scale)
        expected.backward()
        loss, gradients = result.simulate(x * scale)
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(gradients["weight"], model.weight.grad, rtol=1e-10, atol=1e-10)


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "einsum" in str(func)
        return func(*args, **(kwargs or {}))


def test_a_side_is_computed_if_it_is_taken():
    """Products are in the bodies, and so is the sum over model, which only one side needs."""

    def run(x, w):
        return torch.cond(x.sum() > 0, lambda x: (x @ w) @ w.T, lambda x: x + 1, (x,))

    x, w = torch.rand(4, 6), torch.randn(6, 6)
    result = gspmd.plan(run, x, w, mesh=Mesh(model=2), in_specs=("_ _", "_ model"))
    assert [c.kind for c in result.collectives] == ["all_reduce"]
    for sign, expected, count in ((1, x @ w @ w.T, 2 * 2), (-1, 1 - x, 0)):
        with Products() as products:
            value = result.simulate(sign * x, w)
        torch.testing.assert_close(value, expected)
        assert products.count == count


def test_a_predicate_is_reduced_before_the_branch():
    """Then all devices take the same side, and collectives in it meet."""

    def run(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin().sum(0), lambda x: x.sum(0), (x,))

    result = gspmd.plan(run, torch.ones(8, 4), mesh=Mesh(data=4), in_specs="data _", out_specs="_")
    first, *sides = result.collectives
    assert (first.kind, first.payload_bytes) == ("all_reduce", 4)
    assert all(c.kind == "all_reduce" and c.payload_bytes == 16 for c in sides)
    centered = torch.randn(8, 4)
    centered -= centered.mean()
    for x in (centered + 0.1, centered - 0.1):  # sums of the rows of some devices differ in sign
        torch.testing.assert_close(result.simulate(x), (x.sin() if x.sum() > 0 else x).sum(0))


def test_a_side_that_draws_draws_if_it_is_taken():
    def run(x):
        return torch.cond(x.sum() > 0, lambda x: F.dropout(x, 0.5), lambda x: x * 1, (x,))

    ones = torch.ones(64, 64)
    result = gspmd.plan(run, ones, mesh=Mesh(data=2), in_specs="data _")
    assert 0.4 < (result.simulate(ones) == 0).float().mean() < 0.6
    torch.testing.assert_close(result.simulate(-ones), -ones)


def test_a_loop_that_values_end_in_a_scan():
    """It has other numbers of iterations in each; its backward there is an error."""

    def run(x, w):
        def body(h, row):
            (h,) = while_(lambda y: y.square().sum() > 1, lambda y: (y @ w * 0.3,), (h + row,))
            return h, h.sum()

        return scan_(body, x[0], x).square().sum()

    torch.manual_seed(0)
    x, model = torch.randn(4, 3, 5, dtype=torch.double), Program(run)
    w = model.weight.detach()
    result = gspmd.plan(run, x, w, mesh=MESH, in_specs=("_ data _", "_ model"))
    torch.testing.assert_close(result.simulate(x, w), run(x, w), rtol=1e-10, atol=1e-10)
    with pytest.raises(
        ShardingError, match="the backward of a while_loop cannot run in another loop"
    ):
        gspmd.plan(model, x, mesh=MESH, grad=True)


@pytest.mark.parametrize(
    "run, message",
    (
        (
            lambda x: torch.cond(x.sum() > 0, lambda x: x, lambda x: x[0], (x,)),
            r"differ: float32\[2, 4\] and float32\[4\]",
        ),
        (
            lambda x: while_loop(lambda x: x.sum() > 0, lambda x: (F.dropout(x, 0.5),), (x,)),
            "draws random numbers",
        ),
    ),
)
def test_errors(run, message):
    with pytest.raises(ShardingError, match=message):
        gspmd.plan(run, torch.ones(2, 4), mesh=MESH)


def test_a_saved_plan(tmp_path):
    def run(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    result = gspmd.plan(run, torch.ones(4, 4), mesh=Mesh(data=2), in_specs="data _")
    result.save(tmp_path / "plan")
    loaded = gspmd.Plan.load(tmp_path / "plan")
    assert str(loaded.program) == str(result.program)
