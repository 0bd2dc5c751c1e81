"""Masks that programs compute from positions: read as flex_attention's along a sharded sequence."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from torchgspmd import Mesh, plan
from torchgspmd.compiler.plan import Plan
from torchgspmd.features.attention import tiles as attention_tiles
from torchgspmd.features.attention.mask_shares import FLEX
from torchgspmd.features.attention.position_masks import READ

MESHES = (
    (Mesh(seq=4), "_ _ seq _"),
    (Mesh(seq=5), "_ _ seq _"),
    (Mesh(data=2, seq=2), "data _ seq _"),
    (Mesh(seq=2, model=2), "_ model seq _"),
)


def ranges(draw: random.Random, s: int, t: int) -> tuple[Tensor, Tensor]:
    """Return the positions [s, 1] and [t], as programs write them."""
    dtype = draw.choice((None, torch.int32))
    rows, columns = torch.arange(s, dtype=dtype), torch.arange(t, dtype=dtype)
    which = draw.randint(0, 3)
    if which == 0:
        return rows[:, None], columns
    if which == 1:
        return rows.view(-1, 1), columns.unsqueeze(0).expand(s, t)
    if which == 2:
        return torch.arange(3, s + 3).reshape(s, 1) - 3, torch.arange(0, 2 * t + 4, 2)[2:] // 2 - 2
    grid = torch.meshgrid(rows, columns, indexing="ij")
    return grid[0], grid[1]


def elementary(draw: random.Random, s: int, t: int, x: list[Tensor]) -> list[Callable[[], Tensor]]:
    """Return masks that broadcast to [b, h, s, t]. x: documents [b, s], [b, t]; lengths [b]."""
    of_q, of_k, lengths = x
    w, n = draw.randint(2, 9), draw.randint(2, 7)
    q, k = ranges(draw, s, t)
    table = torch.eye(4, dtype=torch.bool) | torch.ones(4, 4, dtype=torch.bool).tril(-2)
    heads = torch.arange(1, 5)
    return [
        lambda: k <= q,
        lambda: torch.ones(s, t, dtype=torch.bool).tril(draw.randint(-1, 2)),
        lambda: ~torch.ones(s, t).triu(1).bool(),
        lambda: (q - k).abs() < w,
        lambda: (of_q[:, :, None] == of_k[:, None])[:, None],
        lambda: (of_q.unsqueeze(-1) == of_k.unsqueeze(-2)).unsqueeze(1),
        lambda: (of_q[0][:, None] == of_k[0]) & (of_k[0] > 0),
        lambda: (torch.arange(t)[None] < lengths[:, None])[:, None, None, :],
        lambda: (of_k != 1)[:, None, None].expand(-1, 1, s, -1),
        lambda: (q - k) % n == 0,
        lambda: (q // n == k // n) | (k < 2),
        lambda: (
            table[of_q[0]][:, of_k[0]] if draw.random() < 0.5 else table[of_q[0][:, None], of_k[0]]
        ),
        lambda: (q - k).abs() < 2 * heads[:, None, None],
        lambda: torch.where(q >= k, of_q.cumsum(1)[0, :, None] % 3 == 0, k % 2 == 0),
        lambda: (torch.arange(t) > 2).view(1, 1, 1, t),
    ]


def drawn(draw: random.Random, masks: list[Callable[[], Tensor]]) -> Tensor:
    parts = draw.sample(masks, draw.randint(1, 3))
    seen = parts[0]()
    for part in parts[1:]:
        join = draw.choice("&|^~")
        other = part()
        seen = {"&": seen & other, "|": seen | other, "^": seen ^ other, "~": seen & ~other}[join]
    return seen if seen.dim() > 1 else seen[None]


def added(draw: random.Random, seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as it is, or as 0 and -inf."""
    which = draw.randint(0, 5)
    if which == 0:
        return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, float("-inf"))
    if which == 1:
        return torch.where(seen, 0.0, float("-inf")).to(dtype)
    return seen


def step(attend: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    def run(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *x: Tensor) -> tuple[Tensor, ...]:
        leaves = [each.detach().requires_grad_() for each in (q, k, v)]
        out = attend(*leaves, *x)
        return out, *torch.autograd.grad(out, leaves, grad)

    return run


def planned(run: Any, args: list[Tensor], mesh: Mesh, spec: str) -> Plan:
    specs = (spec,) * 4 + tuple(" ".join("_" * x.dim()) for x in args[4:])
    return plan(run, *args, mesh=mesh, in_specs=specs, out_specs=(spec,) * 4)


@pytest.mark.parametrize("seed", range(60))
def test_numbers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tiles, "TILE_KEYS", 7)
    monkeypatch.setattr(attention_tiles, "TILE", 8 * 4 * 7)
    draw = random.Random(seed)
    torch.manual_seed(seed)
    mesh, spec = draw.choice(MESHES)
    s = draw.choice((24, 29))
    t = draw.choice((s, s, 19))
    b, has_batch, fixed = 2, draw.random() < 0.8, draw.random() < 0.5
    x = [torch.randint(3, (b, n)).sort(1).values for n in (s, t)] + [torch.randint(t, (b,))]

    def attend(q: Tensor, k: Tensor, v: Tensor, *of_run: Tensor) -> Tensor:
        chosen = random.Random(seed)  # the same for the program and for the reference
        seen = drawn(chosen, elementary(chosen, s, t, [*(of_run or x)]))
        seen = seen[0] if seen.dim() == 4 and not has_batch else seen
        return F.scaled_dot_product_attention(q, k, v, added(chosen, seen, q.dtype))

    lead = (b,) if has_batch else ()
    spec = spec if has_batch else spec.partition(" ")[2]
    args = [torch.randn(*lead, 4, n, 3, dtype=torch.float64) for n in (s, t, t, s)]
    args += [] if fixed else x
    run = step(attend)
    result = planned(run, args, mesh, spec)
    nodes = [*result.sharded.nodes]
    assert not [n for n in nodes if n.target in READ and len(n.args) > 5 + 3 * READ[n.target]]
    values = [n for n in nodes if isinstance(n.meta.get("val"), Tensor)]
    assert not [n.name for n in values if tuple(n.meta["val"].shape[-2:]) == (s, t)]
    for got, want in zip(result.simulate(*args, _poison=True), run(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def masked(of: str, documents: Tensor, n: int) -> tuple[Callable[..., Tensor], Callable]:
    """Return a mask as a program computes it, and as flex_attention takes it."""

    def window(_: Tensor) -> Tensor:
        at = torch.arange(n)
        return (at[:, None] >= at) & (at[:, None] - at < 5)

    if of == "window":
        return window, lambda b, h, q, k: (q >= k) & (q - k < 5)
    return (
        lambda x: (x[:, None] == x).tril(),
        lambda b, h, q, k: (documents[q] == documents[k]) & (q >= k),
    )


@pytest.mark.parametrize("of", ["documents", "window"])
def test_bytes_and_memory_are_those_of_flex_attention(of: str) -> None:
    n, spec, mesh = 64, "_ _ seq _", Mesh(seq=4)
    documents = torch.arange(n) // 9
    seen, mask = masked(of, documents, n)
    blocks = create_block_mask(mask, None, None, n, n, device="cpu")
    ways = (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, seen(documents)),
        lambda q, k, v: flex_attention(q, k, v, block_mask=blocks),
    )
    args = [torch.randn(1, 2, n, 8) for _ in range(4)]
    read, flex = (planned(step(way), args, mesh, spec) for way in ways)
    assert [n for n in read.sharded.nodes if n.target in FLEX]
    assert read.sent_bytes == flex.sent_bytes and read.memory.peak <= flex.memory.peak


def test_a_mask_with_pairs_of_a_run_stays_a_mask() -> None:
    """An argument has a number for each pair; a causal mask needs none."""
    spec, mesh, sdpa = "_ _ seq _", Mesh(seq=4), F.scaled_dot_product_attention
    args = [torch.randn(1, 2, 16, 4, dtype=torch.float64) for _ in range(4)]
    given = planned(step(sdpa), [*args, torch.rand(16, 16) < 0.7], mesh, spec)
    triangle = torch.ones(16, 16, dtype=torch.bool).tril
    causal = planned(step(lambda *x: sdpa(*x, triangle())), args, mesh, spec)
    alike = step(lambda *x: sdpa(*x, is_causal=True))
    for result in (given, causal):
        assert not [n for n in result.sharded.nodes if n.target in FLEX]
    assert causal.sent_bytes == planned(alike, args, mesh, spec).sent_bytes
    for got, want in zip(causal.simulate(*args, _poison=True), alike(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
