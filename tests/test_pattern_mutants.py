"""Programs one node away from what a pattern recognizes: right, recognized or not.

Operands swapped or exchanged, other dimensions, numbers and dtypes, another user, an operation in
between. First programs of users, planned with drawn layouts and simulated, forward and backward;
then programs of one rank, before and after the passes that lower them. MUTANTS=40 draws 40 of each
instead of 3.
"""

from __future__ import annotations

import os
import random
import zlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from expert_layer import by_bmm, by_einsum, by_matmul
from graph_mutants import copied, one_node_apart
from helpers import assert_same
from torch import fx

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardingError
from torchgspmd.compat.operators import aten
from torchgspmd.fx_passes.lower.local_rewrites import fold_views, nll_backward
from torchgspmd.fx_passes.lower.lower_einsum import EINSUM, lower_einsum

MANY = int(os.environ.get("MUTANTS", "3"))


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64)


def layer_norm(x, w, b):
    c = x - x.mean(-1, keepdim=True)
    return c * torch.rsqrt((c * c).mean(-1, keepdim=True) + 0.1) * w + b


def experts(multiply, x, up, down, chosen):
    return multiply(torch.tanh(multiply(x, up, chosen)), down, chosen)


def fused(x, w, b):
    q, k, v = F.linear(x, w, b).split([4, 4, 4], -1)
    return torch.softmax(q @ k.mT * 0.5, -1) @ v


def joined(x, w, u):
    y = torch.cat([x @ w, x.sin() @ u], -1)
    return y[:, 1:5] * 2 + y[:, 4:]


def grouped(x, w, y):
    return F.group_norm(x, 2, w, y, 0.1).relu()


TABLE = numbers(4, 6, 6) / 3, numbers(4, 6, 6) / 3, torch.tensor([3, 0, 0, 2, 1, 3, 3, 0])
PROGRAMS = {
    "layer_norm by hand": (layer_norm, (numbers(4, 3, 6), numbers(6), numbers(6))),
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, [6], w, b, 0.1).sin() @ w,
        (numbers(4, 3, 6), numbers(6), numbers(6)),
    ),
    "rms_norm": (
        lambda x, w: F.rms_norm(x, [6], w, 0.1) * torch.rsqrt(x.square().mean(-1, True) + 0.1),
        (numbers(4, 3, 6), numbers(6)),
    ),
    "group_norm": (grouped, (numbers(4, 4, 3), numbers(4), numbers(4))),
    "experts by bmm": (partial(experts, by_bmm), (numbers(8, 6), *TABLE)),
    "experts by matmul": (partial(experts, by_matmul), (numbers(8, 6), *TABLE)),
    "experts by einsum": (partial(experts, by_einsum), (numbers(8, 6), *TABLE)),
    "fused product": (fused, (numbers(2, 4, 6), numbers(12, 6), numbers(12))),
    "joined products": (joined, (numbers(4, 6), numbers(6, 4), numbers(6, 4))),
    "einsum": (
        lambda x, y: torch.einsum("bqd,bkd->bqk", x, y).relu(),
        (numbers(4, 4, 6), numbers(4, 4, 6)),
    ),
    "inner": (lambda x, y: torch.inner(x, y) * x, (numbers(6), numbers(6))),
}


def graph_of(function, count):
    names = "xyzuv"[:count]
    source = f"lambda {', '.join(names)}: (f({', '.join(names)}),)"
    return fx.Tracer().trace(eval(source, {"f": function}))  # noqa: S307


def step(graph):
    run = fx.GraphModule({}, graph)

    def joint(*inputs):
        inputs = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
        outs = run(*inputs)
        terms = [out.double().sin().sum() for out in outs if out.requires_grad]
        leaves = [t for t in inputs if t.requires_grad]
        if not terms:
            return outs, ()
        gradients = torch.autograd.grad(
            sum(terms), leaves, allow_unused=True, materialize_grads=True
        )
        return outs, gradients

    return joint


def eager(tensors, graph):
    """Return the results and gradients of one device, which have to be finite numbers."""
    outs, gradients = step(graph)(*tensors)
    if not all(isinstance(t, torch.Tensor) and t.isfinite().all() for t in (*outs, *gradients)):
        raise ValueError
    return outs, gradients


def drawn_spec(rng, tensor):
    at = rng.randrange(tensor.dim() + 1)
    return " ".join("a" if d == at else "_" for d in range(tensor.dim())) or None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_near_a_pattern(name):
    function, tensors = PROGRAMS[name]
    rng, refused = random.Random(name), 0
    graph = graph_of(function, len(tensors))
    for _ in range(MANY):
        mutant, text, want = one_node_apart(graph, rng, partial(eager, tensors))
        specs = tuple(drawn_spec(rng, t) for t in tensors)
        what = f"{name}, {text}, {specs}\n{mutant}"
        try:
            plan = gspmd.plan(step(mutant), *tensors, mesh=Mesh(a=2), in_specs=specs)
            got = plan.simulate(*tensors, _poison=True)
        except ShardingError as error:
            assert "fix" in str(error), f"{what}: {error}"
            refused += 1
            continue
        except Exception as error:
            raise AssertionError(what) from error
        low = any(t.dtype == torch.float32 for t in want[0]) or "float32" in text
        assert_same([*got[0], *got[1]], [*want[0], *want[1]], what, terms=1 << (32 if low else 12))
    assert refused < max(2, MANY)


# ------------------------------------------------------------------------- programs of one rank


class Program:
    """A graph of operations of one rank, and its inputs."""

    def __init__(self):
        self.graph, self.inputs = fx.Graph(), []

    def input(self, *shape, values=None):
        self.inputs.append(numbers(*shape) if values is None else values)
        return self.graph.placeholder(f"x{len(self.inputs)}")

    def __call__(self, op, *args, **kwargs):
        return self.graph.call_function(op, args, kwargs)

    def results(self, *nodes):
        self.graph.output(nodes)
        return self.graph, self.inputs


def linear_sum():
    p = Program()
    x, y = p.input(2, 3, 4), p.input(2, 3, 4)
    one = p(EINSUM, "bsm,hm->bsh", x, p.input(4, 4))
    two = p(EINSUM, "bsk,kh->bsh", y, p.input(4, 4))
    return p.results(p(aten.add.Tensor, p(aten.add.Tensor, one, two), p.input(4)))


def weight_gradient():
    p = Program()
    product = p(EINSUM, "bsh,bsm->hm", p.input(2, 3, 4), p.input(2, 3, 4))
    return p.results(p(aten.add.Tensor, product, p.input(4)))


def scores():
    p = Program()
    product = p(EINSUM, "bqd,bkd->bqk", p.input(4, 4, 4), p.input(4, 4, 4))
    return p.results(p(aten.add.Tensor, p(EINSUM, "bqk,bkd->bdq", product, product), product))


def views():
    p = Program()
    x = p.input(4, 4, 4)
    flat = p(aten.reshape.default, p(aten.reshape.default, x, [8, 8]), [4, 16])
    turned = p(aten.permute.default, x, [1, 0, 2])
    again = p(aten.permute.default, x, [1, 0, 2])
    wide = p(aten.expand.default, p(aten.unsqueeze.default, turned, 0), [2, 4, 4, 4])
    back = p(aten.transpose.int, p(aten.contiguous.default, again), 0, 1)
    return p.results(p(aten.sin.default, flat), wide, p(aten.reshape.default, back, [4, 4, 4]))


def cross_entropy_gradient():
    p = Program()
    y = p.input(4, 4, values=numbers(4, 4).log_softmax(1))
    index, value = p.input(values=torch.tensor([[1], [0], [3], [1]])), p.input(4, 1)
    zeros = p(aten.full.default, [4, 4], 0, dtype=torch.float64)
    scattered = p(aten.scatter.src, zeros, 1, index, value)
    return p.results(p(aten._log_softmax_backward_data.default, scattered, y, 1, torch.float64))


LOWERED = {
    linear_sum: lower_einsum,
    weight_gradient: lower_einsum,
    scores: lower_einsum,
    views: fold_views,
    cross_entropy_gradient: nll_backward,
}


class Shapes(fx.Interpreter):
    """Runs a graph and notes shape and dtype of each value, as localize does."""

    def run_node(self, n):
        value = super().run_node(n)
        if n.target is EINSUM:  # a letter has one size; broadcast ones are other nodes by then
            terms, sizes = n.args[0].split("->")[0].split(","), {}
            for term, operand in zip(terms, n.args[1:]):
                for letter, size in zip(term, operand.meta["shape"]):
                    if sizes.setdefault(letter, size) != size:
                        raise ValueError(letter)
        if n.target is aten._log_softmax_backward_data.default:  # which checks no shape
            if n.args[0].meta["shape"] != n.args[1].meta["shape"]:
                raise ValueError(n)
        if isinstance(value, torch.Tensor):
            n.meta |= {"shape": tuple(value.shape), "dtype": value.dtype}
        return value


def interpreted(inputs, graph):
    results = Shapes(fx.GraphModule({}, graph)).run(*inputs)
    if not all(t.isfinite().all() for t in results):
        raise ValueError
    return results


@pytest.mark.parametrize("build", LOWERED, ids=lambda build: build.__name__)
def test_programs_of_one_rank_near_a_pattern(build):
    torch.manual_seed(zlib.crc32(build.__name__.encode()))
    rng, (graph, inputs) = random.Random(build.__name__), build()
    run, rewritten = partial(interpreted, inputs), set()
    for number in range(20 * MANY):
        if number:
            mutant, text, want = one_node_apart(graph, rng, run)
        else:
            mutant, text, want = (unchanged := copied(graph)), "", run(unchanged)
        before = [node.target for node in mutant.nodes]
        what = f"{text}\n{mutant}"
        try:
            LOWERED[build](mutant).lint()
            got = fx.GraphModule({}, mutant)(*inputs)
        except Exception as error:
            raise AssertionError(what) from error
        assert_same([*got], [*want], what, terms=1 << (32 if "float32" in text else 12))
        rewritten.add(before != [node.target for node in mutant.nodes])
    assert True in rewritten and (False in rewritten) == (build is cross_entropy_gradient)
