"""Rows by experts: numbers of one device, no weight gathered, few bytes, no silent drops."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from expert_layer import CHOICES, Experts, batch
from samples import SAMPLES
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardingError, moe
from torchgspmd.rules.rewrites import rewrite_of

ROUTINGS = ("uniform", "skewed", "to one", "empty experts")
WIDTH = 256


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def planned(model: Experts, mesh: Mesh, *arguments: torch.Tensor) -> gspmd.Plan:
    """The plan with experts along `expert` and tokens along all axes."""
    gspmd.annotate(model, mesh, {"*": "expert _ _"})
    rows = f"{'+'.join(mesh.names)} _"
    specs = {"in_specs": (rows, rows, rows), "out_specs": (rows, "")}
    return gspmd.plan(model, *arguments, mesh=mesh, grad=True, **specs)


def check(model: Experts, plan: gspmd.Plan, *arguments: torch.Tensor) -> None:
    """Compare with every expert on every token."""
    (y, dropped), gradients = plan.simulate(*arguments, _poison=True)
    expected = model.whole(*arguments)
    close(y, expected)
    assert dropped == 0
    wanted = torch.autograd.grad(expected.sum(), [*model.parameters()])
    for (name, _), gradient in zip(model.named_parameters(), wanted):
        close(gradients[name], gradient)
    smallest = model.up.numel() * 8 / 2
    assert all(c.payload_bytes < smallest for c in plan.collectives if c.kind == "all_gather")


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize(
    "cut",
    [
        {},
        {"shards": 4},
        {"shards": 3, "groups": 2},
        {"groups": 3},
        {"shards": 4, "capacity": 4.0},
        {"shards": 2, "groups": 2, "capacity": 2.0},
    ],
)
def test_one_device(kind, cut):
    """Five experts: the last shard has fewer, or none. Leading dimensions stay."""
    torch.manual_seed(0)
    model, arguments = Experts(5, 6, 4, **cut), batch(kind, 24, 6, 5)
    y, dropped = model(*(t.unflatten(0, (4, 6)) for t in arguments))
    close(y.flatten(0, 1), model.whole(*arguments))
    assert dropped == 0
    wanted = [arguments[0], arguments[2], *model.parameters()]
    found = torch.autograd.grad(y.square().sum(), wanted)
    for a, b in zip(found, torch.autograd.grad(model.whole(*arguments).square().sum(), wanted)):
        close(a, b)


def test_rows_are_sorted_and_torch_takes_them():
    x, chosen, _ = batch("skewed", 24, 8, 4)
    routed = moe.dispatch(x.detach(), chosen, 4)
    experts, order = chosen.flatten().sort(stable=True)
    close(routed.rows, x[order // CHOICES])
    assert routed.ends.tolist() == [(experts <= e).sum().item() for e in range(4)]
    w = torch.randn(4, 8, 16)
    torch.testing.assert_close(
        moe.grouped_mm(routed.rows.float(), w, routed.ends),
        torch._grouped_mm(routed.rows.float(), w, offs=routed.ends),
    )


def test_autocast_multiplies_halves():
    x, chosen, _ = batch("skewed", 24, 8, 4)
    rows, w, bias = x.detach().float(), torch.randn(4, 8, 5), torch.randn(4, 5)
    routed = moe.dispatch(rows, chosen, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y = moe.grouped_mm(routed.rows, w, routed.ends, bias)
    assert y.dtype == torch.bfloat16
    expected = moe.grouped_mm(routed.rows, w, routed.ends, bias)
    torch.testing.assert_close(y.float(), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("devices", (2, 4))
def test_tokens_come_to_all_experts(devices):
    """Forward and backward: tokens are gathered and sums scattered, once each."""
    torch.manual_seed(0)
    tokens = 16 * devices
    model = Experts(8, WIDTH, 64)
    plan = planned(model, Mesh(expert=devices), *batch("uniform", tokens, WIDTH, 8))
    for kind in ROUTINGS:
        check(model, plan, *batch(kind, tokens, WIDTH, 8))
    assert plan.sent_bytes <= 1.02 * 4 * (devices - 1) * 16 * WIDTH * 8


@pytest.mark.parametrize("capacity, kinds", [(1.0, ROUTINGS[:1]), (4.0, ROUTINGS[1:])])
def test_rows_go_to_their_experts(capacity, kinds):
    """An even share of room is enough for the uniform routing; the others have all there may be."""
    torch.manual_seed(0)
    model = Experts(8, WIDTH, 64, shards=4, capacity=capacity)
    plan = planned(model, Mesh(expert=4), *batch("uniform", 64, WIDTH, 8))
    for kind in kinds:
        check(model, plan, *batch(kind, 64, WIDTH, 8))
    rows = 16 * CHOICES * 3 / 4 * capacity
    assert plan.sent_bytes <= 1.02 * 4 * rows * WIDTH * 8
    if capacity == 1:
        large = [c for c in plan.collectives if c.sent_bytes > WIDTH * 8]
        assert [c.kind for c in large] == ["all_to_all"] * 4


@pytest.mark.parametrize("capacity", (None, 1.9))
def test_groups_of_devices_have_all_experts(capacity):
    """Tokens leave their group for nothing; gradients of weights are summed over the groups."""
    torch.manual_seed(0)
    model = Experts(6, WIDTH, 64, shards=2, groups=2, capacity=capacity)
    arguments = batch("skewed", 48, WIDTH, 6)
    plan = planned(model, Mesh(data=2, expert=2), *arguments)
    check(model, plan, *arguments)
    if capacity is None:
        weights = sum(p.numel() // 2 * 8 for p in model.parameters())
        assert plan.sent_bytes <= 1.02 * (4 * 12 * WIDTH * 8 + weights)


def test_more_devices_than_experts():
    torch.manual_seed(0)
    model, arguments = Experts(3, 16, 128, shards=4), batch("skewed", 32, 16, 3)
    check(model, planned(model, Mesh(expert=4), *arguments), *arguments)


def test_rows_without_room_are_counted():
    """On every mesh the same are dropped: of 8 choices of each of 4 parts, 4 have room."""
    torch.manual_seed(0)
    model = Experts(4, 8, 8, shards=4, capacity=2.0, overflow="count")
    arguments = batch("to one", 16, 8, 4)
    y, dropped = model(*arguments)
    (simulated, count), _ = planned(model, Mesh(expert=4), *arguments).simulate(*arguments)
    close(simulated, y)
    assert dropped == count == 16
    close(y.view(4, 4, 8)[:, :2], model.whole(*arguments).view(4, 4, 8)[:, :2])
    assert not y.view(4, 4, 8)[:, 2:].any()


def test_rows_without_room_are_an_error():
    model = Experts(4, 8, 8, shards=4, capacity=2.0)
    arguments = batch("to one", 16, 8, 4)
    message = "8 rows go from one shard of the tokens to one of the experts, which has room for 4"
    with pytest.raises(ShardingError, match=message):
        model(*arguments)
    with pytest.raises(ShardingError, match=message):
        planned(model, Mesh(expert=4), *arguments).simulate(*arguments)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x, c: moe.dispatch(x, c[1:], 4), "differ in more than the last dimension"),
        (lambda x, c: moe.dispatch(x, c, 4, overflow="eror"), "no overflow 'eror'"),
        (lambda x, c: moe.dispatch(x, c, 4, shards=3, capacity=1.0), "cannot be cut into 3 parts"),
        (lambda x, c: moe.grouped_mm(x, x[:, None], torch.ones(5)), "does not have a matrix"),
        (lambda x, c: moe.combine(x, moe.dispatch(x, c, 4), c), "do not fit"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ShardingError, match=message):
        call(torch.ones(16, 8), torch.zeros(16, CHOICES, dtype=torch.long))


# ---------------------------------------------------------------- gradients that are counted once


class Biased(nn.Module):
    """A layer with a router, and biases everywhere; x [b, s, m]."""

    def __init__(self, **cut):
        super().__init__()
        torch.manual_seed(0)
        shapes = {"router": (16, 4), "router_bias": (4,), "up": (4, 16, 32), "up_bias": (4, 32)}
        for name, shape in {**shapes, "down": (4, 32, 16), "down_bias": (4, 16)}.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, dtype=torch.float64) / 3))
        self.cut = cut

    def route(self, x):
        return (x @ self.router + self.router_bias).softmax(-1).topk(2, -1)

    def forward(self, x):
        weights, chosen = self.route(x)
        routed = moe.dispatch(x, chosen, 4, **self.cut)
        h = moe.grouped_mm(routed.rows, self.up, routed.ends, self.up_bias).tanh()
        y = moe.grouped_mm(h, self.down, routed.ends, self.down_bias)
        return moe.combine(y, routed, weights).square().sum()

    def whole(self, x):
        weights, chosen = self.route(x)
        h = (torch.einsum("bsm,emh->ebsh", x, self.up) + self.up_bias[:, None, None]).tanh()
        y = torch.einsum("ebsh,ehm->ebsm", h, self.down) + self.down_bias[:, None, None]
        share = ((chosen == torch.arange(4)[:, None, None, None]) * weights).sum(-1)
        return torch.einsum("ebsm,ebs->bsm", y, share).square().sum()


def counted_once(x_spec: str, names: tuple[str, ...], **cut) -> None:
    """Compare gradients on expert=2,model=2, where hidden units are sharded along `model`."""
    model, x = Biased(**cut), torch.randn(4, 8, 16, dtype=torch.float64)
    mesh = Mesh(expert=2, model=2)
    specs = {"up": "expert _ model", "up_bias": "expert model", "down": "expert model _"}
    gspmd.annotate(model, mesh, {**specs, "down_bias": "expert _"})
    plan = gspmd.plan(model, x, mesh=mesh, in_specs=x_spec, grad=True)
    loss, gradients = plan.simulate(x, _poison=True)
    expected = model.whole(x)
    close(loss, expected)
    expected.backward()
    for name in names:
        close(gradients[name], model.get_parameter(name).grad)


def test_bias_of_a_router_under_tensor_parallelism():
    counted_once("expert _ _", ("router", "router_bias"))


def test_biases_of_experts_under_tensor_parallelism():
    counted_once("expert _ _", ("up_bias", "down_bias"), shards=2, capacity=2.0)


def test_experts_of_a_sequence_that_is_sharded_too():
    counted_once("expert model _", ("router", "router_bias", "up", "up_bias", "down", "down_bias"))


class RandomSecond(nn.Module):
    """The second expert of a token is asked as often as its weight says (GShard)."""

    def __init__(self):
        super().__init__()
        self.router = nn.Parameter(torch.randn(8, 4, dtype=torch.float64))
        self.up = nn.Parameter(torch.randn(4, 8, 8, dtype=torch.float64))

    def forward(self, x):
        weights, chosen = (x @ self.router).softmax(-1).topk(2, -1)
        first, second = weights.unbind(1)
        asked = torch.rand_like(second) < 2 * second
        routed = moe.dispatch(x, chosen, 4)
        y = moe.grouped_mm(routed.rows, self.up, routed.ends)
        return moe.combine(y, routed, torch.stack([first, second.where(asked, 0)], 1)), asked.sum()


def test_random_experts_are_the_same_on_every_mesh():
    torch.manual_seed(0)
    model, x, results = RandomSecond(), torch.randn(32, 8, dtype=torch.float64), []
    for mesh in (Mesh(expert=1), Mesh(data=2, expert=2)):
        gspmd.annotate(model, mesh, {"up": "expert _ _"})
        rows = f"{'+'.join(mesh.names)} _"
        plan = gspmd.plan(model, x, mesh=mesh, in_specs=rows, out_specs=(rows, ""))
        torch.manual_seed(1)
        results.append(plan.simulate(x))
    (one, asked), (four, asked_of_four) = results
    close(one, four)
    assert 0 < asked == asked_of_four < 32


# ------------------------------------------------------------------------------------- XLA


@pytest.mark.parametrize("name", ("grouped_mm", "grouped_outer", "block_mm", "block_outer"))
def test_products_for_xla(name):
    op = getattr(torch.ops.torchgspmd, name).default
    for sample in SAMPLES[op]:
        args, kwargs = sample()
        torch.testing.assert_close(rewrite_of("xla", op)(*args, **kwargs), op(*args, **kwargs))


def test_xla_cannot_raise():
    with pytest.raises(ShardingError, match="cannot raise an error"):
        rewrite_of("xla", torch.ops.torchgspmd.within.default)(torch.ones(2, 2, 2), 1, None)


class Calls(TorchDispatchMode):
    """Counts the calls of operations of experts."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.update([str(function)] if function.namespace == "torchgspmd" else [])
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("cut", [{}, {"shards": 3}, {"shards": 2, "capacity": 2.0}])
def test_vmap_has_no_loop(cut):
    """Stages with rows and weights of their own are one call, with the numbers of each alone."""
    torch.manual_seed(0)
    stages = [Experts(5, 6, 4, **cut) for _ in range(2)]
    each = [batch(kind, 12, 6, 5) for kind in ("skewed", "to one")]
    arguments = [torch.stack(parts) for parts in zip(*each)]
    weights, _ = torch.func.stack_module_state(stages)

    def run(weights, *arguments):
        return torch.func.functional_call(stages[0], weights, arguments)[0]

    with Calls() as calls:
        loss = torch.vmap(run)(weights, *arguments).square().sum()
        found = torch.autograd.grad(loss, [*weights.values()])
    for i, stage in enumerate(stages):
        with Calls() as alone:
            loss = stage(*each[i])[0].square().sum()
            gradients = torch.autograd.grad(loss, [*stage.parameters()])
        assert calls.names == alone.names
        for stacked, gradient in zip(found, gradients):
            close(stacked[i], gradient)
