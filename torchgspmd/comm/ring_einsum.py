"""Collective matmul: einsums whose operand is gathered, or whose result is scattered, in parts that
travel round a ring.

While a device multiplies with one part, the next one is on its way from its neighbour; an
all_gather's, or a reduce_scatter's, bytes are sent in n - 1 permutes. One call of a program,
whatever the number of devices: the loop is in here. Source: windowed einsum, arXiv 2105.04663,
section 4 and 5; arXiv 2211.05322 calls it collective matmul.

    gather    device i multiplies part i + t in step t, and passes it on to device i - 1
    scatter   device i adds its term of block i + t + 1 to what came from device i + 1, and passes it on to device i - 1
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..compat.operators import c10d
from .collective import _only_in_graphs


def gather_einsum(
    x: Any,
    others: tuple,
    dim: int,
    axes: str,
    equations: tuple[str, ...],
    sides: tuple[int, ...],
    keep: bool,
) -> Any:
    """(*results, the gathered tensor if keep): x, gathered at `dim` over `axes`, in every equation,
    where it is operand number `side`, with the other one.
    """
    _only_in_graphs("gather_einsum")


def einsum_scatter(a: Any, b: Any, dim: int, axes: str, equation: str) -> Any:
    """The result of the equation, a term on every device, summed over `axes` and scattered at
    `dim`.
    """
    _only_in_graphs("einsum_scatter")


@dataclass(frozen=True)
class Ring:
    """A device's place among those of its group. ranks: their numbers in the process group, in the
    order of the axes.
    """

    name: str
    ranks: tuple[int, ...]
    me: int

    def pass_on(self, x: Tensor) -> Tensor:
        """Begins to send a tensor to the device before this one; to be waited for: what comes from
        the one behind.
        """
        sends, receives = (
            [
                x.numel() if rank == self.ranks[(self.me + step) % len(self.ranks)] else 0
                for rank in range(len(self.ranks))
            ]
            for step in (-1, 1)
        )
        return c10d.all_to_all_single(x.reshape(-1), receives, sends, self.name)


def part(
    equation: str,
    letter: str,
    operands: Sequence[Tensor],
    index: int,
    count: int,
    given: int | None = None,
) -> Tensor:
    """The equation with part number `index` of a letter's dimension. given: an operand that is that
    part already.
    """
    cut = []
    for i, (letters, x) in enumerate(zip(equation.split("->")[0].split(","), operands)):
        if letter in letters and i != given:
            rows = x.shape[letters.index(letter)] // count
            x = x.narrow(letters.index(letter), index * rows, rows)
        cut.append(x)
    return torch.einsum(equation, *cut)


def join(equation: str, letter: str, parts: Sequence[Tensor]) -> Tensor:
    """Results for all parts of a letter as that for the whole: behind each other, or summed where
    the letter is summed over.
    """
    out = equation.split("->")[1]
    return (
        torch.cat(list(parts), out.index(letter))
        if letter in out
        else functools.reduce(operator.iadd, parts)
    )


def ring_gather_einsum(
    x: Tensor,
    others: Sequence[Tensor],
    dim: int,
    equations: Sequence[str],
    sides: Sequence[int],
    keep: bool,
    name: str,
    ranks: Sequence[int],
    me: int,
) -> tuple[Tensor, ...]:
    """gather_einsum on one device."""
    ring, n = Ring(name, tuple(ranks), me), len(ranks)
    letters = [e.split("->")[0].split(",")[side][dim] for e, side in zip(equations, sides)]
    x = x.contiguous()
    chunks: list[Any] = [None] * n
    results: list[list[Any]] = [[None] * n for _ in equations]
    for step in range(n):
        index = (me + step) % n
        coming = ring.pass_on(x) if step < n - 1 else x
        chunks[index] = x if keep else None
        for parts, equation, letter, side, other in zip(results, equations, letters, sides, others):
            parts[index] = part(
                equation, letter, (other, x) if side else (x, other), index, n, given=side
            )
        x = c10d.wait_tensor(coming).view(x.shape) if step < n - 1 else x
    joined = [
        join(equation, letter, parts)
        for equation, letter, parts in zip(equations, letters, results)
    ]
    return (*joined, torch.cat(chunks, dim)) if keep else tuple(joined)


def ring_einsum_scatter(
    a: Tensor, b: Tensor, dim: int, equation: str, name: str, ranks: Sequence[int], me: int
) -> Tensor:
    """einsum_scatter on one device."""
    ring, n = Ring(name, tuple(ranks), me), len(ranks)
    letter = equation.split("->")[1][dim]
    total = part(equation, letter, (a, b), (me + 1) % n, n)
    for step in range(1, n):
        coming = ring.pass_on(total.contiguous())
        term = part(equation, letter, (a, b), (me + step + 1) % n, n)
        total = term.add_(c10d.wait_tensor(coming).view(term.shape))
    return total.contiguous()
