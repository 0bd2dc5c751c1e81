"""The lowering of each kind of collective, one at a time.

A lowering is a generator. It yields the node of the call, is sent the node of the wait, and returns
the result.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Generator, Sequence
from typing import Any

from torch import fx

from ...comm.box_exchange import elements, exchange, pack, unpack
from ...comm.collective import split_axes
from ...comm.local_ops import as_dtype
from ...comm.ring_einsum import (
    einsum_scatter,
    gather_einsum,
    ring_einsum_scatter,
    ring_gather_einsum,
)
from ...compat.operators import aten, c10d
from ...compat.private_apis import OpOverload
from ...halo import Window, sent_rows
from ...shard_spec import ShardSpec
from .collective_builder import CollectiveBuilder

Lowering = Generator[fx.Node, fx.Node, fx.Node]
_Rows = tuple[int, int]  # (first row, number of rows)


def _all_reduce(
    build: CollectiveBuilder, x: Any, shape: list[int], reduction: str, axes: str
) -> Lowering:
    name, _ = build.groups.group(split_axes(axes))
    op = (
        c10d.all_reduce_.default if _owns_memory(build.node.args[1][0]) else c10d.all_reduce.default
    )
    return (yield build.begin(op, shape, build.contiguous(x), c10d_reduction(reduction), name))


def _all_gather(
    build: CollectiveBuilder, x: Any, shape: list[int], dim: int, axes: str
) -> Lowering:
    name, positions = build.groups.group(split_axes(axes))
    n = len(positions)
    gathered = yield build.begin(
        c10d.all_gather_into_tensor.default,
        [n * shape[0], *shape[1:]],
        build.contiguous(x),
        n,
        name,
    )
    stacked = build.reorder(build.call(aten.reshape.default, gathered, [n, *shape]), positions)
    return build.contiguous(build.from_front(stacked, shape, dim, n))


def _reduce_scatter(
    build: CollectiveBuilder, x: Any, shape: list[int], reduction: str, dim: int, axes: str
) -> Lowering:
    name, positions = build.groups.group(split_axes(axes))
    n = len(positions)
    stacked, shard = build.to_front(x, shape, dim, n)
    stacked = build.contiguous(build.reorder(stacked, [positions.index(i) for i in range(n)]))
    mine = yield build.begin(
        c10d.reduce_scatter_tensor.default, [1, *shard], stacked, c10d_reduction(reduction), n, name
    )
    return build.call(aten.reshape.default, mine, shard)


def _all_to_all(
    build: CollectiveBuilder, x: Any, shape: list[int], gather_dim: int, scatter_dim: int, axes: str
) -> Lowering:
    name, positions = build.groups.group(split_axes(axes))
    n = len(positions)
    stacked, shard = build.to_front(x, shape, scatter_dim, n)
    stacked = build.contiguous(build.reorder(stacked, [positions.index(i) for i in range(n)]))
    moved = yield build.begin(
        c10d.all_to_all_single.default, [n, *shard], stacked, [1] * n, [1] * n, name
    )
    return build.contiguous(build.from_front(build.reorder(moved, positions), shard, gather_dim, n))


def _permute(
    build: CollectiveBuilder,
    x: Any,
    shape: list[int],
    before: str,
    after: str,
    size: tuple[int, ...],
) -> Lowering:
    """Lower to an all_to_all of boxes of any size, empty for most peers. Gloo and NCCL have it."""
    plan = exchange(build.mesh, tuple(size), ShardSpec.parse(before), ShardSpec.parse(after))
    name, _ = build.groups.group(plan.axes)
    mine = plan.transfer(build.groups.coordinates)
    sends, receives = (
        [0 if box is None else elements(box) for box in boxes]
        for boxes in (mine.sends, mine.receives)
    )
    flat = build.call(
        pack, build.contiguous(x), tuple(box for box in mine.sends if box is not None)
    )
    moved = yield build.exchange(flat, receives, sends, name)
    return build.call(
        unpack,
        x,
        moved,
        tuple(box for box in mine.receives if box is not None),
        mine.keep,
        mine.shape,
    )


def _halo(
    build: CollectiveBuilder, x: Any, shape: list[int], dim: int, axes: str, text: str, size: int
) -> Lowering:
    """Lower to an all_to_all that sends only to devices whose window reaches into this shard."""
    window, (name, positions) = Window.parse(text), build.groups.group(split_axes(axes))
    n, me = len(positions), build.mesh.index(split_axes(axes), build.groups.coordinates)
    peers = sorted(range(n), key=positions.__getitem__)
    required = list(window.pieces(me, size, n))
    sends = [
        [(row, rows) for owner, row, _, rows in window.pieces(j, size, n) if owner == me != j]
        for j in peers
    ]
    receives = [
        [(place, rows) for owner, _, place, rows in required if owner == j != me] for j in peers
    ]
    pieces = [
        (place, rows, build.call(aten.narrow.default, x, dim, row, rows))
        for owner, row, place, rows in required
        if owner == me
    ]
    if sent_rows(window, size, n):
        pieces += yield from _exchange_rows(build, x, shape, dim, name, sends, receives)
    return _concat_window(build, x, shape, dim, window, pieces)


def _exchange_rows(
    build: CollectiveBuilder,
    x: Any,
    shape: list[int],
    dim: int,
    name: str,
    sends: list[list[_Rows]],
    receives: list[list[_Rows]],
) -> Generator[fx.Node, fx.Node, list[tuple[int, int, fx.Node]]]:
    """Exchange rows of x with the group. Returns the received (place in window, rows, tensor)."""
    row = math.prod(shape) // shape[dim]
    flat = [
        build.call(aten.reshape.default, build.call(aten.narrow.default, x, dim, place, n), [-1])
        for peer in sends
        for place, n in peer
    ]
    packed = (
        build.call(aten.cat.default, flat) if flat else build.call(aten.new_empty.default, x, [0])
    )
    moved = yield build.exchange(
        packed,
        *[[sum(rows for _, rows in peer) * row for peer in side] for side in (receives, sends)],
        name,
    )
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
    x: Any,
    shape: list[int],
    dim: int,
    window: Window,
    pieces: list[tuple[int, int, Any]],
) -> fx.Node:
    """Concatenate the pieces of a window, with its fill in the gaps."""
    fill = as_dtype(window.fill or 0.0, build.node.meta["dtype"])
    tensors, row = [], 0
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


def _gather_einsum(
    build: CollectiveBuilder, x: Any, others: Sequence, dim: int, axes: str, *rest: Any
) -> fx.Node:
    return build.call(ring_gather_einsum, x, others, dim, *rest, *build.ring_position(axes))


def _einsum_scatter(
    build: CollectiveBuilder, a: Any, b: Any, dim: int, axes: str, equation: str
) -> fx.Node:
    return build.call(ring_einsum_scatter, a, b, dim, equation, *build.ring_position(axes))


def _owns_memory(value: fx.Node) -> bool:
    """Return True if a value's memory has no other reader, so that it can be written over."""
    while (
        value.op == "call_function"
        and len(value.users) == 1
        and isinstance(value.target, OpOverload)
    ):
        if not any(r.alias_info for r in value.target._schema.returns):
            return True
        value = value.args[0]
    return False


def c10d_reduction(reduction: str) -> str:
    """Return the name that torch.distributed has for a reduction."""
    return {"prod": "product"}.get(reduction, reduction)


SINGLE: dict[str, Callable[..., Lowering]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "halo": _halo,
    "permute": _permute,
}
RINGS: dict[Callable, Callable[..., fx.Node]] = {
    gather_einsum: _gather_einsum,
    einsum_scatter: _einsum_scatter,
}
