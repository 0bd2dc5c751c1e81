"""What modules keep between calls, in plans."""

import collections
import copy
import functools
import math

import numpy
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, rand
from torch import nn

import torchgspmd as gspmd
from torchgspmd.capture.state.recorder import ReachedObjects


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.hidden, self.calls = nn.Parameter(rand(6, 8)), None, 0

    def forward(self, x):
        self.calls += 1
        self.hidden = x @ self.weight + (0.0 if self.hidden is None else self.hidden)
        return self.hidden.sum(0)


def test_a_plan_is_of_the_state_as_it_is():
    """What a module keeps is among the inputs of a plan; it changes by simulate only."""
    mesh, net, x = gspmd.Mesh(data=2), Recurrent(), rand(4, 6)
    first = gspmd.plan(net, x, mesh=mesh, in_specs="data _")
    assert net.hidden is None and net.calls == 0 and "hidden" not in str(first)
    first.simulate(x)
    then = gspmd.plan(net, x, mesh=mesh, in_specs="data _")
    assert "%hidden : f32[4@data, 8]" in " ".join(str(then).split())
    torch.testing.assert_close(then.simulate(x), (2 * x @ net.weight).sum(0))
    torch.testing.assert_close(net.hidden, 2 * x @ net.weight)
    assert net.calls == 2
    net.hidden = None
    with pytest.raises(gspmd.ShardingError, match="there is no tensor at 'hidden' any more"):
        then.simulate(x)


class Node:
    def __init__(self, depth):
        self.value, self.rows = 1.0, [[0.0] * 10 for _ in range(10)]
        self.children = [Node(depth - 1) for _ in range(4)] if depth else []


def test_of_very_many_objects_the_nearest_are_watched():
    """A module that names its trainer, which names all there is."""
    net, x = Uses(lambda x, n: x), rand(4, 6)
    net.trainer = Node(6)  # 5,461 of them
    net.use = lambda x, n: x * net.trainer.children[3].children[0].value
    plan = gspmd.plan(net, x, mesh=gspmd.Mesh(data=2))
    assert len(plan.captured.reads.guards) < 20 and plan.captured.reads.hold()
    net.trainer.children[3].children[0].value = 2.0
    assert not plan.captured.reads.hold()
    assert len(ReachedObjects([net]).objects) == 1000


USES = {
    "product": lambda x, n: n * x,
    "quotient": lambda x, n: n / (x + 9),
    "power": lambda x, n: x * 2**n,
    "float": lambda x, n: x * (n * 0.5),
    "row": lambda x, n: x[n],
    "rows": lambda x, n: x[:n],
    "size": lambda x, n: x.new_full((n,), 2.0),
    "view": lambda x, n: x.view(n, -1),
    "ones": lambda x, n: torch.ones(n, 1),
    "expand": lambda x, n: x[None].expand(n, 4, 6),
    "roll": lambda x, n: x.roll(n, 0),
    "tensor": lambda x, n: x * torch.tensor(n),
    "array": lambda x, n: x + torch.from_numpy(numpy.arange(n).sum(keepdims=True)),
    "range": lambda x, n: sum(x * i for i in range(n)),
    "list": lambda x, n: x * [5, 6, 7, 8][n],
    "table": lambda x, n: x * {2: 3}.get(n, 9),
    "text": lambda x, n: x * len(f"{n:05d}"),
    "branch": lambda x, n: x * 3 if n > 2 else x,
    "even": lambda x, n: x * (5 if n % 2 == 0 else 7),
    "root": lambda x, n: x * math.sqrt(n),
    "bias correction": lambda x, n: x * (math.sqrt(1 - 0.9**n) / (1 - math.pow(0.5, n))),
    "exponent": lambda x, n: x.abs() ** (1 / n),
    "lerp": lambda x, n: x.clone().lerp_(x * x, weight=1 / n),
    "largest": lambda x, n: x * max(n, 3),
    "truth": lambda x, n: x * 2 if n else x,
    "clamp": lambda x, n: x.clamp(min=n),
    "clamp both": lambda x, n: (x * 1).clip_(-0.2, n**0.25),
    "where": lambda x, n: torch.where(x > n, x, n),
    "alpha": lambda x, n: torch.add(x, x, alpha=n),
}


class Uses(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.calls, self.use = 0, use

    def forward(self, x):
        self.calls += 1
        return self.use(x, self.calls + 1)


# that need no other program for another number
INPUTS = {"product", "quotient", "float", "truth", "alpha"}
INPUTS |= {"root", "bias correction", "exponent", "lerp", "clamp", "clamp both"}


@pytest.mark.parametrize("name", USES)
def test_a_number_that_is_counted_up(name):
    net, reference, x, plans = Uses(USES[name]), Uses(USES[name]), rand(4, 6), []
    for step in range(2):
        plan = next((p for p in plans if p.captured.reads.hold()), None)
        if plan is None:
            plans.append(plan := gspmd.plan(net, x, mesh=gspmd.Mesh(data=2)))
        torch.testing.assert_close(plan.simulate(x), reference(x))
        assert net.calls == step + 1 and type(net.calls) is int
    assert len(plans) == (1 if name in INPUTS else 2)


def test_a_counter_that_is_not_used_is_no_part_of_the_program():
    net, x = Uses(lambda x, n: x * 2), rand(4, 6)
    plan = gspmd.plan(net, x, mesh=gspmd.Mesh(data=2))
    plan.simulate(x)
    plan.simulate(x)
    assert plan.captured.reads.hold() and plan.captured.numbers() == [] and net.calls == 2
    net.calls = None
    assert not plan.captured.reads.hold()


Pair = collections.namedtuple("Pair", "calls other")
INTO = {
    "named": lambda n: Pair(n, [n]),
    "table": lambda n: collections.OrderedDict(calls=n),
    "deque": lambda n: collections.deque([n]),
}


@pytest.mark.parametrize("make", INTO.values(), ids=list(INTO))
def test_what_is_made_of_a_counted_number_holds_numbers(make):
    """Results, attributes and what is put into arguments: no stand-in is left."""

    class Makes(Uses):
        def forward(self, x, log):
            y = super().forward(x)
            self.kept, log["kept"] = make(self.calls), make(self.calls)
            return y, make(self.calls)

    net, log = Makes(lambda x, n: x * n), {}
    _, result = gspmd.plan(net, rand(4, 6), log, mesh=gspmd.Mesh(data=2)).simulate(rand(4, 6), log)
    for found in (result, net.kept, log["kept"]):
        assert found == make(1) and all(
            type(leaf) is int for leaf in torch.utils._pytree.tree_leaves(found)
        )


def test_conditions_of_numbers_that_do_not_fit():
    """A condition that fails on another number does not hold; of large integers none is computed in
    64 bits, and doubling is no hang.
    """
    net, x = Uses(lambda x, n: x * (n * 10**15 / 10**15)), rand(4, 6)
    plan = gspmd.plan(net, x, mesh=gspmd.Mesh(data=2))
    assert plan.captured.reads.hold()
    net.calls = 10**6
    assert not plan.captured.reads.hold()
    torch.testing.assert_close(
        gspmd.plan(net, x, mesh=gspmd.Mesh(data=2)).simulate(x), x * (10**6 + 2)
    )
    net = Uses(lambda x, n: x * int(n / 2))
    net.calls = 0.0
    plan = gspmd.plan(net, x, mesh=gspmd.Mesh(data=2))
    plan.simulate(x)
    net.calls = math.nan
    assert not plan.captured.reads.hold()

    def doubled(x, n):
        for _ in range(100):
            n = n * 0.5 + n * 0.5
        return x * n

    net = Uses(doubled)
    torch.testing.assert_close(gspmd.plan(net, x, mesh=gspmd.Mesh(data=2)).simulate(x), 2 * x)


class Logs(Uses):
    def forward(self, x, log):
        y = super().forward(x)
        log["calls"].append(self.calls)
        return y


def test_a_number_that_is_put_into_an_argument():
    net, x, log = Logs(lambda x, n: x * n), rand(4, 6), {"calls": []}
    plan = gspmd.plan(net, x, log, mesh=gspmd.Mesh(data=2))
    torch.testing.assert_close(plan.simulate(x, log), 2 * x)
    assert log == {"calls": [1]} and type(log["calls"][0]) is int and not plan.captured.reads.hold()


def add(total, x):
    total.add_(x.sum(0))
    return x * 1


def test_a_tensor_around_a_function_is_changed_in_place():
    total, x = torch.zeros(6), rand(4, 6)
    plan = gspmd.plan(lambda x: add(total, x), x, mesh=gspmd.Mesh(data=2), in_specs="data _")
    for step in range(3):
        torch.testing.assert_close(total, step * x.sum(0))
        plan.simulate(x)


class Elsewhere:
    last = torch.zeros(6)


def kept_where_nobody_looks(x):
    y = x + getattr(Elsewhere, "la" + "st")
    setattr(Elsewhere, "la" + "st", y.mean(0))
    return y


def test_a_tensor_that_was_kept_where_nobody_looks_is_an_error():
    gspmd.plan(kept_where_nobody_looks, rand(4, 6), mesh=gspmd.Mesh(data=2))
    with pytest.raises(gspmd.ShardingError, match="uses a tensor without values"):
        gspmd.plan(kept_where_nobody_looks, rand(4, 6), mesh=gspmd.Mesh(data=2))


def test_a_tensor_given_to_a_function_that_it_changes_in_place_is_an_error():
    with pytest.raises(gspmd.ShardingError, match="changes a tensor in place that"):
        gspmd.plan(functools.partial(add, torch.zeros(6)), rand(4, 6), mesh=gspmd.Mesh(data=2))


@functools.lru_cache(None)
def angles(rows):
    return torch.arange(rows * 6.0).view(-1, 6).cos()


KNOWN: dict = {}


def known_angles(rows):
    if rows not in KNOWN:
        KNOWN[rows] = torch.arange(rows * 6.0).view(-1, 6).cos()
    return KNOWN[rows]


@pytest.mark.parametrize("cache", [angles, known_angles])
def test_constants_that_a_function_caches_have_values(cache):
    net, mesh, x = nn.Linear(6, 8), gspmd.Mesh(data=2), rand(4, 6)
    net.forward = lambda x: nn.functional.linear(x * cache(len(x)), net.weight)
    for _ in range(2):
        torch.testing.assert_close(
            gspmd.plan(net, x, mesh=mesh, in_specs="data _").simulate(x), net(x)
        )
    torch.testing.assert_close(cache(4), torch.arange(24.0).view(4, 6).cos())
    assert type(cache(4)) is torch.Tensor


class Makers(collections.OrderedDict):
    """A table that makes what is asked for, as that of activations in transformers."""

    def __getitem__(self, name):
        layer = super().__getitem__(name)(6)
        return nn.init.constant_(layer.weight, 3.0)


MAKERS = Makers(affine=nn.LayerNorm)


def test_a_table_that_makes_its_values_is_not_looked_into():
    net, x = nn.Linear(6, 6), rand(4, 6)
    net.forward = lambda x: nn.functional.linear(x, net.weight) * MAKERS["affine"].detach()
    torch.testing.assert_close(
        gspmd.plan(net, x, mesh=gspmd.Mesh(data=2), in_specs="data _").simulate(x), net(x)
    )


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = torch.zeros(2, 6)
        self.first = self.rows[0]

    def forward(self, x):
        self.first.add_(x.mean(0))
        return x + self.rows[0]


def test_a_change_of_what_shares_its_memory_is_an_error():
    with pytest.raises(
        gspmd.ShardingError, match="changes a tensor in place that shares its memory with 'rows'"
    ):
        gspmd.plan(Views(), rand(4, 6), mesh=gspmd.Mesh(data=2))


LOSSES: list = []
FACTOR = 2.0


def keep(loss):
    LOSSES.append(loss)
    return loss * FACTOR


class Keeps(Uses):
    def inner(self, x):
        return keep((x * self.calls).mean())

    def forward(self, x):
        return self.inner(super().forward(x))


class Pyramid(nn.Module):
    """Asks for values of constants, of buffers and of a tensor in an attribute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor(2))
        self.register_buffer("scales", torch.tensor([1.5, 2.0]))
        self.offsets = torch.tensor([0, 3])

    def forward(self, x):
        shapes = torch.tensor([[2, 3], [3, 2]])
        for rows, columns in shapes.tolist():
            x = x.view(-1, rows, columns).transpose(1, 2).flatten(1)
        if (torch.arange(6).view(2, 3) > 4).any() and torch.equal(shapes[0], shapes[1].flip(0)):
            x = x * int(shapes.prod(1)[0])
        x = x * {"2": 2, "3": 5}[f"{self.count.item():d}"]
        for _ in range(self.count):
            x = x + self.offsets[1].item()
        for scale in self.scales.tolist():
            x = x * scale
        return x if self.scales.sum() > 3 else -x


def test_values_that_a_plan_looks_at():
    net, x, mesh = Pyramid(), rand(4, 6), gspmd.Mesh(data=2)
    plan = gspmd.plan(net, x, mesh=mesh, in_specs="data _", out_specs="same")
    assert not plan.collectives and not plan.replicated_ops
    torch.testing.assert_close(plan.simulate(x), net(x))
    for change in (
        lambda: net.count.add_(1),
        lambda: net.scales.mul_(0.5),
        lambda: net.offsets.fill_(2),
    ):
        change()
        with pytest.raises(
            gspmd.ShardingError, match="a buffer has another value than when this was planned"
        ):
            plan.simulate(x)
        plan = gspmd.plan(net, x, mesh=mesh, in_specs="data _")
        torch.testing.assert_close(plan.simulate(x), net(x))


@pytest.mark.parametrize(
    "branch",
    [
        lambda x: x.sum() > 0,
        lambda x: (x > 0).any().item() == 1,
        lambda x: torch.rand(3).sum() > 1,
        lambda x: torch.equal(x, x + 1),
        lambda x: (x > 0).any().item() != 0,
    ],
)
def test_values_of_arguments_and_random_numbers_are_not_looked_at(branch):
    with pytest.raises(gspmd.ShardingError, match="the program depends on values"):
        gspmd.plan(lambda x: x * 2 if branch(x) else x, rand(4, 6), mesh=gspmd.Mesh(data=2))


class Pictures(nn.Module):
    """Rows of several pictures [sum(heights * widths), 6], and what a layer asks of their sizes."""

    def __init__(self, ask):
        super().__init__()
        self.ask, self.head = ask, nn.Linear(6, 6)
        self.places = nn.Parameter(rand(40, 6))

    def forward(self, x, sizes):
        return torch.cat([*self.ask(self, self.head(x), sizes)]).square().mean(0)


def placed(net, x, sizes):
    at = 0
    for height, width in sizes.tolist():
        grid = net.places[: height * width].view(height, width, 6)
        yield x[at : at + height * width] + grid.transpose(0, 1).reshape(-1, 6)
        at += height * width


def attended(net, x, sizes):
    ends = F.pad(sizes.prod(1).repeat_interleave(sizes[:, 0] * 0 + 1).cumsum(0), (1, 0))
    for part in x.split((ends[1:] - ends[:-1]).tolist()):
        yield F.scaled_dot_product_attention(part[None], part[None], part[None])[0]


ASKED = {
    "places": placed,
    "split": attended,
    "longest": lambda net, x, sizes: [x + net.places[: int(sizes.max())].sum(0)],
    "range": lambda net, x, sizes: [x + net.places[i] for i in range(sizes[0, 0].item())],
    "branch": lambda net, x, sizes: [x if sizes[0, 0] > sizes[0, 1] else x * 3],
    "unbind": lambda net, x, sizes: [x[: int(h * w)] * h for h, w in sizes],
    "resized": lambda net, x, sizes: [
        F.interpolate(x.mT[None], size=int(sizes[1].prod()), mode="linear")[0].mT
    ],
    "float": lambda net, x, sizes: [x[: round(float(sizes[0, 0]) * 1.6)]],
}


# Those of which one program serves all sizes.
STAY_SYMBOLS = ("places", "longest", "unbind", "resized", "float")


@pytest.mark.parametrize("name", ASKED)
def test_whole_numbers_of_arguments_have_a_program_each(name):
    net, mesh = Pictures(ASKED[name]), gspmd.Mesh(data=2, model=2)
    for weight in (net.places, net.head.weight):
        gspmd.mark_sharding(weight, mesh, "data model")
    first, other = torch.tensor([[2, 4], [4, 3]]), torch.tensor([[5, 2], [2, 5]])
    plans = []
    for sizes in (first, other):
        x = rand(20, 6)
        plans.append(gspmd.plan(net, x, sizes, mesh=mesh, in_specs=("data _", None), grad=True))
        got, gradients = plans[-1].simulate(x, sizes, _poison=True)
        want = net(x, sizes)
        assert_same(got, want, name)
        wanted = torch.autograd.grad(want.sum(), [*net.parameters()], allow_unused=True)
        for key, grad in zip(dict(net.named_parameters()), wanted):
            if grad is not None:
                assert_same(gradients[key], grad, f"{name}: {key}")
    is_for_all = not plans[0].captured.looks
    if torch.__version__ >= "2.10":  # 2.9 cannot trace slices by numbers
        assert is_for_all == (name in STAY_SYMBOLS)
    if is_for_all:
        assert_same(plans[0].simulate(x, other)[0], net(x, other), name)
    else:
        with pytest.raises(gspmd.ShardingError, match="argument 'sizes' has another value"):
            plans[0].simulate(x, other)
    values = plans[0].simulate(x, torch.tensor(first.tolist()))[0]  # equal numbers
    assert_same(values, net(x, first), name)


def test_numbers_that_stay_symbols_are_in_one_program():
    x, n = rand(4, 6), torch.tensor([3])
    plan = gspmd.plan(lambda x, n: x * n.item(), x, n, mesh=gspmd.Mesh(data=2))
    assert_same(plan.simulate(x, n + 1), x * 4, "n")


def makes(net):
    net.fresh = nn.Parameter(torch.ones(6))


def takes_away(net):
    net.weight = None


def replaces(net):
    net.weight = nn.Parameter(net.weight.detach() / 2)


def lengthens(net):
    net.weight = nn.Parameter(torch.ones(12))


def lengthens_data(net):
    net.weight.data = torch.ones(12)


@pytest.mark.parametrize(
    "change, message",
    [
        (makes, "forward makes parameter 'fresh'"),
        (takes_away, "forward takes away parameter 'weight'"),
        (
            replaces,
            "forward puts another parameter in the place of 'weight', on which its result depends",
        ),
        (
            lengthens,
            r"parameter 'weight', torch.float32 of shape \[6\], is given data of torch.float32 "
            r"and shape \[12\]",
        ),
        (lengthens_data, r"a tensor, torch.float32 of shape \[6\], is given data"),
    ],
)
def test_parameters_that_forward_cannot_change(change, message):
    """Their gradients would be lost. The module stays as it was."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x):
            y = x * self.weight
            change(self)
            return y if self.weight is None else y + self.weight[:6]

    net = Net()
    with pytest.raises(gspmd.ShardingError, match=message):
        gspmd.plan(net, rand(4, 6), mesh=gspmd.Mesh(data=2), grad=True)
    assert [name for name, _ in net.named_parameters()] == ["weight"]
    assert type(net.weight) is nn.Parameter and net.weight.tolist() == [1.0] * 6


def test_what_functions_that_forward_calls_read_and_write():
    net, x = Keeps(lambda x, n: x), rand(4, 6)
    plan = gspmd.plan(net, x, mesh=gspmd.Mesh(data=2), in_specs="data _")
    predicates = {guard.source.name: guard.predicate for guard in plan.captured.reads.guards}
    assert LOSSES == [] and predicates["FACTOR"] == 2.0
    for step in (1, 2):
        torch.testing.assert_close(plan.simulate(x), 2 * step * x.mean())
        torch.testing.assert_close(LOSSES, [x.mean() * i for i in range(1, step + 1)])
    LOSSES.clear()


def test_batch_norm_is_of_the_whole_batch():
    """Also that which models of several processes have."""
    net, x = nn.BatchNorm1d(6), rand(8, 6)
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(net))
    plan = gspmd.plan(synced, x, mesh=gspmd.Mesh(data=4), in_specs="data _")
    torch.testing.assert_close(plan.simulate(x), net(x))
    torch.testing.assert_close(synced.running_var, net.running_var)


class Frozen(dict):
    """A configuration that nobody may change, as those of diffusers."""

    def _refuse(self, *_):
        raise TypeError("this is frozen")

    __setitem__ = __delitem__ = setdefault = update = pop = clear = _refuse


def test_a_table_that_refuses_changes_is_read():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = Frozen(scale=2.0, sizes=Frozen(first=3))

        def forward(self, x):
            self.last = x.sum()
            return x * self.config["scale"] * self.config["sizes"]["first"]

    net, x = Net(), rand(4, 6)
    plan = gspmd.plan(net, x, mesh=gspmd.Mesh(data=2), in_specs="data _")
    torch.testing.assert_close(plan.simulate(x), x * 6)
    assert plan.captured.holds([x])
    net.config = Frozen(scale=3.0, sizes=Frozen(first=3))
    assert not plan.captured.holds([x])
