"""A plan is run with other values than it was made with: the new result or an error, not the old.

Each case is a program, what is changed after planning, and the arguments of the run. The truth is
the program itself, in eager PyTorch, at that time.
"""

import functools
import random
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import torchgspmd as gspmd
from torchgspmd.capture.state.value_keys import difference, value_key
from torchgspmd.errors import ShardingError

MESH = gspmd.Mesh(data=2)
X = torch.arange(1.0, 17.0).view(4, 4)
SCALE, TABLE, ARRAY, TEXT, TENSOR = 2.0, {"scale": [2.0]}, np.full(2000, 2.0), "neg", torch.ones(4)


class Color(Enum):
    RED, BLUE = 1, 2


@dataclass
class Options:
    scale: float = 2.0
    parts: list = field(default_factory=lambda: [1.0, {"a": 2.0}])


class Slots:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale


class Around:
    """An object that contains itself."""

    def __init__(self, scale):
        self.scale, self.inner = scale, {"self": self}


def scaled_by(scale):
    return lambda x: x * scale


def nested(value):
    return {"a": [1, (value, "b")]}


ONE = np.full(3000, 1.0)
OTHER = ONE.copy()
OTHER[1500] += 1e-12


def number(s):
    """Return a number that follows from a value of any of these types."""
    if isinstance(s, (str, torch.dtype, Enum, type(None), bytes, range, torch.device)):
        return float(sum(map(ord, str(s))))
    if isinstance(s, dict):
        return sum(map(number, s.values()))
    if isinstance(s, (list, tuple)):
        return sum(map(number, s))
    if isinstance(s, (set, frozenset)):
        return float(sum(s))
    if isinstance(s, np.ndarray):
        return number(s.tolist())
    if callable(s):
        return float(s(3.0))
    if isinstance(s, (Options, Slots, Around)):
        return s.scale + (number(s.parts) if isinstance(s, Options) else 0)
    return float(s)


VALUES = {
    "float": (2.0, 3.0),
    "nearly equal": (2.0, 2.0 + 1e-12),
    "int": (2, 3),
    "int and float": (2, 2.0),
    "flag": (False, True),
    "flag and int": (True, 1),
    "none": (None, 1.0),
    "complex part": (complex(1, 0).real, complex(2, 0).real),
    "text": ("a", "b"),
    "bytes": (b"a", b"b"),
    "range": (range(3), range(4)),
    "dtype": (torch.float32, torch.float64),
    "device": (torch.device("cpu"), torch.device("meta")),
    "enum": (Color.RED, Color.BLUE),
    "array": (np.ones(1), np.full(1, 5.0)),
    "large array": (ONE, OTHER),
    "array of another type": (np.ones(3, np.float32), np.full(3, 1.0)),
    "array of another shape": (np.ones(4), np.ones((2, 2))),
    "array of objects": (np.array([1, "a"], object), np.array([1, "b"], object)),
    "number of NumPy": (np.float32(1.5), np.float32(2.5)),
    "list": ([1, 2], [1, 3]),
    "longer list": ([1, 2], [1, 2, 3]),
    "long list": ([0.0] * 3000, [0.0] * 2999 + [1.0]),
    "tuple": ((1, 2), (1, 3)),
    "dict": ({"a": 1}, {"a": 2}),
    "key": ({"a": 1}, {"b": 1}),
    "set": ({1, 2}, {1, 3}),
    "nested": (nested(1.0), nested(2.0)),
    "array in a list": ([np.ones(2)], [np.full(2, 3.0)]),
    "object": (Options(2.0), Options(3.0)),
    "deep object": (Options(parts=[1.0, {"a": 2.0}]), Options(parts=[1.0, {"a": 3.0}])),
    "slots": (Slots(2.0), Slots(3.0)),
    "around": (Around(2.0), Around(3.0)),
    "function": (scaled_by(2.0), scaled_by(3.0)),
    "partial": (functools.partial(max, 5.0), functools.partial(max, 7.0)),
    "method": (Around(2.0).scale.__add__, Around(3.0).scale.__add__),
}


def kept(x, s):
    return x + number(s) if s is not None else x


def checked(run, expected, *names):
    """Return whether a run gives the expected result; an error has to name what changed."""
    try:
        got = run()
    except ShardingError as error:
        text = str(error)
        assert all(name in text for name in names), text
        assert "when this was planned" in text and "plan it again" in text, text
        return False
    torch.testing.assert_close(got, expected)
    return True


# A NumPy array is no argument: test_errors.py has its message.
ARGUMENTS = [name for name, (value, _) in VALUES.items() if "array" not in name]


@pytest.mark.parametrize("how", ("positional", "keyword"))
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name, how):
    first, second = VALUES[name]
    calls = [((X, s), {}) if how == "positional" else ((X,), {"s": s}) for s in (first, second)]
    (args, kwargs), other = calls
    plan = gspmd.plan(kept, *args, mesh=MESH, in_specs={"x": "data _"}, **kwargs)
    torch.testing.assert_close(plan.simulate(*args, **kwargs), kept(X, first))
    run = lambda: plan.simulate(*other[0], **other[1])  # noqa: E731
    try:
        run()
    except ShardingError as error:
        assert "argument 's" in str(error) or "another structure" in str(error), error
    else:
        torch.testing.assert_close(run(), kept(X, second))
    torch.testing.assert_close(plan.simulate(*args, **kwargs), kept(X, first))


@pytest.mark.parametrize("change", ("list", "dict", "object", "slots", "nested"))
def test_arguments_that_are_changed_in_place(change):
    value, step = {
        "list": ([1.0, 2.0], lambda v: v.__setitem__(1, 5.0)),
        "dict": ({"a": [1.0]}, lambda v: v["a"].__setitem__(0, 5.0)),
        "object": (Options(), lambda v: v.parts[1].__setitem__("a", 5.0)),
        "slots": (Slots(2.0), lambda v: setattr(v, "scale", 5.0)),
        "nested": (nested([1.0] * 3), lambda v: v["a"][1][0].__setitem__(0, 5.0)),
    }[change]
    plan = gspmd.plan(kept, X, value, mesh=MESH, in_specs=("data _", None))
    torch.testing.assert_close(plan.simulate(X, value), kept(X, value))
    step(value)
    checked(lambda: plan.simulate(X, value), kept(X, value), "argument 's")


def with_defaults(x, s=2.0, *, t=[1.0]):  # noqa: B006
    return x * s + t[0]


def reads_globals(x):
    y = x * SCALE + TABLE["scale"][0] + float(ARRAY[1500])
    return -y if TEXT == "neg" else y


def adds_tensor(x):
    return x + TENSOR


def calls_helper(x):
    return helper(x)


def helper(x):
    return x * 2


def set_global(name, value):
    return lambda: globals().__setitem__(name, value)


def closure(kind):
    """Return a function of a closure, and what changes the closure."""
    scale, options, array = 2.0, Options(), np.full(2000, 2.0)
    tensor, model = torch.full((4,), 2.0), nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4)).eval()

    def change():
        nonlocal scale, tensor
        if kind == "cell":
            scale = 3.0
        elif kind == "object":
            options.parts[1]["a"] = 5.0
        elif kind == "array":
            array[1500] = 7.0
        elif kind == "tensor":
            tensor = torch.full((4,), 3.0)
        elif kind == "tensor in place":
            tensor.fill_(3.0)
        elif kind == "module":
            model[0].p = 0.25
        elif kind == "mode":
            model[0].train()
        elif kind == "weight in place":
            with torch.no_grad():
                model[1].weight.fill_(1.0)
        elif kind == "weight":
            model[1].weight = nn.Parameter(torch.ones(4, 4))

    def f(x):
        return model(x * scale + options.parts[1]["a"] + float(array[1500])) + tensor

    return f, change


FUNCTIONS = {
    "default": (with_defaults, lambda: setattr(with_defaults, "__defaults__", (3.0,))),
    "keyword default": (with_defaults, lambda: with_defaults.__kwdefaults__.update(t=[4.0])),
    "default in place": (with_defaults, lambda: with_defaults.__kwdefaults__["t"].append(1.0)),
    "global": (reads_globals, set_global("SCALE", 3.0)),
    "global table": (reads_globals, lambda: TABLE["scale"].__setitem__(0, 9.0)),
    "global array": (reads_globals, lambda: ARRAY.__setitem__(1500, 9.0)),
    "global text": (reads_globals, set_global("TEXT", "pos")),
    "global tensor": (adds_tensor, set_global("TENSOR", torch.full((4,), 5.0))),
    "global tensor in place": (adds_tensor, lambda: TENSOR.fill_(7.0)),
    "helper": (calls_helper, set_global("helper", lambda x: x * 3)),
}
CLOSURES = "cell object array tensor module mode weight".split() + [
    "tensor in place",
    "weight in place",
]


@pytest.mark.parametrize("name", (*FUNCTIONS, *(f"closure {kind}" for kind in CLOSURES)))
def test_variables_of_functions(name):
    if name in FUNCTIONS:
        f, change = FUNCTIONS[name]
    else:
        f, change = closure(name.removeprefix("closure "))
    plan = gspmd.plan(f, X, mesh=MESH, in_specs="data _")
    torch.testing.assert_close(plan.simulate(X), f(X))
    torch.testing.assert_close(plan.simulate(X), f(X))  # a run changes nothing that it depends on
    change()
    torch.manual_seed(0)
    checked(lambda: plan.simulate(X), f(X))


FOUND, KEPT = [], {}


def keeps(x):
    FOUND.append(x.sum())
    KEPT["last"] = y = x * SCALE
    return y


def test_what_a_run_writes_is_no_change():
    """Lists and tables of the program itself differ after each run; other changes are seen."""
    scale = SCALE
    plan = gspmd.plan(keeps, X, mesh=MESH, in_specs="data _")
    for count in (1, 2, 3):
        torch.testing.assert_close(plan.simulate(X), X * SCALE)
        assert len(FOUND) == count
    set_global("SCALE", SCALE + 1)()
    with pytest.raises(ShardingError, match="SCALE is .*, and was "):
        plan.simulate(X)
    set_global("SCALE", scale)()
    FOUND.clear()


class Model(nn.Module):
    rate = 1.5

    def __init__(self):
        super().__init__()
        self.inner, self.drop, self.norm = nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)
        self.scale, self.flag, self.text, self.dtype = 2.0, False, "neg", torch.float32
        self.options, self.slots, self.array = Options(), Slots(2.0), np.full(2000, 2.0)
        self.table, self.act = {"a": [1.0, (2.0,)]}, F.relu
        self.register_buffer("shift", torch.ones(4))
        self.plain = torch.ones(4)

    def forward(self, x, s=1.0):
        y = self.norm(self.drop(self.inner(x))) * self.scale * self.rate + self.shift * s
        y = -y if self.flag else y
        y = y + self.options.parts[1]["a"] + self.slots.scale + float(self.array[1500])
        y = y + self.table["a"][0] + self.table["a"][1][0] + self.plain
        y = (y + 0.1 * self.act(y)).to(self.dtype)
        return -y if self.text == "neg" else y


def no_gradient(m, name, value):
    with torch.no_grad():
        m.get_parameter(name).fill_(value)


CHANGES = {
    "number": lambda m: setattr(m, "scale", 7.0),
    "flag": lambda m: setattr(m, "flag", True),
    "text": lambda m: setattr(m, "text", "pos"),
    "dtype": lambda m: setattr(m, "dtype", torch.float64),
    "object": lambda m: m.options.parts[1].__setitem__("a", 5.0),
    "another object": lambda m: setattr(m, "options", Options(parts=[0, {"a": 9.0}])),
    "slots": lambda m: setattr(m.slots, "scale", 5.0),
    "array": lambda m: m.array.__setitem__(1500, 5.0),
    "table": lambda m: m.table["a"].__setitem__(0, 5.0),
    "tuple": lambda m: m.table["a"].__setitem__(1, (5.0,)),
    "function": lambda m: setattr(m, "act", F.gelu),
    "class attribute": lambda m: setattr(m, "rate", 3.0),
    "default": lambda m: setattr(type(m).forward, "__defaults__", (3.0,)),
    "train": lambda m: m.train(),
    "a submodule in train": lambda m: m.norm.train(),
    "rate of dropout": lambda m: (setattr(m.drop, "p", 0.25), m.drop.train()),
    "submodule": lambda m: setattr(m, "inner", nn.Linear(4, 4)),
    "eps": lambda m: setattr(m.norm, "eps", 0.5),
    "hook": lambda m: m.inner.register_forward_hook(lambda m, x, y: y * 2),
    "weight in place": lambda m: no_gradient(m, "inner.weight", 2.0),
    "weight": lambda m: setattr(m.inner, "weight", nn.Parameter(torch.ones(4, 4))),
    "no weight": lambda m: setattr(m.inner, "bias", None),
    "dtype of weights": lambda m: m.inner.double(),
    "buffer": lambda m: setattr(m, "shift", torch.full((4,), 3.0)),
    "buffer in place": lambda m: m.shift.fill_(3.0),
    "statistics": lambda m: m.norm.running_mean.fill_(3.0),
    "tensor": lambda m: setattr(m, "plain", torch.full((4,), 3.0)),
    "tensor in place": lambda m: m.plain.fill_(3.0),
}


@pytest.fixture
def model():
    torch.manual_seed(0)
    defaults = Model.forward.__defaults__
    yield Model().eval()
    Model.forward.__defaults__ = defaults


def eager(f, *args):
    """Return the result, or None where eager PyTorch raises: the plan may raise anything then."""
    try:
        with torch.no_grad():
            return f(*args)
    except RuntimeError:
        return None


@pytest.mark.parametrize("name", CHANGES)
def test_attributes_of_modules(model, name):
    plan = gspmd.plan(model, X, mesh=MESH, in_specs="data _")
    torch.testing.assert_close(plan.simulate(X), model(X))
    torch.testing.assert_close(plan.simulate(X), model(X))
    CHANGES[name](model)
    expected = eager(model, X)
    if expected is None:
        with pytest.raises(ShardingError, match="when this was planned"):
            plan.simulate(X)
    else:
        entered = checked(lambda: plan.simulate(X), expected)
        assert entered == (name in ENTERS), name


ENTERS = {"weight in place", "weight", "buffer", "buffer in place", "statistics", "tensor in place"}


def test_requires_grad_of_a_plan_with_gradients(model):
    plan = gspmd.plan(model, X, mesh=MESH, in_specs="data _", grad=True)
    assert "inner.weight" in plan.simulate(X)[1]
    model.inner.weight.requires_grad_(False)
    with pytest.raises(ShardingError, match="requires_grad of inner.weight is False, and was True"):
        plan.simulate(X)


class Plain(nn.Module):
    """What a file can compare: no objects without a name, no arrays, no tensors in attributes."""

    rate = 1.5

    def __init__(self):
        super().__init__()
        self.inner, self.drop, self.norm = nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)
        self.scale, self.flag, self.table, self.act = 2.0, False, {"a": [1.0, (2.0,)]}, F.relu
        self.options = Options()

    def forward(self, x, s=1.0):
        y = self.act(self.norm(self.drop(self.inner(x)))) * self.scale * self.rate + s
        y = y + self.table["a"][0] + self.table["a"][1][0] + self.options.parts[1]["a"]
        return -y if self.flag else y


OF_FILES = (
    "number flag object table tuple function train submodule eps hook".split()
    + ["class attribute", "default", "a submodule in train", "rate of dropout"]
    + ["weight in place", "weight", "dtype of weights", "statistics"]
)


@pytest.mark.parametrize("when", ("before", "after"))
def test_plans_of_files(tmp_path, when):
    """The same of Plan.load: what was changed before the plan is read, and afterwards."""
    for name in OF_FILES:
        torch.manual_seed(0)
        model, defaults = Plain().eval(), Plain.forward.__defaults__
        gspmd.plan(model, X, mesh=MESH, in_specs="data _").save(path := tmp_path / "plan.json")
        if when == "before":
            CHANGES[name](model)
            expected = eager(model, X)
            try:
                got = gspmd.Plan.load(path, model).simulate(X)
            except ShardingError as error:
                assert "is no plan for this program" in str(error), error
                got = None
        else:
            plan = gspmd.Plan.load(path, model)
            torch.testing.assert_close(plan.simulate(X), model(X))
            CHANGES[name](model)
            expected = eager(model, X)
            try:
                got = plan.simulate(X)
            except ShardingError as error:
                assert "when this was planned" in str(error), error
                got = None
        Plain.forward.__defaults__ = defaults
        if got is not None and expected is not None:
            torch.testing.assert_close(got, expected, msg=name)
        assert (got is not None) == (name in ENTERS), name


def test_arguments_of_a_file(tmp_path):
    gspmd.plan(kept, X, 2.0, mesh=MESH, in_specs=("data _", None)).save(tmp_path / "plan.json")
    plan = gspmd.Plan.load(tmp_path / "plan.json")
    torch.testing.assert_close(plan.simulate(X, 2.0), kept(X, 2.0))
    with pytest.raises(ShardingError, match="argument 's' is 3.0, and was 2.0 when"):
        plan.simulate(X, 3.0)


def test_wrapped_model(model):
    """On a mesh of one device: a changed value, also deep in an argument, has its own program."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = gspmd.parallelize(model, gspmd.Mesh(data=1))
        with torch.no_grad():
            for name in ("default", "number", "flag", "dtype", "object", "slots", "array", "table"):
                before = wrapped(X)
                torch.testing.assert_close(before, model(X))
                CHANGES[name](model)
                assert name == "dtype" or not torch.equal(model(X), before), name
                torch.testing.assert_close(wrapped(X), model(X), msg=name)
        takes = gspmd.parallelize(Takes(), gspmd.Mesh(data=1))
        for name in ("flag", "nearly equal", "slots", "deep object", "function"):
            for value in VALUES[name]:
                torch.testing.assert_close(takes(X, value), kept(X, value), rtol=0, atol=0)
    finally:
        dist.destroy_process_group()


class Takes(nn.Module):
    def forward(self, x, s):
        return kept(x, s)


@pytest.mark.parametrize("name", VALUES)
def test_keys(name):
    """Equal keys of equal values, other keys of others; the difference names both."""
    first, second = VALUES[name]
    assert value_key(first) == value_key(first) != value_key(second)
    hash(value_key(first))
    _, now, then = difference(value_key(second), value_key(first))
    assert now and then


def test_random_trees():
    """500 random trees, each with one leaf changed: another key, and the way to the leaf."""
    generator = random.Random(0)

    def tree(depth):
        kind = generator.choice("ldtaon" if depth else "n")
        children = (
            [tree(depth - 1) for _ in range(generator.randint(1, 3))] if kind in "ldto" else []
        )
        return {
            "l": lambda: children,
            "d": lambda: {f"k{i}": child for i, child in enumerate(children)},
            "t": lambda: tuple(children),
            "o": lambda: Options(0.0, children),
            "a": lambda: np.arange(generator.randint(1, 2000), dtype=float),
            "n": lambda: generator.choice((1, 2.5, "a", True, None, torch.float32)),
        }[kind]()

    def changed(value):
        if isinstance(value, np.ndarray):
            other = value.copy()
            other[generator.randrange(len(other))] += 0.5
            return other
        if isinstance(value, Options):
            return Options(value.scale, changed(value.parts))
        if isinstance(value, dict):
            at = generator.choice(list(value))
            return {k: changed(v) if k == at else v for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            at = generator.randrange(len(value))
            return type(value)(changed(v) if i == at else v for i, v in enumerate(value))
        return "another"

    for _ in range(500):
        value = tree(3)
        assert value_key(value) == value_key(value)
        assert value_key(changed(value)) != value_key(value)


def test_a_wide_circle():
    """Each of 40 objects leads to all others: the walk visits each once, not each path."""
    around = [Options(float(i), []) for i in range(40)]
    for each in around:
        each.parts = around
    key = value_key(around)
    around[-1].scale = -1.0
    assert value_key(around) != key


def test_what_parallelize_leaves():
    """The forward of a wrapped model leads to its programs: the key is that of the object."""

    class Proxy:
        def __init__(self):
            self.programs = []

    Proxy.__module__ = "torchgspmd.runtime.mesh_module"
    proxy = Proxy()
    key = value_key([proxy])
    proxy.programs.append(1)
    assert value_key([proxy]) == key != value_key([Proxy()])


def test_the_error():
    plan = gspmd.plan(kept, X, Options(), mesh=MESH, in_specs=("data _", None))
    with pytest.raises(ShardingError) as error:
        plan.simulate(X, Options(parts=[1.0, {"a": 4.0}]))
    assert str(error.value).replace(__file__, "FILE").splitlines()[0] == (
        "argument 's'['parts'][1]['a'] is 4.0, and was 2.0 when this was planned"
    )


def test_a_mesh_in_a_closure_is_the_same_after_it_was_used():
    """A mesh remembers what it has counted, and a spec its axes."""
    mesh, x = gspmd.Mesh(a=2, m=2), torch.ones(4, 6)

    def f(x):
        return gspmd.mark_sharding(x * 2, mesh, "a m")

    plan = gspmd.plan(f, x, mesh=gspmd.Mesh(a=2, m=2))
    mesh.count(("a", "m")), mesh.names
    assert plan.simulate(x).equal(x * 2)


# ------------------------------------------------------------------------- caches by tensors' class


class Backend:
    """What einops looks up by a tensor's class."""


CACHE: dict[type, Backend] = {}
READS = {
    "get": lambda kind: CACHE.get(kind),
    "in": lambda kind: CACHE[kind] if kind in CACHE else None,
    "items": lambda kind: next((v for k, v in CACHE.items() if k is kind), None),
    "copy": lambda kind: dict(CACHE).get(kind),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("grad", [False, True])
def test_a_cache_by_class_has_no_entry_of_a_trace(read, grad):
    """A trace's tensors have classes of their own, which no run looks up."""

    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            for each in (x, self.weight):
                if READS[read](type(each)) is None:
                    CACHE[type(each)] = next(iter(CACHE.values()), None) or Backend()
            return x @ self.weight

    CACHE.clear()
    model, x = Cached(), torch.ones(8, 4)
    want = model(x)  # fills the cache
    for _ in range(2):
        plan = gspmd.plan(model, x, mesh=gspmd.Mesh(data=2), in_specs="data _", grad=grad)
        for _ in range(2):
            got = plan.simulate(x)
            assert torch.equal(got[0] if grad else got, want)
