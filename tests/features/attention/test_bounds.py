"""Bounds of masks over blocks: never a wrong claim, and exact ones for masks that models have."""

from __future__ import annotations

import math
import operator
import random
from functools import partial

import pytest
import torch
from torch import Tensor

from torchgspmd.features.attention.bounds import blocks_seen
from torchgspmd.features.attention.flex_capture import _functions, _NotElementwise
from torchgspmd.features.attention.flex_op import Flex
from torchgspmd.features.attention.tiles import Place

LENGTH, BATCH, HEADS = 23, 2, 3
ENDS = torch.tensor([[5, 5, 12, 23], [9, 10, 20, 22]])
AT = torch.arange(LENGTH)
DOCUMENTS = (AT.view(-1, 1) >= ENDS.unsqueeze(1)).sum(-1)  # [b, s]
PREFIX = torch.tensor([4, 9])
REAL = torch.randn(LENGTH, generator=torch.Generator().manual_seed(0))
TABLE = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.2
DRAWN = torch.rand(6, HEADS, 6, generator=torch.Generator().manual_seed(2)) < 0.5

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
    lambda b, h, q, k: TABLE[q, k],
    lambda b, h, q, k: TABLE[k // 2, q] | TABLE[k - 9, q],
    lambda b, h, q, k: DRAWN[q // 4, h, k // 4],
    lambda b, h, q, k: torch.floor(q / 5) == torch.floor(k / 5),
    lambda b, h, q, k: torch.div(q - 9, 4, rounding_mode="trunc") >= torch.div(k, 3).ceil(),
    lambda b, h, q, k: ((q - k) ** 2).float().sqrt() <= 4.5,
    lambda b, h, q, k: (q - 12) ** 3 >= (k - 12) * (k - 12),
    lambda b, h, q, k: torch.log(q - k + 0.5) < 1.2,
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
    whole = BATCH, HEADS, 1, LENGTH, LENGTH
    seen = Flex(buffers, text, "", "").seen(whole, Place((0,) * 5, whole), torch.device("cpu"))
    seen = torch.as_tensor(seen).expand(whole).squeeze(2)
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


# ------------------------------------------------------------ numbers at the ends of their types


def _extreme(dtype: torch.dtype) -> Tensor:
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return torch.tensor([low, high, *range(max(low, -3), 8)]).to(dtype)[AT % 10]


INTS = torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64
TYPES = *INTS, torch.float16, torch.float32, torch.float64, torch.bool
BUFFERS = [*map(_extreme, INTS), REAL, REAL.double(), REAL.half(), REAL > 0] + [
    torch.tensor([math.inf, -math.inf, 0.0, odd])[AT % 4] for odd in (1.0, math.nan)
]
SINGLE = [*map(torch.tensor, (3, math.nan, -math.inf, True)), torch.tensor(0.3).double()]
CONSTANTS = (0, 1, 2, 3, 5, -1, -2, -7, 0.5, -1.5, True, 300, 2**31, 2**62, 2**63 - 1, -(2**63))
ARITHMETIC = operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod
ROUNDED = [partial(torch.div, rounding_mode=mode) for mode in ("floor", "trunc")]
BINARY = *ARITHMETIC, torch.minimum, torch.maximum, torch.rsub, operator.truediv, *ROUNDED
RISING = torch.floor, torch.ceil, torch.sqrt, torch.log, torch.exp2, torch.relu, torch.trunc
POWERS = lambda x: x * x, lambda x: x**2, lambda x: x**3, lambda x: x**-1
SIMPLE = operator.neg, torch.abs, lambda x: x >> 1, lambda x: torch.rsub(x, 3, alpha=2)
UNARY = *SIMPLE, *RISING, *POWERS
COMPARISONS = torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge
JOINS = operator.and_, operator.or_, operator.xor, torch.logical_and, torch.logical_or, operator.mul


def number(draw: random.Random, depth: int):
    """Return a function of positions: a number, whatever its type."""
    kinds = "constant constant binary unary clamp cast where truth"
    x, c, at = draw.choice(BUFFERS), draw.choice(CONSTANTS), draw.choice((0, 2, 2, 3, 3))
    if not depth or draw.random() < 0.2:
        a = draw.choice(SINGLE)
        position = lambda *p: p[at]  # noqa: E731
        return draw.choice((position, position, position, lambda *p: x[p[at]], lambda *p: a))
    a, b = number(draw, depth - 1), number(draw, depth - 1)
    t, dtype = truth(draw, depth - 1), draw.choice(TYPES)
    two, one, same = draw.choice(BINARY), draw.choice(UNARY), draw.choice(ARITHMETIC)
    low, high = draw.choice((None, -3, 0, 2)), draw.choice((1, 5, 9))
    return {
        "constant": draw.choice((lambda *p: same(a(*p), c), lambda *p: same(c, a(*p)))),
        "binary": lambda *p: two(a(*p), b(*p)),
        "unary": lambda *p: one(a(*p)),
        "clamp": lambda *p: torch.clamp(a(*p), low, high),
        "cast": lambda *p: a(*p).to(dtype),
        "where": lambda *p: torch.where(t(*p), a(*p), b(*p)),
        "truth": t,
    }[draw.choice(kinds.split())]


def truth(draw: random.Random, depth: int):
    a, b = number(draw, max(depth - 1, 0)), number(draw, max(depth - 1, 0))
    c, compare, join = draw.choice(CONSTANTS), draw.choice(COMPARISONS), draw.choice(JOINS)
    if not depth or draw.random() < 0.5:
        return draw.choice((lambda *p: compare(a(*p), c), lambda *p: compare(a(*p), b(*p))))
    left, right = truth(draw, depth - 1), truth(draw, depth - 1)
    return draw.choice(
        (
            lambda *p: join(left(*p), right(*p)),
            lambda *p: ~left(*p),
            lambda *p: torch.logical_not(a(*p)),
            lambda *p: (a(*p) & left(*p)) == 1,
            lambda *p: a(*p).bool(),
        )
    )


@pytest.mark.parametrize("seed", range(40))
def test_no_claim_about_numbers_of_any_type_is_wrong(seed: int) -> None:
    draw = random.Random(seed)
    checked = 0
    while checked < 5:
        mask = truth(draw, draw.randint(1, 3))
        try:
            _functions(torch.zeros(1), lambda score, *_: score, mask)
            mask(*torch.tensor([1, 1, 1, 1]))
        except (RuntimeError, TypeError, OverflowError, _NotElementwise):
            continue  # PyTorch has no such operation for these types, or divides by 0
        check(mask, cut(draw), cut(draw))
        checked += 1


@pytest.mark.parametrize(
    "mask",
    (
        lambda b, h, q, k: q >= SINGLE[1],
        lambda b, h, q, k: -BUFFERS[0][k] >= h,
        lambda b, h, q, k: abs(q) <= BUFFERS[5][k].to(torch.int64),
        lambda b, h, q, k: BUFFERS[9][q] - BUFFERS[9][k] <= math.inf,
        lambda b, h, q, k: q + BUFFERS[4][k] > 0,
        lambda b, h, q, k: (q > k) * (k < 9),
        lambda b, h, q, k: torch.rsub(q, 3, alpha=2) > k,
        lambda b, h, q, k: (BUFFERS[2][q] * BUFFERS[2][k]).to(torch.int8) > 3,
    ),
)
def test_wrapped_and_unordered_numbers(mask) -> None:
    check(mask, [(0, 9), (9, LENGTH)], [(0, 2), (2, 16), (16, LENGTH)])
