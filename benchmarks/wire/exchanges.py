"""Experts' exchanges over a link with a rate: whole, and in parts beside products.

    python benchmarks/wire/exchanges.py [--rates 50mbit 100mbit] [--steps 12] [--layers 1]

Two hosts have a process and half of the experts and tokens each. A layer has a fixed number of
places in each expert. All variants take turns in one run. Printed are the median and the least of
wall times; the least is that of a moment when other jobs rested:

    compute    the products of one process, by plain PyTorch without messages
    wire       bytes / rate of payload: 0.956 of the link's
    whole      a step without the pass `split_exchanges`
    parts      a step with it; both as a multiple of the longer one of compute and wire
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hosts import Wire, missing
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd.comm.hardware import Link

EXPERTS, WIDTH, HIDDEN = 8, 256, 2048
GROUPS, TOKENS, PLACES = 4, 256, 48
WARM = 2


class Scale(nn.Module):
    """x [g, s, m] -> the same: a weight in front, so that the layer has a gradient to send back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Layer(nn.Module):
    """x [g, s, m] -> [g, s, m]: one expert for each token."""

    def __init__(self, experts: int, places: int) -> None:
        super().__init__()
        self.places, self.router = places, nn.Parameter(torch.randn(WIDTH, experts) / 8)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN) / 16)
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, WIDTH) / 32)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = (x @ self.router).softmax(-1).max(-1)  # [g, s]
        taken = F.one_hot(chosen, len(self.up))  # [g, s, e]
        before = taken.cumsum(1) - taken
        places = (before[..., None] == torch.arange(self.places)) & (taken[..., None] > 0)
        places = places.to(x.dtype)  # [g, s, e, c]
        y = torch.einsum("gsec,gsm->egcm", places, x)
        y = torch.einsum("egcm,emh->egch", y, self.up).relu()
        y = torch.einsum("egch,ehm->egcm", y, self.down)
        return x + torch.einsum("gsec,gs,egcm->gsm", places, weights, y)


def model_of(layers: int, devices: int) -> nn.Sequential:
    """Return layers whose products are one of so many devices' share."""
    torch.manual_seed(0)
    rows = EXPERTS // devices, PLACES * devices
    return nn.Sequential(Scale(), *(Layer(*rows) for _ in range(layers)))


def measure(steps: int, layers: int, rate: str) -> None:
    """Print the row of one run, in which each process is a rank."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    n, payload = dist.get_world_size(), Wire(0, rate).payload
    x = torch.randn(GROUPS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    share, own = model_of(layers, n), x[: GROUPS // n]
    seconds: dict[str, list[float]] = {"compute": []}

    def timed(name: str, model: Callable[[Tensor], Tensor], x: Tensor) -> None:
        dist.barrier()
        begin = time.perf_counter()
        model(x).square().mean().backward()
        dist.barrier()
        seconds.setdefault(name, []).append(time.perf_counter() - begin)

    for _ in range(3):
        timed("compute", share, own)
    mesh = gspmd.Mesh(expert=n)
    matrices = sum(p.numel() for p in share.parameters() if p.dim() == 3)
    count = 6 * matrices * PLACES * GROUPS  # FLOPs of the experts' products
    alone = torch.tensor(min(seconds["compute"]))
    dist.broadcast(alone, 0)
    hardware = dataclasses.replace(
        gspmd.Hardware.of("cpu"),
        flops={4: count / alone.item()},
        links=(Link(math.inf, payload, 1e-3),),
        beside=True,
    )
    models, plans = {}, {}
    for name, skip in (("whole", ("split_exchanges",)), ("parts", ())):
        model = model_of(layers, 1)
        gspmd.annotate(model, mesh, {"*.up": "expert _ _", "*.down": "expert _ _"})
        models[name] = gspmd.parallelize(
            model,
            mesh,
            in_specs="expert _ _",
            out_specs="expert _ _",
            hardware=hardware,
            advanced={"skip_passes": skip},
        )
    losses = {}
    for step in range(WARM + steps):
        for name in random.Random(step).sample(["compute", *models], 1 + len(models)):
            model, data = (share, own) if name == "compute" else (models[name], x)
            model.zero_grad()
            timed(name, model, data)
    for name, model in models.items():
        plans[name] = model.plan
        losses[name] = model(x).square().mean().item()
    if dist.get_rank() == 0:
        wire = plans["parts"].sent_bytes / payload
        assert plans["whole"].sent_bytes == plans["parts"].sent_bytes
        torch.testing.assert_close(losses["parts"], losses["whole"], rtol=1e-5, atol=0)
        for what, of in (("median", statistics.median), ("least", min)):
            compute, whole, parts = (of(seconds[name][WARM:]) for name in ("compute", *models))
            bound = max(compute, wire)
            print(
                f"| {rate} | {what} | compute {1e3 * compute:.0f} ms | wire {1e3 * wire:.0f} ms "
                f"| whole {1e3 * whole:.0f} ms, {whole / bound:.2f} "
                f"| parts {1e3 * parts:.0f} ms, {parts / bound:.2f} |",
                flush=True,
            )
        guesses = (1e3 * plans[name].estimate(hardware).seconds for name in models)
        print(f"| {rate} | estimates: whole, parts |", *(f"{guess:.0f} ms |" for guess in guesses))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", default=["50mbit", "100mbit"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--limit", type=float, default=170, help="seconds of a run")
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # the rate, in a process of torchrun
    args = parser.parse_args()
    if args.rank:
        measure(args.steps, args.layers, args.rank)
        return
    if why := missing():
        parser.error(why)
    for rate in args.rates:
        with Wire(2, rate) as wire:
            flags = f"--rank {rate} --steps {args.steps} --layers {args.layers}".split()
            text = wire.torchrun(1, [__file__, *flags], args.limit)
            print("\n".join(r for r in text.splitlines() if r.startswith("| ")), flush=True)


if __name__ == "__main__":
    main()
