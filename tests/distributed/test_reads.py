"""What forward reads is changed between calls, in each way that there is: six calls of a module
and of a copy on one device are compared, and the programs that were made for them counted: a number
or tensor that changes is an input of the second one.
"""

import collections
import contextvars
import copy
import enum
import functools
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import settings_of_reads as settings
import torch
import torch.distributed as dist
from ranks import distributed
from torch import nn

import torchgspmd as gspmd

CALLS = 6
THREAD, CONTEXT = threading.local(), contextvars.ContextVar("context")
SCALE, TENSOR, PLAIN = 1.0, torch.ones(4), {"scale": 1.0}
TABLE = {"state": torch.ones(4), "scale": 1.0, "other": None}
ACTIVATIONS = {"one": torch.relu, "other": torch.tanh}


class Kind(enum.Enum):
    SINGLE, DOUBLE = 1, 2


class Thing:
    """An object that an attribute or variable names."""

    default = 1.0

    def __init__(self, **attributes: Any):
        self.__dict__.update(attributes)

    def scaled(self, y):
        return y * SCALE

    def __call__(self, y):
        return y * SCALE * self.default

    @property
    def scale_of_all(self):
        return SCALE


class Closed(type):
    def __setattr__(cls, name, value):
        raise TypeError("this class does not change")


class OfClosed(metaclass=Closed):
    def __init__(self):
        self.gain = 1.0


@dataclass(slots=True)
class Slotted:
    gain: float = 1.0


SETTINGS, STAGES = (
    Thing(gain=1.0, table={"state": torch.ones(4), "scale": 1.0}),
    [Thing(gain=1.0), Thing(gain=2.0)],
)


def times(y):
    return y * SCALE


def far(y, calls=6):
    return nearer(y) if calls else y


def nearer(y):
    return nearest(y)


def nearest(y):
    return times(y)


class Net(nn.Module):
    per_class = 1.0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tensor, self.table = (
            torch.ones(4),
            {"used": torch.ones(4), "other": torch.ones(4), "scale": 1.0},
        )
        self.kind, self.activation, self.activations, self.gain, self.share = (
            Kind.SINGLE,
            torch.relu,
            [torch.relu],
            1.0,
            1,
        )
        self.halves, self.pair = [1.0, 2.0], (1.0, 2.0)
        self.names, self.array, self.many = {"a"}, np.ones(4), [float(i) for i in range(2000)]
        self.thing, self.things, self.space, self.slotted = (
            Thing(),
            (Thing(gain=1.0), [Thing(gain=2.0)]),
            SimpleNamespace(),
            Slotted(),
        )
        self.closed = OfClosed()
        self.nested = Thing(inner=Thing(inner=Thing(inner=Thing(gain=1.0))))
        self.function, self.partial = (
            times,
            functools.partial(lambda table, y: y * table["scale"] + table["state"], TABLE),
        )

    def forward(self, x):
        return self.use(self.linear(x))

    def method(self, y):
        return y

    @staticmethod
    def static(y):
        return y * SCALE


def scale(step, *nets):
    global SCALE
    SCALE = 1.0 + step


def table(step, *nets):
    TABLE["scale"] = 1.0 + step


def new_table(step, *nets):
    global TABLE
    TABLE = {"state": torch.full((4,), 1.0 + step), "scale": 1.0 + step, "other": None}


def new_plain_table(step, *nets):
    global PLAIN
    PLAIN = {"scale": 1.0 + step}


def global_tensor(step, *nets):
    global TENSOR
    TENSOR = torch.full((4,), 1.0 + step)


def of_nets(change: Callable, late: bool = False) -> Callable:
    """That does this to each module and the number of the call; late: from the fourth call on."""
    return lambda step, *nets: [change(net, step) for net in nets if step > 2 or not late]


def sets(name: str, value: Callable[[int], Any], late: bool = False, of: str = "") -> Callable:
    def change(net, step):
        holder = functools.reduce(getattr, of.split("."), net) if of else net
        setattr(holder, name, value(step))

    return of_nets(change, late)


def of_settings(
    holder: Any, name: str, value: Callable[[int], Any] = lambda step: 1.0 + step
) -> Callable:
    return lambda step, *nets: setattr(holder, name, value(step))


def one_of(*values: Any) -> Callable[[int], Any]:
    return lambda step: values[step % len(values)]


def number(step):
    return 1.0 + step


def full(step):
    return torch.full((4,), 1.0 + step)


def lazily(net, y):
    net.mean = getattr(net, "mean", 0.0) * 0.9 + 0.1 * y.detach().mean(0)
    return y + net.mean


def if_it_is_there(net, y):
    if not hasattr(net, "mean"):
        net.mean = torch.zeros(4)
    net.mean = 0.9 * net.mean + 0.1 * y.detach().mean(0)
    return y + net.mean


def of_things(net, y):
    for thing in net.things[1]:
        thing.gain, thing.last = 0.9 * thing.gain, y
        y = y * thing.gain
    return y


def decays(net, y):
    """What is computed of nothing but a tensor in an attribute is of the program, too."""
    old = net.tensor * 0.9
    old.add_(1.0)
    net.last, net.tensor = old * 2, old[1:3].repeat(2)
    return y * old + net.tensor


def decays_in_a_table(net, y):
    y = y * TABLE["state"] * TABLE["scale"]
    TABLE["state"] = 0.9 * TABLE["state"]
    return y


def puts_numbers_elsewhere(net, y):
    """Into a new list and tuple, another attribute, another module and the result, each as it was
    before.
    """
    net.halves, net.pair = [x * 0.5 for x in net.halves], (net.pair[1], net.pair[0] + 1)
    net.share = net.share * 2
    net.linear.before, net.gain = net.gain, net.gain + net.share
    return y * net.halves[0] + net.pair[0] * net.pair[1] + net.gain + net.linear.before


def counts_in_place(net, y):
    TENSOR.add_(y.detach().mean(0))
    return y * TENSOR


def counts_in_a_module(net, y):
    settings.CALLS[net.which] += 1
    settings.PRODUCT = settings.PRODUCT * 0.5
    settings.LAST = y.detach().mean()
    return y * settings.CALLS[net.which] + settings.LAST


def inner_function(net, y):
    def inner(y):
        return y * SCALE * TABLE["scale"] * TABLE["state"]

    return inner(y)


def both(*changes: Callable) -> Callable:
    return lambda step, *nets: [change(step, *nets) for change in changes]


def nothing(step, *nets):
    pass


CASES: dict[str, tuple[Callable, Callable, int]] = {  # forward, what changes, how many programs
    "a global number": (lambda net, y: y * SCALE, scale, 2),
    "in a comprehension": (lambda net, y: sum([y * SCALE for _ in range(2)]), scale, 2),
    "in an inner function": (inner_function, both(scale, table), 2),
    "far away": (lambda net, y: far(y), scale, 2),
    "in a method of an object": (lambda net, y: net.thing.scaled(y), scale, 2),
    "in an object that is called": (lambda net, y: net.things[1][0](y), scale, 2),
    "in a property": (lambda net, y: y * net.thing.scale_of_all, scale, 2),
    "in a static method": (lambda net, y: net.static(y), scale, 2),
    "in a function of an attribute": (lambda net, y: net.function(y), scale, 2),
    "in a function of a module": (
        lambda net, y: settings.scaled(y),
        of_settings(settings, "SCALE"),
        2,
    ),
    "a number of a module": (lambda net, y: y * settings.SCALE, of_settings(settings, "SCALE"), 2),
    "what forward changes there": (counts_in_a_module, nothing, 2),
    "a table of a module": (
        lambda net, y: y * settings.TABLE["scale"],
        lambda step, *nets: settings.TABLE.update(scale=1.0 + step),
        2,
    ),
    "in a method of a class": (
        lambda net, y: settings.Options.scaled(y),
        of_settings(settings.Options, "scale", one_of(1.0, 2.0)),
        2,
    ),
    "an object of a class": (
        lambda net, y: y * settings.Named.options.late,
        of_settings(settings.Named.options, "late"),
        2,
    ),
    "by vars": (lambda net, y: y * vars(net)["gain"], sets("gain", number), 2),
    "in __dict__": (
        lambda net, y: y * net.nested.inner.__dict__.get("late", 1.0),
        sets("late", number, of="nested.inner"),
        2,
    ),
    "a copy of __dict__": (
        lambda net, y: y * {**vars(net.nested.inner.inner.inner)}["gain"],
        sets("gain", number, of="nested.inner.inner.inner"),
        2,
    ),
    "a copied object": (
        lambda net, y: y * copy.copy(net.nested.inner.inner.inner).gain,
        sets("gain", number, of="nested.inner.inner.inner"),
        2,
    ),
    "fields as a table": (
        lambda net, y: y * asdict(net.slotted)["gain"],
        sets("gain", one_of(1.0, 2.0), of="slotted"),
        2,
    ),
    "a new entry of __dict__": (
        lambda net, y: y * (2.0 if "late" in vars(net.thing) else 1.0),
        sets("late", lambda step: 0.5, late=True, of="thing"),
        2,
    ),
    "of a thread": (lambda net, y: y * THREAD.scale, of_settings(THREAD, "scale"), 2),
    "of a context": (
        lambda net, y: y * CONTEXT.get(),
        lambda step, *nets: CONTEXT.set(1.0 + step % 2),
        2,
    ),
    "a table with tensors": (lambda net, y: y * TABLE["state"] * TABLE["scale"], table, 2),
    "a table in a comprehension": (
        lambda net, y: sum([y * TABLE["state"] * TABLE["scale"] for _ in range(2)]),
        table,
        2,
    ),
    "a table of a partial function": (lambda net, y: net.partial(y), table, 2),
    "another table": (lambda net, y: y * TABLE["scale"] + TABLE["state"], new_table, 2),
    "another plain table": (lambda net, y: y * PLAIN["scale"], new_plain_table, 2),
    "a table that forward writes, too": (decays_in_a_table, table, 2),
    "a tensor in a table": (
        lambda net, y: y * TABLE["state"],
        lambda step, *nets: TABLE.update(state=full(step)),
        2,
    ),
    "one that is filled": (
        lambda net, y: y * TABLE["state"],
        lambda step, *nets: TABLE["state"].fill_(1.0 + step),
        1,
    ),
    "one that is not read": (
        lambda net, y: y * TABLE["scale"],
        lambda step, *nets: TABLE.update(other=full(step)),
        1,
    ),
    "its values": (
        lambda net, y: y * TABLE["state"].tolist()[0],
        lambda step, *nets: TABLE.update(state=full(step // 2)),
        2,
    ),
    "a global tensor": (lambda net, y: y * TENSOR, global_tensor, 2),
    "one that forward changes in place": (counts_in_place, nothing, 1),
    "a function in a table": (
        lambda net, y: ACTIVATIONS["one"](y),
        lambda step, *nets: ACTIVATIONS.update(one=[torch.relu, torch.tanh][step % 2]),
        2,
    ),
    "a table of a global object": (
        lambda net, y: y * SETTINGS.table["scale"] * SETTINGS.table["state"],
        lambda step, *nets: SETTINGS.table.update(scale=1.0 + step),
        2,
    ),
    "a global list of objects": (
        lambda net, y: y * STAGES[0].gain + STAGES[1].gain,
        lambda step, *nets: setattr(STAGES[1], "gain", 1.0 + step),
        2,
    ),
    "a tensor": (lambda net, y: y * net.tensor, sets("tensor", full), 2),
    "a tensor or None": (
        lambda net, y: y if net.tensor is None else y * net.tensor,
        sets("tensor", lambda n: full(n) if n else None),
        3,
    ),
    "a tensor in a table of its own": (
        lambda net, y: y * net.table["used"],
        of_nets(lambda net, n: net.table.update(used=full(n))),
        2,
    ),
    "an unused one there": (
        lambda net, y: y * net.table["used"],
        of_nets(lambda net, n: net.table.update(other=full(n))),
        1,
    ),
    "two numbers in a product": (
        lambda net, y: y * (net.gain * (1 - net.share / 9)) + net.gain / net.share,
        both(sets("gain", number), sets("share", lambda n: n + 2)),
        2,
    ),
    "a function": (
        lambda net, y: net.activation(y),
        sets("activation", one_of(torch.relu, torch.tanh)),
        2,
    ),
    "a function in a list": (
        lambda net, y: net.activations[0](y),
        of_nets(lambda net, n: net.activations.__setitem__(0, [torch.relu, torch.tanh][n % 2])),
        2,
    ),
    "a method": (lambda net, y: net.method(y), sets("method", lambda n: torch.relu, late=True), 2),
    "an enum": (
        lambda net, y: y * 2 if net.kind is Kind.DOUBLE else y,
        sets("kind", one_of(*Kind)),
        2,
    ),
    "a set": (
        lambda net, y: y * 2 if "b" in net.names else y,
        of_nets(lambda net, n: net.names.add("b"), late=True),
        2,
    ),
    "an array": (
        lambda net, y: y * float(net.array[0]),
        of_nets(lambda net, n: net.array.__setitem__(0, 1.0 + n % 2)),
        2,
    ),
    "a long list": (
        lambda net, y: y * net.many[7],
        of_nets(lambda net, n: net.many.__setitem__(7, 1.0 + n % 2)),
        2,
    ),
    "what is there later": (
        lambda net, y: y * getattr(net, "late", 1.0),
        sets("late", number, late=True),
        3,
    ),
    "what the class has first": (
        lambda net, y: y * net.per_class,
        sets("per_class", number, late=True),
        3,
    ),
    "the same of an object": (
        lambda net, y: y * net.thing.default,
        sets("default", number, True, "thing"),
        3,
    ),
    "there later in an object": (
        lambda net, y: y * getattr(net.thing, "gain", 1.0),
        sets("gain", number, True, "thing"),
        3,
    ),
    "there later in a namespace": (
        lambda net, y: y * getattr(net.space, "gain", 1.0),
        sets("gain", number, True, "space"),
        3,
    ),
    "an object deep in others": (
        lambda net, y: y * net.nested.inner.inner.inner.gain,
        sets("gain", number, of="nested.inner.inner.inner"),
        2,
    ),
    "objects in lists": (
        lambda net, y: y * net.things[0].gain + net.things[1][0].gain,
        of_nets(
            lambda net, n: [
                setattr(thing, "gain", n + 1.0) for thing in (net.things[0], *net.things[1])
            ]
        ),
        2,
    ),
    "an object with slots": (
        lambda net, y: y * net.slotted.gain,
        sets("gain", one_of(1.0, 2.0), of="slotted"),
        2,
    ),
    "an object of a class that is closed": (
        lambda net, y: y * net.closed.gain,
        sets("gain", number, of="closed"),
        2,
    ),
    "another object": (
        lambda net, y: y * net.thing.gain,
        of_nets(lambda net, n: setattr(net, "thing", Thing(gain=1.0 + n))),
        CALLS,
    ),
    "what forward makes first": (lazily, nothing, 2),
    "what it looks for": (if_it_is_there, nothing, 2),
    "objects that it changes": (of_things, nothing, 1),
    "numbers that it puts elsewhere": (puts_numbers_elsewhere, nothing, 3),
    "of tensors in attributes alone": (decays, nothing, 1),
}
START = {name: globals()[name] for name in ("SCALE", "TENSOR", "PLAIN")}


def around_functions():
    """A number, a tensor and tables around functions: of the number and tensor each has its
    program.
    """
    found = {}
    value, tensor, tables, counts = (
        1.0,
        torch.ones(4),
        {"state": torch.ones(4), "scale": 1.0},
        collections.defaultdict(float),
    )

    def change(step, *nets):
        nonlocal value, tensor
        value, tensor, tables["scale"] = 1.0 + step % 2, full(step), 1.0 + step

    def counted(net, y):
        counts[id(net)] += 1
        return y * counts[id(net)]

    found["a number around a function"] = lambda net, y: y * value, change, 2
    found["a tensor around a function"] = lambda net, y: y * tensor, change, 2
    found["a table around a function"] = (
        lambda net, y: y * tables["state"] * tables["scale"],
        change,
        2,
    )
    found["a table around a function that forward writes"] = counted, change, 2
    return found


@distributed("data=2")
@pytest.mark.parametrize("name", [*CASES, *around_functions()])
def test_what_is_read(mesh, name):
    use, change, programs = {**CASES, **around_functions()}[name]
    TABLE.update(state=torch.ones(4), scale=1.0, other=None)
    START["TENSOR"].fill_(1.0)
    globals().update(START)
    Used = type("Used", (Net,), {"use": use})
    torch.manual_seed(0)
    reference, net = Used(), Used()
    reference.which, net.which = 0, 1
    net.load_state_dict(reference.state_dict())
    sharded = gspmd.parallelize(net, mesh)
    for step in range(CALLS):
        change(step, reference, net)
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        before, tensor = TABLE["state"], TENSOR.clone()
        theirs = reference(x)
        if use in (decays_in_a_table, counts_in_place):  # one state for both
            TABLE["state"] = before
            TENSOR.copy_(tensor)
        torch.testing.assert_close(
            sharded(x), theirs, msg=lambda text, step=step: f"{name}, call {step}: {text}"
        )
    made = len(sharded._all_programs())
    assert made == programs, f"{name}: {made} programs"


@distributed("data=2")
def test_tensors_of_alike_names(mesh):
    """Of two modules, and an argument that is named as a parameter."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.hidden, self.calls = nn.Parameter(torch.ones(4)), torch.zeros(4), 0

        def forward(self, weight):
            self.calls += 1
            y = weight * self.weight * self.calls + self.hidden
            self.hidden = y.detach().mean(0)
            return y

    reference, net = (nn.Sequential(Layer(), Layer()) for _ in range(2))
    sharded = gspmd.parallelize(net, mesh)
    for step in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        torch.testing.assert_close(sharded(x), reference(x))
    assert net[1].calls == 3


@distributed("data=2")
def test_numbers_that_come_out(mesh):
    """One program for all calls; a number that forward and a hook of its backward count up, too."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.step, self.sum, self.tau, self.seen = nn.Linear(4, 4), 0, 0, 1.0, 0

        def forward(self, x):
            self.step += 1
            self.tau, self.sum, self.seen = (
                self.tau * 0.5 + self.step,
                self.sum + self.step,
                self.seen + 1,
            )
            y = self.linear(x)
            y.register_hook(self.count)
            return y * self.tau * self.seen, {
                "step": self.step,
                "both": [self.sum, (self.step * self.tau,)],
            }

        def count(self, gradient):
            self.seen += 10

    torch.manual_seed(0)
    reference, net = Counts(), Counts()
    net.load_state_dict(reference.state_dict())
    sharded = gspmd.parallelize(net, mesh)
    for step in range(CALLS):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        (mine, numbers), (theirs, expected) = sharded(x), reference(x)
        torch.testing.assert_close(mine, theirs)
        assert numbers == expected and type(numbers["step"]) is int, (numbers, expected)
        mine.sum().backward()
        theirs.sum().backward()
        assert net.seen == reference.seen and net.sum == reference.sum
    assert len(sharded._all_programs()) == 1


@distributed("data=2")
def test_what_is_not_read(mesh):
    """Ranks may have other values there."""
    space = SimpleNamespace(rank=dist.get_rank(), gain=2.0)

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.space, self.rank, self.thing = (
                nn.Linear(4, 4),
                space,
                dist.get_rank(),
                Thing(rank=dist.get_rank(), gain=3.0),
            )

        def forward(self, x):
            return self.linear(x) * self.space.gain * self.thing.gain + space.gain

    torch.manual_seed(0)
    net = Uses()
    sharded = gspmd.parallelize(net, mesh)
    x = torch.ones(4, 4)
    with torch.no_grad():
        torch.testing.assert_close(sharded(x), net.linear(x) * 6.0 + 2.0)
        space.gain = 3.0
        torch.testing.assert_close(sharded(x), net.linear(x) * 9.0 + 3.0)
