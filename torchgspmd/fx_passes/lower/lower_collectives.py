"""The collectives of a program as torch.distributed's functional collectives, for one rank.

Coordinates become numbers, what can be computed from them is computed. At its `start` a collective
becomes the reshapes that bring its dimension to the front and the call; where its results are
waited for, the wait and the way back: plain nodes, no Python beside them at run time. How a kind is
lowered is a generator, which yields what the call returns and is sent what the wait returns.

Memory in flight: between its start and its wait a collective reads its operand and writes its
result. The operand is written by nobody (programs do not write in place) but the in-place
all_reduce_, which is used where nobody else sees the operand's memory; the result is seen by nobody
but the wait. torch.distributed keeps both alive. in_flight.py checks this.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import fx

from ...comm.box_exchange import elements, exchange, pack, unpack
from ...comm.collective import split_axes, start, wait
from ...comm.local_ops import as_dtype
from ...comm.process_groups import ProcessGroups
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

_Lowered = Generator[
    fx.Node, fx.Node, list[fx.Node]
]  # yields what was begun, is sent what was waited for


def lower_collectives(graph: fx.Graph, groups: ProcessGroups) -> fx.Graph:
    """The program with this rank's coordinates put in; its remaining inputs are the parts of the
    inputs.
    """
    return _Lowering(graph, groups).run()


class _Lowering:
    def __init__(self, source: fx.Graph, groups: ProcessGroups):
        self.source, self.groups, self.mesh, self.graph = source, groups, groups.mesh, fx.Graph()
        self.node: fx.Node

    def run(self) -> fx.Graph:
        new: dict[fx.Node, Any] = {}
        coordinates = dict(
            zip((n for n in self.source.nodes if n.op == "placeholder"), self.mesh.names)
        )
        for node in self.source.nodes:
            self.node = node
            if node in coordinates:
                new[node] = self.groups.coordinates[coordinates[node]]
            elif node.target is start:
                new[node] = self._start(node, new)
            elif node.target is wait:
                new[node] = self._carry(new[node.args[0]].results(self)[node.args[1]])
            elif node.target in _RINGS:
                new[node] = self._carry(
                    _RINGS[node.target](self, *fx.map_arg(node.args, new.__getitem__))
                )
            elif node.target in _ARITHMETIC and not any(
                isinstance(new.get(a, a), fx.Node) for a in node.args
            ):
                new[node] = node.target(
                    *(new.get(a, a) if isinstance(a, fx.Node) else a for a in node.args)
                )
            else:
                new[node] = self._copy(node, new)
        return self.graph

    def _start(self, node: fx.Node, new: dict[fx.Node, Any]) -> _InFlight:
        kind, operands, arguments = node.args
        shapes = [list(x.meta["shape"]) for x in operands]
        if len(operands) > 1:
            return _InFlight(_MERGED[kind](self, [new[x] for x in operands], shapes, arguments))
        return _InFlight(_alone(_LOWERINGS[kind](self, new[operands[0]], shapes[0], *arguments[0])))

    def _copy(self, node: fx.Node, new: dict[fx.Node, Any]) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), new.__getitem__)
        made = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        made.meta = dict(node.meta)
        return made

    def _carry(self, last: fx.Node) -> fx.Node:
        last.meta = dict(self.node.meta)
        return last

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self.graph.call_function(op, args, kwargs)
        made.meta = {
            "source": self.node.meta.get("source"),
            "backward": self.node.meta.get("backward", False),
        }
        return made

    def place(self, axes: str) -> tuple[str, list[int], int]:
        """The name of the group over these axes, the numbers in it of its members in axes order,
        and which of them this rank is.
        """
        return *self.groups.group(split_axes(axes)), self.mesh.index(
            split_axes(axes), self.groups.coordinates
        )

    # -------------------------------------------------------------------------------------- layout changes

    def to_front(self, x: Any, shape: list[int], dim: int, count: int) -> tuple[Any, list[int]]:
        """x with `dim` cut into `count` equal parts that stand in a new first dimension; pads what
        does not divide.
        """
        rows = -(-shape[dim] // count)
        if rows * count != shape[dim]:
            x = self.call(
                aten.constant_pad_nd.default,
                x,
                [0, 0] * (len(shape) - 1 - dim) + [0, rows * count - shape[dim]],
            )
        part = [*shape[:dim], rows, *shape[dim + 1 :]]
        x = self.call(aten.reshape.default, x, [*shape[:dim], count, rows, *shape[dim + 1 :]])
        if dim:
            order = [dim, *range(dim), *range(dim + 1, len(shape) + 1)]
            x = self.call(aten.permute.default, x, order)
        return x, part

    def from_front(self, x: Any, part: list[int], dim: int, count: int) -> Any:
        """The inverse: parts in the first dimension joined at `dim`."""
        if dim:
            x = self.call(
                aten.permute.default, x, [*range(1, dim + 1), 0, *range(dim + 1, len(part) + 1)]
            )
        return self.call(
            aten.reshape.default, x, [*part[:dim], part[dim] * count, *part[dim + 1 :]]
        )

    def reorder(self, x: Any, positions: Sequence[int]) -> Any:
        """Takes the first dimension's entries in another order."""
        if list(positions) == list(range(len(positions))):
            return x
        return self.call(torch.stack, [self.call(aten.select.int, x, 0, p) for p in positions])

    def begin(self, op: Any, shape: list[int], *args: Any) -> fx.Node:
        """A collective; shape: of its result."""
        made = self.call(op, *args)
        made.meta |= {"shape": shape, "dtype": self.node.args[1][0].meta["dtype"]}
        return made

    def exchange(self, x: Any, receives: list[int], sends: list[int], name: str) -> fx.Node:
        """all_to_all of vectors: so many elements from and to every member of the group."""
        return self.begin(c10d.all_to_all_single.default, [sum(receives)], x, receives, sends, name)

    def contiguous(self, x: Any) -> Any:
        return self.call(aten.contiguous.default, x)

    def unpack(self, flat: Any, shapes: list[list[int]]) -> list[fx.Node]:
        """The results of merged collectives out of their flat concatenation."""
        parts = self.call(
            aten.split_with_sizes.default, flat, [math.prod(shape) for shape in shapes], 0
        )
        return [
            self.call(aten.reshape.default, self.call(operator.getitem, parts, i), shape)
            for i, shape in enumerate(shapes)
        ]


class _InFlight:
    """A collective between its start and its wait."""

    def __init__(self, lowering: _Lowered):
        self.lowering = lowering
        self.made: list[fx.Node] | None = None
        try:
            self.begun = next(lowering)
        except StopIteration as done:  # it sends nothing
            self.made = done.value

    def results(self, to: _Lowering) -> list[fx.Node]:
        """Waits where it is first called."""
        if self.made is None:
            try:
                self.lowering.send(to.call(c10d.wait_tensor.default, self.begun))
            except StopIteration as done:
                self.made = done.value
        return self.made


def _alone(lowering: Generator) -> _Lowered:
    return [(yield from lowering)]


def _all_reduce(to: _Lowering, x: Any, shape: list[int], reduction: str, axes: str) -> Generator:
    name, _ = to.groups.group(split_axes(axes))
    op = c10d.all_reduce_.default if _owned(to.node.args[1][0]) else c10d.all_reduce.default
    return (yield to.begin(op, shape, to.contiguous(x), _reduction(reduction), name))


def _all_gather(to: _Lowering, x: Any, shape: list[int], dim: int, axes: str) -> Generator:
    name, positions = to.groups.group(split_axes(axes))
    n = len(positions)
    gathered = yield to.begin(
        c10d.all_gather_into_tensor.default, [n * shape[0], *shape[1:]], to.contiguous(x), n, name
    )
    stacked = to.reorder(to.call(aten.reshape.default, gathered, [n, *shape]), positions)
    return to.contiguous(to.from_front(stacked, shape, dim, n))


def _reduce_scatter(
    to: _Lowering, x: Any, shape: list[int], reduction: str, dim: int, axes: str
) -> Generator:
    name, positions = to.groups.group(split_axes(axes))
    n = len(positions)
    stacked, part = to.to_front(x, shape, dim, n)
    stacked = to.contiguous(to.reorder(stacked, [positions.index(i) for i in range(n)]))
    mine = yield to.begin(
        c10d.reduce_scatter_tensor.default, [1, *part], stacked, _reduction(reduction), n, name
    )
    return to.call(aten.reshape.default, mine, part)


def _all_to_all(
    to: _Lowering, x: Any, shape: list[int], gather_dim: int, scatter_dim: int, axes: str
) -> Generator:
    name, positions = to.groups.group(split_axes(axes))
    n = len(positions)
    stacked, part = to.to_front(x, shape, scatter_dim, n)
    stacked = to.contiguous(to.reorder(stacked, [positions.index(i) for i in range(n)]))
    moved = yield to.begin(
        c10d.all_to_all_single.default, [n, *part], stacked, [1] * n, [1] * n, name
    )
    return to.contiguous(to.from_front(to.reorder(moved, positions), part, gather_dim, n))


def _permute(
    to: _Lowering, x: Any, shape: list[int], before: str, after: str, size: tuple[int, ...]
) -> Generator:
    """all_to_all of pieces of all sizes, none for most; gloo and NCCL alike have it."""
    plan = exchange(to.mesh, tuple(size), ShardSpec.parse(before), ShardSpec.parse(after))
    name, _ = to.groups.group(plan.axes)
    mine = plan.transfer(to.groups.coordinates)
    sends, receives = (
        [0 if box is None else elements(box) for box in boxes]
        for boxes in (mine.sends, mine.receives)
    )
    flat = to.call(pack, to.contiguous(x), tuple(box for box in mine.sends if box is not None))
    moved = yield to.exchange(flat, receives, sends, name)
    return to.call(
        unpack,
        x,
        moved,
        tuple(box for box in mine.receives if box is not None),
        mine.keep,
        mine.shape,
    )


def _halo(
    to: _Lowering, x: Any, shape: list[int], dim: int, axes: str, text: str, size: int
) -> Generator:
    """all_to_all with nothing for all but those whose window reaches into this device's part."""
    window, (name, positions) = Window.parse(text), to.groups.group(split_axes(axes))
    n, me = len(positions), to.mesh.index(split_axes(axes), to.groups.coordinates)
    peers = sorted(range(n), key=positions.__getitem__)  # in the order of the group
    wanted = list(window.pieces(me, size, n))
    sends = [
        [(row, rows) for owner, row, _, rows in window.pieces(j, size, n) if owner == me != j]
        for j in peers
    ]
    receives = [
        [(place, rows) for owner, _, place, rows in wanted if owner == j != me] for j in peers
    ]
    pieces = [
        (place, rows, to.call(aten.narrow.default, x, dim, row, rows))
        for owner, row, place, rows in wanted
        if owner == me
    ]
    if sent_rows(window, size, n):
        pieces += yield from _exchange(to, x, shape, dim, name, sends, receives)
    return _joined(to, x, shape, dim, window, pieces)


def _exchange(
    to: _Lowering, x: Any, shape: list[int], dim: int, name: str, sends: list, receives: list
) -> Generator:
    """Sends rows (start, count) of x to every member of a group; what arrives, as (place in the
    window, rows, tensor).
    """
    row = math.prod(shape) // shape[dim]
    flat = [
        to.call(aten.reshape.default, to.call(aten.narrow.default, x, dim, place, n), [-1])
        for peer in sends
        for place, n in peer
    ]
    packed = to.call(aten.cat.default, flat) if flat else to.call(aten.new_empty.default, x, [0])
    moved = yield to.exchange(
        packed,
        *[[sum(rows for _, rows in peer) * row for peer in side] for side in (receives, sends)],
        name,
    )
    places = [piece for peer in receives for piece in peer] or [
        (0, 0)
    ]  # who receives nothing must use it all the same
    parts = to.call(aten.split_with_sizes.default, moved, [rows * row for _, rows in places])
    return [
        (
            place,
            rows,
            to.call(
                aten.reshape.default,
                to.call(operator.getitem, parts, i),
                [*shape[:dim], rows, *shape[dim + 1 :]],
            ),
        )
        for i, (place, rows) in enumerate(places)
    ]


def _joined(
    to: _Lowering,
    x: Any,
    shape: list[int],
    dim: int,
    window: Window,
    pieces: list[tuple[int, int, Any]],
) -> fx.Node:
    """A window of its pieces, with its fill where there is none."""
    fill, parts, row = as_dtype(window.fill or 0.0, to.node.meta["dtype"]), [], 0
    for place, rows, piece in [*sorted(pieces, key=lambda p: p[:2]), (window.length, 0, None)]:
        if place > row:
            parts.append(
                to.call(
                    aten.new_full.default, x, [*shape[:dim], place - row, *shape[dim + 1 :]], fill
                )
            )
        if piece is not None:
            parts.append(piece)
        row = place + rows
    return to.call(aten.cat.default, parts, dim)


def _gather_einsum(
    to: _Lowering, x: Any, others: Sequence, dim: int, axes: str, *rest: Any
) -> fx.Node:
    return to.call(ring_gather_einsum, x, others, dim, *rest, *to.place(axes))


def _einsum_scatter(to: _Lowering, a: Any, b: Any, dim: int, axes: str, equation: str) -> fx.Node:
    return to.call(ring_einsum_scatter, a, b, dim, equation, *to.place(axes))


# ------------------------------------------------------------------------------------------ several as one


def _merged_all_reduce(
    to: _Lowering, xs: list[Any], shapes: list[list[int]], arguments: Sequence[tuple]
) -> _Lowered:
    reduction, axes = arguments[0]
    name, _ = to.groups.group(split_axes(axes))
    flat = to.call(aten.cat.default, [to.call(aten.reshape.default, x, [-1]) for x in xs])
    total = yield to.begin(
        c10d.all_reduce_.default, [sum(map(math.prod, shapes))], flat, _reduction(reduction), name
    )
    return to.unpack(total, shapes)


def _merged_all_gather(
    to: _Lowering, xs: list[Any], shapes: list[list[int]], arguments: Sequence[tuple]
) -> _Lowered:
    name, positions = to.groups.group(split_axes(arguments[0][1]))
    n = len(positions)
    flat = to.call(aten.cat.default, [to.call(aten.reshape.default, x, [-1]) for x in xs])
    gathered = yield to.begin(
        c10d.all_gather_into_tensor.default, [n * sum(map(math.prod, shapes))], flat, n, name
    )
    rows = to.call(aten.reshape.default, gathered, [n, sum(map(math.prod, shapes))])
    parts = to.call(
        aten.split_with_sizes.default,
        to.reorder(rows, positions),
        [math.prod(shape) for shape in shapes],
        1,
    )
    made = []
    for i, (shape, (dim, _)) in enumerate(zip(shapes, arguments)):
        stacked = to.call(aten.reshape.default, to.call(operator.getitem, parts, i), [n, *shape])
        made.append(to.contiguous(to.from_front(stacked, shape, dim, n)))
    return made


def _merged_reduce_scatter(
    to: _Lowering, xs: list[Any], shapes: list[list[int]], arguments: Sequence[tuple]
) -> _Lowered:
    reduction, _, axes = arguments[0]
    name, positions = to.groups.group(split_axes(axes))
    n = len(positions)
    rows, parts = [], []
    for x, shape, (_, dim, _) in zip(xs, shapes, arguments):
        stacked, part = to.to_front(x, shape, dim, n)
        rows.append(to.call(aten.reshape.default, stacked, [n, -1]))
        parts.append(part)
    flat = to.reorder(to.call(aten.cat.default, rows, 1), [positions.index(i) for i in range(n)])
    shape = [1, sum(map(math.prod, parts))]
    total = yield to.begin(
        c10d.reduce_scatter_tensor.default,
        shape,
        to.contiguous(flat),
        _reduction(reduction),
        n,
        name,
    )
    return to.unpack(to.call(aten.reshape.default, total, [-1]), parts)


def _owned(value: fx.Node) -> bool:
    """Whether nobody else sees the memory of a value that is used once, so that it can be written
    over.
    """
    while (
        value.op == "call_function"
        and len(value.users) == 1
        and isinstance(value.target, OpOverload)
    ):
        if not any(r.alias_info for r in value.target._schema.returns):
            return True
        value = value.args[0]
    return False


def _reduction(reduction: str) -> str:
    return {"prod": "product"}.get(reduction, reduction)


_ARITHMETIC = {
    operator.add,
    operator.sub,
    operator.mul,
    operator.floordiv,
    operator.mod,
    operator.neg,
    operator.eq,
    operator.ne,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
}
_LOWERINGS: dict[str, Callable] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "halo": _halo,
    "permute": _permute,
}
_MERGED: dict[str, Callable] = {
    "all_reduce": _merged_all_reduce,
    "all_gather": _merged_all_gather,
    "reduce_scatter": _merged_reduce_scatter,
}
_RINGS: dict[Any, Callable] = {gather_einsum: _gather_einsum, einsum_scatter: _einsum_scatter}
