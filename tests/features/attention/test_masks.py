"""Masks and score functions drawn from their whole kind, along a sharded sequence.

Elementary masks joined by &, | and ~; scores with biases, learned or not; documents as constants or
arguments; the logsumexp in use. Numbers and gradients are those of all scores on one device.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from torchgspmd import Mesh, mark_sharding, plan
from torchgspmd.features.attention import tiles as attention_tiles
from torchgspmd.features.attention.mask_shares import FLEX
from torchgspmd.features.attention.op import attention

MESHES = (
    (Mesh(seq=2), "_ _ seq _"),
    (Mesh(seq=4), "_ _ seq _"),
    (Mesh(data=2, seq=2), "data _ seq _"),
    (Mesh(seq=2, model=2), "_ model seq _"),
)
HEADS = ((4, 2), (6, 3), (3, 1), (2, 2))
WIDTH = 4


def elementary(draw: random.Random, tables: list[Tensor], documents: Any) -> list[Callable]:
    """Return masks of models. tables: [s, t], [s / 4, t / 4]. documents: [b, s], [b, t]."""
    w, n, near = draw.randint(2, 9), draw.randint(2, 7), torch.tensor([1, 3, 5, 30, 7, 2])
    (table, many), (of_q, of_k) = tables, documents
    return [
        lambda b, h, q, k: q >= k,
        lambda b, h, q, k: abs(q - k) < w,
        lambda b, h, q, k: of_q[b, q] == of_k[b, k],
        lambda b, h, q, k: of_q[b][q] == of_k[b][k],
        lambda b, h, q, k: (k < n) | (of_q[0, q] == 1),
        lambda b, h, q, k: (q - k) % n == 0,
        lambda b, h, q, k: q // n == torch.div(k, n, rounding_mode="floor"),
        lambda b, h, q, k: abs(q - k) < near[h],
        lambda b, h, q, k: table[q, k],
        lambda b, h, q, k: many[q // 4, k // 4],
        lambda b, h, q, k: ((q // n - k // n) ** 2 + (q % n - k % n) ** 2).float().sqrt() < 2.5,
    ]


def drawn_mask(draw: random.Random, masks: list[Callable]) -> Callable | None:
    parts = draw.sample(masks, draw.randint(0, 3))
    joins = [draw.choice("&|^") for _ in parts]

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = parts[0](b, h, q, k)
        for part, join in zip(parts[1:], joins):
            other = part(b, h, q, k)
            seen = seen & other if join == "&" else seen | other if join == "|" else seen & ~other
        return seen

    return mask if parts else None


def scores(x: list[Tensor], t: int) -> list[Callable | None]:
    """Return score functions. x: [h], [h, s, t], [s + t, h], [b] and a number."""
    return [
        None,
        lambda score, b, h, q, k: 2 * torch.tanh(score / 2),
        lambda score, b, h, q, k: score + x[0][h] * (k - q),
        lambda score, b, h, q, k: score + x[1][h, q, k],
        lambda score, b, h, q, k: score + x[1][h][q][k] * x[0][h],
        lambda score, b, h, q, k: score * x[4] + x[2][q - k + t - 1, h],
        lambda score, b, h, q, k: torch.tanh(score * x[3][b]) * x[4] + x[1][0, :, k][q],
        lambda score, b, h, q, k: torch.where((q - k) % 2 == 0, score, x[0][h] + x[1][h, q, 0]),
    ]


def all_scores(mask: Any, score: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    found = q @ k.mT / math.sqrt(q.shape[-1])
    places = [torch.arange(n) for n in found.shape]
    if score is not None:
        found = flex._vmap_for_bhqkv(score, prefix=(0,))(found, *places)
    if mask is not None:
        seen = flex.create_mask(mask, *found.shape, "cpu")
        found = found.masked_fill(~seen, -math.inf)
    lse = found.logsumexp(-1)
    weights = (found - torch.where(lse == -math.inf, 0, lse).unsqueeze(-1)).exp()
    return weights @ v, lse


@pytest.mark.parametrize("seed", range(60))
def test_numbers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tiles, "TILE_KEYS", 7)
    monkeypatch.setattr(attention_tiles, "TILE", 8 * 4 * 7)
    draw = random.Random(seed)
    torch.manual_seed(seed)
    (mesh, spec), (heads, kv_heads) = draw.choice(MESHES), draw.choice(HEADS)
    s = draw.choice((24, 29))
    t = draw.choice((s, s, 19))
    b = draw.choice((2, 3))
    documents = [torch.randint(3, (b, n)).sort(1).values for n in (s, t)]
    tables = [torch.rand(-(-s // n), -(-t // n)) < 0.3 for n in (1, 4)]
    sizes = (heads,), (heads, s, t), (s + t, heads), (b,), ()
    params = [torch.randn(size, dtype=torch.float64) for size in sizes]
    learned = [draw.random() < 0.6 for _ in params]
    is_argument, keeps_lse = draw.random() < 0.4, draw.random() < 0.3
    which = draw.random()

    def functions(x: list[Tensor], of_rows: list[Tensor]) -> tuple[Any, Any]:
        chosen = random.Random(seed)  # the same for the program and for the reference
        mask = drawn_mask(chosen, elementary(chosen, tables, of_rows))
        every = scores(x, t)
        return mask, every[int(which * len(every))]

    def run(attend: Callable, *args: Tensor) -> tuple[Tensor, ...]:
        q, k, v, grad, *x = (a.detach() for a in args[:9])
        leaves = [q, k, v, *(each for each, needs in zip(x, learned) if needs)]
        for leaf in leaves:
            leaf.requires_grad_()
        out, lse = attend(*functions(x, args[9:] if is_argument else documents), q, k, v)
        if keeps_lse:
            out = out * torch.sigmoid(lse).unsqueeze(-1)
        grads = torch.autograd.grad(out, leaves, grad, allow_unused=True)
        return out, *(g for g in grads if g is not None)

    def ours(mask: Any, score: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
        blocks = mask and create_block_mask(mask, b, heads, s, t, device="cpu", BLOCK_SIZE=8)
        result = flex_attention(q, k, v, score, blocks, enable_gqa=True, return_lse=keeps_lse)
        return result if keeps_lse else (result, None)

    shapes = (heads, s), (kv_heads, t), (kv_heads, t), (heads, s)
    tensors = [torch.randn(b, *shape, WIDTH, dtype=torch.float64) for shape in shapes]
    args = [*tensors, *params, *documents]
    result = plan(
        lambda *a: run(ours, *a),
        *args,
        mesh=mesh,
        in_specs=(spec,) * 4 + tuple(" ".join("_" * x.dim()) for x in args[4:]),
        advanced={"regather": draw.choice(("auto", "all"))},
    )
    assert [n for n in result.sharded.nodes if n.target in FLEX], "all scores are kept"
    expected = run(all_scores, *args)
    for got, want in zip(result.simulate(*args, _poison=True), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [(2, 4, 11, 11), (1, 4, 11, 11), (4, 1, 11), (2, 1, 1, 11), (11,)])
@pytest.mark.parametrize("by_hand", (False, True))
def test_a_bias_that_needs_a_gradient(size: tuple[int, ...], by_hand: bool) -> None:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, n, 11, 2, dtype=torch.float64) for n in (4, 4, 4, 4))
    bias = torch.randn(size, dtype=torch.float64)

    def step(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v, bias)]
        q, k, v, bias = leaves
        if by_hand:
            out = ((q @ k.mT) * 0.5 + bias).softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, bias, scale=0.5)
        return out, *torch.autograd.grad(out, leaves, grad)

    args = q, k, v, grad, bias
    specs = ("data _ seq _",) * 4 + (" ".join("_" * len(size)),)
    result = plan(step, *args, mesh=Mesh(data=2, seq=3), in_specs=specs)
    nodes = [*result.sharded.nodes]
    assert [n for n in nodes if n.target in FLEX]
    assert not [n for n in nodes if n.target is attention._opoverload or "softmax" in str(n.target)]
    for got, want in zip(result.simulate(*args, _poison=True), step(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


# -------------------------------------------------------------- an order that each run computes


@pytest.mark.parametrize("kind", ["causal", "both ways", "varlen"])
def test_tokens_are_ordered_in_a_run(kind: str) -> None:
    """One program for all borders; each run has nearly the same work on all devices."""
    rows, words, mesh = 64, 11, Mesh(seq=4)
    torch.manual_seed(0)
    sizes = (words, 8), (rows, 8), (8, 3, 4), (2, 8, 1, 4), (3, 4, 8)
    weights = [torch.randn(size, dtype=torch.float64) / 2 for size in sizes]
    tokens = torch.randint(words, (1, rows))

    def step(ours: bool, tokens: Tensor, cu: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in weights]
        table, place, wq, wkv, out = leaves
        x = mark_sharding(tokens, mesh, "_ seq") if ours else tokens
        x = F.embedding(x, table) + place
        q = torch.einsum("bsm,mnd->bnsd", x, wq)
        k, v = torch.einsum("bsm,cmnd->cbnsd", x, wkv)
        at = torch.arange(rows)
        document = torch.searchsorted(cu, at, right=True)
        if not ours:
            seen = document.unsqueeze(1) == document
            seen = seen if kind == "both ways" else seen.tril()
            y = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        elif kind == "varlen":
            from torch.nn.attention.varlen import varlen_attn

            q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
            y = varlen_attn(q, k, v, cu, cu, rows, rows, window_size=(-1, 0), enable_gqa=True)
            y = y.transpose(0, 1).unsqueeze(0)
        else:

            def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                same = document[q] == document[k]
                return same if kind == "both ways" else same & (q >= k)

            blocks = create_block_mask(mask, None, None, rows, rows, device="cpu")
            y = flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
        loss = (x + torch.einsum("bnsd,ndm->bsm", y, out)).square().mean()
        return loss, *torch.autograd.grad(loss, leaves)

    if kind == "varlen":
        pytest.importorskip("torch.nn.attention.varlen", reason="torch 2.9 has no varlen_attn")
    borders = [[0, 30, 34, 50, 64], [0, 1, 2, 3, 64], [0, 16, 32, 48, 64]]
    cu = [torch.tensor(each, dtype=torch.int32) for each in borders]
    options = {"costs": {"link_flops_per_byte": 1e-3}}
    result = plan(lambda *a: step(True, *a), tokens, cu[0], *weights, mesh=mesh, advanced=options)
    assert [n for n in result.sharded.nodes if "token_order" in str(n.target)]
    assert "an order that each run computes" in str(result)
    for each in cu:
        args = tokens, each, *weights
        expected = step(False, *args)
        for got, want in zip(result.simulate(*args, _poison=True), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        document = torch.searchsorted(each, torch.arange(rows), right=True)
        seen = document.unsqueeze(1) == document
        seen = seen if kind == "both ways" else seen.tril()
        text = (
            "aten.eq.Tensor(aten.index.Tensor(u0, [q]), aten.index.Tensor(u0, [k]))"
            if kind == "both ways"
            else "aten.bitwise_and.Tensor(aten.ge.Tensor(q, k), aten.eq.Tensor("
            "aten.index.Tensor(u0, [q]), aten.index.Tensor(u0, [k])))"
        )
        order = torch.ops.torchgspmd.token_order([document], text, 1, 3, rows, 4, 32, 1e-6)
        work = seen.sum(1).view(32, -1).sum(1)[order].view(4, -1).sum(1).double()
        assert sorted(order.tolist()) == [*range(32)]
        assert work.max() <= 1.2 * work.mean(), work
