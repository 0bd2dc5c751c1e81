"""What changes after a call: each entry of the list of dependencies, and eager PyTorch beside it.

A change is drawn for each row of dependencies.py, after one call and after three, in train and eval
mode, by parallelize, train_step, a plan that was loaded, and one from the cache of plans. The truth
is the plain model with the same change.
"""

import contextlib
import re
import sys
import types
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as of_all

import torchgspmd as gspmd
from torchgspmd.capture.state.dependencies import CALL, DEPENDENCIES, GUARDS, START, TABLES
from torchgspmd.capture.state.run_guards import ModuleFacts
from torchgspmd.compiler.plan_cache import files
from torchgspmd.errors import ShardingError
from torchgspmd.runtime.sharded_module import ShardedModule

FACTOR = 2.0


def helper(x, by=1.5):
    return x * by


def halved(x, by=0.5):
    return x * by


def made(factor):
    def scaled(self, x):
        return x * factor

    return scaled


class Options:
    def weight(self, x):
        return x * 1.25


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 * ctx.saved_tensors[0]


class Inner(nn.Module):
    rate = 0.75

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.full((4,), 0.5))

    @property
    def ratio(self):
        return 1.5

    @classmethod
    def bias(cls):
        return 0.125

    @staticmethod
    def fixed(x):
        return x + 0.0625

    def scaled(self, x):
        return x * self.rate

    def forward(self, x):
        y = self.linear(x) * self.ratio + self.bias() + self.shift
        return self.fixed(self.scaled(y)) * (2.0 if self.training else 1.0)


class Other(Inner):
    def forward(self, x):
        return super().forward(x) * 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.second.weight = self.third.weight = self.first.weight
        self.inner, self.last, self.act = Inner(), nn.Linear(4, 4), nn.Tanh()
        self.options, self.scale, self.table = Options(), 1.0, {"a": [1.0]}
        self.register_buffer("one", torch.ones(4))
        self.other = nn.Module()
        self.other.register_buffer("one", self.one)

    def body(self, x):
        y = self.third(self.act(self.second(F.gelu(self.first(x)))))
        y = helper(self.inner(y)) * FACTOR * self.scale * self.table["a"][0]
        return self.options.weight(Squared.apply(y)) * self.other.one + self.one

    def forward(self, x, by=1.0):
        return (self.last(self.body(x)) * by).square().mean()


class Looking(Net):
    def forward(self, x, by=1.0):
        loss = super().forward(x, by)
        return loss * 2 if self.one.sum() > 4.5 else loss


def parameter(of):
    return nn.Parameter(of.detach().clone())


def untie(m):
    m.second.weight = parameter(m.first.weight)


def tie_in_another_way(m):
    # first = second, third alone; then first alone, second = third
    m.first.weight = parameter(m.first.weight)


def tie_again(m):
    m.second.weight = m.first.weight


def tie_to_another(m):
    m.last.weight = m.inner.linear.weight


def untie_buffer(m):
    m.other.one = m.one.detach().clone()


def tie_buffers(m):
    m.inner.shift = m.one


def swap(m):
    m.first, m.last = m.last, m.first


def set_on(owner, name, value):
    return lambda m: setattr(owner, name, value)


def remove(m):
    m.handle.remove()


def hook(kind, function, of=lambda m: m.inner, **flags):
    """Return a change that registers a hook, and one that removes it."""

    def add(m):
        vars(m)["handle"] = getattr(of(m), f"register_{kind}")(function, **flags)

    return add


def hook_on_all(kind, function):
    def add(m):
        if "all" not in HANDLES:
            HANDLES["all"] = getattr(of_all, f"register_module_{kind}")(function)

    return add


HANDLES: dict = {}


def twice(m, *values):
    """Double what a hook of any kind may replace: the last of its arguments."""
    return tuple(v if v is None else v * 2 for v in values[-1])


def doubled_output(m, args, y):
    return y * 2


def with_kwargs(m, args, kwargs, *y):
    return y[0] * 2 if y else (tuple(a * 2 for a in args), kwargs)


def doubled_inputs(m, grads, _):
    return tuple(g if g is None else g * 2 for g in grads)


def own_forward(m):
    before = m.forward
    m.forward = lambda x, by=1.0: before(x, by) * 3


def forward_of_submodule(m):
    m.inner.forward = types.MethodType(lambda self, x: self.linear(x), m.inner)


def code_of_helper(m):
    helper.__code__ = halved.__code__


def defaults_of_helper(m):
    helper.__defaults__ = (0.25,)


def globally(name, value):
    return lambda m: globals().__setitem__(name, value)


def no_hooks(m):
    m.inner._forward_hooks = OrderedDict()


def linear_forward(self, x):
    return F.linear(x, self.weight, self.bias) * 2


def add_override(m):
    nn.Tanh.extra = None  # an entry that nothing reads
    Other.scaled = made(7.0)
    m.inner.__class__ = Other


HOOK = hook("forward_hook", doubled_output)
BACKWARD_HOOK = hook("full_backward_hook", doubled_inputs)
# Row -> (before the first call, after it)
CHANGES = {
    "submodules": [
        (None, swap),
        (None, lambda m: setattr(m, "act", nn.ReLU())),
        (None, lambda m: setattr(m, "second", m.first)),
        (None, lambda m: setattr(m, "act", m.inner)),
    ],
    "classes": [(None, lambda m: setattr(m.inner, "__class__", Other)), (None, add_override)],
    "kinds of tensors": [(None, lambda m: m.double()), (lambda m: m.double(), lambda m: m.float())],
    "shared tensors": [
        (None, untie),
        (None, tie_in_another_way),
        (untie, tie_again),
        (untie, lambda m: (tie_again(m), setattr(m.third, "weight", parameter(m.third.weight)))),
        (tie_in_another_way, tie_again),
        (None, tie_to_another),
        (None, untie_buffer),
        (untie_buffer, tie_buffers),
        (None, tie_buffers),
    ],
    "forward hooks": [
        (None, HOOK),
        (HOOK, remove),
        (HOOK, no_hooks),
        (None, hook("forward_hook", with_kwargs, with_kwargs=True)),
        (None, hook("forward_hook", doubled_output, always_call=True)),
        (None, hook("forward_hook", doubled_output, lambda m: m.act)),
    ],
    "forward pre hooks": [
        (None, hook("forward_pre_hook", twice)),
        (hook("forward_pre_hook", twice), remove),
        (None, hook("forward_pre_hook", with_kwargs, with_kwargs=True)),
        (None, hook("forward_pre_hook", twice, lambda m: m.last)),
    ],
    "backward hooks": [
        (None, BACKWARD_HOOK),
        (BACKWARD_HOOK, remove),
        (None, hook("full_backward_hook", doubled_inputs, lambda m: m.last)),
    ],
    "backward pre hooks": [
        (None, hook("full_backward_pre_hook", twice)),
        (hook("full_backward_pre_hook", twice), remove),
    ],
    "hooks of all modules": [
        (None, hook_on_all("forward_hook", lambda m, a, y: y * 1.5)),
        (None, hook_on_all("forward_pre_hook", twice)),
        (None, hook_on_all("full_backward_hook", doubled_inputs)),
        (None, hook_on_all("full_backward_pre_hook", twice)),
        (hook_on_all("forward_hook", lambda m, a, y: y * 1.5), lambda m: HANDLES["all"].remove()),
    ],
    "modes": [
        (None, lambda m: m.inner.train(not m.inner.training)),
        (lambda m: m.inner.eval(), lambda m: m.inner.train()),
    ],
    "trained tensors": [
        (None, lambda m: m.inner.linear.weight.requires_grad_(False)),
        (lambda m: m.last.bias.requires_grad_(False), lambda m: m.last.bias.requires_grad_()),
    ],
    "methods": [
        (None, set_on(Inner, "scaled", lambda self, x: x * 3)),
        (None, set_on(Inner, "scaled", made(5.0))),
        (set_on(Inner, "scaled", made(5.0)), set_on(Inner, "scaled", made(6.0))),
        (None, set_on(Inner, "ratio", property(lambda self: 4.0))),
        (None, set_on(Inner, "bias", classmethod(lambda cls: 2.0))),
        (None, set_on(Inner, "fixed", staticmethod(lambda x: x * 5))),
        (None, set_on(Inner, "forward", lambda self, x: self.linear(x))),
        (None, set_on(Net, "forward", lambda self, x, by=1.0: self.body(x).square().mean())),
        (None, set_on(Net, "body", lambda self, x: self.last(x))),
        (None, set_on(nn.Linear, "forward", linear_forward)),
        (None, set_on(nn.Tanh, "forward", lambda self, x: x * 2)),
        (None, set_on(Options, "weight", lambda self, x: x * 9)),
        (None, set_on(Squared, "backward", staticmethod(lambda ctx, grad: grad * 5))),
        (None, own_forward),
        (None, forward_of_submodule),
    ],
    "functions": [
        (None, globally("helper", halved)),
        (None, code_of_helper),
        (None, defaults_of_helper),
        (None, set_on(F, "gelu", lambda x: x * 2)),
        (None, set_on(F, "linear", lambda x, w, b=None: x @ w.t() * 2)),
    ],
    "attributes and variables": [
        (None, lambda m: setattr(m, "scale", 3.0)),
        (None, lambda m: m.table["a"].__setitem__(0, 4.0)),
        (None, globally("FACTOR", 5.0)),
        (None, set_on(Inner, "rate", 6.0)),
    ],
    "buffer values": [(None, lambda m: m.one.data.fill_(2.0))],
    "arguments": [(None, lambda m: vars(m).__setitem__("by", 3.0))],
    "torch's modes": [(None, lambda m: vars(m).__setitem__("autocast", True))],
}
DRAWN = [
    pytest.param(Looking if row == "buffer values" else Net, first, later, id=f"{row}-{i}")
    for row, changes in CHANGES.items()
    for i, (first, later) in enumerate(changes)
]
OWNERS = (Inner, Net, Other, Options, Squared, nn.Linear, nn.Tanh, F)


@pytest.fixture(autouse=True)
def as_before(tmp_path, monkeypatch):
    """Undo all changes of classes, functions and variables."""
    monkeypatch.setenv("TORCHGSPMD_CACHE", str(tmp_path / "plans"))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    before = [dict(vars(owner)) for owner in OWNERS]
    variables, code, defaults = dict(globals()), helper.__code__, helper.__defaults__
    function = helper
    HANDLES.clear()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    for handle in HANDLES.values():
        handle.remove()
    of_all._global_is_full_backward_hook = None
    function.__code__, function.__defaults__ = code, defaults
    globals().update(variables)
    for owner, table in zip(OWNERS, before):
        for name in {*vars(owner)} - {*table}:
            delattr(owner, name)
        for name, value in table.items():
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)


def apply(change, *models):
    for model in models:
        if change is not None:
            change(model)


def full(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def call(m, model=None):
    """Return the loss of a model, or of the training step around it; with its gradients."""
    model = model if model is not None else m
    dtype = next(model.parameters()).dtype
    x = torch.linspace(-1, 1, 24, dtype=dtype).view(6, 4)
    precise = torch.autocast("cpu", torch.bfloat16, enabled="autocast" in vars(model))
    with precise:
        return m(x, vars(model).get("by", 1.0))


def gradients(model):
    """Return all gradients by name. Of a name without a gradient it is None."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: None if p.grad is None else full(p.grad) for name, p in named}


def assert_alike(mine, theirs):
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert (value is None) == (mine[name] is None), name
        if value is not None:
            assert mine[name].dtype == value.dtype
            narrow = value.dtype.itemsize < 8
            # Sums of 6 rows, through five layers.
            close = dict(rtol=1e-4, atol=1e-5) if narrow else dict(rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(mine[name], value, **close)


def compare(plain, ours, backward=True):
    """Run both, and compare loss and gradients."""
    losses = []
    for model in (plain, ours):
        model.zero_grad()
        losses.append(call(model))
        if backward:
            losses[-1].backward()
    precise = "autocast" not in vars(plain)
    close = dict(rtol=1e-5, atol=1e-6) if precise else dict(rtol=0.02, atol=0.02)
    torch.testing.assert_close(losses[1].detach(), losses[0].detach(), **close)
    if precise:
        assert_alike(gradients(ours), gradients(plain))


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("net, first, later", DRAWN)
def test_parallelize(net, first, later, mode, calls):
    plain, ours = net().train(mode == "train"), net().train(mode == "train")
    ours = gspmd.parallelize(ours, gspmd.Mesh(data=1), in_specs="auto")
    apply(first, plain, ours)
    for _ in range(calls):
        compare(plain, ours)
    apply(later, plain, ours)
    for _ in range(2):
        compare(plain, ours)
    # and back, where there is a way
    if later in (HOOK, BACKWARD_HOOK):
        apply(remove, plain, ours)
        compare(plain, ours)


@pytest.mark.parametrize("net, first, later", DRAWN)
def test_cache_of_plans(net, first, later):
    """A plan of another start is not taken for a program that has changed, before or after it."""
    earlier = gspmd.parallelize(net(), gspmd.Mesh(data=1), in_specs="auto")
    apply(first, earlier)
    call(earlier).backward()
    handles = {k: h for k, h in HANDLES.items()}
    for change in (later, None):
        HANDLES.update(handles)
        plain, ours = net(), net()
        ours = gspmd.parallelize(ours, gspmd.Mesh(data=1), in_specs="auto")
        apply(first, plain, ours)
        apply(change, plain, ours)
        compare(plain, ours)
        apply(None if change else later, plain, ours)
        compare(plain, ours)


def test_the_cache_has_the_model(monkeypatch):
    """Without a change the second start plans nothing, so the test above sees the cache."""
    planned, plan_here = [], ShardedModule._plan_here
    monkeypatch.setattr(
        ShardedModule, "_plan_here", lambda *args: planned.append(1) or plan_here(*args)
    )
    for change in (None, None, tie_to_another):
        ours = gspmd.parallelize(Net(), gspmd.Mesh(data=1), in_specs="auto")
        apply(change, ours)
        call(ours).backward()
        assert len(planned) == (1 if change is None else 2)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("net, first, later", DRAWN)
def test_train_step(net, first, later, mode):
    models = [net().train(mode == "train") for _ in range(2)]
    apply(first, *models)
    steps = [
        gspmd.train_step(m, torch.optim.SGD(m.parameters(), 0.01), lambda m, *a: m(*a))
        for m in models
    ]
    steps[1] = gspmd.parallelize(steps[1], gspmd.Mesh(data=1), in_specs="auto")
    for change in (None, later):
        for m, step in zip(models, steps):
            apply(change, m if step is steps[0] else step.model)
        try:
            expected = call(steps[0], models[0])
        except Exception:  # the optimizer has no such weight: then ours raises too
            with pytest.raises(Exception):  # noqa: B017, PT011
                call(steps[1], steps[1].model)
            return
        close = dict(rtol=0.02, atol=0.02) if "autocast" in vars(models[0]) else {}
        torch.testing.assert_close(call(steps[1], steps[1].model), expected, **close)
        if not close:
            weights = [dict(m.named_parameters(remove_duplicate=False)) for m in models]
            assert_alike({n: full(p).detach() for n, p in weights[1].items()}, weights[0])


@pytest.mark.parametrize("net, first, later", DRAWN)
def test_loaded_plan(net, first, later, tmp_path):
    """A plan of a file refuses to run for a program that has changed, or is right."""
    model, x = net(), torch.linspace(-1, 1, 24).view(6, 4)
    apply(first, model)
    x = x.to(next(model.parameters()).dtype)
    path = tmp_path / "plan.json"
    with contextlib.suppress(ShardingError):
        gspmd.plan(model, x, 1.0, mesh=gspmd.Mesh(data=2), in_specs=("data _", None)).save(path)
    for load_first in (True, False):
        if not path.exists():
            return
        plan = None
        if load_first:
            plan = gspmd.Plan.load(path, model)
            with contextlib.suppress(ShardingError):
                torch.testing.assert_close(plan.simulate(x, 1.0), model(x))
        if load_first or "all" not in HANDLES:
            apply(later if load_first else None, model)
        try:
            plan = plan or gspmd.Plan.load(path, model)
            result = plan.simulate(x.to(next(model.parameters()).dtype), vars(model).get("by", 1.0))
        except ShardingError as error:
            assert re.search(r"plan it again|make it a tensor|plan\(\)", str(error)), error
            continue
        if "autocast" not in vars(model):
            torch.testing.assert_close(result, call(model), check_dtype=False)


def test_each_row_has_a_change():
    """A new row of the list comes with a change here."""
    rows = {row.name for row in DEPENDENCIES if row.compared in (CALL, TABLES, GUARDS)}
    assert rows == CHANGES.keys()


def test_the_list_is_read_by_all():
    """Guards of a call, of a simulated plan and the key of the cache have the rows of the list."""
    model = Net()
    facts = [row.facts for row in DEPENDENCIES if row.facts is not None]
    names = [name for row in facts for name, _ in row(model)]
    assert len(set(names)) == len(names)
    of_file = {name for row in DEPENDENCIES if row.compared == START for name, _ in rows_of(row)}
    assert set(ModuleFacts(model).then) == {*names} - of_file
    modules = {id(m): name for name, m in model.named_modules()}
    assert [name for name, _ in files._description(model, modules)] == names


def rows_of(row):
    return row.facts(Net()) if row.facts is not None else ()


def test_design_has_the_list():
    page = (Path(__file__).parents[3] / "docs/design.md").read_text()
    rows = re.findall(r"^\| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", page, re.MULTILINE)
    listed = [row for row in rows if row[2] in (CALL, TABLES, GUARDS, START)]
    assert listed == [(row.name, row.meaning, row.compared) for row in DEPENDENCIES]
