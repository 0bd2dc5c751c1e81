"""Random draws that are recomputed: the same numbers again, whatever draws and whatever recomputes.

    RECOMPUTED_DRAWS=all python -m pytest -q tests/capture/test_draws.py      # the whole product

The truth is the program without checkpoints, which draws the same masks once, and for some the
central difference of the plan's own loss.
"""

import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import torchgspmd as gspmd
from torchgspmd.capture.draws import draws
from torchgspmd.errors import ShardingError
from torchgspmd.rules import natively
from torchgspmd.rules.custom_ops.random import DRAW_SEED
from torchgspmd.shard_spec import ShardSpec
from torchgspmd.tools.suggest.layers import Layers

aten, ours = torch.ops.aten, torch.ops.torchgspmd


def attention(x, *, written=False):
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    if written:
        y = F.dropout((q @ q.mT / 2).softmax(-1), 0.5) @ q
    else:
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=0.5)
    return y.transpose(1, 2).flatten(2)


def flex(x):
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    y = flex_attention(q, q, q, lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf))
    return F.dropout(y, 0.5).transpose(1, 2).flatten(2)


def like(x, method, *args):
    return x * getattr(torch.empty_like(x), method)(*args)


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "two dropouts": lambda x: F.dropout(F.dropout(x, 0.3), 0.3),
    "dropout in place": lambda x: F.dropout(x * 2, 0.5, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x, 0.5),
    "dropout2d": lambda x: F.dropout2d(x.unsqueeze(-1), 0.5).squeeze(-1),
    "dropout3d": lambda x: F.dropout3d(x[..., None, None], 0.5).flatten(2),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.4)),
    "bernoulli of values": lambda x: x * torch.bernoulli(x.detach().sigmoid()),
    "bernoulli_": lambda x: like(x, "bernoulli_", 0.5),
    "rand": lambda x: x * torch.rand(x.shape),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x + x.tanh() * torch.randn(x.shape[-1]),
    "randn_like": lambda x: x * torch.randn_like(x),
    "randint": lambda x: x * torch.randint(0, 3, x.shape),
    "randperm": lambda x: x[..., torch.randperm(x.shape[-1])],
    "normal": lambda x: x * torch.normal(torch.zeros(x.shape), 0.3),
    "normal_": lambda x: like(x, "normal_"),
    "uniform_": lambda x: like(x, "uniform_", 0, 1),
    "exponential_": lambda x: like(x, "exponential_"),
    "multinomial": lambda x: x * torch.multinomial(torch.ones(x.shape[-1]), x.shape[-1]),
    "poisson": lambda x: x * torch.poisson(torch.ones(x.shape)),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu in place": lambda x: F.rrelu(x * 2, training=True, inplace=True),
    "gumbel_softmax": lambda x: x * F.gumbel_softmax(x, dim=-1),
    "gumbel_softmax hard": lambda x: x * F.gumbel_softmax(x, hard=True, dim=-1),
    "rsample": lambda x: torch.distributions.Normal(x, 1.0).rsample(),
    "attention": attention,
    "flex_attention": flex,
    "attention by products": partial(attention, written=True),
}
MODULES = {
    "MultiheadAttention": lambda: Attention(False),
    "MultiheadAttention with weights": lambda: Attention(True),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.5, batch_first=True),
}


class Block(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.weight, self.draw = nn.Parameter(torch.randn(8, 8) / 2), draw

    def forward(self, x):
        return x + DRAWS[self.draw](x @ self.weight)


class Attention(nn.Module):
    def __init__(self, need_weights):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, 0.5, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x):
        return x + self.inner(x, x, x, need_weights=self.need_weights)[0]


def one_by_one(blocks, call=lambda block, x: block(x)):
    def run(x):
        for block in blocks:
            x = call(block, x)
        return x

    return run


def selective(policy, function, x):
    context = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(function, x, use_reentrant=False, context_fn=context)


def saves(chosen):
    def policy(context, op, *args, **kwargs):
        saved, recomputed = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
        return saved if chosen(op) else recomputed

    return policy


class EverySecondDraw:
    """Of draws that alternate, one is saved and the next one is drawn again."""

    def __init__(self):
        self.count = 0

    def __call__(self, op):
        self.count += draws(op)
        return draws(op) and self.count % 2 == 1


again, reentrant = partial(checkpoint, use_reentrant=False), partial(checkpoint, use_reentrant=True)
WAYS = {
    "each block": lambda blocks: one_by_one(blocks, again),
    "each block, reentrant": lambda blocks: one_by_one(blocks, reentrant),
    "all blocks": lambda blocks: partial(again, one_by_one(blocks)),
    "nested": lambda blocks: partial(again, one_by_one(blocks, again)),
    "nested, reentrant": lambda blocks: partial(reentrant, one_by_one(blocks, again)),
    "sequential": lambda blocks: partial(
        checkpoint_sequential, nn.Sequential(*blocks), 2, use_reentrant=False
    ),
    "draws saved": lambda blocks: one_by_one(blocks, partial(selective, saves(draws))),
    "draws recomputed": lambda blocks: partial(
        selective, saves(lambda op: not draws(op)), one_by_one(blocks)
    ),
    "every second draw saved": lambda blocks: partial(
        selective, saves(EverySecondDraw()), one_by_one(blocks)
    ),
    "products saved": lambda blocks: partial(selective, [aten.mm.default], one_by_one(blocks)),
}
MESHES = {"data=1": "_ _ _", "data=2": "data _ _", "data=2,model=2": "data model _"}


class Net(nn.Module):
    """Blocks. way: how they are run; None: one after the other, as they are."""

    def __init__(self, draw, way=None, wrap=None, count=2):
        super().__init__()
        torch.manual_seed(0)
        blocks = [MODULES[draw]() if draw in MODULES else Block(draw) for _ in range(count)]
        blocks = [block.double() for block in blocks]
        self.blocks = wrap(blocks) if wrap else nn.ModuleList(blocks)
        self.way = WAYS.get(way, one_by_one)

    def forward(self, x):
        wrapped = not isinstance(self.blocks, nn.ModuleList)
        y = self.blocks(x) if wrapped else self.way(self.blocks)(x)
        return y.square().sum() if y.dim() else y


@pytest.fixture(autouse=True)
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


INPUT = torch.randn(4, 8, 8, dtype=torch.double, generator=torch.Generator().manual_seed(3))


def simulated(net, mesh, spec, **options):
    plan = gspmd.plan(net, INPUT, mesh=gspmd.Mesh.parse(mesh), in_specs=spec, grad=True, **options)
    return plan, seeded(plan)


def seeded(plan):
    torch.manual_seed(5)
    return plan.simulate(INPUT)


def assert_gradients(net, plan, gradients):
    """Compare with the central difference of the plan's own loss, along random directions."""
    torch.manual_seed(1)
    step, ends = 1e-5, []
    directions = {name: torch.randn_like(p) for name, p in net.named_parameters()}
    for sign in (1, -1):
        with torch.no_grad():
            for name, p in net.named_parameters():
                p += sign * step * directions[name]
            ends.append(seeded(plan)[0])
            for name, p in net.named_parameters():
                p -= sign * step * directions[name]
    slope = sum((gradients[name] * d).sum() for name, d in directions.items())
    torch.testing.assert_close((ends[0] - ends[1]) / (2 * step), slope, rtol=1e-5, atol=1e-7)


def drawn_cases():
    """Every draw with every way once in three, on a mesh in turn; all of the product if asked."""
    everything = os.environ.get("RECOMPUTED_DRAWS") == "all"
    for i, draw in enumerate((*DRAWS, *MODULES)):
        for j, mesh in enumerate(MESHES):
            if everything:
                yield draw, mesh, tuple(WAYS)
            elif (i + j) % len(MESHES) == 0:
                yield draw, mesh, tuple(WAYS)[i % 5 :: 5]


@pytest.mark.parametrize("draw, mesh, ways", drawn_cases())
def test_recomputed_draws_are_the_first_ones(draw, mesh, ways):
    _, (loss, gradients) = simulated(Net(draw), mesh, MESHES[mesh])
    for way in ways:
        _, (again, recomputed) = simulated(Net(draw, way), mesh, MESHES[mesh])
        torch.testing.assert_close(again, loss, rtol=1e-12, atol=0)
        for name, gradient in gradients.items():
            message = f"{way}: gradient of {name}"
            torch.testing.assert_close(
                recomputed[name], gradient, rtol=1e-9, atol=1e-9, msg=message
            )


@pytest.mark.parametrize("rng", ("global", "native"))
@pytest.mark.parametrize("draw", ("dropout", "attention", "rrelu"))
def test_gradients_are_those_of_the_loss(draw, rng):
    net = Net(draw, "nested")
    plan, (_, gradients) = simulated(net, "data=2", "data _ _", advanced={"rng": rng})
    assert_gradients(net, plan, gradients)


@pytest.mark.parametrize("draw", ("attention", "flex_attention", "dropout"))
def test_sharded_sequences(draw):
    """Attention of a sharded sequence goes round, or what it needs is gathered."""
    _, (loss, gradients) = simulated(Net(draw), "seq=2", "_ seq _")
    for way in ("nested", "draws recomputed"):
        _, (again, recomputed) = simulated(Net(draw, way), "seq=2", "_ seq _")
        torch.testing.assert_close(again, loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(recomputed, gradients, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("draw", ("attention", "dropout", "rrelu in place"))
def test_layers_that_suggest_recomputes(draw):
    _, (loss, gradients) = simulated(net := Net(draw), "data=2", "data _ _")
    for number in (1, 2):
        with Layers.of(net).recomputed((("", number),)):
            _, (again, recomputed) = simulated(net, "data=2", "data _ _")
        torch.testing.assert_close(again, loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(recomputed, gradients, rtol=1e-9, atol=1e-9)


CIRCULAR = {"schedule": "circular", "repeats": 2}
SCHEDULES = (
    {"schedule": "gpipe"},
    CIRCULAR,
    *({"schedule": s, "loss": 1} for s in ("1f1b", "zero_bubble")),
)


@pytest.mark.parametrize(
    "draw, options",
    [
        *(("dropout", options) for options in (None, *SCHEDULES)),
        *(("attention", options) for options in (None, CIRCULAR, SCHEDULES[-1])),
        ("rand", SCHEDULES[0]),
    ],
    ids=str,
)
def test_blocks_that_recompute(draw, options):
    """Stacks and pipelines: with and without recomputation, the gradients of the loss."""
    mesh, results = gspmd.Mesh(stage=2), []
    for recompute in (False, True):
        wrap = partial(gspmd.stack, recompute=recompute)
        if options is not None:
            loss = (lambda y: y.square().sum()) if "loss" in options else None
            settings = {**options, "loss": loss, "microbatches": 2, "recompute": recompute}
            wrap = partial(gspmd.pipeline, mesh=mesh, **settings)
        net = Net(draw, wrap=wrap, count=4 if options is CIRCULAR else 2)
        plan, result = simulated(net, "stage=2", "_ _ _")
        results.append(result)
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
    assert_gradients(net, plan, results[1][1])


@pytest.mark.parametrize("draw", ("dropout", "attention"))
def test_backward_that_the_program_runs(draw):
    """As in train_step: the gradients are results of the program."""

    def gradient(x, weight, call):
        y = x
        for _ in range(2):
            y = call(lambda y: y + DRAWS[draw](y @ weight), y)
        return torch.autograd.grad(y.square().sum(), weight)[0]

    weight, results = torch.randn(8, 8, requires_grad=True), []
    for call in (lambda f, y: f(y), again):
        specs = ("data _ _", None, None)
        plan = gspmd.plan(gradient, INPUT, weight, call, mesh=gspmd.Mesh(data=2), in_specs=specs)
        torch.manual_seed(5)
        results.append(plan.simulate(INPUT, weight, call))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("preserve", (True, False))
def test_preserve_rng_state(preserve):
    """Without it the recomputation draws on, as in eager PyTorch: other masks."""
    call = partial(checkpoint, use_reentrant=False, preserve_rng_state=preserve)
    net = Net("dropout")
    net.way = partial(one_by_one, call=call)
    plan, (_, gradients) = simulated(net, "data=2", "data _ _")
    _, (_, plain) = simulated(Net("dropout"), "data=2", "data _ _")
    seeds = len(plan.program.graph.find_nodes(op="call_function", target=DRAW_SEED))
    assert seeds == (2 if preserve else 4)
    assert preserve == all(torch.allclose(gradients[name], plain[name]) for name in plain)


def test_restored_generator():
    """The program restores the generator by itself: equal masks, also of other values."""

    def f(x):
        with torch.random.fork_rng():
            first = torch.rand(x.shape)
        second = torch.rand(x.shape)
        return x * first, x * second, x * torch.rand(x.shape)

    before = torch.get_rng_state()
    plan = gspmd.plan(f, torch.ones(4, 6), mesh=gspmd.Mesh(data=2), in_specs=("data _",))
    assert torch.equal(torch.get_rng_state(), before), "planning moves the caller's generator"
    first, second, third = plan.simulate(torch.ones(4, 6))
    assert torch.equal(first, second) and not torch.equal(first, third)


def test_draw_without_a_seed_of_other_operands():
    def f(x):
        with torch.random.fork_rng():
            first = torch.poisson(x)
        return first + torch.poisson(x + 1)

    with pytest.raises(ShardingError, match="poisson.* is recomputed with other operands"):
        gspmd.plan(f, torch.ones(4), mesh=gspmd.Mesh(data=2))


def test_native_numbers_of_one_draw_have_one_layout():
    """In another layout the generator of a shard would draw others."""
    for specs, expected in (("a _", "a _"), True), (("a _", "_ a"), False):
        graph = torch.fx.Graph()
        seed = graph.call_function(DRAW_SEED, ())
        shape = [4, 4]
        options = (0, shape, [0, 0], shape, torch.float32, torch.device("cpu"), False)
        for spec in specs:
            node = graph.call_function(ours.uniform.default, (seed, *options))
            node.meta["spec"] = ShardSpec.parse(spec)
        natively(graph)
        uniform = graph.find_nodes(op="call_function", target=ours.uniform.default)
        assert [node.args[-1] for node in uniform] == [expected] * 2
