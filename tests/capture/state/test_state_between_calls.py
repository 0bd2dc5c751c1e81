"""State that a call leaves, or that a user changes between calls, as the next call finds it.

Each case is called four times, and changed before the third. A wrapped model has the numbers of
eager PyTorch; `simulate` has them, or raises a ShardingError that names what changed.
"""

import types
from collections import deque

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchgspmd as gspmd
from torchgspmd.capture.state.instructions import uses_of_names
from torchgspmd.errors import ShardingError

X = torch.arange(12.0).view(3, 4)


class Value:
    def __init__(self, v):
        self.v = v


class Net(nn.Module):
    """start: what self.state is at first. A case overrides run."""

    start = staticmethod(list)

    def __init__(self):
        super().__init__()
        self.weight, self.state = nn.Parameter(torch.ones(4)), self.start()

    def forward(self, x):
        return self.run(x * self.weight)


def case(run, start=list, change=lambda net: None):
    return type("Case", (Net,), {"run": run, "start": staticmethod(start)}), change


def left(reads, leaves):
    """Read the state, and leave something there afterwards."""

    def run(self, x):
        y = x * reads(self.state)
        leaves(self.state, y)
        return y

    return run


TABLE, SETTINGS = {"a": [Value(2.0)]}, types.SimpleNamespace(value=Value(2.0))


def global_table(self, x):
    return x * TABLE["a"][0].v


def global_object(self, x):
    return x * SETTINGS.value.v


class WithClass(Net):
    rate = 2.0

    def run(self, x):
        return x * type(self).rate


class WithDefaults(Net):
    def run(self, x, by=2.0, *, to=1.0):
        return x * by + to


def set_default(net):
    WithDefaults.run.__defaults__ = (5.0,)


def set_keyword_default(net):
    WithDefaults.run.__kwdefaults__ = {"to": 5.0}


def append(state, y):
    state.append(y.sum())


def two():
    return {"scale": torch.full((4,), 2.0), "last": torch.zeros(())}


CASES = {
    "length of tensors": case(left(lambda s: len(s) + 1, append)),
    "length of numbers": case(left(lambda s: len(s) + 1, lambda s, y: s.append(1))),
    "length of a dict": case(left(lambda s: len(s) + 1, lambda s, y: s.update({len(s): 1})), dict),
    "length of a deque": case(
        left(lambda s: len(s) + 1, lambda s, y: s.append(1)), lambda: deque(maxlen=2)
    ),
    "whether it is empty": case(left(lambda s: 7.0 if s else 1.0, append)),
    "last tensor": case(left(lambda s: s[-1], append), lambda: [torch.tensor(2.0)]),
    "sum of all": case(left(lambda s: sum(s, 1.0), append)),
    "loop over numbers": case(left(sum, lambda s, y: s.append(3.0)), lambda: [2.0]),
    "tensor replaced": case(
        left(lambda s: s["scale"], lambda s, y: s.update(last=y.sum())),
        two,
        lambda net: net.state.update(scale=torch.full((4,), 5.0)),
    ),
    "tensor of another shape": case(
        left(lambda s: s["scale"], lambda s, y: s.update(last=y.sum())),
        two,
        lambda net: net.state.update(scale=torch.full((1,), 5.0)),
    ),
    "object in a table": case(
        lambda self, x: x * self.state["a"].v,
        lambda: {"a": Value(2.0)},
        lambda net: setattr(net.state["a"], "v", 5.0),
    ),
    "object in a global table": case(
        global_table, change=lambda net: setattr(TABLE["a"][0], "v", 5.0)
    ),
    "another object in a global table": case(
        global_table, change=lambda net: TABLE.update(a=[Value(6.0)])
    ),
    "global object": case(global_object, change=lambda net: setattr(SETTINGS.value, "v", 5.0)),
    "attribute of type(self)": (WithClass, lambda net: setattr(type(net), "rate", 5.0)),
    "default": (WithDefaults, set_default),
    "keyword default": (WithDefaults, set_keyword_default),
}


def restore():
    TABLE["a"], SETTINGS.value, WithClass.rate = [Value(2.0)], Value(2.0), 2.0
    WithDefaults.run.__defaults__, WithDefaults.run.__kwdefaults__ = (2.0,), {"to": 1.0}


def results(call, net, change):
    """Return the results of four calls, up to the first refusal, and that."""
    restore()
    found = []
    for count in range(4):
        if count == 2:
            change(net)
        try:
            found.append(call(X).detach().clone())
        except ShardingError as error:
            restore()
            return found, str(error)
    restore()
    return found, ""


@pytest.fixture(scope="module")
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield gspmd.Mesh(data=1)
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:a program has been made anew")
@pytest.mark.parametrize("name", CASES)
def test_next_call_finds_the_state(one_process, name):
    cls, change = CASES[name]
    expected, _ = results(net := cls(), net, change)
    wrapped = gspmd.parallelize(net := cls(), one_process, in_specs="data _")
    found, refusal = results(wrapped, net, change)
    assert not refusal
    torch.testing.assert_close(found, expected)
    plan = gspmd.plan(net := cls(), X, mesh=gspmd.Mesh(data=2), in_specs="data _")
    found, refusal = results(plan.simulate, net, change)
    assert not refusal or "when this was planned" in refusal, refusal
    torch.testing.assert_close(found, expected[: len(found)])


def test_what_is_only_added_to_makes_no_new_program(one_process):
    """Lists that hooks append to, and tables in which a run leaves tensors, grow without one."""
    losses, net = [], Net()
    net.log, net.last = {"loss": []}, {}

    def hook(module, args, y):
        losses.append(y.detach())
        module.log["loss"].append(y.mean())
        module.log.setdefault("count", []).append(1)
        module.last["y"] = y

    net.run = lambda x: x.sin()
    net.register_forward_hook(hook)
    wrapped = gspmd.parallelize(net, one_process, in_specs="data _")
    for _ in range(4):
        wrapped(X)
    assert [len(losses), len(net.log["loss"]), len(net.log["count"])] == [4, 4, 4]
    assert len(wrapped._all_programs()) == 2  # the second one finds the list of counts


def uses(of):
    return uses_of_names([of]).get("seen")


def test_uses_of_names():
    assert uses(lambda o, y: o.seen.append(y.sum() if y else (y, *y))) == {".append"}
    assert uses(lambda o, y: o.seen["a"].append(y)) == {"[].append"}
    assert uses(lambda o, y: o.seen.setdefault(y, []).append(y)) == {"[].append"}
    assert uses(lambda o, y: (o.seen.append(y), len(o.seen))) == {".append", "read"}
    for read in (
        lambda o, y: o.seen,
        lambda o, y: y[o.seen],
        lambda o, y: o.seen[0],
        lambda o, y: o.seen.pop(),
        lambda o, y: o.seen + [y],
        lambda o, y: getattr(o, "seen"),  # noqa: B009
        lambda o, y: y(o.seen),
        lambda o, y: [x for x in o.seen],
        lambda o, y: o.seen and y,
        lambda o, y: o.seen.setdefault(y, []),
    ):
        assert uses(read) == {"read"}

    def sets(o, y):
        o.seen["a"] = o.other

    def sets_elsewhere(o, y):
        o.other["a"] = o.seen

    def adds(o, y):
        o.seen += [y]

    assert uses(sets) == {"[]="}
    assert uses(sets_elsewhere) == uses(adds) == {"read"}
