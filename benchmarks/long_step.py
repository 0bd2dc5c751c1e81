"""A training step of a long sequence against a ring written by hand, and against one process.

    torchrun --nproc-per-node 4 benchmarks/long_step.py [--tokens 16384] [--heads 1] [--steps 3]

A small GPT, float32, whose sequence lies along all processes. By hand: causal ring attention with
tokens in zigzag order (blocks travel by batched sends and receives while a process computes with
one; results are merged by their logsumexp), and gradients of weights in one bucket. All variants
live in one run and take turns. Printed: CPU time of a step (forward and backward) of all processes,
its ratio to the one by hand, and the peak of the memory that a step allocates in a process, also
over that of one process with the whole sequence.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import torchgspmd as gspmd

VOCABULARY, LAYERS = 64, 2
Step = Callable[[Tensor, Tensor], Tensor]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.attend = heads, causal
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [b, s, m]
        q, k, v = self.qkv(self.ln1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        y = self.attend(*(part.transpose(1, 2) for part in (q, k, v)))  # [b, n, s, d]
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, width: int, heads: int, tokens: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(LAYERS)))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor, position: Tensor) -> Tensor:  # [b, s]
        x = self.blocks(self.embedding(tokens) + position)
        logits = self.head(self.ln(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


# ------------------------------------------------------------------------------------------ by hand


def sent_on(tensor: Tensor) -> tuple[Tensor, list]:
    """Start to send a tensor to the next process; return what comes from the one before."""
    rank, n = dist.get_rank(), dist.get_world_size()
    coming = torch.empty_like(tensor)
    ops = [
        dist.P2POp(dist.isend, tensor, (rank + 1) % n),
        dist.P2POp(dist.irecv, coming, (rank - 1) % n),
    ]
    return coming, dist.batch_isend_irecv(ops)


def parts(rank: int, block: int, rows: int) -> list[tuple[slice, slice, bool]]:
    """Return rows of queries and keys to compute. A process has chunks i and 2n - 1 - i."""
    low, high, everything = slice(0, rows // 2), slice(rows // 2, rows), slice(0, rows)
    if block == rank:
        return [(low, low, True), (high, low, False), (high, high, True)]
    return [(everything, low, False)] if block < rank else [(high, everything, False)]


flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Ring(torch.autograd.Function):
    """Causal attention in a ring, in zigzag order."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, n = dist.get_rank(), dist.get_world_size()
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf)
        block = torch.stack([k, v])
        for step in range(n):
            if step < n - 1:
                coming, work = sent_on(block)
            for rows, columns, diagonal in parts(rank, (rank - step) % n, q.shape[-2]):
                o, part = flash(
                    q[:, :, rows], *block[..., columns, :].unbind(0), is_causal=diagonal
                )
                both = torch.logaddexp(lse[..., rows], part)
                out[:, :, rows] *= (lse[..., rows] - both).exp().unsqueeze(-1)
                out[:, :, rows] += o * (part - both).exp().unsqueeze(-1)
                lse[..., rows] = both
            if step < n - 1:
                for each in work:
                    each.wait()
                block = coming
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = ctx.saved_tensors
        rank, n = dist.get_rank(), dist.get_world_size()
        q_grad, block, total = torch.zeros_like(q), torch.stack([k, v]), None
        for step in range(n):
            if step < n - 1:
                coming, work = sent_on(block)
            term = torch.zeros_like(block)
            for rows, columns, diagonal in parts(rank, (rank - step) % n, q.shape[-2]):
                args = grad[:, :, rows], q[:, :, rows], *block[..., columns, :].unbind(0)
                rest = out[:, :, rows], lse[..., rows], 0.0, diagonal
                dq, dk, dv = flash_backward(*args, *rest)
                q_grad[:, :, rows] += dq
                term[0][..., columns, :] += dk
                term[1][..., columns, :] += dv
            if total is not None:
                arriving, travels = total
                for each in travels:
                    each.wait()
                term += arriving
            total = sent_on(term)
            if step < n - 1:
                for each in work:
                    each.wait()
                block = coming
        arriving, travels = total
        for each in travels:
            each.wait()
        return q_grad, arriving[0], arriving[1]


def by_hand(model: GPT, rank: int, n: int) -> Step:
    for block in model.blocks:
        block.attend = Ring.apply
    weights = [*model.parameters()]

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        chunks = torch.arange(tokens.shape[1]).chunk(2 * n)
        places = torch.cat([chunks[rank], chunks[2 * n - 1 - rank]])
        position = model.position[places]
        loss = model(tokens[:, places], targets[:, places], position) / targets.numel()
        loss.backward()
        flat = torch.cat([*(w.grad.reshape(-1) for w in weights), loss.detach().reshape(1)])
        dist.all_reduce(flat)
        for w, g in zip(weights, flat.split([w.numel() for w in weights] + [1])):
            w.grad = g.view(w.shape)
        return flat[-1]

    return step


# -------------------------------------------------------------------------------- what is measured


class Whole(nn.Module):
    """The same model with marks that shard its sequence and the table of positions."""

    def __init__(self, model: GPT, mesh: gspmd.Mesh):
        super().__init__()
        self.model, self.mesh = model, mesh
        gspmd.mark_sharding(model.position, mesh, "seq _")

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        tokens = gspmd.mark_sharding(tokens, self.mesh, "_ seq")
        return self.model(tokens, targets, self.model.position) / targets.numel()


def trained(module: nn.Module) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = module(tokens, targets)
        loss.backward()
        return loss.detach()

    return step


def peak_of(step: Callable[[], object]) -> int:
    """Return the most bytes that a step has allocated and not yet freed, at any time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    total = most = 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            total += event.nbytes()
            most = max(most, total)
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, mesh = GPT(args.width, args.heads, args.tokens), gspmd.Mesh(seq=n)
    modules = {name: copy.deepcopy(model) for name in ("by hand", "torchgspmd")}
    variants = {
        "by hand": by_hand(modules["by hand"], rank, n),
        "torchgspmd": trained(
            gspmd.parallelize(
                Whole(modules["torchgspmd"], mesh), mesh, advanced={"regather": "all"}
            )
        ),
    }
    batch = tuple(torch.randint(VOCABULARY, (2, 1, args.tokens)).unbind(0))
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    losses: dict[str, float] = {}
    for number in range(args.steps + 1):  # The first one plans.
        for name, step in variants.items():
            for w in modules[name].parameters():
                w.grad = None
            dist.barrier()
            begin = time.process_time()
            losses[name] = step(*batch).item()
            if number:
                seconds[name].append(time.process_time() - begin)
    for one, other in zip(*(module.parameters() for module in modules.values())):
        assert one.grad is not None and other.grad is not None
        whole = getattr(other.grad, "full_tensor", lambda g=other.grad: g)()
        torch.testing.assert_close(whole, one.grad, rtol=1e-3, atol=1e-5)
    peaks = [peak_of(lambda step=step: step(*batch)) for step in variants.values()]
    dist.barrier()
    alone = peak_of(lambda: trained(Whole(model, mesh))(*batch)) if rank == 0 else 0
    rows = torch.tensor([statistics.median(each) for each in seconds.values()], dtype=torch.float64)
    most = torch.tensor(peaks, dtype=torch.int64)
    dist.all_reduce(rows)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if rank == 0:
        print(f"{args.tokens:,} tokens, {n} processes; one has {alone / (1 << 20):.1f} MiB alone")
        for name, time_, bytes_ in zip(variants, rows.tolist(), most.tolist()):
            print(
                f"  {name:12} {time_:7.2f} s  {time_ / rows[0]:5.2f}  peak "
                f"{bytes_ / (1 << 20):7.1f} MiB  {bytes_ / alone:5.3f}  loss {losses[name]:.6f}"
            )
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
