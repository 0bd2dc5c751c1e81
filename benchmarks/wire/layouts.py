"""Layouts over a link with a rate: bytes beside the plan's, seconds beside estimates and bounds.

    python benchmarks/wire/layouts.py [--rates 50mbit 200mbit] [--processes 1] [--only dp cp]

Each run begins with `calibrate`, whose links are printed beside the true rate, of payload: 0.956 of
the link's. Then for each layout of a small GPT (experts have a layer of their own):

    MiB out    that a host's interface sends in a step, the mean of both, and by how much they
               exceed the plan's bytes that leave a host
    step       the median wall time, and by how much `plan.estimate` exceeds it
    bound      the estimate's step where links send beside computing: the longer of computation and
               bytes / rate, and the bytes that nothing hides; the step, as a multiple of it
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hosts import Wire, missing
from steps import WARM, sent  # and the path to step_time
from torch import Tensor, nn

# isort: split
import step_time

import torchgspmd as gspmd
from torchgspmd.comm.hosts import block_size, host_name
from torchgspmd.comm.kinds import KINDS, StepKind, permute

WIDTH, TOKENS = 128, (step_time.BATCH, step_time.SEQUENCE)


class OneKeyHead(nn.Module):
    """Attention with one head of keys and values, whose sequence is sharded."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal, self.embed = is_causal, nn.Embedding(step_time.VOCABULARY, WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        q = self.q(x).unflatten(2, (2, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(2, (2, 1, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal, enable_gqa=True)
        y = x + y.transpose(1, 2).flatten(2)
        return F.cross_entropy((y @ self.embed.weight.T).flatten(0, 1), targets.flatten())


class Experts(nn.Module):
    """Tokens are sent to their experts, and back."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(experts, WIDTH, WIDTH)) for _ in range(2))
        self.embed = nn.Embedding(step_time.VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        n, x = len(self.up), self.embed(tokens).flatten(0, 1)
        chosen = (targets.flatten() % n).unsqueeze(1)
        routed = gspmd.moe.dispatch(x, chosen, n, shards=n, capacity=n)
        h = F.gelu(gspmd.moe.grouped_mm(routed.rows, self.up, routed.ends))
        y = gspmd.moe.grouped_mm(h, self.down, routed.ends)
        return gspmd.moe.combine(y, routed, torch.ones_like(chosen, dtype=x.dtype)).square().mean()


class Pipelined(nn.Module):
    """The GPT with its blocks in stages."""

    def __init__(self, model: step_time.GPT, mesh: gspmd.Mesh, schedule: str) -> None:
        super().__init__()
        self.embedding, self.head = model.embedding, model.head
        self.blocks = gspmd.pipeline(
            model.blocks, mesh, microbatches=4, schedule=schedule, loss=self.loss
        )

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.blocks(self.embedding(tokens), targets=targets)


def with_sequence(n: int) -> nn.Module:
    """Return the GPT with sharded weights, and activations sharded along the sequence."""
    model, mesh = step_time.GPT(WIDTH), gspmd.Mesh(model=n)
    step_time.mark(model, mesh, "tp")
    for block in model.blocks:
        block.register_forward_hook(
            lambda _, args, out: gspmd.mark_sharding(out, mesh, "_ model _")
        )
    return gspmd.parallelize(model, mesh)


def along(axis: str, model: nn.Module, n: int, **options: object) -> nn.Module:
    """Return a model whose tokens are sharded along their second dimension."""
    spec = f"_ {axis}"
    return gspmd.parallelize(model, gspmd.Mesh(**{axis: n}), in_specs=(spec, spec), **options)


def experts(n: int) -> nn.Module:
    model, mesh = Experts(n), gspmd.Mesh(expert=n)
    for weight in (model.up, model.down):
        gspmd.mark_sharding(weight, mesh, "expert _ _")
    return gspmd.parallelize(model, mesh, in_specs=("expert _", "expert _"))


def stages(n: int, schedule: str) -> nn.Module:
    mesh = gspmd.Mesh(stage=n)
    return gspmd.parallelize(Pipelined(step_time.GPT(WIDTH), mesh, schedule), mesh)


def two_axes(n: int) -> nn.Module:
    mesh, spec = gspmd.Mesh(host=2, core=n // 2), "host+core _"
    return gspmd.parallelize(step_time.GPT(WIDTH), mesh, in_specs=(spec, spec))


LAYOUTS: dict[str, Callable[[int], nn.Module]] = {
    "dp": lambda n: step_time.ours(step_time.GPT(WIDTH), "dp"),
    "tp": lambda n: step_time.ours(step_time.GPT(WIDTH), "tp"),
    "fsdp": lambda n: step_time.ours(step_time.GPT(WIDTH), "fsdp"),
    "sp": with_sequence,
    "cp": lambda n: along("seq", step_time.GPT(WIDTH), n),
    "ring": lambda n: along("seq", OneKeyHead(False), n),
    "zigzag": lambda n: along("seq", OneKeyHead(True), n),
    "ep": experts,
    "gpipe": lambda n: stages(n, "gpipe"),
    "1f1b": lambda n: stages(n, "1f1b"),
    "zero_bubble": lambda n: stages(n, "zero_bubble"),
    "two_axes": two_axes,
}


def leaving(plan: gspmd.Plan, each: int) -> float:
    """Return the bytes that a host with some ranks sends in a step, in the mean of all hosts.

    What ranks pass on, or sum, leaves a host once for each other host. The rest leaves it once for
    each other rank.
    """
    total = 0.0
    for collective in plan.collectives:
        group = next(iter(plan.mesh.groups(collective.axes)))
        n, inside = len(group), sum(rank // each == group[0] // each for rank in group)
        kind = KINDS[collective.kind]
        once = isinstance(kind, StepKind) and kind.relays
        away = (1 - inside / n) / (inside if once else 1) / (1 - 1 / n)
        if kind is permute:  # of stages, the last or the first of which sends nothing
            away *= 1 - 1 / n
        total += each * collective.sent_bytes * away
    return total


def measure(steps: int, rate: str, names: list[str], bytes_alone: bool) -> None:
    """Print the table of one run, in which each process is a rank."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    n, rows = dist.get_world_size(), [None] * dist.get_world_size()
    dist.all_gather_object(rows, host_name())
    each = block_size([str(name) for name in rows]) or 1
    mesh = gspmd.Mesh(host=2, core=n // 2) if each > 1 else gspmd.Mesh(data=n)
    hardware = gspmd.Hardware.of("cpu") if bytes_alone else gspmd.calibrate(mesh)
    if dist.get_rank() == 0 and not bytes_alone:
        found, true = each * hardware.links[-1].bandwidth, Wire(0, rate).payload
        inside = f", inside {hardware.links[0].bandwidth / 1e6:,.0f} MB/s" if each > 1 else ""
        print(
            f"| {rate} | link between hosts {8e-6 * found:.1f} Mbit/s "
            f"({100 * (found / true - 1):+.1f} %), "
            f"{1e3 * hardware.links[-1].latency:.2f} ms{inside}"
        )
    tokens = torch.randint(step_time.VOCABULARY, (2, *TOKENS))
    dist.broadcast(tokens, 0)
    for name in names:
        torch.manual_seed(0)
        model = LAYOUTS[name](n)
        seconds, link = [], []
        for _ in range(WARM + steps):
            dist.barrier()
            before, start = sent(), time.perf_counter()
            model(*tokens).backward()
            model.zero_grad()
            dist.barrier()
            seconds.append(time.perf_counter() - start)
            link.append(sent() - before)
        out = torch.tensor(statistics.median(link[WARM:]) / n)
        dist.all_reduce(out)
        if dist.get_rank() == 0:
            plan, wall = model.plan, statistics.median(seconds[WARM:])
            guess = plan.estimate(hardware).seconds
            bound = plan.estimate(dataclasses.replace(hardware, beside=True)).seconds
            planned = leaving(plan, each)
            print(
                f"| {rate} | {name} "
                f"| {out / 2**20:.2f} MiB out, {100 * (out / planned - 1):+.1f} % "
                f"| step {1e3 * wall:.0f} ms, estimate {100 * (guess / wall - 1):+.0f} % "
                f"| bound {1e3 * bound:.0f} ms, {wall / bound:.2f} |",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", default=["50mbit", "200mbit"])
    parser.add_argument("--processes", type=int, default=1, help="on each host")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--limit", type=float, default=600, help="seconds of a run")
    parser.add_argument(
        "--bytes", action="store_true", help="without calibrate: estimates are wrong"
    )
    parser.add_argument("--only", nargs="+", choices=[*LAYOUTS])
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # the rate, in a process of torchrun
    args = parser.parse_args()
    names = args.only or [n for n in LAYOUTS if n != "two_axes" or args.processes > 1]
    if args.rank:
        measure(args.steps, args.rank, names, args.bytes)
        return
    if why := missing():
        parser.error(why)
    for rate in args.rates:
        with Wire(2, rate) as wire:
            alone = "--bytes" if args.bytes else ""
            flags = f"--rank {rate} --steps {args.steps} {alone} --only".split()
            text = wire.torchrun(args.processes, [__file__, *flags, *names], args.limit)
            rows = (row for row in text.splitlines() if row.startswith(f"| {rate}"))
            print("\n".join(rows), flush=True)


if __name__ == "__main__":
    main()
