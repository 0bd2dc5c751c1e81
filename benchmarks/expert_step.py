"""Time of a step through expert layers against the same layers written by hand.

    torchrun --nproc-per-node 2 benchmarks/expert_step.py [--widths 64 256] [--steps 30]

A token chooses two of eight experts, none is dropped, and each process has some of the experts and
of the tokens. By hand, as Megatron-LM's all_to_all dispatcher: processes tell each other how many
rows they send, rows sorted by expert travel, are sorted again, multiplied by the experts' matrices
(torch's grouped product), and travel back. torchgspmd runs the plain layer in both ways of
docs/mixture_of_experts.md.

Losses and gradients are compared with the layer of one process, a loop over all experts. Then all
variants take turns in one run. Printed: median CPU time of a step (forward, backward, the sum of
the router's gradient) summed over the processes, and its ratio to the one by hand.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import torchgspmd as gspmd
from torchgspmd import moe

EXPERTS, CHOICES, LAYERS, TOKENS = 8, 2, 2, 1024
SENT = {"shards": 2, "capacity": 1.25}  # of moe.dispatch


class Layer(nn.Module):
    """x [t, m] -> y [t, m]: experts on one process, each on its rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(width, EXPERTS) / 8)
        self.up = nn.Parameter(torch.randn(EXPERTS, width, 4 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 4 * width, width) / (4 * width) ** 0.5)

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [t, k], [t, k]
        weights, chosen = (x @ self.router).softmax(-1).topk(CHOICES)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.chosen(x)
        y = torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(self.up, self.down)):
            token, choice = (chosen == expert).nonzero(as_tuple=True)
            rows = F.gelu(x[token] @ up) @ down
            y = y.index_add(0, token, rows * weights[token, choice].unsqueeze(1))
        return y


class Model(nn.Module):
    """x [t, m] -> the mean over all tokens of a loss behind expert layers."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().sum() / (TOKENS * x.shape[1])


# ------------------------------------------------------------------------------------------ by hand


class AllToAll(torch.autograd.Function):
    """Send rows: `ins` of them to each process, `outs` from each."""

    @staticmethod
    def forward(ctx, rows: Tensor, outs: list[int], ins: list[int]) -> Tensor:
        ctx.splits = ins, outs
        got = rows.new_empty(sum(outs), rows.shape[1])
        dist.all_to_all_single(got, rows, outs, ins)
        return got

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return AllToAll.apply(grad.contiguous(), *ctx.splits), None, None


def transposed(rows: Tensor, sizes: Tensor) -> Tensor:
    """Sort blocks of rows whose sizes are [a, b] by b first."""
    blocks, columns = rows.split(sizes.flatten().tolist()), sizes.shape[1]
    return torch.cat([block for b in range(columns) for block in blocks[b::columns]])


class HandLayer(Layer):
    """The layer with some of the experts, on some of the tokens."""

    def forward(self, x: Tensor) -> Tensor:  # [t, m]
        weights, chosen = self.chosen(x)
        flat, n = chosen.flatten(), dist.get_world_size()
        order = flat.argsort(stable=True)
        token, sent = order // CHOICES, flat.bincount(minlength=EXPERTS)
        come = torch.empty_like(sent)
        dist.all_to_all_single(come, sent)
        sizes = come.view(n, -1)  # [process, own expert]
        ins, outs = sent.view(n, -1).sum(1).tolist(), sizes.sum(1).tolist()

        rows = AllToAll.apply(x.index_select(0, token), outs, ins)
        rows, ends = transposed(rows, sizes), sizes.sum(0).cumsum(0, dtype=torch.int32)
        rows = F.gelu(F.grouped_mm(rows, self.up, offs=ends))
        rows = F.grouped_mm(rows, self.down, offs=ends)
        rows = AllToAll.apply(transposed(rows, sizes.T), ins, outs)

        rows = rows * weights.flatten().index_select(0, order).unsqueeze(1)
        return torch.zeros_like(x).index_add(0, token, rows)


def by_hand(model: Model) -> Callable[[Tensor], Tensor]:
    rank, n = dist.get_rank(), dist.get_world_size()
    for layer in model.layers:
        layer.__class__ = HandLayer
        for name in ("up", "down"):
            own = getattr(layer, name).detach().chunk(n)[rank]
            setattr(layer, name, nn.Parameter(own.clone()))

    def step(x: Tensor) -> Tensor:
        loss = model(x.chunk(n)[rank])
        loss.backward()
        routers: list[Any] = [layer.router for layer in model.layers]
        flat = torch.cat([r.grad.flatten() for r in routers] + [loss.detach().view(1)])
        dist.all_reduce(flat)
        for router, grad in zip(routers, flat[:-1].chunk(len(routers))):
            router.grad = grad.view_as(router)
        return flat[-1]

    return step


# ------------------------------------------------------------------------------------- torchgspmd


class PlainLayer(Layer):
    """The layer in plain PyTorch; dispatch: further arguments of moe.dispatch."""

    dispatch: dict = {}

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.chosen(x)
        routed = moe.dispatch(x, chosen, EXPERTS, **self.dispatch)
        rows = F.gelu(moe.grouped_mm(routed.rows, self.up, routed.ends))
        return moe.combine(moe.grouped_mm(rows, self.down, routed.ends), routed, weights)


def ours(model: Model, dispatch: dict) -> Callable[[Tensor], Tensor]:
    mesh = gspmd.Mesh(expert=dist.get_world_size())
    layers: Any = model.layers
    for layer in layers:
        layer.__class__, layer.dispatch = PlainLayer, dispatch
    gspmd.annotate(model, mesh, {"**.up": "expert _ _", "**.down": "expert _ _"})
    module = gspmd.parallelize(model, mesh, in_specs="expert _")

    def step(x: Tensor) -> Tensor:
        loss = module(x)
        loss.backward()
        return loss.detach()

    return step


def check(whole: Model, model: Model, loss: Tensor, expected: Tensor) -> None:
    """Compare a loss and the gradients with those of one process."""
    torch.testing.assert_close(loss, expected)
    for one, other in zip(whole.parameters(), model.parameters()):
        assert one.grad is not None and other.grad is not None
        grad = other.grad.to_local() if isinstance(other.grad, DTensor) else other.grad
        part = one.grad.chunk(len(one) // len(grad))[dist.get_rank() if one.dim() == 3 else 0]
        torch.testing.assert_close(grad, part, rtol=1e-3, atol=1e-6)


def run(width: int, steps: int) -> None:
    torch.manual_seed(0)
    whole, x = Model([Layer(width) for _ in range(LAYERS)]), torch.randn(TOKENS, width)
    models = {name: copy.deepcopy(whole) for name in ("hand", "gathered", "sent")}
    variants = {
        "hand": by_hand(models["hand"]),
        "gathered": ours(models["gathered"], {}),
        "sent": ours(models["sent"], SENT | {"shards": dist.get_world_size()}),
    }
    expected = whole(x)
    expected.backward()
    for name, step in variants.items():
        check(whole, models[name], step(x), expected.detach())
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(steps):
        for name in random.Random(number).sample(list(variants), len(variants)):
            models[name].zero_grad()
            dist.barrier()
            start = time.process_time()
            variants[name](x)
            seconds[name].append(time.process_time() - start)
    rows = torch.tensor([statistics.median(each[3:]) for each in seconds.values()])
    dist.all_reduce(rows)
    if dist.get_rank() == 0:
        print(f"width {width}: {TOKENS} tokens, {EXPERTS} experts, {LAYERS} layers")
        for name, each in zip(variants, rows.tolist()):
            ratio = each / rows[0].item()
            print(f"  {name:12} {each * 1e3:8.1f} ms   {ratio:5.2f} of hand", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for width in options.widths:
        run(width, options.steps)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
