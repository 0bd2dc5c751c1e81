"""Branches of Python on values: both sides run, as in eager PyTorch, with their gradients."""

import copy
import itertools

import pytest
import torch
from helpers import assert_same, message
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import torchgspmd as gspmd

MESH = gspmd.Mesh(data=2, model=3)
pytestmark = pytest.mark.filterwarnings("ignore")


class Layers(nn.Module):
    """Three layers, and a method with branches."""

    def __init__(self, form):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.double) for _ in range(3))
        self.form = form.__name__

    def forward(self, x):
        return getattr(self, self.form)(x)

    def assigned(self, x):
        y = self.layers[0](x)
        if y.sum() > 0 and y.isfinite().all():
            y = self.layers[1](y)
            scale = 2.0
        elif y.amax() < 3:
            scale = 3.0
        else:
            unused = "on this side"
            scale = len(unused) / 24
        return y * scale

    def continued(self, x):
        seen = ()
        for layer in self.layers:
            seen = seen + (x,)
            if not x.mean() > -0.1 or x.isnan().any():
                continue
            x = torch.tanh(layer(x)) - 0.1
        return x, seen

    def returned(self, x):
        skip = False
        if x.mean().item() < 0:
            skip = True
        if self.training:
            if skip:
                return -x
        z = self.layers[0](x)
        if z.max() > 0.5:
            return z * 2
        return z if z.sum() > 0 else z * 3

    def in_expressions(self, x):
        y = self.layers[0](x) if x.sum() > 0 else x
        return self.layers[1](y) * (2 if (y.mean() > 0).item() else 3)

    def with_super(self, x):
        if x.sum() > 0:
            x = super().__getattr__("layers")[0](x)
            self_of_side = self.layers[1]
            x = self_of_side(x)
        return x

    def in_place(self, x):
        y = self.layers[0](x)
        whole = y.view(-1)
        if y.sum() > 0:
            y[1:3] = 0
            y += self.layers[1](x)
        elif y.sum() < -5:
            y.mul_(2)
        return whole * 2

    def in_a_checkpoint(self, x):
        return checkpoint(self.assigned, x, use_reentrant=False)


FORMS = [
    Layers.returned,
    Layers.continued,
    Layers.assigned,
    Layers.in_expressions,
    Layers.with_super,
    Layers.in_place,
    Layers.in_a_checkpoint,
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_both_sides(form):
    """One plan runs for all values."""
    torch.manual_seed(1)
    model = Layers(form)
    specs = itertools.cycle(["model data", "_ model", "data _"])
    for layer in model.layers:
        gspmd.mark_sharding(layer.weight, MESH, next(specs))
    calls = [
        torch.randn(5, 6, dtype=torch.double) * s + at for s, at in ((1, 1), (0.1, -1), (3, 0))
    ]
    plan = gspmd.plan(model, calls[0], mesh=MESH, in_specs="data _", grad=True)
    for x in calls:
        got, grads = plan.simulate(x, _poison=True)
        want = model(x)
        assert_same(got, want, terms=1 << 10)
        used = [t for t in pytree.tree_leaves(want) if t.requires_grad]
        parameters = dict(model.named_parameters())
        exact = (
            torch.autograd.grad(
                sum(t.sum() for t in used), [*parameters.values()], allow_unused=True
            )
            if used
            else [None] * len(parameters)
        )
        assert all(name in grads for name, grad in zip(parameters, exact) if grad is not None)
        for name, grad in zip(parameters, exact):
            if name in grads:  # zeros, not None, where the side does not run
                want = torch.zeros_like(grads[name]) if grad is None else grad
                assert_same(grads[name], want, name, terms=1 << 10)


class Refused(Exception):
    """An exception whose constructor takes other arguments than it shows."""

    def __init__(self, *, value):
        super().__init__(f"refused {value:.3f}", value)


def raising(x):
    if x.sum() > 100:
        raise ValueError("positive")
    return x * 2


def formatting(x):
    y = x * 2
    if not (y.abs() < 100).all():
        largest = y.abs().max()
        raise Refused(value=largest)
    elif y.sum() > 0:
        y = y * 2
    return y


def asserting(x):
    assert x.isfinite().all() and x.sum() < 100, f"sum {x.sum().item()}"
    y = x.sin()
    if y.sum() < 7:
        y = y + 1
    else:
        raise KeyError("seven")
    return y


def behind_a_branch(x):
    if x.sum() > 0 and x.amax() < 50:
        return x * 2
    if x.sum() > 100:
        print("too large:", x.sum())
        raise ValueError("positive")
    print(f"mean {x.mean():.3f}")
    return x * 3


def checking(x):
    """What torchvision's detectors do with boxes without an area."""
    if x.sum() > 100:
        torch._assert(False, "positive")
    if x.isnan().any():
        torch._check_value(False, lambda: "not a number")
    return x * 2


RAISES = [raising, formatting, asserting, behind_a_branch, checking]


@pytest.mark.parametrize("program", RAISES, ids=lambda program: program.__name__)
def test_a_side_that_raises(program, capsys):
    """One plan runs for all values, and raises the same exception for the same ones."""
    torch.manual_seed(1)
    x, outcomes = torch.randn(5, 6, dtype=torch.double), []
    plan = gspmd.plan(program, x, mesh=MESH, in_specs="data model")
    for values in (x, -x, x.abs(), 100 * x.abs(), torch.full_like(x, 2), x / 0):
        error, want = None, None
        try:
            want = program(values)
        except Exception as raised:
            error = raised
        expected = capsys.readouterr().out
        if error is None:
            assert_same(plan.simulate(values, _poison=True), want, terms=1 << 10)
        else:
            with pytest.raises(type(error)) as caught:
                plan.simulate(values, _poison=True)
            first, *more = error.args  # pytest adds lines to the text of its own `assert`
            assert str(caught.value.args[1:]) == str((*more,))
            assert str(caught.value.args[0]) == str(first).partition("\nassert ")[0]
            assert "test_python_branches.py" in str(caught.value.__cause__)
        assert capsys.readouterr().out == expected
        outcomes.append(error is None)
    assert {*outcomes} == {True, False}


class Dropped(Layers):
    """transformers' layerdrop."""

    def forward(self, x):
        for layer in self.layers:
            if self.training:
                probability = torch.rand([])
                if probability < 0.5:
                    continue
            x = x + torch.tanh(layer(x))
        return x


def test_dropped_layers():
    """Each step draws the layers that it leaves out: the numbers are those of the others."""
    torch.manual_seed(0)
    model, x = Dropped(Layers.assigned), torch.randn(4, 6, dtype=torch.double)
    plan = gspmd.plan(model, x, mesh=MESH, in_specs="data _", grad=True)
    found = set()
    for seed in range(8):
        torch.manual_seed(seed)
        got, grads = plan.simulate(x, _poison=True)
        kept = [bool(grads[f"layers.{i}.weight"].any()) for i in range(3)]
        found.add(tuple(kept))
        y = x
        for layer, is_kept in zip(model.layers, kept):
            y = y + torch.tanh(layer(y)) if is_kept else y
        assert_same(got, y)
        total = y.sum() + sum(0 * p.sum() for p in model.parameters())
        exact = torch.autograd.grad(total, [*model.parameters()])
        for grad, want in zip(grads.values(), exact):
            assert_same(grad, want)
    assert len(found) > 2
    model.eval()
    assert_same(gspmd.plan(model, x, mesh=MESH).simulate(x), model(x))  # no branch


def constants(x):
    """Numbers in results are not those of the trace: torch computes with constants at once."""
    pred = x.sum() > 0
    one, other = torch.tensor(2), torch.tensor(3)
    if pred:
        number = one
    else:
        number = other
    return x * number.item()


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_of_a_side(sign):
    x = torch.full((4, 6), float(sign))
    assert_same(gspmd.plan(constants, x, mesh=MESH, in_specs="data _").simulate(x), constants(x))

    def f(x):
        results = torch.cond(
            x.sum() > 0, lambda: (torch.tensor(True),), lambda: (torch.tensor(False),)
        )
        return x * results[0].item()

    if torch.__version__ < "2.10":
        with pytest.raises(gspmd.ShardingError, match="cannot compute with a truth value"):
            gspmd.plan(f, x, mesh=MESH, in_specs="data _")
        return
    want = x * (sign > 0)
    assert_same(gspmd.plan(f, x, mesh=MESH, in_specs="data _").simulate(x), want)


class Leaving(nn.Module):
    """A side leaves tensors in attributes and buffers: by assignments, calls and in place."""

    def __init__(self, form):
        super().__init__()
        self.norm = nn.BatchNorm1d(6, dtype=torch.double)
        self.up = nn.Linear(6, 6, dtype=torch.double)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.last, self.form = torch.zeros(6, dtype=torch.double), form

    def forward(self, x):
        y = self.up(x)
        if self.form == "norm":
            if y.sum() > 0:
                y = self.norm(y)
        elif self.form == "assigned":
            if y.sum() > 0:
                self.last = y.detach().mean(0)
                self.count += 2
            else:
                self.count += 1
        elif y.sum() > 0:
            self.leave(y)
            if y.amax() > 1:
                self.leave(2 * y)
        return y * (self.last.sum() + 1)

    def leave(self, y):
        self.last = self.last + y.detach().sum(0)
        self.count.add_(y.shape[0])


@pytest.mark.parametrize("form", ["norm", "assigned", "called"])
def test_what_a_side_leaves(form):
    torch.manual_seed(1)
    eager = Leaving(form)
    model = copy.deepcopy(eager)
    gspmd.annotate(model, MESH, {"up.weight": "model _"})
    x = torch.randn(5, 6, dtype=torch.double)
    plan = gspmd.plan(model, x, mesh=MESH, in_specs="data _", grad=True)
    taken = set()
    for values in (x, -x, x.abs(), 3 * x, -x.abs()):
        model.load_state_dict(eager.state_dict())
        if form != "norm":
            model.last = eager.last.clone()
        count = int(eager.count)
        got, grads = plan.simulate(values, _poison=True)
        want = eager(values)
        assert_same(got, want, terms=1 << 10)
        want.sum().backward()
        assert_same(grads["up.weight"], eager.up.weight.grad, terms=1 << 10)
        eager.zero_grad()
        assert_same(model.last, eager.last, terms=1 << 10)
        for (name, buffer), exact in zip(model.named_buffers(), eager.buffers()):
            assert_same(buffer, exact, name, terms=1 << 10)
        taken.add(int(eager.count) - count + int(eager.norm.num_batches_tracked) % 2)
    assert len(taken) > 1


seen = []


def in_place(x):
    y = x * 2
    if y.sum() > 0:
        (y,)[0].add_(1)
    return y


def in_a_table(x):
    table = {}
    if x.sum() > 0:
        table["x"] = x
    return x


def appending(x):
    if x.sum() > 0:
        seen.append(x)
    return x


def caught(x):
    try:
        if x.sum() > 0:
            raise ValueError("positive")
    except ValueError:
        x = -x
    return x


def of_two_shapes(x):
    y = x[:2] if x.sum() > 0 else x
    return y * 2


def of_an_object(x):
    box = Box()
    if x.sum() > 0:
        box.value = x
    return x


class Numbered(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            self.seen = 1
        return x

    seen = 0


class Box:
    value = None


@pytest.mark.parametrize(
    "program", [in_place, in_a_table, of_an_object, Numbered(), appending, caught, of_two_shapes]
)
def test_effects_and_other_shapes_are_errors(program):
    text = message(lambda: gspmd.plan(program, torch.randn(4, 6), mesh=MESH))
    assert text.startswith("the program depends on values: ") and not seen
    assert "test_python_branches.py" in text and "  fix   " in text


@pytest.mark.parametrize("equation", ["i,j->ij", "bi,ij->bij"])
def test_products_of_elements_promote(equation):
    """An einsum that sums nothing multiplies elements: of two dtypes, and without autocast."""
    shapes = {"i,j->ij": ((5,), (6,)), "bi,ij->bij": ((4, 5), (5, 6))}[equation]
    whole, x = torch.arange(100)[: shapes[0][-1]].expand(shapes[0]), torch.randn(shapes[1])

    def f(whole, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = torch.einsum(equation, whole.float(), x)
        return torch.einsum(equation, whole, x), cast

    plan = gspmd.plan(f, whole, x, mesh=MESH, in_specs=(None, "model" + " _" * (x.dim() - 1)))
    assert_same(plan.simulate(whole, x, _poison=True), f(whole, x))
