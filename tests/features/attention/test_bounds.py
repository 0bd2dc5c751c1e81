"""Bounds of masks over blocks: never a wrong claim, and exact ones for masks that models have."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from torchgspmd.features.attention.bounds import blocks_seen
from torchgspmd.features.attention.flex_capture import _functions

LENGTH, BATCH, HEADS = 23, 2, 3
ENDS = torch.tensor([[5, 5, 12, 23], [9, 10, 20, 22]])
AT = torch.arange(LENGTH)
DOCUMENTS = (AT.view(-1, 1) >= ENDS.unsqueeze(1)).sum(-1)  # [b, s]
PREFIX = torch.tensor([4, 9])
REAL = torch.randn(LENGTH, generator=torch.Generator().manual_seed(0))

LEAVES = (
    lambda b, h, q, k: q >= k,
    lambda b, h, q, k: q - k < 6,
    lambda b, h, q, k: k - q <= 2,
    lambda b, h, q, k: DOCUMENTS[b, q] == DOCUMENTS[b, k],
    lambda b, h, q, k: DOCUMENTS[0 * b, q] != DOCUMENTS[b, k],
    lambda b, h, q, k: k < PREFIX[b],
    lambda b, h, q, k: q // 4 == k // 4,
    lambda b, h, q, k: q // 4 + h >= k // 4,
    lambda b, h, q, k: (q - k) % 5 == 0,
    lambda b, h, q, k: (q % 7) * (k - 9) < 20,
    lambda b, h, q, k: abs(q - k) < 5 + b,
    lambda b, h, q, k: REAL[q] < REAL[k] * 0.5,
    lambda b, h, q, k: REAL[torch.clamp(k - 3, min=0)] > 0.1,
    lambda b, h, q, k: torch.where(h == 1, q, k) > 11,
    lambda b, h, q, k: torch.where(q > k, q - k, k - q) < 3,
    lambda b, h, q, k: torch.maximum(q, k) - torch.minimum(q, k) < 7,
    lambda b, h, q, k: (q * q + k).float().sin() > 0,  # no bounds
    lambda b, h, q, k: (-k + 20).bool(),
    lambda b, h, q, k: DOCUMENTS[b, k - 23] == 1,  # counts from the end
    # Bits of numbers, whose operands have no bounds.
    lambda b, h, q, k: ((q >> 1) & (k >> 1)) == 5,
    lambda b, h, q, k: ((q >> 1) | (k >> 1)) > 6,
    lambda b, h, q, k: ((q >> 2) ^ (k >= q)) < 4,
)


def drawn(seed: int):
    draw = random.Random(seed)
    parts = [draw.choice(LEAVES) for _ in range(draw.randint(1, 4))]
    joins = [draw.choice("&|^~") for _ in parts]

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = parts[0](b, h, q, k)
        for part, join in zip(parts[1:], joins):
            other = part(b, h, q, k)
            other = ~other if join == "~" else other
            seen = seen | other if join == "|" else seen ^ other if join == "^" else seen & other
        return seen

    return mask


def cut(draw: random.Random) -> list[tuple[int, int]]:
    at = sorted(draw.sample(range(LENGTH + 1), draw.randint(2, 6)))
    return list(zip(at, at[1:]))


def check(mask, queries, keys, exact: bool = False) -> None:
    buffers, (text, *_) = _functions(torch.zeros(1), lambda score, *_: score, mask)
    lead = torch.arange(BATCH), torch.arange(HEADS)
    found = blocks_seen(text, buffers, lead, queries, keys)
    places = lead[0].view(-1, 1, 1, 1), lead[1].view(-1, 1, 1), AT.view(-1, 1), AT
    seen = mask(*places).expand(BATCH, HEADS, LENGTH, LENGTH)
    for i, (a, b) in enumerate(queries):
        for j, (c, d) in enumerate(keys):
            block = seen[..., a:b, c:d]
            assert found.some[i][j] or not block.any()
            assert block.all() or not found.whole[i][j]
            assert not exact or (found.some[i][j], found.whole[i][j]) == (block.any(), block.all())


@pytest.mark.parametrize("seed", range(60))
def test_no_claim_is_wrong(seed: int) -> None:
    draw = random.Random(seed)
    check(drawn(seed), cut(draw), cut(draw))


@pytest.mark.parametrize("leaf", range(6))
def test_masks_of_models_have_exact_bounds(leaf: int) -> None:
    blocks = [(i, min(i + 4, LENGTH)) for i in range(0, LENGTH, 4)]
    check(LEAVES[leaf], blocks, blocks, exact=leaf != 4)
    both = LEAVES[3]
    check(lambda *at: both(*at) & LEAVES[0](*at) & LEAVES[1](*at), blocks, blocks)
