"""Collective matmul: einsums that gather an operand, or scatter the result, round a ring.

    gather    In step t device i multiplies chunk i + t and passes it on to device i - 1.
    scatter   In step t device i adds its term to block i + t + 1 in the sum from device i + 1.
              It passes the sum on to device i - 1.

While a device multiplies one chunk, the next one is on its way from its neighbour. An all_gather or
a reduce_scatter becomes n - 1 permutes with as many bytes. The program has one call for any device
count: the loop is in this file. Source: windowed einsum, arXiv 2105.04663, sections 4 and 5; arXiv
2211.05322 calls it collective matmul.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.operators import c10d
from ...layout.mesh import Mesh
from ...rules.custom_ops.nd import einsum_flops
from ..carriers import fused_einsum_scatter, fused_gather_einsum, is_turned
from ..collective import CollectiveBuilder
from .all_gather import all_gather
from .kind import FusedKind
from .reduce_scatter import reduce_scatter


@dataclass(frozen=True)
class RingPosition:
    """A device's position in its group. ranks: positions in the process group, in axes order."""

    name: str
    ranks: tuple[int, ...]
    me: int

    def pass_on(self, x: Tensor) -> Tensor:
        """Start to send x to the previous device; return the pending tensor from the next one."""
        sends, receives = (
            [
                x.numel() if rank == self.ranks[(self.me + step) % len(self.ranks)] else 0
                for rank in range(len(self.ranks))
            ]
            for step in (-1, 1)
        )
        return c10d.all_to_all_single(x.reshape(-1), receives, sends, self.name)


def einsum_chunk(
    equation: str,
    letter: str,
    operands: Sequence[Tensor],
    index: int,
    count: int,
    chunked: int | None = None,
) -> Tensor:
    """Return the einsum over chunk number `index` in a letter's dimension.

    chunked: the operand, by number, that is that chunk already.
    """
    chunks: list[Tensor] = []
    for i, (letters, x) in enumerate(zip(equation.split("->")[0].split(","), operands)):
        if letter in letters and i != chunked:
            rows = x.shape[letters.index(letter)] // count
            x = x.narrow(letters.index(letter), index * rows, rows)
        chunks.append(x)
    return torch.einsum(equation, *chunks)


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
    """Compute gather_einsum on one device."""
    ring, n = RingPosition(name, tuple(ranks), me), len(ranks)
    letters = [e.split("->")[0].split(",")[side][dim] for e, side in zip(equations, sides)]
    x = x.contiguous()
    chunks: list[Any] = [None] * n
    results: list[list[Any]] = [[None] * n for _ in equations]
    for step in range(n):
        index = (me + step) % n
        # Sent before the matmul, so that the chunk is on its way while this device computes.
        coming = ring.pass_on(x) if step < n - 1 else x
        chunks[index] = x if keep else None
        for row, equation, letter, side, other in zip(results, equations, letters, sides, others):
            row[index] = einsum_chunk(
                equation, letter, (other, x) if side else (x, other), index, n, chunked=side
            )
        x = c10d.wait_tensor(coming).view(x.shape) if step < n - 1 else x
    joined = [
        torch.cat(row, out.index(letter)) if letter in out else functools.reduce(Tensor.add_, row)
        for out, letter, row in zip((e.split("->")[1] for e in equations), letters, results)
    ]
    return (*joined, torch.cat(chunks, dim)) if keep else tuple(joined)


def ring_einsum_scatter(
    a: Tensor, b: Tensor, dim: int, equation: str, name: str, ranks: Sequence[int], me: int
) -> Tensor:
    """Compute einsum_scatter on one device."""
    ring, n = RingPosition(name, tuple(ranks), me), len(ranks)
    letter = equation.split("->")[1][dim]
    # After n - 1 passes the block that started here is complete at device me - 1 + n - ...
    total = einsum_chunk(equation, letter, (a, b), (me + 1) % n, n)
    for step in range(1, n):
        # Sent before the matmul: the term of the next block is computed meanwhile.
        coming = ring.pass_on(total.contiguous())
        term = einsum_chunk(equation, letter, (a, b), (me + step + 1) % n, n)
        total = term.add_(c10d.wait_tensor(coming).view(term.shape))
    return total.contiguous()


def _lower_gather(
    build: CollectiveBuilder,
    x: object,
    others: Sequence[object],
    dim: int,
    axes: str,
    equations: Sequence[str],
    sides: Sequence[int],
    keep: bool,
) -> fx.Node:
    turned = [*map(is_turned, equations, sides)]
    # Not along the summed letter: not every torch gathers that.
    is_row = all(dim < len(e.split("->")[0].split(",")[s]) - 1 for e, s in zip(equations, sides))
    if is_row and None not in turned and (name := build.shared_group(axes)) is not None:
        return build.call(fused_gather_einsum, x, others, dim, turned, keep, name)
    rest = equations, sides, keep, *build.ring_position(axes)
    return build.call(ring_gather_einsum, x, others, dim, *rest)


def _simulate_gather(
    mesh: Mesh,
    x: list[Tensor],
    others: Sequence[list[Tensor]],
    dim: int,
    axes: str,
    equations: Sequence[str],
    sides: Sequence[int],
    keep: bool,
) -> list[tuple[Tensor, ...]]:
    whole = all_gather.simulate(mesh, x, dim, axes)
    results = [
        [torch.einsum(equation, *((y, w) if side else (w, y))) for w, y in zip(whole, other)]
        for equation, side, other in zip(equations, sides, others)
    ]
    return list(zip(*results, *([whole] if keep else [])))


def _gather_flops(
    n: int,
    x: Sequence[int],
    others: Sequence[Sequence[int]],
    dim: int,
    axes: str,
    equations: Sequence[str],
    sides: Sequence[int],
    keep: bool,
) -> int:
    whole = [*x[:dim], n * x[dim], *x[dim + 1 :]]
    return sum(
        einsum_flops(equation, *((other, whole) if side else (whole, other)))
        for equation, side, other in zip(equations, sides, others)
    )


gather_einsum = FusedKind(
    name="gather_einsum",
    signature="gather_einsum(x, others, dim, axes, equations, sides, keep)",
    meaning="""Return (*results, the gathered tensor if keep) of einsums of gathered x with others.
        x is gathered at `dim` over `axes`. In each equation it is operand number `side`.""",
    picture="""
        device 0   x0 w   ->   x0 w, x1 w
        device 1   x1 v   ->   x0 v, x1 v
    """,
    replaces=all_gather,
    simulate=_simulate_gather,
    flops=_gather_flops,
    lower=_lower_gather,
    runs=(ring_gather_einsum, fused_gather_einsum),
)


def _lower_scatter(
    build: CollectiveBuilder, a: object, b: object, dim: int, axes: str, equation: str
) -> fx.Node:
    name = build.shared_group(axes) if dim < len(equation.split("->")[1]) - 1 else None
    for side, pair in enumerate(((a, b), (b, a)) if name is not None else ()):
        if (turned := is_turned(equation, side)) is not None:
            return build.call(fused_einsum_scatter, *pair, dim, turned, name)
    return build.call(ring_einsum_scatter, a, b, dim, equation, *build.ring_position(axes))


def _simulate_scatter(
    mesh: Mesh, a: list[Tensor], b: list[Tensor], dim: int, axes: str, equation: str
) -> list[Tensor]:
    terms = [torch.einsum(equation, x, y) for x, y in zip(a, b)]
    return reduce_scatter.simulate(mesh, terms, "sum", dim, axes)


def _scatter_flops(
    n: int, a: Sequence[int], b: Sequence[int], dim: int, axes: str, equation: str
) -> int:
    return einsum_flops(equation, a, b)


einsum_scatter = FusedKind(
    name="einsum_scatter",
    signature="einsum_scatter(a, b, dim, axes, equation)",
    meaning="Sum the results of an einsum over `axes`, and shard the sum along `dim`.",
    picture="""
        device 0   x0 w0   ->   rows 0 of x0 w0 + x1 w1
        device 1   x1 w1   ->   rows 1 of x0 w0 + x1 w1
    """,
    replaces=reduce_scatter,
    simulate=_simulate_scatter,
    flops=_scatter_flops,
    lower=_lower_scatter,
    runs=(ring_einsum_scatter, fused_einsum_scatter),
)
