"""Sizes that only a run knows, and which shards of a dimension lie within others.

    f32[u0, 8]      (OpenSize(496), 8)      496 is near u0: costs are computed with it

An argument's size may be sharded: the call says it, and every run computes a shard's rows from it.
A size that depends on values may not: one device's share would depend on values on others.

    n rows over 4 devices           ceil(n / 4) each
    k n rows over 4 devices         k ceil(n / 4) each: whole groups of k, as of n rows flattened
    n = 2 p rows in 2 microbatches  2 ceil(p / 4) each, where p is the size of the argument

Stand-ins identify sizes. An argument size's first stand-in is a multiple of GROUP, and its half is
not. The second is the first times a prime of its own: the ratio between both names the sizes whose
product a number is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .mesh import Mesh

Axes = tuple[str, ...]
GROUP = 16
RATIOS = (3, 5, 7, 11, 13, 17, 19, 23, 29)  # of the stand-ins of an argument's sizes, in order


class OpenSize(int):
    """A number in place of a size that only a run knows.

    It computes as an int, but equals no int: memoized facts about a shape hold for its kind.
    leading: the argument size that is divided if the dimension is sharded; -1: it is whole. other:
    the second number in its place, if that is known.
    """

    leading: int
    other: int

    def __new__(cls, size: int, leading: int = -1, other: int = 0) -> OpenSize:
        new = super().__new__(cls, size)
        new.leading, new.other = leading, other
        return new

    def __eq__(self, other: object) -> bool:
        # Not `other`: a size without its second stand-in, as one of `like`, is the same size.
        return (
            isinstance(other, OpenSize)
            and int(self) == int(other)
            and self.leading == other.leading
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((OpenSize, int(self), self.leading))


class LocalRows(int):
    """A device's rows of a size in the run: a number that also names the size.

    Two sizes may have one number: 8 n, and the shard of 16 n on two devices. axes: shard the size.
    """

    size: OpenSize
    axes: Axes

    def __new__(cls, rows: int, size: OpenSize, axes: Axes) -> LocalRows:
        new = super().__new__(cls, rows)
        new.size, new.axes = size, axes
        return new


def factors_of(size: int, other: int) -> tuple[int, ...]:
    """Return the argument sizes, with repetitions, whose product a size is.

    size, other: its two stand-ins. () if it is no such product.
    """
    # Constants are no multiples of GROUP, or have the same number in both traces.
    is_multiple = size > 0 and size % GROUP == 0 and other % size == 0
    ratio, found = other // size if is_multiple else 0, list[int]()
    for i, prime in enumerate(RATIOS):
        while ratio > 0 and ratio % prime == 0:
            ratio //= prime
            found.append(i)
    # A rest above 1: the ratio has a prime of no argument, as a sum of sizes may have.
    return tuple(found) if ratio == 1 else ()


@dataclass(frozen=True)
class Product:
    """A size as a whole number times argument sizes, given by position; () for a number."""

    times: int
    factors: tuple[int, ...] = ()

    def number(self, sizes: Sequence[int]) -> int:
        """Return its value in a run with these argument sizes."""
        return self.times * math.prod(sizes[i] for i in self.factors)

    def group(self, sizes: Sequence[int]) -> int:
        """Return how many rows in a sharded dimension stay together on one device."""
        # factors[0] is the size that is divided: all other factors multiply its rows.
        return self.times * math.prod(sizes[i] for i in self.factors[1:])


def product_of(
    size: int, other: int, stand_ins: Sequence[int] | Mapping[int, int]
) -> Product | None:
    """Return a size, given by two stand-ins, as a product; None if it is none.

    stand_ins: the first number for each argument size.
    """
    if size == other:
        return Product(size)
    factors = factors_of(size, other)
    known = math.prod(stand_ins[i] for i in factors)
    return Product(size // known, factors) if factors and size % known == 0 else None


def open_size(size: int, other: int) -> OpenSize:
    """Return a size known only in a run, given its two stand-ins."""
    # The first argument in order is divided: a product of two sizes is sharded along one.
    return OpenSize(size, min(factors_of(size, other), default=-1), other)


def with_open_sizes(shape: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """Return a shape, with open sizes where the same value's other shape differs."""
    return tuple(n if n == m else open_size(n, m) for n, m in zip(shape, other))


def is_whole(size: int) -> bool:
    """Return whether every device has the complete dimension, whatever a layout says."""
    return isinstance(size, OpenSize) and size.leading < 0


def like(size: int, number: int) -> int:
    """Return a number as a size, open if `size` is."""
    return OpenSize(number, size.leading) if isinstance(size, OpenSize) else number


def nests(size: int, coarse: Axes, fine: Axes, mesh: Mesh) -> bool:
    """True if each block over `fine` lies within one block over `coarse`.

    `fine` begins with the axes in `coarse`. Open sizes need not nest in any run.
    """
    n, m = mesh.count(coarse), mesh.count(fine)
    if isinstance(size, OpenSize):
        return n == m if size.leading >= 0 and n > 1 else m == 1 or size.leading >= 0
    if not coarse:
        return True
    # Padding breaks nesting: 5 rows over 4 devices are blocks of 2, over 2 devices blocks of 3.
    return -(-size // m) * (m // n) == -(-size // n)
