"""How much arithmetic all devices do together, against that of the whole program: 1.00 is an even
split.

    python benchmarks/arithmetic.py

Small programs, forward and backward, on 8 devices: counted by torch.utils.flop_counter (products,
attention, convolutions) while Plan.simulate runs them, and over the captured graph. The counter
takes the gradient of a convolution's input for arithmetic on all rows of the other gradient that it
reads, those of the neighbours too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import torchgspmd as gspmd
from torchgspmd import Mesh


def of_devices(plan: gspmd.Plan, inputs: tuple) -> int:
    """Of all devices together."""
    with FlopCounterMode(display=False) as counter:
        plan.simulate(*inputs)
    return counter.get_total_flops()


def with_gradients(function: Callable[..., Tensor]) -> Callable:
    """y and the gradients of all arguments for a cotangent."""

    def run(dy: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
        leaves = [a.detach().requires_grad_() for a in args]
        y = function(*leaves)
        return y, *torch.autograd.grad(y, leaves, dy)

    return run


def block(x, wq, wk, wv, wo, up, down):  # x[b, s, m]
    h = F.layer_norm(x, x.shape[-1:])
    q, k, v = (torch.einsum("bsm,mnd->bnsd", h, w) for w in (wq, wk, wv))
    x = x + torch.einsum(
        "bnsd,ndm->bsm", F.scaled_dot_product_attention(q, k, v, is_causal=True), wo
    )
    return x + F.gelu(F.layer_norm(x, x.shape[-1:]) @ up) @ down


def experts(x, gate, up, down):  # x[g, s, m], each token to its best expert
    weights = (x @ gate).softmax(-1)
    chosen = F.one_hot(weights.argmax(-1), gate.shape[-1]).to(x.dtype)
    place = F.one_hot(((chosen.cumsum(1) - 1) * chosen).sum(-1).long(), x.shape[1]).to(x.dtype)
    dispatch = chosen.unsqueeze(-1) * place.unsqueeze(-2)  # [g, s, e, c]
    h = torch.einsum(
        "egch,ehm->egcm",
        torch.einsum("egcm,emh->egch", torch.einsum("gsec,gsm->egcm", dispatch, x), up).relu(),
        down,
    )
    return torch.einsum("gsec,egcm->gsm", dispatch * weights.unsqueeze(-1), h)


def pipeline(x, w):  # x[t, b, m], w[stages, m, m]
    state, outputs = x.new_zeros(w.shape[0], *x.shape[1:]), []
    for rows in x:
        state = torch.einsum("lbm,lmn->lbn", torch.cat([rows.unsqueeze(0), state[:-1]]), w).tanh()
        outputs.append(state[-1])
    return torch.stack(outputs)


def convolutions(x, first, second):  # x[n, c, h, w]
    return F.conv2d(F.conv2d(x, first, stride=2, padding=1).relu(), second)


ATTENTION, MLP = ((64, 8, 8),) * 3 + ((8, 8, 64),), ((64, 256), (256, 64))
WIDE = ("_ model _",) * 3 + ("model _ _", "_ model", "model _")
STORED = ("data _ _",) * 4 + ("data _",) * 2
# name -> (mesh, function, shapes of its arguments, their layouts); the result has the shape and
# layout of the first unless given
PROGRAMS = {
    "tensor parallel block": (
        Mesh(data=2, model=4),
        block,
        ((16, 64, 64), *ATTENTION, *MLP),
        ("data _ _", *WIDE),
        None,
    ),
    "sequence parallel block": (
        Mesh(data=2, model=4),
        block,
        ((16, 64, 64), *ATTENTION, *MLP),
        ("data model _", *WIDE),
        None,
    ),
    "fully sharded block": (
        Mesh(data=8),
        block,
        ((16, 64, 64), *ATTENTION, *MLP),
        ("data _ _", *STORED),
        None,
    ),
    "experts": (
        Mesh(expert=8),
        experts,
        ((8, 32, 32), (32, 8), (8, 32, 64), (8, 64, 32)),
        ("expert _ _", "_ _", "expert _ _", "expert _ _"),
        None,
    ),
    "pipeline": (
        Mesh(stage=4, data=2),
        pipeline,
        ((8, 16, 64), (4, 64, 64)),
        ("_ data _", "stage _ _"),
        None,
    ),
    "convolutions": (
        Mesh(space=8),
        convolutions,
        ((4, 8, 64, 32), (16, 8, 3, 3), (8, 16, 1, 1)),
        ("_ _ space _", "_ _ _ _", "_ _ _ _"),
        (4, 8, 32, 16),
    ),
}


def ratio(name: str) -> float:
    """Arithmetic of all devices over that of the program."""
    mesh, function, shapes, specs, result = PROGRAMS[name]
    inputs = tuple(torch.randn(shape) * 0.1 for shape in (result or shapes[0], *shapes))
    plan = gspmd.plan(
        with_gradients(function),
        *inputs,
        mesh=mesh,
        in_specs=(specs[0], *specs),
        out_specs=(specs[0], *specs),
    )
    return of_devices(plan, inputs) / plan.estimate().model_flops


def main() -> None:
    for name in PROGRAMS:
        print(f"{name:24} {ratio(name):6.3f}")


if __name__ == "__main__":
    main()
