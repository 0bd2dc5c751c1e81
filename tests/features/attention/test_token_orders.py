"""Blocks of tokens in another order: the search, the expressions, and numbers of whole programs."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops import scan
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from torchgspmd import Mesh, mark_sharding, plan
from torchgspmd.features.attention.flex_capture import _functions
from torchgspmd.features.attention.flex_op import Flex
from torchgspmd.features.attention.mask_shares import MaskedRing
from torchgspmd.features.attention.tiles import Place
from torchgspmd.features.attention.token_orders import in_order

# Waiting counts for much more than bytes, so that an order is worth its exchange.
SLOW = {"link_flops_per_byte": 1e-3}
HEADS, WIDTH, WORDS = 3, 8, 11


def drawn_mask(draw: random.Random, rows: int):
    """Return a mask of models: documents, a window, a prefix, all of them causal or not."""
    ends = sorted(draw.sample(range(1, rows), draw.randint(1, 6)))
    document = (torch.arange(rows).unsqueeze(1) >= torch.tensor(ends)).sum(1)
    near, ahead = draw.randint(2, rows), draw.randint(1, rows // 2)
    return draw.choice(
        (
            lambda b, h, q, k: (document[q] == document[k]) & (q >= k),
            lambda b, h, q, k: document[q] == document[k],
            lambda b, h, q, k: (document[q] == document[k]) & (q >= k) & (q - k < near),
            lambda b, h, q, k: q >= k,
            lambda b, h, q, k: (q >= k) | (k < ahead),
            lambda b, h, q, k: (q >= k) & ((k < ahead) | (q - k < near // 4)),
            lambda b, h, q, k: (q >= k) & ((q // 4 == k // 4) | (h == 1) | (document[k] == 0)),
        )
    )


def ring_of(mask, rows: int, shards: int, flops_per_byte: float = 1.0) -> MaskedRing:
    buffers, texts = _functions(torch.zeros(1), lambda score, *_: score, mask)
    q, k = (torch.empty(1, heads, rows, WIDTH, device="meta") for heads in (HEADS, 1))
    return MaskedRing(q, k, k, Flex(buffers, *texts), shards, flops_per_byte)


def seen_by(change: Flex, rows: int) -> Tensor:
    whole = 1, 1, HEADS, rows, rows
    seen = change.seen(whole, Place((0,) * 5, whole), torch.device("cpu"))
    return torch.as_tensor(seen).expand(whole)[0, 0]


@pytest.mark.parametrize("seed", range(20))
def test_an_order_is_a_permutation_and_no_dearer(seed: int) -> None:
    draw = random.Random(seed)
    shards, rows = draw.choice(((2, 32), (3, 48), (4, 64), (5, 60)))
    ring = ring_of(drawn_mask(draw, rows), rows, shards, 10.0 ** draw.randint(-3, 2))
    if ring.balanced is None:
        return  # all blocks are alike
    order, price = ring.balanced
    assert sorted(order.blocks) == [*range(len(order.blocks))]
    changed = Flex(*in_order(ring.change.functions, order, order.starts()))
    places = (order.starts().unsqueeze(1) + torch.arange(rows // len(order.blocks))).flatten()
    expected = seen_by(ring.change, rows)[:, places][:, :, places]
    assert torch.equal(seen_by(changed, rows), expected)
    assert price <= 1.001 * max(ring.price, 1.0)  # at worst all keys travel, and nobody waits
    if ring.flops_per_byte < 1e-2:
        work = expected.sum((0, 2)).view(shards, -1).sum(1)
        before = seen_by(ring.change, rows).sum((0, 2)).view(shards, -1).sum(1)
        assert work.max() <= max(before.max(), 1.3 * work.double().mean())


def test_documents_and_causal_masks_are_balanced() -> None:
    rows, shards = 512, 8
    ends = torch.tensor([300, 310, 350, 440, 460])
    document = (torch.arange(rows).unsqueeze(1) >= ends).sum(1)
    for mask in (
        lambda b, h, q, k: q >= k,
        lambda b, h, q, k: (document[q] == document[k]) & (q >= k),
    ):
        ring = ring_of(mask, rows, shards, 1e-3)
        assert ring.balanced is not None
        order, _ = ring.balanced
        changed = Flex(*in_order(ring.change.functions, order, order.starts()))
        work = seen_by(changed, rows)[0].sum(1).view(shards, -1).sum(1).double()
        assert work.max() / work.mean() < 1.06


# ------------------------------------------------------------------------------- whole programs


def weights(rows: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    sizes = (
        (WORDS, WIDTH),
        (rows, WIDTH),
        (2, WIDTH, HEADS, 4),
        (2, WIDTH, 2, 1, 4),
        (2, HEADS, 4, WIDTH),
    )
    return tuple(torch.randn(size, dtype=torch.float64) / 2 for size in sizes)


def step(attend, loops: bool, mesh: Mesh | None, tokens: Tensor, targets: Tensor, *w: Tensor):
    """tokens, targets [b, s]; returns the loss and all gradients."""
    table, place, *layers = w = tuple(x.detach().requires_grad_() for x in w)

    def layer(x: Tensor, each: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        q, kv, out = each
        y = F.layer_norm(x, x.shape[-1:])
        keys, values = torch.einsum("bsm,mcnd->cbnsd", y, kv)
        y = attend(torch.einsum("bsm,mnd->bnsd", y, q), keys, values)
        return F.gelu(x + torch.einsum("bnsd,ndm->bsm", y, out)), x.sum()

    x = F.embedding(tokens if mesh is None else mark_sharding(tokens, mesh, "_ seq"), table) + place
    if loops:
        x, _ = scan(layer, x, tuple(layers))
    else:
        for each in zip(*layers):
            x, _ = layer(x, each)
    loss = F.cross_entropy((x @ table.T).flatten(0, 1), targets.flatten())
    return loss, *torch.autograd.grad(loss, w)


@pytest.mark.parametrize("loops", (False, True))
@pytest.mark.parametrize("seed", range(8))
def test_numbers_are_those_of_one_device(seed: int, loops: bool) -> None:
    draw = random.Random(seed)
    shards, rows = draw.choice(((2, 32), (3, 48), (4, 32), (3, 37)))  # 37: no blocks
    mask, at = drawn_mask(draw, rows), torch.arange(rows)
    blocks = create_block_mask(mask, None, None, rows, rows, device="cpu")
    heads = torch.arange(HEADS).view(-1, 1, 1)
    seen = mask(0, heads, at.unsqueeze(1), at).expand(HEADS, rows, rows)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)

    args, mesh = (*torch.randint(WORDS, (2, 2, rows)), *weights(rows)), Mesh(seq=shards)
    options = {"costs": SLOW, "regather": draw.choice(("auto", "all"))}
    result = plan(lambda *x: step(ours, loops, mesh, *x), *args, mesh=mesh, advanced=options)
    expected = step(reference, False, None, *args)
    for got, want in zip(result.simulate(*args, _poison=True), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    ordered = "token_" in result.text(full=True)
    ring = ring_of(mask, rows, shards, SLOW["link_flops_per_byte"])
    assert ordered == (ring.balanced is not None and ring.balanced[1] < ring.price), seed
    if ordered and seed == 3:
        result.verify()
