"""Capture: whatever a module or function does, simulated devices give the numbers of one device,
gradients included.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
from helpers import MESHES, assert_same, eager, message, rand
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchgspmd as gspmd
from torchgspmd import Mesh

BIG = Mesh(a=2, m=3)


def check(module: nn.Module, *args, mesh: Mesh = BIG, terms: int = 256, **kwargs):
    """Forward and every gradient of a module against eager; returns the plan."""
    plan = gspmd.plan(module, *args, mesh=mesh, grad=True, **kwargs)
    state = {name: t.clone() for name, t in module.state_dict().items()}
    torch.manual_seed(1)
    want = eager(module, *args, **kwargs)
    after = {name: t.clone() for name, t in module.state_dict().items()}
    module.load_state_dict(state)
    torch.manual_seed(1)
    got = plan.simulate(*args, _poison=True, **kwargs)
    assert_same(got, want, terms=terms)
    assert_same(dict(module.state_dict()), after, "state", terms=terms)
    return plan


def marked(module: nn.Module, mesh: Mesh, layouts: dict[str, str]) -> nn.Module:
    """The layouts as far as the mesh has their axes."""
    words = {
        name: " ".join(w if w in ("_", "?") or w in mesh.names else "_" for w in spec.split())
        for name, spec in layouts.items()
    }
    return gspmd.annotate(module, mesh, words)


def seeded(make):
    torch.manual_seed(0)
    return make()


class Block(nn.Module):
    """A pre-norm attention and MLP block with heads as a dimension of their own."""

    def __init__(self, width: int = 12, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, s, w = x.shape
        q, k, v = (
            t.view(b, s, self.heads, w // self.heads).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).split(w, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, w)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


MEGATRON = {
    "qkv.weight": "m _",
    "qkv.bias": "m",
    "out.weight": "_ m",
    "up.weight": "m _",
    "up.bias": "m",
    "down.weight": "_ m",
}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("shape", [(4, 6, 12), (5, 7, 12)], ids=["even", "uneven"])
def test_transformer_block(mesh, shape):
    batch = "a _ _" if "a" in mesh.names else "_ _ _"
    block = marked(seeded(Block), mesh, MEGATRON)
    x = gspmd.mark_sharding(rand(*shape), mesh, batch)
    check(block, x, mesh=mesh)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_uneven_everything(mesh):
    net = seeded(
        lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3))
    )
    marked(net, mesh, {"0.weight": "m _", "2.weight": "m", "3.weight": "_ m"})
    check(
        net, gspmd.mark_sharding(rand(5, 5), mesh, "a _" if "a" in mesh.names else "m _"), mesh=mesh
    )


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index):
        return F.cross_entropy(self.head(self.embed(index)).flatten(0, 1), index.flatten())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_tied_weights_have_one_gradient(mesh):
    net = marked(seeded(Tied), mesh, {"embed.weight": "m _"})
    plan = check(net, torch.arange(15).view(5, 3) % 11, mesh=mesh)
    assert [i.name for i in plan.captured.inputs if i.kind == "parameter"] == ["embed.weight"]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_updates_its_buffers(mesh, training):
    net = seeded(lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU())).train(
        training
    )
    net[1].running_mean.uniform_(-1, 1)
    marked(net, mesh, {"1.weight": "m", "0.weight": "m _"})
    plan = check(
        net, gspmd.mark_sharding(rand(7, 6), mesh, "a _" if "a" in mesh.names else "_ _"), mesh=mesh
    )
    changed = [
        plan.captured.inputs[o.input].name for o in plan.captured.outputs if o.kind == "mutation"
    ]
    assert changed == (
        ["1.running_mean", "1.running_var", "1.num_batches_tracked"] if training else []
    )


class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        before, y = self.mean, self.linear(x)
        self.mean, self.seen = 0.9 * self.mean + 0.1 * y.detach().mean(0), y
        return y - self.mean, before * 1.0


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_assigned_buffers_are_updated_and_attributes_are_there_after_a_run(mesh):
    net = marked(seeded(Averaged), mesh, {"linear.weight": "m _"})
    reference, x = copy.deepcopy(net), rand(5, 6)
    plan = gspmd.plan(net, x, mesh=mesh, grad=True)
    assert not hasattr(net, "seen") and not net.mean.any()
    for _ in range(2):
        assert_same(plan.simulate(x, _poison=True), eager(reference, x))
        assert_same((net.mean, net.seen), (reference.mean, reference.seen))


class Remembers(nn.Module):
    """What it computed once, in a table and a list of its own."""

    def __init__(self):
        super().__init__()
        self.scale, self.known, self.seen = nn.Parameter(torch.ones(8)), {"inner": {}}, []

    def forward(self, x):
        self.seen.append(x)
        if "bias" not in self.known["inner"]:
            self.known["inner"]["bias"] = self.scale * 2
        return x + self.known["inner"]["bias"]


def test_what_a_module_remembers_is_not_of_the_trace():
    model, x = Remembers(), rand(4, 8)
    plan = gspmd.plan(model, x, mesh=BIG, grad=True)
    assert model.known == {"inner": {}} and model.seen == []
    got, gradients = plan.simulate(x)
    assert_same(
        (got, model.known, model.seen), (x + 2, {"inner": {"bias": torch.full((8,), 2.0)}}, [x])
    )
    assert gradients["scale"].eq(8).all()
    other = rand(3, 8)  # uses what the first run has left
    assert_same(gspmd.plan(model, other, mesh=BIG, grad=True).simulate(other), other + 2)
    assert len(model.seen) == 2


@pytest.mark.parametrize("use", [lambda t: t, lambda t: t * 2])
def test_a_gradient_that_would_be_lost_is_an_error(use):
    """Of a tensor that the module reads, and that no attribute, list or variable has."""
    other, x = torch.ones(8, requires_grad=True), rand(4, 8)

    class Holds(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.scale, self.how = nn.Parameter(torch.ones(8)), how
            self.held = functools.partial(lambda how, tensor: how(tensor), tensor=use(other))

        def forward(self, x):
            return x * self.scale + self.held(self.how)

    with pytest.raises(
        gspmd.ShardingError,
        match=r"tensor \[8\] that requires a gradient, and is no parameter, argument",
    ):
        gspmd.plan(Holds(torch.tanh), x, mesh=BIG, grad=True)
    for how in (torch.detach, torch.no_grad()(torch.tanh)):
        gspmd.plan(Holds(how), x, mesh=BIG, grad=True)
    with torch.no_grad():
        gspmd.plan(Holds(torch.tanh), x, mesh=BIG)


def test_a_buffer_that_changes_its_shape_and_one_that_forward_registers():
    net, x = nn.Linear(6, 4), rand(5, 6)
    net.register_buffer("cache", torch.zeros(1, 6))

    def forward(x):
        net.cache = torch.cat([net.cache, x])
        net.register_buffer("total", net.cache.sum(0))
        return net.cache.sum()

    net.forward = forward
    rows = torch.cat([torch.zeros(1, 6), x])
    for _ in range(2):
        plan = gspmd.plan(net, x, mesh=BIG, in_specs="a _")
        assert_same(plan.simulate(x, _poison=True), rows.sum())
        assert_same(dict(net.named_buffers()), {"cache": rows, "total": rows.sum(0)})
        rows = torch.cat([rows, x])


Point = collections.namedtuple("Point", "x y")


class Trees(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(rand(4, 5))

    def forward(self, pair, *, scale=None, flag=False, rest=None):
        x = pair["a"][0] @ self.w + (pair["a"][1] if flag else 0)
        return {
            "point": Point(x if scale is None else x * scale, None),
            "list": [x.sum(), 3, "text"],
            "none": rest,
        }


@pytest.mark.parametrize("flag", [True, False])
def test_keywords_and_trees_in_and_out(flag):
    net = gspmd.annotate(seeded(Trees), BIG, {"w": "_ m"})
    check(net, {"a": (rand(6, 4), rand(5))}, scale=torch.tensor(2.0), flag=flag)


def test_default_arguments_and_none():
    check(seeded(Trees), {"a": [rand(6, 4), None]})


def test_one_value_returned_twice_and_an_input_returned():
    def f(x):
        y = x.sin()
        return y, [y, x]

    x = rand(5, 4)
    assert_same(gspmd.plan(f, x, mesh=BIG, in_specs="m _").simulate(x, _poison=True), f(x))


def test_one_tensor_passed_twice():
    x = rand(5, 4)
    assert_same(
        gspmd.plan(torch.mul, x, x, mesh=BIG, in_specs=("m _", "_ a")).simulate(x, x, _poison=True),
        x * x,
    )


def test_dropout_differs_between_runs_and_is_off_in_eval():
    net = nn.Sequential(nn.Dropout(0.5))
    x = torch.ones(64)
    plan = gspmd.plan(net, x, mesh=Mesh(m=2), in_specs="m")
    assert not torch.equal(plan.simulate(x), plan.simulate(x))
    assert torch.equal(gspmd.plan(net.eval(), x, mesh=Mesh(m=2), in_specs="m").simulate(x), x)


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.b(self.a(x).relu())
        return y, y.float().logsumexp(-1)


def test_autocast():
    net = gspmd.annotate(seeded(Autocast), BIG, {"a.weight": "m _", "b.weight": "_ m"})
    x = rand(7, 6)
    plan = gspmd.plan(net, x, mesh=BIG, grad=True)
    (got, _), grads = plan.simulate(x, _poison=True)
    (want, _), expected = eager(net, x)
    assert got.dtype == torch.bfloat16 and {n: g.dtype for n, g in grads.items()} == dict.fromkeys(
        expected, torch.float32
    )
    for g, w in [(got.float(), want.float()), *((grads[n], expected[n]) for n in expected)]:
        torch.testing.assert_close(
            g, w, rtol=0, atol=8 * torch.finfo(torch.bfloat16).eps * float(w.detach().abs().max())
        )


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(3, 3)
        self.a.weight.requires_grad_(False)

    def forward(self, x):
        return self.b(self.a(x).relu()), x.detach() * 2


def test_frozen_and_unused_parameters_have_no_gradient():
    net = gspmd.annotate(seeded(Frozen), BIG, {"a.weight": "m _"})
    plan = check(net, rand(7, 6))
    assert sorted(plan.simulate(rand(7, 6))[1]) == ["a.bias", "b.bias", "b.weight"]


class Checkpointed(nn.Module):
    def __init__(self, dropout: float = 0.0, keep: bool = False):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(6, 8), nn.Linear(8, 6), nn.Dropout(dropout)
        self.keep = keep

    def inner(self, x):
        return self.b(self.drop(self.a(x).sin()))

    def forward(self, x):
        if self.keep:
            return self.inner(self.inner(x)).cos()
        return checkpoint(
            self.inner, checkpoint(self.inner, x, use_reentrant=False), use_reentrant=False
        ).cos()


def test_checkpointing_recomputes_in_the_backward():
    net = gspmd.annotate(seeded(Checkpointed), BIG, {"a.weight": "m _", "b.weight": "_ m"})
    plan = check(net, gspmd.mark_sharding(rand(7, 6), BIG, "a _"))
    sines = [
        n.meta["backward"]
        for n in plan.captured.graph.nodes
        if n.target is torch.ops.aten.sin.default
    ]
    assert sines.count(False) == 2 and sines.count(True) >= 2


def test_dropout_of_what_is_recomputed_has_the_mask_of_the_forward():
    found = []
    for mesh, keep in ((BIG, False), (Mesh(a=1, m=1), True)):
        net = gspmd.annotate(
            seeded(lambda keep=keep: Checkpointed(0.5, keep)),
            mesh,
            {"a.weight": "m _", "b.weight": "_ m"},
        )
        plan = gspmd.plan(net, rand(7, 6), mesh=mesh, grad=True)
        torch.manual_seed(1)
        found.append(plan.simulate(rand(7, 6), _poison=True))
    assert_same(*found, terms=256)


def test_gradients_inside_of_a_function():
    def f(w, x):
        loss = (x @ w).tanh().square().sum()
        (grad,) = torch.autograd.grad(loss, w, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), w)
        return loss, grad, second

    w, x = rand(6, 5).requires_grad_(), rand(7, 6, seed=1)
    plan = gspmd.plan(f, w, x, mesh=BIG, in_specs=("_ m", "a _"))
    assert_same(plan.simulate(w, x, _poison=True), f(w, x), terms=1024)


def test_optimizer_step_inside_of_a_function():
    def step(w, moment, x):
        with torch.enable_grad():
            v = w.detach().requires_grad_()
            (grad,) = torch.autograd.grad((x @ v).square().mean(), v)
        moment.mul_(0.9).add_(grad)
        w.sub_(0.1 * moment)
        return grad.norm()

    x = rand(7, 6, seed=2)
    w, moment = rand(6, 5), rand(6, 5, seed=1)
    plan = gspmd.plan(step, w, moment, x, mesh=BIG, in_specs=("_ m", "_ m", "a _"))
    w2, moment2 = w.clone(), moment.clone()
    want = step(w2, moment2, x)
    assert_same(plan.simulate(w, moment, x, _poison=True), want)
    assert_same([w, moment], [w2, moment2])


def test_torch_optimizer_inside_of_a_function():
    def step(w, x):
        v = nn.Parameter(w.detach())
        optimizer = torch.optim.SGD([v], lr=0.1)
        (v.grad,) = torch.autograd.grad((x @ v).square().mean(), v)
        optimizer.step()
        return v.detach()

    w, x = rand(6, 5), rand(7, 6, seed=1)
    want = step(w.clone(), x)
    assert_same(
        gspmd.plan(step, w, x, mesh=BIG, in_specs=("_ m", "a _")).simulate(
            w.clone(), x, _poison=True
        ),
        want,
    )


def test_arguments_changed_in_place():
    def f(x, y):
        x[1:3].add_(y)
        x.mul_(2)
        return x.sum()

    x, y = rand(5, 4), rand(4)
    x2 = x.clone()
    plan = gspmd.plan(f, x, y, mesh=BIG, in_specs=("m _", None))
    want = f(x2, y)
    assert_same(plan.simulate(x, y, _poison=True), want)
    assert_same(x, x2)


def test_view_of_an_argument_changed_in_place():
    def f(x):
        x.t()[0].fill_(3.0)
        return x + 1

    x = rand(5, 4)
    x2 = x.clone()
    plan = gspmd.plan(f, x, mesh=BIG, in_specs="m a")
    want = f(x2)
    assert_same(plan.simulate(x, _poison=True), want)
    assert_same(x, x2)


def test_constant_of_the_model():
    table = rand(4)
    x = rand(5, 4)
    assert_same(
        gspmd.plan(lambda x: x + table, x, mesh=BIG, in_specs="m _").simulate(x, _poison=True),
        x + table,
    )


def test_positions_beyond_the_end_look_nothing_up():
    """Padding of an index is no place of the table: 7 positions over 2 or 3 devices."""
    for mesh in MESHES:
        f = lambda table: F.embedding(torch.arange(7), table).sin()  # noqa: E731
        table = rand(7, 4)
        assert_same(
            gspmd.plan(f, table, mesh=mesh, out_specs="m _").simulate(table, _poison=True), f(table)
        )


def test_model_on_the_meta_device_is_not_allocated():
    with torch.device("meta"):
        net = nn.Sequential(
            nn.Linear(1 << 16, 1 << 18), nn.ReLU(), nn.Linear(1 << 18, 1 << 16)
        )  # 128 GiB
    mesh = Mesh(a=2, m=4)
    gspmd.annotate(net, mesh, {"0.weight": "m _", "0.bias": "m", "2.weight": "_ m"})
    plan = gspmd.plan(
        net, torch.empty(64, 1 << 16, device="meta"), mesh=mesh, in_specs="a _", grad=True
    )
    assert plan.memory.parameters == ((1 << 34) * 2 + (1 << 18)) // 4 * 4 + (1 << 16) * 4
    assert str(plan.in_specs[0]) == "m _" and all(p.is_meta for p in net.parameters())


def test_fake_arguments():
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(6, 4)
    plan = gspmd.plan(torch.sin, x, mesh=BIG, in_specs="m _")
    assert_same(plan.simulate(rand(6, 4)), rand(6, 4).sin())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_types(dtype):
    x, y = rand(6, 4).to(dtype), rand(4, 5).to(dtype)
    f = lambda x, y: (x @ y).sum(0)  # noqa: E731
    assert_same(
        gspmd.plan(f, x, y, mesh=BIG, in_specs=("a m", "m _")).simulate(x, y, _poison=True), f(x, y)
    )


class Box:
    """An object that pytree does not know."""

    def __init__(self, tensor, scale=1):
        self.tensor, self.scale = tensor, scale


def test_objects_that_hold_tensors_are_taken_and_returned():
    def doubled(x, box):
        return x + box.scale * box.tensor, Box(2 * box.tensor)

    x, first, second = rand(6, 4), Box(rand(6, 4, seed=1), 3), Box(rand(6, 4, seed=2), 3)
    plan = gspmd.plan(doubled, x, first, mesh=BIG, in_specs=("a m", None))
    for box in (first, second):
        (y, other), (want, _) = plan.simulate(x, box, _poison=True), doubled(x, box)
        assert_same((y, other.tensor), (want, 2 * box.tensor))


class Slotted:
    """One whose attributes are in slots."""

    __slots__ = ("tensor",)

    def __init__(self, tensor):
        self.tensor = tensor


class Table(dict):
    """A table that pytree does not know."""


class Row(list):
    """A list that pytree does not know."""


class Pair(tuple):
    """A tuple that pytree does not know."""


@pytest.mark.parametrize(
    "holder, entry",
    [(Table(a=rand(6, 4)), "a"), (Row([rand(6, 4)]), 0), (Pair([rand(6, 4), 3]), 0)],
    ids=["table", "list", "tuple"],
)
def test_collections_of_other_types_are_opened_too(holder, entry):
    plan = gspmd.plan(
        lambda x, h: (x + h[entry], type(h)(h)),
        rand(6, 4),
        holder,
        mesh=BIG,
        in_specs=("a m", None),
    )
    changed = type(holder)(
        {**holder, entry: rand(6, 4, seed=5)}
        if isinstance(holder, dict)
        else (rand(6, 4, seed=5), *holder[1:])
    )
    y, other = plan.simulate(rand(6, 4), changed)
    assert_same((y, other[entry]), (rand(6, 4) + changed[entry], changed[entry]))
    assert type(other) is type(holder)


class Cache:
    """Keys of tokens, as a model keeps them from call to call."""

    def __init__(self):
        self.layers, self.seen, self.last = [], 0, {"none": None}

    def tensors(self):
        return [layer.tensor for layer in self.layers], self.last["x"], self.last["layer"].tensor


def test_what_is_put_into_arguments_is_there_after_every_run():
    def attend(x, cache, out):
        for i in range(2):
            if len(cache.layers) == i:
                cache.layers.append(Slotted(x * (i + 1)))
            else:
                cache.layers[i].tensor = torch.cat([cache.layers[i].tensor, x * (i + 1)])
        cache.seen += len(x)
        cache.last.pop("none", None)
        cache.last.update(x=x.sin(), layer=cache.layers[-1])
        out[:] = [out[-1], x]
        return sum(layer.tensor.sum() for layer in cache.layers), cache

    mine, theirs, out, want = Cache(), Cache(), ["before"], ["before"]
    layers = mine.layers
    for step, rows in enumerate((6, 3, 3)):
        x = rand(rows, 4, seed=step)
        plan = gspmd.plan(attend, x, mine, out, mesh=BIG, in_specs=("a m", None, None))
        assert mine.seen == theirs.seen and len(mine.layers) == len(
            theirs.layers
        )  # not when it is only traced
        total, returned = plan.simulate(x, mine, out, _poison=True)
        assert_same((total, mine.tensors()), (attend(x, theirs, want)[0], theirs.tensors()))
        assert (
            returned is mine
            and mine.layers is layers
            and mine.seen == theirs.seen
            and "none" not in mine.last
        )
        assert_same(out[1], want[1])
        fresh, again = Cache(), Cache()  # the same program for another one
        if step == 0:
            plan.simulate(x, fresh, ["before"])
            attend(x, again, ["before"])
            assert_same(fresh.tensors(), again.tensors())


def test_gradients_of_objects_that_are_returned():
    @dataclasses.dataclass(frozen=True)
    class Losses:
        loss: Tensor
        more: Box

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(rand(5, 7, seed=1))

        def forward(self, x, losses):
            y = x @ self.weight
            losses["norm"] = y.square().sum()
            return Losses(y.sum(), Box(y.sin()))

    net, x, losses = Net(), rand(6, 5), {}
    gspmd.mark_sharding(net.weight, BIG, "_ m")
    result, gradients = gspmd.plan(
        net, x, losses, mesh=BIG, in_specs=("a _", None), grad=True
    ).simulate(x, losses, _poison=True)
    wanted = {}
    want = net(x, wanted)
    (want.loss + want.more.tensor.sum()).backward()  # cotangents of ones for what is returned
    assert_same(
        (result.loss, result.more.tensor, losses["norm"]),
        (want.loss, want.more.tensor, wanted["norm"]),
    )
    assert_same(gradients["weight"], net.weight.grad)


class Router(nn.Module):
    """Leaves a loss of its own in an attribute, and keeps what it computed once."""

    def __init__(self):
        super().__init__()
        self.weight, self.loss, self.table = nn.Parameter(rand(5, 7, seed=1)), None, None

    def forward(self, x):
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(len(x) * 7.0).view(-1, 7).cos()
        y = x @ self.weight * self.table[: len(x)]
        self.loss, self.kept = y.square().mean(), (y, {"sum": y.sum(0)})
        return y.sin()


def test_tensors_that_forward_assigns_to_attributes():
    net, want = nn.Sequential(Router(), nn.Linear(7, 3)), nn.Sequential(Router(), nn.Linear(7, 3))
    want.load_state_dict(net.state_dict())
    gspmd.mark_sharding(net[0].weight, BIG, "_ m")
    for rows in (6, 9, 3):
        x = rand(rows, 5, seed=rows)
        left = net[0].loss
        plan = gspmd.plan(net, x, mesh=BIG, in_specs="a _", grad=True)
        assert net[0].loss is left
        assert_same(plan.simulate(x, _poison=True), eager(want, x))
        assert_same((net[0].loss, net[0].kept), (want[0].loss, want[0].kept))
        assert_same(net[0].table, want[0].table)


def test_a_function_that_keeps_what_it_computes():
    found: list = []

    def f(x):
        found.append(x.sin())
        return x.cos()

    plan = gspmd.plan(f, rand(6, 4), mesh=BIG, in_specs="a m")
    assert not found
    assert_same(plan.simulate(rand(6, 4), _poison=True), rand(6, 4).cos())
    assert_same(found, [rand(6, 4).sin()])


def test_a_tensor_that_is_passed_twice_and_changed():
    def f(x, y):
        y.mul_(2)
        return x + y

    plan, x = gspmd.plan(f, rand(6, 4), rand(6, 4), mesh=BIG), rand(6, 4)
    assert message(lambda: plan.simulate(x, x)).startswith(
        "one tensor is passed as 'x' and 'y', and changed in place"
    )
    assert_same(plan.simulate(x, x.clone()), 3 * rand(6, 4))


class Extractor:
    def __init__(self):
        self.rows, self.table, self.last = [], {}, None

    def method(self, module, args, result):
        self.rows.append(result)

    def __call__(self, module, args, result):
        self.last = result.detach()


FOUND: dict = {}


def test_hooks_that_keep_what_they_see():
    net, extractor, closure = (
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)),
        Extractor(),
        {"rows": []},
    )
    gspmd.mark_sharding(net[0].weight, BIG, "m _")
    net[0].register_forward_hook(lambda module, args, result: FOUND.update(first=result))
    net[0].register_forward_hook(extractor.method)
    net[1].register_forward_hook(extractor)
    net[1].register_forward_pre_hook(lambda module, args: closure["rows"].extend(args))
    net[2].register_forward_hook(
        functools.partial(lambda table, *args: table.update(out=args[-1]), extractor.table)
    )
    found = lambda: copy.copy(  # noqa: E731
        (
            FOUND["first"],
            extractor.rows[-1],
            extractor.table["out"],
            extractor.last,
            closure["rows"][-1],
        )
    )
    x = rand(5, 6)
    plan = gspmd.plan(net, x, mesh=BIG, in_specs="a _", grad=True)
    assert (
        not FOUND
        and not extractor.rows
        and not extractor.table
        and extractor.last is None
        and closure == {"rows": []}
    )
    for runs in (1, 2):
        plan.simulate(x, _poison=True)
        assert len(extractor.rows) == len(closure["rows"]) == runs
    got = found()
    net(x)
    assert_same(got, found())


def test_hooks_of_gradients_that_keep_what_they_see():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.last, self.inside = nn.Linear(6, 8), nn.Linear(8, 4), None, {}

        def forward(self, x):
            y = self.up(x).sin()
            y.register_hook(lambda grad: self.inside.update(y=grad))
            return self.down(y)

        def keep(self, module, grad_input, grad_output):
            self.last = grad_input[0], grad_output[0]

    net, x = Net(), rand(5, 6)
    net.down.register_full_backward_hook(net.keep)
    gspmd.mark_sharding(net.up.weight, BIG, "m _")
    plan = gspmd.plan(net, x, mesh=BIG, in_specs="a _", grad=True)
    assert net.last is None and not net.inside
    got = plan.simulate(x, _poison=True), net.last, dict(net.inside)
    assert_same(got, (eager(net, x), net.last, dict(net.inside)))


def test_gradients_of_complex_results():
    class Spectrum(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.complex(rand(5, 7, seed=1), rand(5, 7, seed=2)))

        def forward(self, x):
            y = torch.fft.fft(x) @ self.weight
            return y, y.abs()

    net, x = Spectrum(), rand(6, 5)
    gspmd.mark_sharding(net.weight, BIG, "_ m")
    assert_same(
        gspmd.plan(net, x, mesh=BIG, in_specs="a _", grad=True).simulate(x, _poison=True),
        eager(net, x),
    )


def complex_gradients(function):
    """The function's results, and gradients of all that it takes, of complex tensors."""

    def joint(*tensors):
        inputs = [t.detach().clone().requires_grad_() for t in tensors]
        outs = function(*inputs)
        return (*outs, *torch.autograd.grad(outs, inputs, [torch.ones_like(t) for t in outs]))

    return joint


COMPLEX = {
    "products": lambda x, w: (
        x @ w,
        torch.einsum("bk,kn->n", x, w),
        nn.functional.linear(x, w.mT),
        torch.vdot(x[:, 0], x[:, 1]),
    ),
    "sums": lambda x, w: (x.logsumexp(1), torch.linalg.vecdot(x, x.sin()), x.norm(), w.prod(1)),
    "moves": lambda x, w: (
        nn.functional.pad(x, (1, 2)),
        x.diagonal(),
        torch.cat([x, w.mT]),
        x.real,
        torch.view_as_real(w),
    ),
    "spectra": lambda x, w: (
        torch.fft.fft(x),
        torch.fft.ifft2(w),
        torch.linalg.eigh(x[:4, :4] + x[:4, :4].mH)[0],
    ),
}


@pytest.mark.parametrize("specs", [("a m", "m _"), ("m _", "_ a"), ("_ a+m", "_ _")], ids=str)
@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_and_their_gradients(name, specs):
    x, w = (torch.complex(rand(*shape), rand(*shape, seed=1)) for shape in ((6, 5), (5, 7)))
    joint = complex_gradients(COMPLEX[name])
    assert_same(
        gspmd.plan(joint, x, w, mesh=BIG, in_specs=specs).simulate(x, w, _poison=True), joint(x, w)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_statistics_of_half_precision_are_computed_in_more(dtype):
    """As PyTorch's kernels do: within two roundings of the result, where sums alone are out of the
    range of float16.
    """

    def statistics(x, dy):
        x = x.detach().clone().requires_grad_()
        found = x.mean(), x.mean(1), x.var(1), x.logsumexp(1), x.softmax(1), x.log_softmax(1)
        return (*found, *torch.autograd.grad(found[-2:], x, (dy, dy)))

    x, dy = (100 + rand(6, 4000)).to(dtype), rand(6, 4000, seed=1).to(dtype)
    assert x.sum().isinf() or dtype != torch.float16
    assert_same(
        gspmd.plan(statistics, x, dy, mesh=BIG, in_specs=("a m", "a m")).simulate(
            x, dy, _poison=True
        ),
        statistics(x, dy),
        terms=2,
    )


@pytest.mark.parametrize("specs", [("a _", "a _"), ("_ a", "a m"), ("a m", "_ a")], ids=str)
def test_integers_are_not_divided_by_padding(specs):
    def divided(x, y):
        return (
            x // y,
            x % y,
            torch.fmod(x, y),
            7 % y,
            x // y[:, :1],
            torch.div(x, y, rounding_mode="trunc"),
            x ** (y - 1),
            2 ** (y - 1),
            x // (y - y + 2),
        )

    x, y = (
        torch.randint(*span, (5, 7), generator=torch.Generator().manual_seed(0))
        for span in ((-9, 9), (1, 5))
    )
    assert_same(
        gspmd.plan(divided, x, y, mesh=BIG, in_specs=specs).simulate(x, y, _poison=True),
        divided(x, y),
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"center": False},
        {"normalized": True, "length": 90},
        {"onesided": False, "hop_length": 5},
        {"win_length": 12, "length": 40},
    ],
    ids=str,
)
def test_istft(options):
    window = torch.hann_window(options.get("win_length", 16)) + 0.1
    spectrum = torch.stft(
        rand(4, 60),
        16,
        window=window,
        return_complex=True,
        **{k: v for k, v in options.items() if k != "length"},
    )
    joint = complex_gradients(lambda x: (torch.istft(x, 16, window=window, **options),))
    assert_same(
        gspmd.plan(joint, spectrum, mesh=BIG, in_specs="a m _").simulate(spectrum, _poison=True),
        joint(spectrum),
    )


@pytest.mark.parametrize("batches", [0, 3])
def test_batch_norm_with_means_over_all_batches(batches):
    net = seeded(lambda: nn.BatchNorm1d(5, momentum=None))
    net.num_batches_tracked.fill_(batches)
    x, alone = rand(7, 5), copy.deepcopy(net)
    plan = gspmd.plan(net, x, mesh=BIG, in_specs="a m", grad=True)
    expected = alone(x)
    got, _ = plan.simulate(x, _poison=True)
    assert_same((got, *net.buffers()), (expected, *alone.buffers()))


def test_backward_nodes_are_told_apart():
    plan = gspmd.plan(seeded(Block), rand(4, 6, 12), mesh=BIG, grad=True)
    flags = [n.meta["backward"] for n in plan.captured.graph.nodes if n.op == "call_function"]
    assert flags == sorted(flags) and 0 < flags.index(True) < len(flags)


def test_source_is_the_user_s_line():
    plan = gspmd.plan(seeded(Block), rand(4, 6, 12), mesh=BIG, grad=True)
    found = {
        n.meta["source"].rpartition(":")[0].rsplit("/")[-1]
        for n in plan.captured.graph.nodes
        if n.op == "call_function" and n.meta["source"]
    }
    assert found == {"test_capture.py"}


@pytest.mark.parametrize("lead", [(3,), (3, 5), (2, 3, 5)], ids=str)
def test_products_keep_their_dimensions(lead):
    net = seeded(lambda: nn.Linear(4, 6))
    plan = check(net, rand(*lead, 4))
    shapes = [
        tuple(n.meta["val"].shape)
        for n in plan.captured.graph.nodes
        if n.target is torch.ops.torchgspmd.einsum.default
    ]
    assert shapes[0] == (*lead, 6)


EINSUMS = [
    "ij,jk->ik",
    "bij,bjk->bik",
    "...ij,jk->...ik",
    "ij,jk",
    "ij,kj,k->i",
    "i,i->",
    "i,j->ij",
    "ii,ij->ij",
    "ijk,kjl->il",
    "ij->ji",
]


@pytest.mark.parametrize("equation", EINSUMS)
def test_einsum(equation):
    sizes = dict(zip("ijklb", (5, 5, 5, 6, 4)))
    terms = equation.split("->")[0].replace("...", "b").split(",")
    operands = [rand(*(sizes[c] for c in term), seed=i) for i, term in enumerate(terms)]
    f = lambda *xs: torch.einsum(equation, *xs)  # noqa: E731
    specs = tuple(" ".join(["m", *"_" * (t.dim() - 1)]) for t in operands)
    assert_same(
        gspmd.plan(f, *operands, mesh=BIG, in_specs=specs).simulate(*operands, _poison=True),
        f(*operands),
    )


MATMULS = [
    ((5, 4), (4, 6)),
    ((5, 4), (4,)),
    ((4,), (4, 6)),
    ((4,), (4,)),
    ((3, 5, 4), (4, 6)),
    ((3, 5, 4), (3, 4, 6)),
    ((5, 4), (3, 4, 6)),
    ((3, 1, 5, 4), (2, 4, 6)),
]


@pytest.mark.parametrize("left, right", MATMULS, ids=str)
def test_matmul(left, right):
    x, y = rand(*left), rand(*right, seed=1)
    specs = tuple(" ".join(["m", *"_" * (t.dim() - 1)]) for t in (x, y))
    for f in (torch.matmul, lambda x, y: x @ y):
        assert_same(
            gspmd.plan(f, x, y, mesh=BIG, in_specs=specs).simulate(x, y, _poison=True), x @ y
        )


class Attention(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.scale = kind, nn.Parameter(torch.ones(()))

    def forward(self, q, k, v):
        options = {
            "plain": {},
            "causal": {"is_causal": True},
            "scale": {"scale": 0.2},
            "gqa": {"enable_gqa": True},
            "bool": {"attn_mask": torch.ones(5, 7, dtype=torch.bool).tril(1)},
            "float": {"attn_mask": torch.linspace(-1, 1, 35).view(5, 7)},
            "strided": {},
            "narrow": {},
        }[self.kind]
        if self.kind == "strided":  # rows that are not in one piece
            q, k, v = (t.mT.clone(memory_format=torch.contiguous_format).mT for t in (q, k, v))
        if self.kind == "narrow":
            v = v[..., :6]
        if self.kind == "gqa":
            k, v = k[:, :2], v[:, :2]
        if self.kind == "causal":
            k, v = k[:, :, :5], v[:, :, :5]
        return F.scaled_dot_product_attention(q * self.scale, k, v, **options)


@pytest.mark.parametrize("spec", ["a m _ _", "_ _ m _", "m _ _ a"])
@pytest.mark.parametrize(
    "kind", ["plain", "causal", "scale", "gqa", "bool", "float", "strided", "narrow"]
)
def test_attention(kind, spec):
    q, k, v = rand(3, 4, 5, 8), rand(3, 4, 7, 8, seed=1), rand(3, 4, 7, 8, seed=2)
    gspmd.mark_sharding(q, BIG, spec)
    check(Attention(kind), q, k, v, terms=1024)


def test_one_value_taken_apart_at_several_places():
    """As the rotation of rotary embeddings is in every layer."""

    def layers(x, table):
        for _ in range(3):
            sin, cos = table.chunk(2, -1)
            x = x * cos + x.flip(-1) * sin
        return x

    x, table = rand(4, 6, 8), rand(6, 16, seed=1)
    plan = gspmd.plan(layers, x, table, mesh=BIG, in_specs=("a _ _", "m _"))
    assert_same(plan.simulate(x, table, _poison=True), layers(x, table))


class Masked(torch.nn.Module):
    """Code for compilers that lacks a case, as LongT5's."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None and not torch.compiler.is_compiling():
            mask = torch.ones(x.shape[1])
        return x * mask[: x.shape[1]]  # pyright: ignore


def test_code_for_compilers_that_fails_is_left_for_the_eager_one() -> None:
    x = torch.rand(4, 6)
    plan = gspmd.plan(Masked(), x, mesh=Mesh(data=2), in_specs="data _")
    torch.testing.assert_close(plan.simulate(x), x)


def test_an_error_of_both_is_the_programs_own() -> None:
    def fails(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        gspmd.plan(fails, torch.rand(4), mesh=Mesh(data=2), in_specs="data")


class RegistersOnce(nn.Module):
    """Its first forward registers a hook, as models of transformers do for hidden states."""

    def __init__(self):
        super().__init__()
        self.child, self.total = nn.Linear(6, 6), torch.zeros(())

    def forward(self, x):
        if not self.__dict__.get("is_hooked"):
            self.child.register_forward_hook(lambda module, args, result: result * 2)
            self.child.register_forward_pre_hook(
                lambda module, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True
            )
            self.is_hooked = True
        self.total = self.total + x.sum()  # a trace that finds this is repeated
        return self.child(x) + self.total


def test_a_repeated_trace_registers_hooks_once():
    net, x = RegistersOnce(), rand(4, 6)
    reference = copy.deepcopy(net)
    plan = gspmd.plan(net, x, mesh=BIG, in_specs="a _", grad=False)
    assert_same(plan.simulate(x, _poison=True), reference(x))
    assert [len(net.child._forward_hooks), len(net.child._forward_pre_hooks)] == [1, 1]
