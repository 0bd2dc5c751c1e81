"""Time of a decoding step with a cache against the same model written by hand.

    torchrun --nproc-per-node 2 benchmarks/generate_step.py [--widths 128 512] [--tokens 60]

A small Llama whose cache has a fixed length, tensor parallel over heads, hidden units and words. By
hand, as gpt-fast: a process has its part of the weights and of the cache, and sums after attention
and after the feed-forward layer. It chooses a token by the largest logit, so it gathers each
process's best. torchgspmd runs the model of one process with marks on weights and cache.

Tokens and caches are compared with those of one process. All variants take turns, token by token,
in one run. Printed: median CPU time of a token summed over the processes, and its ratio to
the one by hand.
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

import torchgspmd as gspmd

HEADS, LAYERS, VOCABULARY, LENGTH, BATCH = 8, 4, 4096, 256, 4
Cache = list[list[Tensor]]  # keys and values of each layer


def summed(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)
        self.head_width = width // HEADS
        self.sum: Callable[[Tensor], Tensor] = lambda x: x

    def forward(
        self, x: Tensor, position: Tensor, turn: Tensor, mask: Tensor, cache: list[Tensor]
    ) -> Tensor:  # [b, m]
        h = self.norm1(x)
        q, k, v = (
            f(h).view(len(x), -1, 1, self.head_width) for f in (self.q, self.k, self.v)
        )  # [b, n, 1, d]
        keys, values = cache  # [b, n, length, d]
        keys.index_copy_(2, position, rotated(k, turn))
        values.index_copy_(2, position, v)
        y = F.scaled_dot_product_attention(rotated(q, turn), keys, values, attn_mask=mask)
        x = x + self.sum(self.o(y.reshape(len(x), -1)))
        h = self.norm2(x)
        return x + self.sum(self.down(F.silu(self.gate(h)) * self.up(h)))


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """Turn pairs of x [..., d] by the angles whose cosine and sine are turn [2, d]."""
    one, other = x.chunk(2, -1)
    return x * turn[0] + torch.cat([-other, one], -1) * turn[1]


class Llama(nn.Module):
    """Tokens [b] at a position [1], and a cache -> logits [b, words]."""

    angles: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        size = width // HEADS
        rates = 1e4 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(LENGTH), rates).repeat(1, 2)
        self.register_buffer("angles", torch.stack([angles.cos(), angles.sin()]))  # [2, length, d]

    def forward(self, tokens: Tensor, position: Tensor, cache: Cache) -> Tensor:
        x, turn = self.embedding(tokens), self.angles[:, position]  # [b, m], [2, 1, d]
        mask = torch.arange(LENGTH) <= position.unsqueeze(1)  # [1, length]
        for block, rows in zip(self.blocks, cache):
            x = block(x, position, turn, mask, rows)
        return self.head(self.norm(x))


class Next(nn.Module):
    """The most likely next token of each text."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, position: Tensor, cache: Cache) -> Tensor:
        return self.model(tokens, position, cache).argmax(-1)


class HandNext(Next):
    """The same where a process has some of the words."""

    def forward(self, tokens: Tensor, position: Tensor, cache: Cache) -> Tensor:
        logits = self.model(tokens, position, cache)
        best, word = logits.max(-1)
        word = word + dist.get_rank() * logits.shape[1]
        mine = torch.stack([best.double(), word.double()])  # [2, b]
        found = mine.new_empty(dist.get_world_size(), *mine.shape)
        dist.all_gather([*found], mine)
        bests, words = found.unbind(1)  # [process, b]
        return words.gather(0, bests.argmax(0, keepdim=True))[0].long()


def new_cache(width: int, heads: int) -> Cache:
    def rows() -> Tensor:
        return torch.zeros(BATCH, heads, LENGTH, width // HEADS)

    return [[rows(), rows()] for _ in range(LAYERS)]


def by_hand(model: Llama, width: int) -> tuple[nn.Module, Cache]:
    rank, n = dist.get_rank(), dist.get_world_size()
    for module in (model, *model.blocks):
        for name, layer in module.named_children():
            if isinstance(layer, nn.Linear):
                part = layer.weight.detach().chunk(n, int(name in ("o", "down")))[rank]
                layer.weight = nn.Parameter(part.clone())
    blocks: Any = model.blocks
    for block in blocks:
        block.sum = summed
    return HandNext(model), new_cache(width, HEADS // n)


def ours(model: Llama, width: int) -> tuple[nn.Module, Cache]:
    mesh, cache = gspmd.Mesh(model=dist.get_world_size()), new_cache(width, HEADS)
    for rows in (rows for layer in cache for rows in layer):
        gspmd.mark_sharding(rows, mesh, "_ model _ _")
    columns = {name: "_ model" for name in ("**.o.weight", "**.down.weight")}
    rows = {f"**.{name}.weight": "model _" for name in ("q", "k", "v", "gate", "up", "head")}
    gspmd.annotate(module := Next(model), mesh, rows | columns)
    return gspmd.parallelize(module, mesh), cache


@torch.no_grad()
def run(width: int, count: int) -> None:
    torch.manual_seed(0)
    whole = Llama(width)
    variants: dict[str, tuple[Any, Cache]] = {
        "one process": (Next(whole), new_cache(width, HEADS)),
        "hand": by_hand(copy.deepcopy(whole), width),
        "torchgspmd": ours(copy.deepcopy(whole), width),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    tokens = dict.fromkeys(variants, torch.arange(BATCH))
    for at in range(count):
        position = torch.tensor([at])
        for name in random.Random(at).sample(list(variants), len(variants)):
            module, cache = variants[name]
            dist.barrier()
            start = time.process_time()
            tokens[name] = module(tokens[name], position, cache)
            seconds[name].append(time.process_time() - start)
        assert all(each.equal(tokens["one process"]) for each in tokens.values()), tokens
    rank, n = dist.get_rank(), dist.get_world_size()
    for name, (_, cache) in variants.items():
        for mine, alone in zip(cache, variants["one process"][1]):
            for own, rows in zip(mine, alone):
                own = getattr(own, "to_local", lambda own=own: own)()
                part = rows if name == "one process" else rows.chunk(n, 1)[rank]
                torch.testing.assert_close(own, part, rtol=1e-3, atol=1e-4)
    times = torch.tensor([statistics.median(each[3:]) for each in seconds.values()])
    dist.all_reduce(times)
    times[0] /= n  # Each process computed the whole.
    if rank == 0:
        print(f"width {width}: {BATCH} texts, {LAYERS} layers, a cache for {LENGTH} tokens")
        for name, each in zip(variants, times.tolist()):
            ratio = each / times[1].item()
            print(f"  {name:12} {each * 1e3:8.2f} ms   {ratio:5.2f} of hand", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--tokens", type=int, default=60)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for width in options.widths:
        run(width, options.tokens)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
