"""Pieces: parts of a split mesh axis that stand together in all layouts around, as one axis.

    mesh seq=8 split into seq:(1)2 and seq:(2)4
    %x : [64@seq:(1)2+seq:(2)4, 32]          one piece: the whole axis
    %q : [64@seq:(2)4, 4@seq:(1)2, 8]        two pieces

One operation may need a part of an axis. For all others the axis is as it was. Searching its parts
one by one would judge more candidates on a larger mesh for the same program.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import lru_cache

from ...layout.mesh import Mesh
from ...layout.open_sizes import is_whole
from ...shard_spec import Axes, ShardSpec


@lru_cache(maxsize=256)
def neighboring_parts(mesh: Mesh) -> tuple[tuple[str, str], ...]:
    """Return the axis pairs that follow on each other as parts of one axis."""
    return tuple(
        (major, minor)
        for major, minor in itertools.pairwise(mesh.names)
        if len(mesh.merge((major, minor))) == 1
    )


def pieces(
    mesh: Mesh, layouts: Iterable[ShardSpec] = (), sets: Iterable[Axes] = ()
) -> tuple[Axes, ...]:
    """Return all mesh axes, grouped in tuples that move together.

    layouts: in which parts have to stand together; without any, each whole axis is a piece. sets:
    axis sets, each with both parts or none.
    """
    together = neighboring_parts(mesh)
    if together:
        layouts, sets = list(layouts), list(sets)
        together = [
            pair
            for pair in together
            if not any(_are_apart(layout, *pair) for layout in layouts)
            and not any((pair[0] in axes) != (pair[1] in axes) for axes in sets)
        ]
    grouped: list[Axes] = []
    for axis in mesh.names:
        if grouped and (grouped[-1][-1], axis) in together:
            grouped[-1] = (*grouped[-1], axis)
        else:
            grouped.append((axis,))
    return tuple(grouped)


def divides_all(mesh: Mesh, axes: Axes, sizes: Iterable[int]) -> bool:
    """Return whether axes divide all sizes that are large enough; where not, a part may."""
    count = mesh.count(axes)
    return all(not is_whole(n) and (n < count or n % count == 0) for n in sizes)


@lru_cache(maxsize=1 << 16)
def _are_apart(layout: ShardSpec, major: str, minor: str) -> bool:
    """Return whether a layout separates two axes that follow on each other."""
    for axes in layout.dims:
        if major in axes or minor in axes:
            return (major, minor) not in itertools.pairwise(axes)
    return (major in layout.pending) != (minor in layout.pending)
