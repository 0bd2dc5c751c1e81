"""How many collectives a program has, of small tensors above all: a message costs more than its
bytes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from helpers import assert_same
from torch import Tensor

import torchgspmd as gspmd
from torchgspmd import Mesh, Plan
from torchgspmd.fx_passes.partition.cost_constants import CostConstants


def r(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def rms_norm(x: Tensor, scale: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * scale


def test_the_gradient_of_a_norm_needs_no_sums_of_its_own():
    """The terms of three products are summed, then pass through the backward of a norm: the sum is
    reduced before it, once, and neither the sums over rows nor the gradient of the scale after.
    """
    mesh, (b, s, m) = Mesh(model=2), (2, 32, 16)

    def layers(x, scale, q, k, v, o):
        for _ in range(2):
            h = rms_norm(x, scale)
            x = x + (h @ q * torch.sigmoid(h @ k) + (h @ v).tanh()) @ o
        return x

    def program(dy, *inputs):
        leaves = [t.detach().requires_grad_() for t in inputs]
        y = layers(*leaves)
        return y, torch.autograd.grad(y, leaves, dy)

    inputs = (r(b, s, m, seed=1), r(b, s, m), r(m), *(r(m, m, seed=i) for i in (2, 3, 4, 5)))
    layouts = ("_ _ _", "_", "_ model", "_ model", "_ model", "model _")
    plan = gspmd.plan(
        program, *inputs, mesh=mesh, in_specs=("_ _ _", *layouts), out_specs=("_ _ _", layouts)
    )
    # forward and backward of each layer
    assert [(c.kind, c.payload_bytes) for c in plan.collectives for _ in range(c.count)] == [
        ("all_reduce", b * s * m * 4)
    ] * 4, plan
    assert_same(plan.simulate(*inputs, _poison=True), program(*inputs), terms=1024)


def kinds(plan: Plan) -> list[str]:
    return [c.kind for c in plan.collectives for _ in range(c.count)]


CHANNELS = 16


def convnext(image: Tensor, stem: Tensor, *weights: Tensor) -> Tensor:
    """Two blocks of a ConvNeXt: a convolution of each channel, then products of each pixel."""
    x = F.conv2d(image, stem, stride=4)  # [n, c, h, w]
    for kernel, bias, up, down in zip(*[iter(weights)] * 4):
        y = F.conv2d(x, kernel, bias, padding=3, groups=CHANNELS).permute(0, 2, 3, 1)
        y = F.gelu(F.layer_norm(y, (CHANNELS,)) @ up) @ down
        x = x + y.permute(0, 3, 1, 2)
    return x


def planned(costs: dict[str, float] | None = None) -> tuple[Plan, tuple[Tensor, ...]]:
    """Four of 16 rows on a device: rows of neighbors are as many bytes as all rows, there and
    back, of some channels. The result is open.
    """
    c = CHANNELS
    block = [(c, 1, 7, 7), (c,), (c, 4 * c), (4 * c, c)]
    shapes = [(4, 3, 64, 64), (c, 3, 4, 4), *block, *block]
    inputs = tuple(r(*shape, seed=i) for i, shape in enumerate(shapes))
    layouts = ("_ _ s _", *(" ".join("_" * len(shape)) for shape in shapes[1:]))
    plan = gspmd.plan(
        convnext, *inputs, mesh=Mesh(s=4), in_specs=layouts, advanced={"costs": costs}
    )
    return plan, inputs


def test_of_programs_that_send_as_much_the_one_with_fewer_messages_is_chosen():
    (plan, inputs), (by_bytes, _) = planned(), planned({"message_price": 0})
    assert kinds(by_bytes) == ["all_to_all"] * 4, by_bytes
    assert kinds(plan) == ["permute"] * 2, plan
    assert plan.sent_bytes <= by_bytes.sent_bytes * (1 + CostConstants().message_share)
    assert_same(plan.simulate(*inputs, _poison=True), convnext(*inputs), terms=1024)


def test_costs_are_explained_with_the_prices_that_decided():
    """By bytes alone channels would win: the products read fewer weights."""
    plan, _ = planned()
    cost = {
        name: float(row.split()[-1].replace(",", ""))
        for row in plan.explain("convolution_1", costs=True).splitlines()
        for name in ("* h0: s", "  g: s")
        if row.startswith(name)
    }
    assert cost["* h0: s"] < cost["  g: s"], plan.explain("convolution_1", costs=True)


def test_no_message_is_saved_where_much_more_would_be_sent():
    """One message with a sum of each device to all of them, in place of two that send less."""

    def program(x):
        return x.cumsum(0)

    x = r(64, 8)
    plan, by_bytes, without_limit = (
        gspmd.plan(program, x, mesh=Mesh(s=8), in_specs="s _", advanced={"costs": costs})
        for costs in (None, {"message_price": 0}, {"message_share": 100})
    )
    assert plan.sent_bytes == by_bytes.sent_bytes < without_limit.sent_bytes
    assert len(kinds(plan)) > len(kinds(without_limit))
    assert_same(plan.simulate(x), program(x))
