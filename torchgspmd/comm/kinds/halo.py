"""halo(x, dim, axes, window, size): every device gets its window's rows (see halo_window.py).
halos(x, before, after): the same on several dimensions, in one exchange.

x is a shard; the dimension has `size` rows globally. A flip over two sharded dimensions sends every
element once, and not along one dimension first.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from ...layout.halo_window import Window, sent_rows
from ...layout.mesh import Coordinates, Mesh
from ...shard_spec import Axes, ShardSpec
from ..box_exchange import MAX_COUNTED_DEVICES, Box, elements, pack, unpack
from ..collective import CollectiveBuilder, Lowering, split_axes
from ..local_ops import assemble_window, join_pieces
from .all_to_all import ALL_TO_ALL
from .kind import CollectiveKind, LocalSteps, Step, in_groups, rename_specs
from .permute import send_boxes


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

    # NaN in rows that no program may read shows a missing mask in tests.
    unspecified = math.nan if x[0].is_floating_point() else 0
    fill = unspecified if window.fill is None else window.fill

    def run(shards: list[Tensor]) -> list[Tensor]:
        windows = [
            [
                (place, shards[owner].narrow(dim, row, rows))
                for owner, row, place, rows in window.pieces(index, size, len(shards), shard_rows)
            ]
            for index in range(len(shards))
        ]
        return [join_pieces(pieces, window.length, fill, dim, x[0]) for pieces in windows]

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
    sends = [[(row, rows) for owner, row, _, rows in of_all[j] if owner == me != j] for j in peers]
    receives = [
        [(place, rows) for owner, _, place, rows in of_all[me] if owner == j != me] for j in peers
    ]
    own = [(place, row, rows) for owner, row, place, rows in of_all[me] if owner == me]
    moved = None
    # All ranks decide alike by the busiest one: a rank that skips the collective would block
    # others.
    if sent_rows(window, size, n, shape[dim]):
        boxes = [
            tuple((row, row + rows) if d == dim else (0, every) for d, every in enumerate(shape))
            for row, rows in itertools.chain(*sends)
        ]
        in_row = math.prod(shape) // shape[dim]
        received, sent = (
            [sum(rows for _, rows in peer) * in_row for peer in side] for side in (receives, sends)
        )
        moved = yield build.exchange(build.call(pack, x, boxes), received, sent, name)
    came = list(itertools.chain(*receives))
    gaps = {"dim": dim, "length": window.length, "fill": window.fill or 0.0}
    return build.call(assemble_window, x, moved, own, came, **gaps)


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

_Piece = tuple[int, Box, Box]  # (owner's place in the group, rows of its shard, rows of the window)


def halos_step(
    mesh: Mesh, shape: tuple[int, ...], itemsize: int, before: ShardSpec, after: ShardSpec
) -> Step | None:
    """Return the exchange that leads to windows.

    None for sizes that only a run knows, over parts of an axis, or over more devices than are
    counted one by one. None also if rows outside two dimensions hold different fills.
    """
    moving = {a for axes, w in zip(after.dims, after.windows) if w is not None for a in axes}
    few = moving <= set(mesh.names) and mesh.count(moving) <= MAX_COUNTED_DEVICES
    is_open = any(w is not None and w.open for w in after.windows)
    if is_open or not few or len(_fills(after)) > 1:
        return None
    axes, windows = _windows(mesh, shape, before, after)
    sent = [0] * len(windows)
    for place, pieces in enumerate(windows):
        for owner, rows, _ in pieces:
            sent[owner] += elements(rows) * (owner != place)
    payload = float(max(sent) * itemsize)
    return halos.step(mesh, (str(before), str(after)), after, axes, payload)


def _fills(after: ShardSpec) -> set[float]:
    """Return the values in rows outside the dimensions."""
    return {w.fill for w in after.windows if w is not None and w.fill is not None}


@lru_cache(maxsize=4096)
def _windows(
    mesh: Mesh, shape: tuple[int, ...], before: ShardSpec, after: ShardSpec
) -> tuple[Axes, tuple[tuple[_Piece, ...], ...]]:
    """Return a group's axes, in mesh order, and each member's window in pieces."""
    dims = {d: w for d, w in enumerate(after.windows) if w is not None}
    axes = tuple(a for a in mesh.names if any(a in after.dims[d] for d in dims))
    members: list[Coordinates] = [
        dict(zip(axes, place))
        for place in itertools.product(*(range(mesh.count((a,))) for a in axes))
    ]
    indices = [tuple(int(mesh.index(after.dims[d], m)) for d in dims) for m in members]
    places, local = {at: place for place, at in enumerate(indices)}, before.local_shape(shape, mesh)

    def pieces(at: tuple[int, ...]) -> tuple[_Piece, ...]:
        """Return one device's window in pieces."""
        result: list[_Piece] = []
        # A window in several dimensions is the product of its pieces in each one.
        for choice in itertools.product(
            *(
                w.pieces(i, shape[d], mesh.count(after.dims[d]))
                for i, (d, w) in zip(at, dims.items())
            )
        ):
            rows, window = ([(0, n) for n in local] for _ in range(2))
            for d, (_, row, first, count) in zip(dims, choice):
                rows[d], window[d] = (row, row + count), (first, first + count)
            result.append((places[tuple(p[0] for p in choice)], tuple(rows), tuple(window)))
        return tuple(result)

    return axes, tuple(map(pieces, indices))


def _localize_several(build: LocalSteps, x: fx.Node, before: str, after: str) -> fx.Node:
    return build.collective(x, before, after, build.sizes(x))


def _simulate_several(
    mesh: Mesh, x: list[Tensor], before: str, after: str, shape: tuple[int, ...]
) -> list[Tensor]:
    spec, results = ShardSpec.parse(after), list(x)
    axes, windows = _windows(mesh, tuple(shape), ShardSpec.parse(before), spec)
    # NaN in rows that no program may read shows a missing mask in tests.
    unspecified = math.nan if x[0].is_floating_point() else 0
    fill, local = next(iter(_fills(spec)), unspecified), spec.local_shape(tuple(shape), mesh)
    for group in mesh.groups(axes):
        for rank, pieces in zip(group, windows):
            boxes = [pack(x[group[owner]], [rows]) for owner, rows, _ in pieces]
            moved = torch.cat(boxes) if boxes else x[rank].new_empty(0)
            results[rank] = unpack(x[rank], moved, [box for *_, box in pieces], None, local, fill)
    return results


def _lower_several(
    build: CollectiveBuilder,
    x: Any,
    shape: list[int],
    before: str,
    after: str,
    size: tuple[int, ...],
) -> Lowering:
    """Lower to an all_to_all on boxes. The device's own rows are one among them."""
    mesh, spec = build.mesh, ShardSpec.parse(after)
    axes, windows = _windows(mesh, tuple(size), ShardSpec.parse(before), spec)
    me = int(mesh.index(axes, build.groups.coordinates))
    sends = [[rows for owner, rows, _ in pieces if owner == me] for pieces in windows]
    receives = [
        [box for owner, _, box in windows[me] if owner == place] for place in range(len(windows))
    ]
    rest = None, spec.local_shape(tuple(size), mesh), next(iter(_fills(spec)), 0.0)
    return (yield from send_boxes(build, x, axes, sends, receives, *rest))


halos = CollectiveKind(
    name="halos",
    signature="halos(f32[4@a, 6@b], a b, a[-2i+2:+2 in 0:4] b[-3i+3:+3 in 0:6]) "
    "-> f32[4@a[-2i+2:+2 in 0:4], 6@b[-3i+3:+3 in 0:6]]",
    meaning="""Exchange rows of several dimensions at once, for every device to have its windows.
        On one device: x, with fill. In the program of one device, the global shape is the last
        argument.""",
    picture="""
        device 0, 1   x00 x01   ->   x11 x10          of x laid out along a and b,
        device 2, 3   x10 x11   ->   x01 x00          before a flip of both
    """,
    suffix="hs",
    payload="what the busiest device sends",
    sent=lambda payload, n: payload,
    localize=_localize_several,
    rename=rename_specs,
    simulate=_simulate_several,
    lower=_lower_several,
    wire=(ALL_TO_ALL,),
    counts_as="permute",
)
