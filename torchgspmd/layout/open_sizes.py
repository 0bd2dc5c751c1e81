"""Sizes of dimensions that only a run knows, and which shards of a dimension lie within others.

    f32[u0, 8]      (OpenSize(496), 8)      496 is near u0: costs are computed with it

No layout divides such a dimension: how many rows a device has, and which of them pad, follows from
the size, and a program has one text for all sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

from .mesh import Mesh

Axes = tuple[str, ...]


class OpenSize(int):
    """A number in the place of a size that only a run knows.

    It computes as an int, but equals no int: what is remembered of a shape holds for its kind.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpenSize) and int(self) == int(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((OpenSize, int(self)))


def with_open_sizes(shape: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """Return a shape whose sizes are open where another shape of the same value differs."""
    return tuple(n if n == m else OpenSize(n) for n, m in zip(shape, other))


def nests(size: int, coarse: Axes, fine: Axes, mesh: Mesh) -> bool:
    """True if every block of a dimension sharded along `fine` lies within a block of `coarse`.

    `fine` begins with the axes of `coarse`. An open size has no blocks: it is never refined.
    """
    if isinstance(size, OpenSize):
        return mesh.count(fine) == 1
    if not coarse:
        return True
    n, m = mesh.count(coarse), mesh.count(fine)
    return -(-size // m) * (m // n) == -(-size // n)
