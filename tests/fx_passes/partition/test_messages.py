"""How many collectives a program has, of small tensors above all: a message costs more than its
bytes.
"""

from __future__ import annotations

import torch
from helpers import assert_same
from torch import Tensor

import torchgspmd as gspmd
from torchgspmd import Mesh


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
