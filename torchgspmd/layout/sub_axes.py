"""Sub-axes: parts of a mesh axis, such as `model:(1)2` and `model:(2)4` in model=8.

The notation is Shardy's. All functions work on names and sizes; Mesh has the methods.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, cast

from ..errors import ShardingError

_SUB_AXIS = re.compile(r"(\w+):\((\d+)\)(\d+)")


# Memoized: planning asks for the same few names at every reshard.
@lru_cache(maxsize=1024)
def sub_axis(name: str) -> tuple[str, int, int] | None:
    """Parse a sub-axis such as `model:(2)4` into (axis, size of the part major to it, its size).

    None for a whole axis's name.
    """
    match = _SUB_AXIS.fullmatch(name)
    return (match[1], int(match[2]), int(match[3])) if match else None


def whole_axis(name: str) -> str:
    """Return the axis itself, or the one that a sub-axis is part of."""
    part = sub_axis(name)
    return part[0] if part else name


def split_axes(
    axes: Iterable[tuple[str, int]], splits: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[str, int], ...]:
    """Split axes: [("model", 8)] by {"model": (2, 4)} is model:(1)2 and model:(2)4."""
    result = []
    for name, size in axes:
        whole, before, _ = sub_axis(name) or (name, 1, size)
        for sub_size in splits.get(name, (size,)):
            # A part that is the whole axis keeps its name, as merge_axes would give it back.
            result.append((f"{whole}:({before}){sub_size}" if sub_size != size else name, sub_size))
            before *= sub_size
    return tuple(result)


def common_splits(axes: Iterable[str], sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the splits after which all sub-axes among `axes` are axes.

    sizes: by name, for the axes that need no split.
    """
    borders: dict[str, set[int]] = {}
    for name, before, size in (
        sub for axis in axes if axis not in sizes and (sub := sub_axis(axis))
    ):
        # Each sub-axis adds its two ends to the borders: overlapping ones cut each other.
        borders.setdefault(name, {1, sizes[name]}).update((before, before * size))
    return {
        name: tuple(b // a for a, b in itertools.pairwise(sorted(points)))
        for name, points in borders.items()
    }


def finer_axes(axis: str, names: Iterable[str]) -> list[str]:
    """Select the sub-axes in `names` that belong to an axis, or to a larger sub-axis."""
    name, before, size = sub_axis(axis) or (axis, 1, 0)
    return [
        finer
        for finer in names
        if (inner := sub_axis(finer))
        and inner[0] == name
        and before <= inner[1]
        and (not size or inner[1] * inner[2] <= before * size)
    ]


def merge_axes(axes: Iterable[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Merge sub-axes that follow on each other; a complete set becomes the axis.

    sizes: whole axes' sizes, by name.
    """
    merged: list[str] = []
    for axis in axes:
        last, sub = sub_axis(merged[-1]) if merged else None, sub_axis(axis)
        # Adjacent: the part major to the second one is exactly all up to the end of the first.
        if last and sub and last[0] == sub[0] and last[1] * last[2] == sub[1]:
            axis = f"{sub[0]}:({last[1]}){last[2] * sub[2]}"
            merged.pop()
            if last[1] == 1 and last[2] * sub[2] == sizes[sub[0]]:
                axis = sub[0]
        merged.append(axis)
    return tuple(merged)


def check_named_size(axis: str, size: object) -> None:
    """Raise ShardingError for a size, or a name, that no mesh axis may have."""
    # bool is a subclass of int: True would pass as size 1.
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ShardingError.here(
            f"mesh axis '{axis}' has size {size!r}; a size is an integer of at least 1"
        )
    if not axis.isidentifier() or axis == "_":
        raise ShardingError.here(
            f"'{axis}' cannot name a mesh axis; use a Python identifier other than '_'"
        )


def unnamed_axes(given: tuple[object, ...]) -> ShardingError:
    """Return the error for sizes without names: Mesh(2, 4), or a mapping."""
    first: Any = given[0]
    named: dict[str, Any] = dict(zip(("data", "model", "seq"), given))
    if isinstance(first, dict):
        named = cast("dict[str, Any]", first)
    axes = ", ".join(f"{name}={size}" for name, size in named.items())
    return ShardingError.here(
        f"Mesh gets {', '.join(map(repr, given))}, and takes the sizes of its axes by name",
        fix=f"write Mesh({axes})",
    )
