"""The collectives of a program as torch.distributed's functional collectives, for one rank.

Coordinates become numbers, what can be computed from them is computed, and each collective becomes the reshapes that
bring its dimension to the front, the call, and the way back: plain nodes, no Python beside them at run time.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..comm.collective import all_gather, all_reduce, all_to_all, halo, permute, reduce_scatter, split_axes
from ..comm.exchange import elements, exchange, pack, unpack
from ..comm.groups import Groups
from ..comm.local import as_dtype
from ..shard_spec import ShardSpec
from ..window import Window, sent_rows
from .bucket import key

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def lower(graph: fx.Graph, groups: Groups) -> fx.Graph:
    """The program with this rank's coordinates put in; its remaining inputs are the parts of the inputs."""
    return _Lowering(graph, groups).run()


class _Lowering:
    def __init__(self, source: fx.Graph, groups: Groups):
        self.source, self.groups, self.mesh, self.graph = source, groups, groups.mesh, fx.Graph()
        self.node: fx.Node

    def run(self) -> fx.Graph:
        new: dict[fx.Node, Any] = {}
        coordinates = dict(zip((n for n in self.source.nodes if n.op == "placeholder"), self.mesh.names))
        for node in self.source.nodes:
            self.node = node
            if node in coordinates:
                new[node] = self.groups.coordinates[coordinates[node]]
            elif node in new:
                continue                                                    # lowered together with the one before it
            elif node.target in _MERGED and len(run := self._run_of(node)) > 1:
                new.update(zip(run, _MERGED[node.target](self, run, [new[n.args[0]] for n in run])))
            elif node.op == "call_function" and node.target in _LOWERINGS:
                x, *rest = node.args
                new[node] = _LOWERINGS[node.target](self, new[x], list(x.meta["shape"]), *rest)
                self._carry(new[node])
            elif node.target in _ARITHMETIC and not any(isinstance(new.get(a, a), fx.Node) for a in node.args):
                new[node] = node.target(*(new.get(a, a) if isinstance(a, fx.Node) else a for a in node.args))
            else:
                new[node] = self._copy(node, new)
        _wait_late(self.graph)
        return self.graph

    def _run_of(self, node: fx.Node) -> list[fx.Node]:
        """The node and the collectives right behind it that can go with it: of equal key, and not using its result."""
        run = [node]
        while key(run[-1].next) == key(node) and run[-1].next.args[0] not in run:
            run.append(run[-1].next)
        return run

    def _copy(self, node: fx.Node, new: dict[fx.Node, Any]) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), new.__getitem__)
        made = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        made.meta = dict(node.meta)
        return made

    def _carry(self, last: fx.Node, node: fx.Node | None = None) -> fx.Node:
        last.meta = dict((node or self.node).meta)
        return last

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self.graph.call_function(op, args, kwargs)
        made.meta = {"source": self.node.meta.get("source"), "backward": self.node.meta.get("backward", False)}
        return made

    # -------------------------------------------------------------------------------------- layout changes

    def to_front(self, x: Any, shape: list[int], dim: int, count: int) -> tuple[Any, list[int]]:
        """x with `dim` cut into `count` equal parts that stand in a new first dimension; pads what does not divide."""
        rows = -(-shape[dim] // count)
        if rows * count != shape[dim]:
            x = self.call(aten.constant_pad_nd.default, x, [0, 0] * (len(shape) - 1 - dim) + [0, rows * count - shape[dim]])
        part = [*shape[:dim], rows, *shape[dim + 1:]]
        x = self.call(aten.reshape.default, x, [*shape[:dim], count, rows, *shape[dim + 1:]])
        if dim:
            order = [dim, *range(dim), *range(dim + 1, len(shape) + 1)]
            x = self.call(aten.permute.default, x, order)
        return x, part

    def from_front(self, x: Any, part: list[int], dim: int, count: int) -> Any:
        """The inverse: parts in the first dimension joined at `dim`."""
        if dim:
            x = self.call(aten.permute.default, x, [*range(1, dim + 1), 0, *range(dim + 1, len(part) + 1)])
        return self.call(aten.reshape.default, x, [*part[:dim], part[dim] * count, *part[dim + 1:]])

    def reorder(self, x: Any, positions: Sequence[int]) -> Any:
        """Takes the first dimension's entries in another order."""
        if list(positions) == list(range(len(positions))):
            return x
        return self.call(torch.stack, [self.call(aten.select.int, x, 0, p) for p in positions])

    def contiguous(self, x: Any) -> Any:
        return self.call(aten.contiguous.default, x)

    def unpack(self, run: list[fx.Node], flat: Any, shapes: list[list[int]], dim: int) -> list[fx.Node]:
        """The results of merged collectives out of their flat concatenation."""
        parts = self.call(aten.split_with_sizes.default, flat, [math.prod(shape) for shape in shapes], dim)
        return [self._carry(self.call(aten.reshape.default, self.call(operator.getitem, parts, i), shape), node)
                for i, (node, shape) in enumerate(zip(run, shapes))]

    def wait(self, x: Any) -> fx.Node:
        return self.call(c10d.wait_tensor.default, x)


def _all_reduce(to: _Lowering, x: Any, shape: list[int], reduction: str, axes: str) -> fx.Node:
    name, _ = to.groups.group(split_axes(axes))
    op = c10d.all_reduce_.default if _owned(to.node.args[0]) else c10d.all_reduce.default
    return to.wait(to.call(op, to.contiguous(x), _reduction(reduction), name))


def _all_gather(to: _Lowering, x: Any, shape: list[int], dim: int, axes: str) -> fx.Node:
    name, positions = to.groups.group(split_axes(axes))
    n = len(positions)
    gathered = to.wait(to.call(c10d.all_gather_into_tensor.default, to.contiguous(x), n, name))
    stacked = to.reorder(to.call(aten.reshape.default, gathered, [n, *shape]), positions)
    return to.contiguous(to.from_front(stacked, shape, dim, n))


def _reduce_scatter(to: _Lowering, x: Any, shape: list[int], reduction: str, dim: int, axes: str) -> fx.Node:
    name, positions = to.groups.group(split_axes(axes))
    n = len(positions)
    stacked, part = to.to_front(x, shape, dim, n)
    stacked = to.contiguous(to.reorder(stacked, [positions.index(i) for i in range(n)]))
    mine = to.wait(to.call(c10d.reduce_scatter_tensor.default, stacked, _reduction(reduction), n, name))
    return to.call(aten.reshape.default, mine, part)


def _all_to_all(to: _Lowering, x: Any, shape: list[int], gather_dim: int, scatter_dim: int, axes: str) -> fx.Node:
    name, positions = to.groups.group(split_axes(axes))
    n = len(positions)
    stacked, part = to.to_front(x, shape, scatter_dim, n)
    stacked = to.contiguous(to.reorder(stacked, [positions.index(i) for i in range(n)]))
    moved = to.wait(to.call(c10d.all_to_all_single.default, stacked, [1] * n, [1] * n, name))
    return to.contiguous(to.from_front(to.reorder(moved, positions), part, gather_dim, n))


def _permute(to: _Lowering, x: Any, shape: list[int], before: str, after: str, size: tuple[int, ...]) -> fx.Node:
    """all_to_all of pieces of all sizes, none for most; gloo and NCCL alike have it."""
    plan = exchange(to.mesh, tuple(size), ShardSpec.parse(before), ShardSpec.parse(after))
    name, _ = to.groups.group(plan.axes)
    mine = plan.transfer(to.groups.coordinates)
    sends, receives = ([0 if box is None else elements(box) for box in boxes] for boxes in (mine.sends, mine.receives))
    flat = to.call(pack, to.contiguous(x), tuple(box for box in mine.sends if box is not None))
    moved = to.wait(to.call(c10d.all_to_all_single.default, flat, receives, sends, name))
    return to.call(unpack, x, moved, tuple(box for box in mine.receives if box is not None), mine.keep, mine.shape)


def _halo(to: _Lowering, x: Any, shape: list[int], dim: int, axes: str, text: str, size: int) -> fx.Node:
    """all_to_all with nothing for all but those whose window reaches into this device's part."""
    window, (name, positions) = Window.parse(text), to.groups.group(split_axes(axes))
    n, me = len(positions), to.mesh.index(split_axes(axes), to.groups.coordinates)
    peers = sorted(range(n), key=positions.__getitem__)                     # in the order of the group
    wanted = list(window.pieces(me, size, n))
    sends = [[(row, rows) for owner, row, _, rows in window.pieces(j, size, n) if owner == me != j] for j in peers]
    receives = [[(place, rows) for owner, _, place, rows in wanted if owner == j != me] for j in peers]
    pieces = [(place, rows, to.call(aten.narrow.default, x, dim, row, rows)) for owner, row, place, rows in wanted if owner == me]
    if sent_rows(window, size, n):
        pieces += _exchange(to, x, shape, dim, name, sends, receives)
    return _joined(to, x, shape, dim, window, pieces)


def _exchange(to: _Lowering, x: Any, shape: list[int], dim: int, name: str, sends: list, receives: list) -> list[tuple[int, int, Any]]:
    """Sends rows (start, count) of x to every member of a group; what arrives, as (place in the window, rows, tensor)."""
    row = math.prod(shape) // shape[dim]
    flat = [to.call(aten.reshape.default, to.call(aten.narrow.default, x, dim, start, n), [-1]) for peer in sends for start, n in peer]
    packed = to.call(aten.cat.default, flat) if flat else to.call(aten.new_empty.default, x, [0])
    moved = to.wait(to.call(c10d.all_to_all_single.default, packed, *[[sum(rows for _, rows in peer) * row for peer in side]
                                                                      for side in (receives, sends)], name))
    places = [piece for peer in receives for piece in peer] or [(0, 0)]     # who receives nothing must use it all the same
    parts = to.call(aten.split_with_sizes.default, moved, [rows * row for _, rows in places])
    return [(place, rows, to.call(aten.reshape.default, to.call(operator.getitem, parts, i), [*shape[:dim], rows, *shape[dim + 1:]]))
            for i, (place, rows) in enumerate(places)]


def _joined(to: _Lowering, x: Any, shape: list[int], dim: int, window: Window, pieces: list[tuple[int, int, Any]]) -> fx.Node:
    """A window of its pieces, with its fill where there is none."""
    fill, parts, row = as_dtype(window.fill or 0.0, to.node.meta["dtype"]), [], 0
    for place, rows, piece in [*sorted(pieces, key=lambda p: p[:2]), (window.length, 0, None)]:
        if place > row:
            parts.append(to.call(aten.new_full.default, x, [*shape[:dim], place - row, *shape[dim + 1:]], fill))
        if piece is not None:
            parts.append(piece)
        row = place + rows
    return to.call(aten.cat.default, parts, dim)


# ------------------------------------------------------------------------------------------ several as one

def _merged_all_reduce(to: _Lowering, run: list[fx.Node], xs: list[Any]) -> list[fx.Node]:
    _, reduction, axes = run[0].args
    name, _ = to.groups.group(split_axes(axes))
    shapes = [list(n.args[0].meta["shape"]) for n in run]
    flat = to.call(aten.cat.default, [to.call(aten.reshape.default, x, [-1]) for x in xs])
    total = to.wait(to.call(c10d.all_reduce_.default, flat, _reduction(reduction), name))
    return to.unpack(run, total, shapes, 0)


def _merged_all_gather(to: _Lowering, run: list[fx.Node], xs: list[Any]) -> list[fx.Node]:
    name, positions = to.groups.group(split_axes(run[0].args[2]))
    n = len(positions)
    shapes = [list(node.args[0].meta["shape"]) for node in run]
    flat = to.call(aten.cat.default, [to.call(aten.reshape.default, x, [-1]) for x in xs])
    gathered = to.wait(to.call(c10d.all_gather_into_tensor.default, flat, n, name))
    rows = to.call(aten.reshape.default, gathered, [n, sum(map(math.prod, shapes))])
    parts = to.call(aten.split_with_sizes.default, to.reorder(rows, positions), [math.prod(shape) for shape in shapes], 1)
    made = []
    for i, (node, shape) in enumerate(zip(run, shapes)):
        stacked = to.call(aten.reshape.default, to.call(operator.getitem, parts, i), [n, *shape])
        made.append(to._carry(to.contiguous(to.from_front(stacked, shape, node.args[1], n)), node))
    return made


def _merged_reduce_scatter(to: _Lowering, run: list[fx.Node], xs: list[Any]) -> list[fx.Node]:
    _, reduction, _, axes = run[0].args
    name, positions = to.groups.group(split_axes(axes))
    n = len(positions)
    rows, shapes = [], []
    for node, x in zip(run, xs):
        stacked, part = to.to_front(x, list(node.args[0].meta["shape"]), node.args[2], n)
        rows.append(to.call(aten.reshape.default, stacked, [n, -1]))
        shapes.append(part)
    flat = to.reorder(to.call(aten.cat.default, rows, 1), [positions.index(i) for i in range(n)])
    total = to.wait(to.call(c10d.reduce_scatter_tensor.default, to.contiguous(flat), _reduction(reduction), n, name))
    return to.unpack(run, to.call(aten.reshape.default, total, [-1]), shapes, 0)


def _wait_late(graph: fx.Graph) -> None:
    """Moves every wait to the first use of what it waits for: what lies between overlaps with the communication."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target is c10d.wait_tensor.default and node.users:
            min(node.users, key=order.__getitem__).prepend(node)


def _owned(value: fx.Node) -> bool:
    """Whether nobody else sees the memory of a value that is used once, so that it can be written over."""
    while value.op == "call_function" and len(value.users) == 1 and isinstance(value.target, torch._ops.OpOverload):
        if not any(r.alias_info for r in value.target._schema.returns):
            return True
        value = value.args[0]
    return False


def _reduction(reduction: str) -> str:
    return {"prod": "product"}.get(reduction, reduction)


_ARITHMETIC = {operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg}
_LOWERINGS: dict[Any, Callable] = {all_reduce: _all_reduce, all_gather: _all_gather, reduce_scatter: _reduce_scatter,
                                   all_to_all: _all_to_all, halo: _halo, permute: _permute}
_MERGED: dict[Any, Callable] = {all_reduce: _merged_all_reduce, all_gather: _merged_all_gather, reduce_scatter: _merged_reduce_scatter}
