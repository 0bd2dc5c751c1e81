"""Steps of training with the optimizer in the program, and pipelines by shifting."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torchgspmd import mark_sharding

from .draw import Draw, spread


def step(draw: Draw):
    """One step of training: gradients and an optimizer. The states lie as stored; some layouts
    divide them only (ZeRO).
    """
    draw.size(b=(16, 32, 64), m=(32, 64), f=(64, 256))
    draw.sizes["v"] = 16
    name = draw.pick("sgd", "momentum", "adamw")
    draw.layout(
        "b m f",
        "m f",
        {"dp": ("b", ""), "zero3": ("b", "m"), "tp": ("b|f", "|f"), "fsdp+tp": ("b|f", "m|f")},
    )
    stored = draw.weights
    states = spread("m", draw.mesh.names) if draw.flip(0.6, "zero1") else stored
    shapes, count = ["m f", "f m", "m", "m v"], {"sgd": 0, "momentum": 1, "adamw": 2}[name]
    clip = draw.flip(0.3, "clip")
    draw.value("b m", scale=1), draw.value("b", high=draw.sizes["v"])
    for dims in shapes:
        draw.weight(dims)
    for dims in shapes * count:
        draw.argument(dims, states, scale=0.0)
    n = len(shapes)

    def loss(x, labels, up, down, scale, head):
        return F.cross_entropy(
            (F.layer_norm(x + F.gelu(x @ up) @ down, x.shape[-1:]) * scale) @ head, labels
        )

    def run(x, labels, *rest):
        leaves = [w.detach().requires_grad_() for w in rest[:n]]
        value = loss(x, labels, *leaves)
        grads = torch.autograd.grad(value, leaves)
        if clip:
            total = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
            grads = [g * (1 / (total + 1e-6)).clamp(max=1) for g in grads]
        if name == "sgd":
            return value, *(w - 0.1 * g for w, g in zip(rest, grads))
        first = [0.9 * m + 0.1 * g for m, g in zip(rest[n:], grads)]
        if name == "momentum":
            return value, *(w - 0.1 * m for w, m in zip(rest, first)), *first
        second = [0.99 * v + 0.01 * g * g for v, g in zip(rest[2 * n :], grads)]
        new = [w * 0.999 - 0.1 * m / (v.sqrt() + 1e-3) for w, m, v in zip(rest, first, second)]
        return value, *new, *first, *second

    draw.results = ("", *draw.specs[2:])
    return run, None


def pipeline(draw: Draw):
    draw.size(t=(4, 8), b=(4, 8), m=(16, 32), f=(32, 64))
    draw.sizes |= {"l": draw.random.choice([4, 8]), "i": draw.random.choice([1, 2])}
    draw.layout(
        "l b m",
        "l m f",
        {
            "stages": ("l", "l"),
            "stages+dp": ("l|b", "l|"),
            "stages+tp": ("l|f", "l|f"),
            "stages+fsdp": ("l|b", "l|m"),
        },
    )
    kind = draw.pick("roll", "cat", "pad")
    (
        draw.value("t b m", scale=1),
        draw.weight("l i m f", scale=0.1),
        draw.weight("l i f m", scale=0.1),
    )
    stages = draw.sizes["l"]

    def shifted(state, rows):
        if kind == "cat":
            return torch.cat([rows[None], state[:-1]])
        if kind == "pad":
            return F.pad(state[:-1], (0, 0, 0, 0, 1, 0)) + F.pad(
                rows[None], (0, 0, 0, 0, 0, stages - 1)
            )
        return torch.where((torch.arange(stages) == 0)[:, None, None], rows, state.roll(1, 0))

    def run(x, up, down):
        state, outputs = x.new_zeros(stages, *x.shape[1:]), []
        for rows in torch.cat([x, x.new_zeros(stages - 1, *x.shape[1:])]):
            state = mark_sharding(
                shifted(state, rows), draw.mesh, draw.spec("l b m", draw.activations)
            )
            for i in range(up.shape[1]):
                state = state + torch.einsum(
                    "lbf,lfm->lbm", torch.einsum("lbm,lmf->lbf", state, up[:, i]).tanh(), down[:, i]
                )
            outputs.append(state[-1])
        return torch.stack(outputs)[stages - 1 :]

    return run, "t b m"
