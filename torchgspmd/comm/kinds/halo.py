"""halo(x, dim, axes, window, size): every device gets its window's rows (see halo_window.py).

x is a shard; the dimension has `size` rows globally.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Generator
from typing import Any

from torch import Tensor, fx

from ...compat.operators import aten
from ...layout.halo_window import Window, sent_rows
from ...layout.mesh import Mesh
from ...shard_spec import ShardSpec
from ..collective import split_axes
from ..collective_builder import CollectiveBuilder, Lowering
from ..local_ops import as_dtype, join_pieces
from .all_to_all import ALL_TO_ALL
from .kind import CollectiveKind, LocalSteps, Step, in_groups

_Rows = tuple[int, int]  # (first row, number of rows)


def halo_step(mesh: Mesh, spec: ShardSpec, dim: int, size: int, row: int) -> Step:
    """Return the step to `spec`, which has a window on a dimension. row: bytes in a row."""
    axes, window = spec.dims[dim], spec.window(dim)
    assert window is not None
    payload = float(sent_rows(window, int(size), mesh.count(axes)) * row)
    return halo.step(mesh, (dim, "+".join(axes), str(window), int(size)), spec, axes, payload)


def _localize(build: LocalSteps, x: fx.Node, dim: int, axes: str, text: str, size: int) -> fx.Node:
    rows = build.sizes(x)[dim] if Window.parse(text).open else size
    return build.collective(x, dim, axes, text, rows)


def _simulate(
    mesh: Mesh, x: list[Tensor], dim: int, axes: str, text: str, size: int
) -> list[Tensor]:
    shard_rows = x[0].shape[dim]
    window = Window.parse(text).in_run(shard_rows, size)

    def run(shards: list[Tensor]) -> list[Tensor]:
        def window_of(index: int) -> Tensor:
            pieces = [
                (place, shards[owner].narrow(dim, row, rows))
                for owner, row, place, rows in window.pieces(index, size, len(shards), shard_rows)
            ]
            return join_pieces(
                # NaN in rows that no program may read shows a missing mask in tests.
                pieces,
                window,
                dim,
                shards[0],
                math.nan if shards[0].is_floating_point() else 0,
            )

        return [window_of(i) for i in range(len(shards))]

    return in_groups(axes, mesh, x, run)


def _lower(
    build: CollectiveBuilder, x: Any, shape: list[int], dim: int, axes: str, text: str, size: int
) -> Lowering:
    """Lower to an all_to_all that sends only to devices whose window reaches into this shard."""
    window = Window.parse(text).in_run(shape[dim], size)
    name, positions = build.groups.group(split_axes(axes))
    n, me = len(positions), build.mesh.index(split_axes(axes), build.groups.coordinates)
    of_all = [list(window.pieces(index, size, n, shape[dim])) for index in range(n)]
    # The all_to_all takes its sizes in process group order.
    peers = sorted(range(n), key=positions.__getitem__)
    required = of_all[me]
    sends = [[(row, rows) for owner, row, _, rows in of_all[j] if owner == me != j] for j in peers]
    receives = [
        [(place, rows) for owner, _, place, rows in required if owner == j != me] for j in peers
    ]
    pieces = [
        (place, rows, build.call(aten.narrow.default, x, dim, row, rows))
        for owner, row, place, rows in required
        if owner == me
    ]
    # All ranks decide alike by the busiest one: a rank that skips the collective would block
    # others.
    if sent_rows(window, size, n, shape[dim]):
        pieces += yield from _exchange_rows(
            build, x, shape, dim=dim, name=name, sends=sends, receives=receives
        )
    return _concat_window(build, x, shape, dim, window, pieces)


def _exchange_rows(
    build: CollectiveBuilder,
    x: object,
    shape: list[int],
    dim: int,
    name: str,
    sends: list[list[_Rows]],
    receives: list[list[_Rows]],
) -> Generator[fx.Node, fx.Node, list[tuple[int, int, fx.Node]]]:
    """Exchange rows with the group. Returns the received (place in window, rows, tensor)."""
    row = math.prod(shape) // shape[dim]
    flat = [
        build.call(aten.reshape.default, build.call(aten.narrow.default, x, dim, place, n), [-1])
        for peer in sends
        for place, n in peer
    ]
    packed = (
        build.call(aten.cat.default, flat) if flat else build.call(aten.new_empty.default, x, [0])
    )
    received_sizes, sent_sizes = (
        [sum(rows for _, rows in peer) * row for peer in side] for side in (receives, sends)
    )
    moved = yield build.exchange(packed, received_sizes, sent_sizes, name)
    # Without any rows to receive, an empty piece still uses the result, so that it is waited for.
    places = [piece for peer in receives for piece in peer] or [(0, 0)]
    received = build.call(aten.split_with_sizes.default, moved, [rows * row for _, rows in places])
    return [
        (
            place,
            rows,
            build.call(
                aten.reshape.default,
                build.call(operator.getitem, received, i),
                [*shape[:dim], rows, *shape[dim + 1 :]],
            ),
        )
        for i, (place, rows) in enumerate(places)
    ]


def _concat_window(
    build: CollectiveBuilder,
    x: object,
    shape: list[int],
    dim: int,
    window: Window,
    pieces: list[tuple[int, int, Any]],
) -> fx.Node:
    """Concatenate a window's pieces, with its fill in the gaps."""
    fill = as_dtype(window.fill or 0.0, build.node.meta["dtype"])
    tensors: list[Any] = []
    row = 0
    for place, rows, piece in [*sorted(pieces, key=lambda p: p[:2]), (window.length, 0, None)]:
        if place > row:
            tensors.append(
                build.call(
                    aten.new_full.default, x, [*shape[:dim], place - row, *shape[dim + 1 :]], fill
                )
            )
        if piece is not None:
            tensors.append(piece)
        row = place + rows
    return build.call(aten.cat.default, tensors, dim)


halo = CollectiveKind(
    name="halo",
    signature="halo(f32[8@a], 0, a, 4i-1:+6 in 0:8 else 0, 8) -> f32[8@a[4i-1:+6 in 0:8 else 0]]",
    meaning="Exchange rows, for every device to have its window. On one device: x, with fill.",
    picture="""
        device 0   x0 x1   ->    0 x0 x1 x2
        device 1   x2 x3   ->   x1 x2 x3  0
    """,
    suffix="h",
    payload="what the busiest device sends",
    sent=lambda payload, n: payload,
    localize=_localize,
    simulate=_simulate,
    lower=_lower,
    wire=(ALL_TO_ALL,),
    counts_as="permute",
)
