"""Calls inside of PyTorch's own functions: bags, optimizers over lists, torch.func, what cannot be
captured.
"""

from __future__ import annotations

import numpy
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, eager, message
from torch import distributions as D
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgspmd as gspmd
from torchgspmd.capture.rewrites.inline_python import tensor_by_tensor

MESH = gspmd.Mesh(data=2, model=2)
X = torch.randn(8, 16)


@pytest.mark.parametrize(
    "mode, offsets, options",
    [
        ("sum", None, {}),
        ("mean", None, {"padding_idx": 3}),
        ("max", None, {"padding_idx": -4}),
        ("sum", [0, 2, 2, 5], {"padding_idx": 3}),
        ("mean", [0, 4, 9, 12], {"include_last_offset": True}),
        ("max", [0, 3, 3], {}),
        ("max", [0, 2, 2, 12], {"padding_idx": 3}),
    ],
)
def test_bags(mode, offsets, options):
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(7, 6, mode=mode, **options)
    gspmd.mark_sharding(bag.weight, MESH, "model _")
    tokens = torch.randint(7, (4, 3))
    arguments = (tokens,) if offsets is None else (tokens.flatten(), torch.tensor(offsets))
    layouts = {"in_specs": ("data _",) if offsets is None else None, "out_specs": "same"}
    plan = gspmd.plan(bag, *arguments, mesh=MESH, grad=True, **layouts)
    assert_same(plan.simulate(*arguments), eager(bag, *arguments))
    assert not any("embedding_bag" in r.op for r in plan.replicated_ops)
    if offsets is None and mode != "max":  # a sum of parts of the lookup stays pending
        assert not plan.replicated_ops


def test_sum_of_a_bag_stays_pending():
    """A device sends the bags, not the rows that are in them."""
    bag = nn.EmbeddingBag(1000, 16, mode="sum")
    gspmd.mark_sharding(bag.weight, MESH, "model _")
    tokens, offsets = torch.randint(1000, (640,)), torch.arange(0, 640, 80)
    plan = gspmd.plan(bag, tokens, offsets, mesh=MESH, grad=True)
    n = MESH.count(("model",))
    assert [c.kind for c in plan.collectives] == ["all_reduce"]
    assert plan.collectives[0].sent_bytes == 2 * (n - 1) / n * 8 * 16 * 4
    assert_same(plan.simulate(tokens, offsets), eager(bag, tokens, offsets))


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod"])
@pytest.mark.parametrize("by", ["lengths", "offsets"])
def test_segment_reduce(reduce, by):
    torch.manual_seed(0)
    lengths = torch.tensor([3, 0, 5, 4])
    bounds = {"lengths": lengths, "offsets": F.pad(lengths.cumsum(0), (1, 0))}[by]

    class Pool(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x, bounds):
            pooled = torch.segment_reduce(x * self.scale, reduce, **{by: bounds})
            return pooled.nan_to_num(0, 0, 0)

    x = torch.randn(12, 6)
    plan = gspmd.plan(Pool(), x, bounds, mesh=MESH, in_specs=("data model", None), grad=True)
    assert_same(plan.simulate(x, bounds), eager(Pool(), x, bounds))
    assert not any("segment" in r.op for r in plan.replicated_ops)


OPTIMIZERS = [
    (torch.optim.AdamW, {}),
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.RMSprop, {"momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {"maximize": True}),
]


FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)


CASES = [(*o, "foreach") for o in OPTIMIZERS] + [(*o, "fused") for o in OPTIMIZERS if o[0] in FUSED]


@pytest.mark.parametrize(
    "optimizer, options, kernel", CASES, ids=lambda x: getattr(x, "__name__", "")
)
def test_optimizers_inside_of_a_program(optimizer, options, kernel):
    def steps(weight, bias, x):
        parameters = [
            weight.detach().clone().requires_grad_(),
            bias.detach().clone().requires_grad_(),
        ]
        made = optimizer(parameters, **options, **{kernel: True})
        for _ in range(3):
            made.zero_grad()
            F.linear(x, *parameters).tanh().square().mean().backward()
            made.step()
        return parameters

    torch.manual_seed(0)
    arguments = torch.randn(5, 16), torch.randn(5), X
    plan = gspmd.plan(
        steps, *arguments, mesh=MESH, in_specs=("model _", "model", "data _"), strict=True
    )
    for got, want in zip(plan.simulate(*arguments), steps(*arguments), strict=True):
        torch.testing.assert_close(
            got, want.detach(), rtol=1e-4, atol=1e-5
        )  # Adam divides by roots of sums of squares


def test_an_optimizer_within_a_program_has_the_numbers_of_eager_mode():
    def step(x):
        x = x.detach().requires_grad_()
        made = torch.optim.Adamax([x], foreach=True)
        x.square().sum().backward()
        made.step()
        return x

    plan = gspmd.plan(step, X, mesh=MESH)
    assert_same(plan.simulate(X.clone()), step(X.clone()))


def test_an_optimizer_that_needs_numbers_in_advance_is_one_sentence():
    # It asks for a value, so the trace says that a compiler runs.
    def step(x, factor):
        x = x.detach().requires_grad_()
        made = torch.optim.Adamax([x], foreach=True)
        (x.square().sum() * factor.tolist()[0]).backward()
        made.step()
        return x

    assert "_foreach_addcdiv_ is given numbers that are known only when it runs" in message(
        lambda: gspmd.plan(step, X.clone(), torch.tensor([2]), mesh=MESH)
    )


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("_foreach_addcdiv_", (1, 1, 1, torch.tensor([2.0, 3.0]))),
        ("_foreach_addcmul", (1, 1, 1, [2.0, 3.0])),
        ("_foreach_maximum_", (1, 1)),
        ("_foreach_minimum", (1, [0.5, 0.7])),
        ("_foreach_norm", (1, 1.0)),
        ("_foreach_add_", (1, 1)),
        ("_foreach_sub", (1, 2.0)),
        ("_foreach_lerp_", (1, 1, 0.3)),
        ("_foreach_pow", (2.0, 1)),
        ("_foreach_copy_", (1, 1)),
        ("_foreach_max", (1,)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_functions_over_lists(name, arguments):
    function = getattr(torch, name)

    def call(f):
        torch.manual_seed(0)
        given = [[torch.rand(3), torch.rand(4)] if isinstance(a, int) else a for a in arguments]
        return f(*given), given

    assert_same(call(tensor_by_tensor(function)), call(function))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.hessian, torch.func.jacfwd])
def test_torch_func(transform):
    def f(w, x):
        return transform(lambda v: (x @ v).tanh().sum())(w)

    w = torch.randn(16)
    plan = gspmd.plan(f, w, X, mesh=MESH, in_specs=("model", "data _"))
    assert_same(plan.simulate(w, X), f(w, X))


def test_reentrant_checkpointing():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            return checkpoint(lambda y: self.linear(y).relu(), x, use_reentrant=True)

    block, x = Block(), X.clone().requires_grad_()
    out, grads = gspmd.plan(block, x, mesh=MESH, in_specs="data _", grad=True).simulate(x)
    want = block(x)
    want.sum().backward()
    assert_same(out, want)
    assert_same(
        grads,
        {
            "linear.weight": block.linear.weight.grad,
            "linear.bias": block.linear.bias.grad,
            "x": x.grad,
        },
    )


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_dense(make):
    net, tokens = make(7, 6, sparse=True), torch.tensor([[1, 2, 1], [5, 1, 2]])
    want, gradients = eager(net, tokens)
    plan = gspmd.plan(
        gspmd.annotate(net, MESH, {"weight": "model data"}), tokens, mesh=MESH, grad=True
    )
    assert_same(plan.simulate(tokens), (want, {"weight": gradients["weight"].to_dense()}))


def test_distributions():
    validates = D.Distribution._validate_args

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 8)

        def forward(self, x):
            mean, scale = self.linear(x).chunk(2, -1)
            normal, unit = (
                D.Normal(mean, scale.exp()),
                D.Normal(torch.zeros_like(mean), torch.ones_like(mean)),
            )
            chosen = D.Categorical(logits=mean)
            likely = normal.log_prob(x[:, :4]), chosen.log_prob(x[:, 0].abs().long() % 4)
            return D.kl_divergence(normal, unit).sum(), chosen.entropy(), likely

    torch.manual_seed(0)
    net, x = Net(), torch.randn(5, 6)
    plan = gspmd.plan(
        gspmd.annotate(net, MESH, {"linear.weight": "model _"}),
        x,
        mesh=MESH,
        in_specs=("data _",),
        grad=True,
    )
    assert_same(plan.simulate(x, _poison=True), eager(net, x), terms=1024)
    assert D.Distribution._validate_args == validates  # torch.compile switches it off, too


def test_transformer_with_a_causal_mask():
    torch.manual_seed(0)
    net = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        1,
        enable_nested_tensor=False,
    )
    x, mask = torch.randn(2, 5, 4), nn.Transformer.generate_square_subsequent_mask(5)
    plan = gspmd.plan(net, x, mesh=MESH, in_specs=("data _ _",), mask=mask, grad=True)
    assert_same(plan.simulate(x, mask=mask), eager(net, x, mask=mask), terms=1024)


@torch.compile
def gated(x):
    return x * torch.sigmoid(x)


def test_what_torch_compile_made_runs_as_it_was_written():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    inner.compile()
    net = nn.Sequential(nn.Linear(16, 16), inner, torch.compile(nn.Linear(16, 8)))
    plan = gspmd.plan(lambda x: gated(net(x)), X, mesh=MESH, in_specs="data _", out_specs="data _")
    assert plan.sent_bytes == 0 and not plan.replicated_ops
    assert_same(plan.simulate(X), gated(net(X)), terms=256)


@pytest.mark.parametrize("compiled", [False, True])
def test_flex_attention(compiled):
    """Its mask and its change of scores, with heads and batch sharded; nothing is sent but the
    loss.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = (torch.randn(2, 4, 24, 8) for _ in range(3))
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 24, 24, device="cpu")
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    attention = torch.compile(flex_attention) if compiled else flex_attention

    def flexible(q, k, v):
        return attention(
            q,
            k,
            v,
            score_mod=lambda s, b, h, i, j: 9 * torch.tanh(s / 9) + slopes[h] * (j - i),
            block_mask=block_mask,
        )

    def dense(q, k, v):
        at = torch.arange(24)
        scores = 9 * torch.tanh(q @ k.mT / 8**0.5 / 9) + slopes.view(4, 1, 1) * (
            at - at.view(24, 1)
        )
        return scores.masked_fill(at > at.view(24, 1), -torch.inf).softmax(-1) @ v

    def step(call):
        def run(q, k, v):
            q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
            y = call(q, k, v)
            return y, *torch.autograd.grad(y.square().sum(), (q, k, v))

        return run

    plan = gspmd.plan(step(flexible), q, k, v, mesh=MESH, in_specs=("data model _ _",) * 3)
    assert plan.sent_bytes == 0 and not plan.replicated_ops
    assert_same(plan.simulate(q, k, v), step(dense)(q, k, v), terms=1024)


def test_what_cannot_be_captured():
    lazy = message(lambda: gspmd.plan(nn.LazyLinear(4), X, mesh=MESH))
    assert "parameter 'weight' has no shape yet" in lazy and "call the model once" in lazy
    scripted = message(lambda: gspmd.plan(torch.jit.script(nn.Linear(16, 4)), X, mesh=MESH))
    assert "TorchScript" in scripted and "where test_inline_python.py:N" in " ".join(
        scripted.split()
    )
    nested = message(
        lambda: gspmd.plan(
            lambda x: torch.nested.nested_tensor([x[0], x[1]]).to_padded_tensor(0.0), X, mesh=MESH
        )
    )
    assert "cannot be captured" in nested and "ested" in nested and "dense tensors" in nested


def test_numpy_and_generators_are_one_sentence():
    own = torch.Generator()
    assert "returns a NumPy array of values" in message(
        lambda: gspmd.plan(lambda x: x.numpy().sum(), X, mesh=MESH)
    )
    assert "NumPy's digitize" in message(
        lambda: gspmd.plan(lambda x: torch.from_numpy(numpy.digitize(x.numpy(), [0])), X, mesh=MESH)
    )
    assert "draws from a torch.Generator of its own" in message(
        lambda: gspmd.plan(lambda x: x + torch.rand(16, generator=own), X, mesh=MESH)
    )
