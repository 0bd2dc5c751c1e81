"""Fused weights: of queries, keys and values cut from one product, the weight changes places, not
what is made with it.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers import assert_same
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import Mesh

B, S, M, N, D = 8, 128, 32, 8, 4  # batch, sequence, width, heads, their width


def attention(x: Tensor, qkv: Tensor, out: Tensor, cut) -> Tensor:
    """x[b, s, m], qkv[m, 3 m], out[m, m]; cut: the fused product as queries, keys and values [b, n,
    s, d].
    """
    y = F.scaled_dot_product_attention(*cut(x @ qkv), is_causal=True)
    return y.transpose(1, 2).reshape(B, S, M) @ out


def heads(*parts: Tensor) -> list[Tensor]:
    return [part.view(B, S, -1, D).transpose(1, 2) for part in parts]


def grouped(y: Tensor) -> list[Tensor]:
    """Half as many keys and values as queries."""
    q, k, v = heads(*y.split([M, M // 2, M // 2], 2))
    return [q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)]


CUTS = {
    "view and unbind": (
        lambda y: [t.transpose(1, 2) for t in y.view(B, S, 3, N, D).unbind(2)],
        3 * M,
    ),
    "reshape and permute": (
        lambda y: y.reshape(B, S, 3, N, D).permute(2, 0, 3, 1, 4).unbind(0),
        3 * M,
    ),
    "indices": (
        lambda y: [y.view(B, S, 3, N, D)[:, :, i].transpose(1, 2) for i in range(3)],
        3 * M,
    ),
    "chunk": (lambda y: heads(*y.chunk(3, -1)), 3 * M),
    "split": (lambda y: heads(*y.split(M, 2)), 3 * M),
    "slices": (lambda y: heads(y[..., :M], y[..., M : 2 * M], y[..., 2 * M :]), 3 * M),
    "groups": (grouped, 2 * M),
    "heads first": (lambda y: y.view(B, S, N, 3 * D).transpose(1, 2).chunk(3, -1), 3 * M),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_fused_weight_costs_no_more_than_its_own_bytes(name: str) -> None:
    """Megatron's two reductions of the activations; besides, the weight and its gradient change
    places, at most once.
    """
    cut, width = CUTS[name]
    mesh = Mesh(data=2, model=4)

    def step(dy, x, qkv, out):
        leaves = [t.detach().requires_grad_() for t in (x, qkv, out)]
        y = attention(*leaves, cut)
        return y, torch.autograd.grad(y, leaves, dy)

    arguments = [torch.randn(shape) * 0.3 for shape in ((B, S, M), (B, S, M), (M, width), (M, M))]
    specs = ("data _ _", "_ model", "model _")
    plan = gspmd.plan(
        step, *arguments, mesh=mesh, in_specs=("data _ _", *specs), out_specs=("data _ _", specs)
    )
    stream, weight, both = (
        B // 2 * S * M * 4,
        M * width // 4 * 4,
        M * (width + M) // 4 * 4,
    )  # bytes of a device
    assert plan.sent_bytes <= 2 * (2 * 3 / 4 * stream) + 2 * (2 * weight) + both
    assert not plan.replicated_ops
    assert_same(plan.simulate(*arguments, _poison=True), step(*arguments), name, terms=2048)


class Gated(torch.nn.Module):
    """A gate and what it gates from one weight with a bias."""

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 48), torch.nn.Linear(24, 16, bias=False)
        for parameter, spec in (
            (self.up.weight, "model _"),
            (self.up.bias, "model"),
            (self.down.weight, "_ model"),
        ):
            gspmd.mark_sharding(parameter, mesh, spec)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


@pytest.mark.parametrize("model", [2, 3, 4])
def test_a_gate_with_a_bias(model: int) -> None:
    mesh, x = Mesh(model=model), torch.randn(64, 16)
    module = Gated(mesh)
    plan = gspmd.plan(module, x, mesh=mesh, grad=True)
    out = module(x)
    grads = dict(
        zip(
            dict(module.named_parameters()),
            torch.autograd.grad(out.sum(), list(module.parameters())),
        )
    )
    assert_same(plan.simulate(x, _poison=True), (out, grads), terms=512)


def test_what_a_cut_product_prints() -> None:
    """Of eight numbers a row and sixteen rows the weight of two rows has fewer."""

    def halves(x, w):
        a, b = (x @ w).chunk(2, -1)
        return a * b

    plan = gspmd.plan(
        halves,
        torch.randn(16, 2),
        torch.randn(2, 8),
        mesh=Mesh(m=4),
        in_specs=("_ _", "_ m"),
        out_specs="_ m",
    )
    assert_expected_inline(
        str(plan),
        """\
mesh m=4
  %x        : f32[16, 2]          = input
  %w        : f32[2, 8@m]         = input
  %w_h      : f32[2, 8@m[i:+1]]   = halo(%w, 1, m, i:+1 in 0:4, 8)
  %slice_1  : f32[2, 4@m]         = slice(%w_h, 1, 0, 4)
  %einsum_1 : f32[16, 4@m]        = einsum(mk,kn->mn, %x, %slice_1)
  %w_h_1    : f32[2, 8@m[i+4:+1]] = halo(%w, 1, m, i+4:+1 in 4:8, 8)
  %slice_2  : f32[2, 4@m]         = slice(%w_h_1, 1, 4, 8)
  %einsum_2 : f32[16, 4@m]        = einsum(mk,kn->mn, %x, %slice_2)
  %mul      : f32[16, 4@m]        = mul(%einsum_1, %einsum_2)
  return %mul

permute        over m               2 x, 32 B sent by a device
sent by a device in all: 32 B
memory of a device: parameters 0 B, inputs 144 B, peak 336 B""",
    )


def test_parts_that_are_used_with_what_comes_of_all_of_them() -> None:
    mesh = Mesh(a=2, b=2)

    def largest(x):
        marked = gspmd.mark_sharding(x, mesh, "_ a _")
        y = torch.cat([x.exp(), x], 1)
        return marked.exp(), y.gather(0, y.argmax(0, keepdim=True))

    x = torch.randn(4, 4, 3)
    plan = gspmd.plan(largest, x, mesh=mesh)
    assert_same(plan.simulate(x, _poison=True), largest(x))


@pytest.mark.parametrize("specs", [("_ _", "_ m", "_ m", "m"), ("_ m", "_ _", "m _", "_")], ids=str)
def test_parts_of_a_product_that_are_joined_again(specs: tuple[str, ...]) -> None:
    """What is cut of the product is cut of the weight first: it has a layout, and is what its users
    take, when parts are joined.
    """

    def step(*arguments):
        x, w, v, b = leaves = [t.detach().requires_grad_() for t in arguments]
        first, second, third, last = (x @ w + b).chunk(4, -1)
        found = last.sum(1), torch.cat([third, second], 1) @ v, third.exp(), first @ v[:4]
        return *found, torch.autograd.grad(sum(t.square().mean() for t in found), leaves)

    arguments = [torch.randn(shape) for shape in ((64, 4), (4, 16), (8, 3), (16,))]
    plan = gspmd.plan(step, *arguments, mesh=Mesh(m=2), in_specs=specs)
    assert_same(plan.simulate(*arguments, _poison=True), step(*arguments), terms=2048)


NORMS = {
    "layer_norm": lambda m: nn.LayerNorm(m),
    "without a bias": lambda m: nn.LayerNorm(m, bias=False),
    "softmax": lambda m: nn.Softmax(-1),
}


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(data=2, model=2)], ids=str)
def test_norms_of_a_batch_stay_fused(name: str, mesh: Mesh) -> None:
    """Gradients of biases are stored over the axis of the batch; the norm keeps its rows."""
    layers = nn.Sequential(nn.Linear(M, M), NORMS[name](M), nn.Linear(M, M))
    model = Loss(layers).double()
    for p in model.parameters():
        gspmd.mark_sharding(p, mesh, " ".join(["data"] + ["_"] * (p.dim() - 1)))
    x = torch.randn(B, S, M, dtype=torch.float64)
    plan = gspmd.plan(model, x, mesh=mesh, in_specs="data _ _", grad=True)
    text = plan.text(full=True)
    fused = "_softmax_backward_data(" if name == "softmax" else "native_layer_norm_backward("
    assert fused in text
    result, gradients = plan.simulate(x)
    wanted = model(x)
    wanted.backward()
    assert_same(result, wanted.detach())
    for key, p in model.named_parameters():
        assert_same(gradients[key], p.grad)


def test_planning_ends_if_rows_have_no_equal_blocks() -> None:
    """The sum over 9 rows stays as it is, while the loss keeps the dimensions of its tokens."""

    def run(x: Tensor, ids: Tensor) -> Tensor:
        sums = F.pad(x.mean(-1), (1, 0)).cumsum(1)[:, 1:]
        return F.cross_entropy((x * sums[..., None]).reshape(-1, 16), ids.reshape(-1))

    x, ids = torch.rand(2, 8, 16), torch.randint(16, (2, 8))
    plan = gspmd.plan(run, x, ids, mesh=Mesh(seq=4), in_specs=("_ seq _", "_ seq"))
    assert_same(plan.simulate(x, ids), run(x, ids))
