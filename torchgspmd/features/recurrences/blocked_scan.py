"""associative_scan in blocks, one for each device that may have a part of the rows.

    rows   x0 x1 x2 | x3 x4 x5 | x6 x7 x8      each block is scanned by itself
    totals       t0         t1         t2      rows that are sent: one a block, whatever the length
    before       --         t0         t0t1    joined with each row of the block

PyTorch's scan takes every second row in each of its steps, so shards exchange rows in each step. A
scan reads only earlier rows, so rows added behind the last one change nothing.

Source: Blelloch, Prefix sums and their applications, 1990.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...capture.trace_context import MESH
from ...compat.private_apis import _pytree as pytree
from ...compat.private_apis import generic_associative_scan

Join = Callable[..., Any]  # (*leaves before, *leaves) -> leaves, row by row along dimension 0
_LEAST_ROWS = 4  # of a block: shorter ones save nothing


def scan_in_blocks(
    scan: Callable[..., list[Tensor]],
    operator: Join,
    leaves: list[Tensor],
    dim: int = 0,
    additional_inputs: Sequence[Any] = (),
) -> list[Tensor]:
    """Compute torch's generic_associative_scan in blocks. scan: torch's."""

    def join(*rows: Tensor) -> list[Tensor]:
        return pytree.tree_leaves(operator(*rows, *additional_inputs))

    mesh = MESH.get()
    if dim or mesh is None or not all(isinstance(len(x), int) for x in leaves):
        return scan(operator, leaves, dim, additional_inputs)
    return _scan(join, [*leaves], _counts([size for _, size in mesh.axes]))


def _counts(sizes: Sequence[int]) -> list[int]:
    """Return numbers of shards that axes can cut rows into, each a divisor of the one before."""
    products = {prod(some) for n in range(len(sizes)) for some in combinations(sizes, n + 1)}
    counts: list[int] = []
    for count in sorted(products - {1}, reverse=True):
        if not counts or counts[-1] % count == 0:
            counts.append(count)
    return counts


def _scan(join: Join, leaves: list[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Scan along dimension 0. counts: how many blocks to try, the most first."""
    rows = len(leaves[0])
    while counts and rows < counts[0] * _LEAST_ROWS and rows % counts[0]:
        counts = counts[1:]
    if not counts or rows <= counts[0]:
        return generic_associative_scan(join, leaves) if rows > 1 else leaves
    count, *fewer = counts
    size = -(-rows // count)
    blocks = [_cut(x, count, size) for x in leaves]  # [count, size, ...]
    inner = torch.vmap(lambda *xs: generic_associative_scan(join, [*xs]))(*blocks)
    # Of the blocks before each. The first has none; its rows are chosen again below.
    totals = _scan(join, [x.select(1, size - 1) for x in inner], fewer)
    before = [torch.cat([x[:1], x[:-1]]) for x in totals]
    joined = torch.vmap(join)(*(x.unsqueeze(1).expand_as(y) for x, y in zip(before, inner)), *inner)
    return [_choose(x, y).flatten(0, 1)[:rows] for x, y in zip(inner, joined)]


def _cut(x: Tensor, count: int, size: int) -> Tensor:
    """Return x [rows, ...] as blocks [count, size, ...]; a block's first row fills it up."""
    rows, missing = len(x), count * size - len(x)
    if not missing:
        return x.unflatten(0, (count, size))
    padded = F.pad(x, [0, 0] * (x.dim() - 1) + [0, missing]).unflatten(0, (count, size))
    place = torch.arange(count * size, device=x.device).reshape(count, size, *[1] * (x.dim() - 1))
    return torch.where(place < rows, padded, padded[:, :1])


def _choose(first: Tensor, others: Tensor) -> Tensor:
    """Return the first block from one tensor, the others from another."""
    is_first = torch.arange(len(first), device=first.device) == 0
    return torch.where(is_first.reshape([-1] + [1] * (first.dim() - 1)), first, others)
