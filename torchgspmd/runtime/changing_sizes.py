"""A warning for calls that differ in sizes only: there is a program for each.

A cache that grows has another size at every token, and sequences that are not padded have many.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import user_line

MANY = 4  # so many sizes of one dimension are warned of; a last batch that is smaller makes two


def warn_of_sizes(key: tuple, others: Iterable[tuple], names: Sequence[str]) -> None:
    """Warn if a program is the fourth, eighth, sixteenth ... for calls that differ in sizes only.

    key: that of the call, whose second entry has the keys of the leaves. names: those of the
    tensors among the leaves.
    """
    alike = [leaves for leaves in (other[1] for other in others if _alike(other, key))]
    if len(alike) < MANY or len(alike) & (len(alike) - 1):
        return
    tensors = [leaf for leaf in zip(*alike) if _shape(leaf[0]) is not None]
    for name, leaves in zip(names, tensors):
        for dim, sizes in enumerate(zip(*map(_shape, leaves))):
            if len(different := sorted(set(sizes))) >= MANY:
                shown = ", ".join(map(str, different[:MANY]))
                warnings.warn(
                    f"{len(alike)} programs have been made for calls that differ in sizes only: "
                    f"dimension {dim} of '{name}' is {shown}{', ...' * (len(different) > MANY)} "
                    f"({user_line()}); pad it to a few sizes, or give a cache a fixed length",
                    stacklevel=4,
                )
                return


def _alike(key: tuple, other: tuple) -> bool:
    """Return whether the keys of two calls are equal but for sizes of tensors."""
    if key[0] != other[0] or key[2:] != other[2:] or len(key[1]) != len(other[1]):
        return False
    return all(
        a == b
        or (one := _shape(a)) is not None
        and (two := _shape(b)) is not None
        and len(one) == len(two)
        and a[1:] == b[1:]
        for a, b in zip(key[1], other[1])
    )


def _shape(leaf: Any) -> tuple[int, ...] | None:
    """Return the shape in the key of a tensor; None for any other leaf."""
    is_tensor = isinstance(leaf, tuple) and bool(leaf) and isinstance(leaf[0], tuple)
    return leaf[0] if is_tensor and all(type(n) is int for n in leaf[0]) else None
