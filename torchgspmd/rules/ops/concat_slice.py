"""Slices along a dimension, and concatenations, for fx_passes/expand/split_products.py.

q, k, v = split(x @ w, 64, 2)       three products with slices of w
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...compat.fx_nodes import ORIGIN
from ...compat.operators import aten
from ...layout.halo_window import Reach
from ..notation import FactorRule, Ints
from ..rewrites import DECLINED, Declined, SplitRequest

PART_OPS = {
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.select.int,
    aten.slice.Tensor,
}
COPIES = {aten.clone.default}
FEWEST_PARTS = 4  # of a sequence: fewer are queries beside keys
MOST = 4  # the most slices along one dimension: q, k, v, and one more


def parts_taken(
    target: object, args: tuple, rule: FactorRule, shape: Ints, results: Sequence[Ints]
) -> list[tuple[int, int, int]]:
    """Return (dimension, start, end) for every result that is a slice of the only operand.

    Empty if the operation is no slice.
    """
    if target in (aten.split.Tensor, aten.split_with_sizes.default):
        d = (args[2] if len(args) > 2 else 0) % len(shape)
        starts = [sum(r[d] for r in results[:i]) for i in range(len(results))]
        return [(d, start, start + result[d]) for start, result in zip(starts, results)]
    if not rule.moves or len(rule.row_access) != 1 or len(rule.operands) != 1:
        return []
    (((_, d), reach),) = rule.row_access.items()
    start, end = reach.low, reach.low + results[0][d]
    # A step or padding makes it no plain slice, and all rows are no cut.
    cuts = 0 <= start and end <= shape[d] and end - start < shape[d]
    return [(d, start, end)] if cuts and reach == Reach(start, start) else []


def equal_parts(
    target: object, args: tuple, rule: FactorRule, shape: Ints, results: Sequence[Ints]
) -> tuple[int, int] | None:
    """Return (dimension, count) for an operation that takes equal parts of the only operand.

    An example is `x.split(64, 2)` of [8, 16, 192]. None for other operations.
    """
    if target in (aten.unbind.int, aten.select.int):
        d = (args[1] if len(args) > 1 else 0) % len(shape)
        return d, shape[d]
    taken = parts_taken(target, args, rule, shape, results)
    widths = {(d, end - start) for d, start, end in taken}
    if len(widths) != 1:
        return None
    ((d, width),) = widths
    aligned = width and all(n % width == 0 for n in (shape[d], *(start for _, start, _ in taken)))
    return (d, shape[d] // width) if aligned else None


def part_placed(target: object, args: tuple, operand: Sequence[int]) -> tuple[int, int] | None:
    """Return (dimension, start) for an operation that puts rows among zeros, else None.

    The gradient of a slice does so. operand: the shape of the rows.
    """
    if target is not aten.slice_backward.default or args[5] != 1:
        return None
    d, size = args[2] % len(operand), args[1][args[2]]
    return d, min(args[3] + size * (args[3] < 0), size)


def parts_joined(
    rule: FactorRule, shapes: Sequence[Sequence[int]], result: Sequence[int]
) -> tuple[int, list[int]] | None:
    """Return a concatenation's (dimension, borders between operands); None for other operations."""
    dims = {d for _, d in rule.row_access}
    if not rule.moves or not len(rule.row_access) == len(shapes) > 1 or len(dims) != 1:
        return None
    (d,) = dims
    borders = [sum(shape[d] for shape in shapes[:i]) for i in range(len(shapes) + 1)]
    reaches = [rule.row_access[i, d] for i in range(len(shapes))]
    contiguous = all(r.low == r.high == -start for r, start in zip(reaches, borders))
    return (d, borders) if contiguous and borders[-1] == result[d] else None


def passes_parts(rule: FactorRule, factor: str) -> bool:
    """Return whether the same call on operand slices gives a slice of the result.

    For a factor that is summed, slices give the sum's terms.
    """
    tensors = (*rule.operands, *rule.results)
    # In a merged dimension the slice's rows would lie apart.
    alone = all(dim == (factor,) for dims in tensors for dim in dims if factor in dim)
    return (
        alone
        and len(rule.results) == 1
        and rule.described
        and rule.local.arguments is None
        and rule.reduce.get(factor, "sum") == "sum"
        and factor not in rule.replicated.union(rule.local.when, rule.windowed)
    )


def take(graph: fx.Graph, value: fx.Node, dim: int, start: int, end: int) -> fx.Node:
    return _call(
        graph,
        aten.slice.Tensor,
        (value, dim, start, end),
        value.meta["val"].narrow(dim, start, end - start),
        value.meta,
    )


def join(graph: fx.Graph, values: Sequence[fx.Node], dim: int, val: Tensor, meta: dict) -> fx.Node:
    return _call(graph, aten.cat.default, (list(values), dim), val, meta)


def add(graph: fx.Graph, values: Sequence[fx.Node], val: Tensor, meta: dict) -> fx.Node:
    total = values[0]
    for value in values[1:]:
        total = _call(graph, aten.add.Tensor, (total, value), val, meta)
    return total


def _call(graph: fx.Graph, target: Any, args: tuple, val: Tensor, meta: dict) -> fx.Node:
    node = graph.create_node("call_function", target, args, name=target.overloadpacket.__name__)
    node.meta = {key: meta[key] for key in ORIGIN if key in meta} | {"val": val}
    return node


# ------------------------------------------------------------------------------------- reshapes


def goes_by_parts(rows: int, others: int, shards: int) -> bool:
    """Return whether `shards` divides only the inner factor in a dimension rows * others.

    A fused q, k, v has 3 * 64 columns, for example: 2 devices divide 64, not 3.
    """
    return rows <= MOST and math.gcd(rows, shards) == 1 and others % shards == 0


def view_by_slices(x: Tensor, shape: Sequence[int], cuts: SplitRequest) -> Tensor | Declined:
    """Reshape between [..., a * r, ...] and [..., a, r's dimensions, ...], one slice for each a.

    The mesh divides r, but not the few rows a, and a device has them all.
    """
    if cuts.results[0] is None:
        return DECLINED
    (before, cut), (after, wanted) = (
        ([n for n in s if n > 1], [count for n, count in zip(s, counts) if n > 1])
        for s, counts in ((x.shape, cuts.operands[0]), (shape, cuts.results[0]))
    )
    dim = next((d for d, (m, n) in enumerate(zip(before, after)) if m != n), None)
    if dim is None:
        return DECLINED
    size, rows = max(before[dim], after[dim]), min(before[dim], after[dim])
    short, long = (before, after) if before[dim] == size else (after, before)
    whole = any(math.prod(long[dim:end]) == size for end in range(dim + 2, len(long) + 1))
    # Rows that devices share would be sent to all of them.
    shared = (wanted if long is after else cut)[dim] > 1
    if not whole or shared or not goes_by_parts(rows, size // rows, cuts.shards):
        return DECLINED
    stacked = [*short[:dim], rows, size // rows, *short[dim + 1 :]]
    if short is before:
        width, x = size // rows, _reshape(x, before)
        x = torch.stack([x.narrow(dim, i * width, width) for i in range(rows)], dim)
    else:
        x = torch.cat(_reshape(x, stacked).unbind(dim), dim)
    return _reshape(x, shape)


def _reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x if list(x.shape) == list(shape) else x.reshape(shape)


class Pieces(NamedTuple):
    """Equal pieces of a value along a dimension. width: their rows; 0: one row, without its dim.

    indices: which pieces an operation takes, one for each result.
    """

    dim: int
    count: int
    width: int
    indices: tuple[int, ...]


def pieces_taken(
    target: object,
    args: tuple,
    rule: FactorRule,
    shape: Sequence[int],
    results: Sequence[Sequence[int]],
) -> Pieces | None:
    """Return the equal pieces that an operation takes of its operand; None if it takes none."""
    parts = equal_parts(target, args, rule, shape, results) if results else None
    if parts is None:
        return None
    d, count = parts
    if target in (aten.unbind.int, aten.select.int):
        chosen = range(count) if target is aten.unbind.int else (args[2] % count,)
        return Pieces(d, count, 0, tuple(chosen))
    width = shape[d] // count
    taken = parts_taken(target, args, rule, shape, results)
    return Pieces(d, count, width, tuple(start // width for _, start, _ in taken))


def pieces_joined(
    target: object,
    args: tuple,
    rule: FactorRule,
    shapes: Sequence[Sequence[int]],
    result: Sequence[int],
) -> Pieces | None:
    """Return the equal pieces that an operation puts side by side; None if it does not."""
    count = len(shapes)
    if target is aten.stack.default:
        d = (args[1] if len(args) > 1 else 0) % len(result)
        return Pieces(d, count, 0, tuple(range(count)))
    joined = parts_joined(rule, shapes, result)
    if joined is None or len({shape[joined[0]] for shape in shapes}) != 1:
        return None
    return Pieces(joined[0], count, shapes[0][joined[0]], tuple(range(count)))


def piece_placed(target: object, args: tuple, operand: Sequence[int]) -> Pieces | None:
    """Return where an operation puts its operand, one of equal pieces, among zeros; else None.

    The gradients of slices and selections do so. operand: its shape.
    """
    if target is aten.select_backward.default:
        d = args[2] % len(args[1])
        return Pieces(d, args[1][d], 0, (args[3] % args[1][d],))
    placed = part_placed(target, args, operand)
    if placed is None:
        return None
    d, start = placed
    width, size = operand[d], args[1][d]
    aligned = width and size % width == 0 and start % width == 0
    return Pieces(d, size // width, width, (start // width,)) if aligned else None


def is_plain_sum(target: object, kwargs: object) -> bool:
    """Return whether an operation adds two operands as they are."""
    return target is aten.add.Tensor and not kwargs
