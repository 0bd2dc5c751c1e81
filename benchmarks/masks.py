"""Bytes and balance of published masks and biases along a sharded sequence. Nothing is run.

    python benchmarks/masks.py [--only window] [--tokens 2048] [--devices 8] [--rate 100]

Each row is the forward of one layer in plain PyTorch, from tokens to a loss, with 4 query heads and
1 key head of width 128 in float32. Beside it:

    sent     bytes that a device sends, over a gather of keys and values. Where only a run knows the
             mask, these are bytes at most: a ring sends the rows that are seen
    work     blocks of 32 x 32 scores that the busiest device computes, over an even split of those
             that have a seen score
    order    of tokens: their own, one that planning finds, or one that each run computes

tests/features/attention/test_masks.py compares numbers and gradients of such masks with one device.
"""

from __future__ import annotations

import argparse
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention

import torchgspmd as gspmd
from torchgspmd.features.attention.flex_op import Flex
from torchgspmd.features.attention.mask_shares import FLEX
from torchgspmd.features.attention.tiles import Place

BATCH, HEADS, WIDTH, MODEL, BLOCK = 2, 4, 128, 512, 32
Made = tuple[Any, Any]  # mask_mod, score_mod


def borders(s: int) -> list[int]:
    return [0, s // 5, s // 5 + 20, s // 2, s - s // 7, s]


def documents_of(cu: Tensor, s: int) -> Tensor:
    return torch.searchsorted(cu, torch.arange(s, device=cu.device), right=True) - 1


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def near(width: int) -> Callable[..., Tensor]:
    return lambda b, h, q, k: (q >= k) & (q - k < width)


def same(cu: Tensor, s: int) -> Callable[..., Tensor]:
    document = documents_of(cu, s)
    return lambda b, h, q, k: document[q] == document[k]


def by_document(cu: Tensor, s: int, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a mask of positions within documents, as attention gym has it."""
    document = documents_of(cu, s)

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        places = (x - cu[document[x]] for x in (q, k))
        return (document[q] == document[k]) & inner(b, h, *places)

    return mask


def natten(side: int, kernel: int) -> Callable[..., Tensor]:
    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        half = kernel // 2
        x, y = ((p).clamp(half, side - 1 - half) for p in (q // side, q % side))
        return ((x - k // side).abs() <= half) & ((y - k % side).abs() <= half)

    return mask


def block_diffusion(half: int, size: int) -> Callable[..., Tensor]:
    """Return BD3-LM's mask: noisy tokens, then clean ones."""

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        clean_q, clean_k = q >= half, k >= half
        block_q, block_k = (torch.where(p >= half, p - half, p) // size for p in (q, k))
        diagonal = (block_q == block_k) & (clean_q == clean_k)
        before = (block_q > block_k) & clean_k & ~clean_q
        return diagonal | before | ((block_q >= block_k) & clean_k & clean_q)

    return mask


@functools.cache
def tree(s: int) -> Tensor:
    """Return who descends from whom [s, s]; a parent is at most 64 tokens away."""
    torch.manual_seed(3)
    found = torch.eye(s, dtype=torch.bool)
    for i in range(1, s):
        found[i] |= found[i - 1 - int(torch.randint(min(i, 64), ()))]
    return found


def t5_bucket(away: Tensor) -> Tensor:
    far = torch.log(away.clamp(min=1) / 16) / math.log(8) * 16 + 16
    return torch.where(away < 16, away.clamp(min=0), far.clamp(max=31).to(away.dtype))


def global_tokens(s: int) -> Callable[..., Tensor]:
    special = torch.zeros(s, dtype=torch.bool)
    special[:64] = True
    return lambda b, h, q, k: special[q] | special[k] | ((q - k).abs() < 128)


@functools.cache
def random_blocks(s: int) -> Callable[..., Tensor]:
    torch.manual_seed(2)
    chosen = torch.rand(s // 64, s // 64) < 0.06

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return chosen[q // 64, k // 64] | ((q // 64 - k // 64).abs() <= 1)

    return mask


def per_head(s: int) -> Callable[..., Tensor]:
    widths = torch.tensor([64, 128, 256, 512])
    return lambda b, h, q, k: (q >= k) & (q - k < widths[h])


# Of s tokens, their borders (a constant, or an argument), and a tensor that needs a gradient.
Make = Callable[[int, Tensor, Tensor], Made]
MASKS: dict[str, Make] = {
    "causal": lambda s, cu, x: (causal, None),
    "sliding window": lambda s, cu, x: (near(256), None),
    "documents": lambda s, cu, x: (same(cu, s), None),
    "documents, causal": lambda s, cu, x: (and_masks(same(cu, s), causal), None),
    "documents, window": lambda s, cu, x: (and_masks(same(cu, s), near(256)), None),
    "prefix": lambda s, cu, x: (lambda b, h, q, k: (q >= k) | (k < s // 3), None),
    "prefix in each document": lambda s, cu, x: (
        by_document(cu, s, lambda b, h, q, k: (q >= k) | (k < 64)),
        None,
    ),
    "dilated window": lambda s, cu, x: (
        lambda b, h, q, k: (q >= k) & (q - k < 256) & ((q - k) % 2 == 0),
        None,
    ),
    "strided (Sparse Transformer)": lambda s, cu, x: (
        lambda b, h, q, k: (q >= k) & ((q - k < 64) | ((q - k) % 64 == 0)),
        None,
    ),
    "global tokens (Longformer)": lambda s, cu, x: (global_tokens(s), None),
    "random blocks (BigBird)": lambda s, cu, x: (random_blocks(s), None),
    "neighbors in 2-D (NATTEN)": lambda s, cu, x: (natten(math.isqrt(s), 7), None),
    "windows of heads": lambda s, cu, x: (per_head(s), None),
    "sinks (StreamingLLM)": lambda s, cu, x: (
        lambda b, h, q, k: (q >= k) & ((k < 4) | (q - k < 256)),
        None,
    ),
    "chunks (Llama 4)": lambda s, cu, x: (
        lambda b, h, q, k: (q // 300 == k // 300) & (q >= k),
        None,
    ),
    "frames of video": lambda s, cu, x: (lambda b, h, q, k: q // 100 >= k // 100, None),
    "block diffusion (BD3-LM)": lambda s, cu, x: (block_diffusion(s // 2, 16), None),
    "a tree, as a table": lambda s, cu, x: (
        (lambda t: lambda b, h, q, k: t[q, k])(tree(s)),
        None,
    ),
    "rounded quotients": lambda s, cu, x: (
        lambda b, h, q, k: torch.div(q, 50, rounding_mode="floor") >= torch.floor(k / 50),
        None,
    ),
    "soft cap, window": lambda s, cu, x: (
        near(256),
        lambda score, b, h, q, k: 20 * torch.tanh(score / 20),
    ),
    "learned slopes": lambda s, cu, x: (
        causal,
        lambda score, b, h, q, k: score - x[h, 0] * (q - k),
    ),
    "learned T5 bias": lambda s, cu, x: (
        causal,
        lambda score, b, h, q, k: score + x[h, t5_bucket(q - k)],
    ),
    "learned relative bias": lambda s, cu, x: (
        None,
        lambda score, b, h, q, k: score + x[h, q - k + s - 1],
    ),
}
IN_RUN = ("documents", "documents, causal", "documents, window", "prefix in each document")


def planned(make: Make, s: int, mesh: gspmd.Mesh, args: argparse.Namespace, in_run: bool) -> Any:
    cu, wide = torch.tensor(borders(s)), 2 * s - 1
    x = torch.randn(HEADS, wide)
    make(s, cu, x)  # so that the program does not draw the tables

    def run(tokens: Tensor, table: Tensor, qkv: list[Tensor], out: Tensor, *rest: Tensor) -> Tensor:
        y = F.embedding(gspmd.mark_sharding(tokens, mesh, "_ seq"), table)
        q, k, v = (torch.einsum("bsm,mhd->bhsd", y, w) for w in qkv)
        mask, score = make(s, rest[1] if in_run else cu, rest[0])
        sizes = BATCH, HEADS, s, s
        blocks = create_block_mask(mask, *sizes, device=tokens.device) if mask else None
        y = flex_attention(q, k, v, score, blocks, enable_gqa=True)
        return torch.einsum("bhsd,hdm->bsm", y, out).square().mean()

    weights = [torch.zeros(MODEL, n, WIDTH) for n in (HEADS, 1, 1)]
    tokens, table = torch.zeros(BATCH, s, dtype=torch.long), torch.zeros(10, MODEL)
    inputs = tokens, table, weights, torch.zeros(HEADS, WIDTH, MODEL), x.requires_grad_(), cu
    rate = {"costs": {"link_flops_per_byte": args.rate}}
    return gspmd.plan(run, *inputs, mesh=mesh, advanced=rate), {-2: x, -1: cu}


def value_of(node: fx.Node, known: dict[fx.Node, Any], constants: Any) -> Any:
    """Return a buffer as a run has it."""
    if node not in known:
        if node.op == "get_attr":
            known[node] = getattr(constants, str(node.target))
        else:
            find = functools.partial(value_of, known=known, constants=constants)
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), find)
            known[node] = node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
    return known[node]


def row(name: str, make: Make, in_run: bool, args: argparse.Namespace) -> list[str]:
    s, n = args.tokens, args.devices
    if "NATTEN" in name:
        s = (-(-math.isqrt(s) // 16) * 16) ** 2  # a square whose blocks divide
    mesh = gspmd.Mesh(seq=n)
    plan, values = planned(make, s, mesh, args, in_run)
    (node,) = [node for node in plan.sharded.nodes if node.target in FLEX]
    inputs = [x for x in plan.sharded.nodes if x.op == "placeholder"]
    known = {inputs[i]: value for i, value in values.items()}
    buffers, *texts = node.args[3:7]
    found = [value_of(x, known, plan.captured.constants) for x in buffers]
    gather = 2 * BATCH * s * WIDTH * 4 * (n - 1) / n
    order = str(node.meta.get("chosen", "their own"))
    order = "each run's" if "each run" in order else "planned" if "ordered" in order else "own"
    columns = [name, "a run" if in_run else "planning", f"{plan.sent_bytes / gather:.2f}"]
    if not texts[0]:
        return [*columns, "1.00", order]
    lead = BATCH, 1, HEADS
    change, cpu = Flex(found, *texts), torch.device("cpu")
    place, pieces = Place((0,) * 5, (*lead, s, s)), [(i, i + BLOCK) for i in range(0, s, BLOCK)]
    some = change.blocks((*lead, s, s), place, pieces, pieces, cpu)
    assert some is not None
    seen = torch.as_tensor(change.seen((*lead, s, s), place, cpu)).expand(*lead, s, s)
    count = s // BLOCK
    needed = seen.reshape(-1, count, BLOCK, count, BLOCK).any(2).any(-1).any(0)
    work = some.some.view(n, -1).sum(1).double()
    return [*columns, f"{work.max() * n / needed.sum():.2f}", order]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="a part of the mask's name")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e2, help="FLOPs while a byte is sent")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    head = ["mask", "known to", "sent", "work", "order of tokens"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for name, make in MASKS.items():
        for in_run in (False, True) if name in IN_RUN else (False,):
            if args.only in name:
                print(f"| {' | '.join(row(name, make, in_run, args))} |", flush=True)


if __name__ == "__main__":
    main()
