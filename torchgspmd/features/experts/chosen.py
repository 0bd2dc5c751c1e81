"""Products between rows and one matrix each, which an index chooses from a table.

    %ws = index(%table, [%index])                       table [e, k, n], index [t]
    %y  = einsum(tk,tkn->tn, %x, %ws)                   each row by its chosen matrix
    %g  = index_put(0, [%index], einsum(tk,tn->tkn, %x, %gy), True)      the table's gradient

No device has to copy a matrix for each row, or to have all matrices. Rows with the same choice are
multiplied where their matrix is (rule.py), and put back at their places.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.fx_nodes import drop_unused, inline, origin_of
from ...compat.operators import aten
from ...fx_passes.ir import Rules
from ...fx_passes.propagate.layouts import Layouts
from ...rules import DECLINED, trace
from ...rules.algebra import constant_of
from ...rules.custom_ops.nd import split_equation
from .op import KERNEL_BYTES
from .rule import mm_by_blocks, outer_by_blocks

ours = torch.ops.torchgspmd


@dataclass(frozen=True)
class Choices:
    """A value that is computed from rows and from values that an index chooses for them.

    table: the value with groups as its first dimension: a table, or its gradient. operands: of the
    value, the index last. compute: computes the value by blocks, from the operands and the number
    of blocks.
    """

    table: fx.Node
    index: fx.Node
    operands: tuple[fx.Node, ...]
    compute: Callable[..., Tensor]


def product_of_choices(node: fx.Node) -> Choices | None:
    """Return the choices behind a product with chosen matrices, or behind its gradient."""
    if node.target is ours.einsum.default:
        a, b, out = split_equation(node.args[0])
        left, right = node.args[1:]
        for matrices, letters, x, x_letters in ((left, a, right, b), (right, b, left, a)):
            source, letters = _unmoved(matrices, letters)
            if chosen := _chosen_from(source):
                return _product(chosen, x, letters, x_letters, out)
    if added := _added_to(node):
        index, values = added
        product, order = _unmoved(values, ascii_letters[: values.meta["val"].dim()])
        if product.target is ours.einsum.default:
            return _gradient(node, index, product, order)
    return None


def rows_of_choices(node: fx.Node, ends: fx.Node | None = None) -> Choices | None:
    """Return the table rows that a node reads, or adds up as a gradient.

    A row, such as a bias, is the product of a one and a one-row matrix. ends: where groups end, if
    the index is sorted.
    """
    by = () if ends is None else (ends,)
    if not isinstance(node.meta.get("val"), Tensor) or not node.meta["val"].is_floating_point():
        return None
    if chosen := _chosen_from(node):
        table, index = chosen
        return Choices(table, index, (table, index, *by), _read_rows)
    if added := _added_to(node):
        index, values = added
        compute = partial(_add_rows, groups=len(node.meta["val"]))
        return Choices(node, index, (values, index, *by), compute)
    return None


def sorted_index_of(ends: fx.Node) -> fx.Node | None:
    """Return the sorted index behind group ends, if the program counted it."""
    counted = _uncast(ends)
    if counted.target is not aten.cumsum.default or _uncast(counted.args[0]).target is not _COUNT:
        return None
    x, *bins = _uncast(counted.args[0]).args
    index, groups = _uncast(x), len(ends.meta["val"])
    is_sorted = index.target is operator.getitem and index.args[0].target in _SORTS
    # histc with these bins counts the rows of each group.
    if bins != [groups, 0, groups - 1] or not is_sorted or index.args[1] != 0:
        return None
    return index if list(index.args[0].args[1:]) in _ASCENDING else None


_READS = aten.index.Tensor, aten._unsafe_index.Tensor
_ADDS = aten.index_put.default, aten._unsafe_index_put.default
ROWS_BY_INDEX = {*_READS, *_ADDS, aten.index_select.default, aten.index_add.default}
_COUNT, _SORTS = aten.histc.default, (aten.sort.default, aten.sort.stable)
_ASCENDING: list[list[Any]] = [[], [-1], [0]]


def _uncast(node: fx.Node) -> fx.Node:
    while node.target is aten._to_copy.default:
        node = node.args[0]
    return node


def _chosen_from(node: object) -> tuple[fx.Node, fx.Node] | None:
    """Return (table, index) for table[index] with a 1-d index, else None."""
    if not isinstance(node, fx.Node) or node.meta.get("dynamic"):
        return None
    args: Any = node.args
    if node.target in _READS:
        table, indices = args
        index, fits = indices[0], _is_first_alone(indices)
    elif node.target is aten.index_select.default:
        table, dim, index = args
        fits = dim == 0
    else:
        return None
    return (table, index) if fits and _is_index(index) and table.meta["val"].dim() > 1 else None


def _is_first_alone(indices: list[fx.Node | None]) -> bool:
    return [i is not None for i in indices] == [True] + [False] * (len(indices) - 1)


def _is_index(index: fx.Node) -> bool:
    val = index.meta["val"]
    return val.dim() == 1 and val.numel() > 0 and val.dtype in (torch.int32, torch.int64)


def _added_to(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return (index, values) if values are added to rows of zeros, else None."""
    if node.meta.get("dynamic"):
        return None
    args: Any = node.args
    if node.target in _ADDS:
        table, indices, values, *accumulate = args
        index, fits = indices[0], _is_first_alone(indices) and accumulate == [True]
    elif node.target is aten.index_add.default and not node.kwargs:
        table, dim, index, values = args
        fits = dim == 0
    else:
        return None
    if not fits or constant_of(table) != 0 or not _is_index(index):
        return None
    shape = [*index.meta["val"].shape, *node.meta["val"].shape[1:]]
    return (index, values) if list(values.meta["val"].shape) == shape else None


def _unmoved(node: fx.Node, letters: str) -> tuple[fx.Node, str]:
    """Return a value before permutations and casts, and the letters for its dimensions there."""
    order = list(letters)
    while isinstance(node, fx.Node):
        if node.target is aten.permute.default:
            dims = [d % len(order) for d in node.args[1]]
            order = [order[dims.index(d)] for d in range(len(order))]
        elif node.target is aten.transpose.int:
            one, other = node.args[1:]
            order[one], order[other] = order[other], order[one]
        elif node.target is not aten._to_copy.default or set(node.kwargs) != {"dtype"}:
            break
        node = node.args[0]
    return node, "".join(order)


def _product(
    chosen: tuple[fx.Node, fx.Node], x: fx.Node, w_letters: str, x_letters: str, out: str
) -> Choices | None:
    """Return a product with chosen matrices, if each row meets one matrix."""
    table, index = chosen
    # The chosen matrices are [t, ...], so their first letter is the row.
    row = w_letters[0]
    k = "".join(c for c in x_letters if c in w_letters and c not in out)
    n = "".join(c for c in out if c in w_letters and c != row)
    ones = "".join(c for c in x_letters if c != row and c not in k)
    sizes = dict(zip(w_letters, (len(index.meta["val"]), *table.meta["val"].shape[1:])))
    sizes |= dict(zip(x_letters, x.meta["val"].shape))
    if row not in x_letters or row not in out or set(n) & set(x_letters):
        return None
    if any(sizes[c] != 1 for c in ones) or 0 in sizes.values():
        return None

    def compute(x: Tensor, table: Tensor, index: Tensor, shards: int) -> Tensor:
        rows = _ordered(x, x_letters, row + ones + k).reshape(len(index), _count(k, sizes))
        matrices = _ordered(table.to(x.dtype), w_letters, row + k + n)
        matrices = matrices.reshape(len(table), _count(k, sizes), _count(n, sizes))
        y = mm_by_blocks(rows, matrices, index, shards=shards, groups=len(table))
        return _ordered(y.reshape([sizes[c] for c in row + ones + n]), row + ones + n, out)

    return Choices(table, index, (x, table, index), compute)


def _gradient(node: fx.Node, index: fx.Node, product: fx.Node, order: str) -> Choices | None:
    """Return the sum over each choice's rows of their outer products.

    order: the letters of the gradient, in the product's dimension order.
    """
    x, y = product.args[1:]
    a, b, out = split_equation(product.args[0])
    # A letter of the gradient -> the product's letter.
    back = dict(zip(order, out))
    dims = "".join(back[c] for c in sorted(order))
    row, groups, dtype = dims[0], len(node.meta["val"]), node.meta["val"].dtype
    k = "".join(c for c in a if c in out and c != row)
    n = "".join(c for c in b if c in out and c != row)
    ones = "".join(c for c in a if c in b and c not in out)
    sizes = dict(zip(a, x.meta["val"].shape)) | dict(zip(b, y.meta["val"].shape))
    if row not in a or row not in b or set(k) & set(n) or 0 in sizes.values():
        return None
    if any(sizes[c] != 1 for c in ones):
        return None

    def compute(x: Tensor, y: Tensor, index: Tensor, shards: int) -> Tensor:
        xs = _ordered(x, a, row + ones + k).reshape(len(index), _count(k, sizes))
        ys = _ordered(y, b, row + ones + n).reshape(len(index), _count(n, sizes))
        sums = outer_by_blocks(xs, ys, index, shards=shards, groups=groups)
        shape = [sizes[c] for c in k + n]
        return _ordered(sums.reshape(groups, *shape), row + k + n, dims).to(dtype)

    return Choices(node, index, (x, y, index), compute)


def _read_rows(table: Tensor, index: Tensor, *rest: object) -> Tensor:
    """Return the rows of a table [e, ...] that an index [t] chooses."""
    by, groups, shards = _grouped_by(index, len(table), *rest)
    # A row is the product of a one with it, in rows as long as PyTorch's kernel takes.
    rows = table.reshape(len(table), 1, -1)
    rows = aten.constant_pad_nd(rows, [0, 0, 0, _lanes(table) - 1])
    out = mm_by_blocks(_ones(index, table), rows, by, shards=shards, groups=groups)
    return out.reshape(len(index), *table.shape[1:])


def _add_rows(values: Tensor, index: Tensor, *rest: object, groups: int) -> Tensor:
    """Return [e, ...]: for each choice the sum over its rows in values [t, ...]."""
    by, named, shards = _grouped_by(index, groups, *rest)
    flat = values.reshape(len(index), -1)
    sums = outer_by_blocks(_ones(index, values), flat, by, shards=shards, groups=named)
    return sums[:, 0].reshape(groups, *values.shape[1:])


def _grouped_by(index: Tensor, groups: int, *rest: Any) -> tuple[Tensor, int, int]:
    """Return (index or ends, groups or 0, shards). rest: [ends,] shards."""
    *ends, shards = rest
    return (ends[0], 0, shards) if ends else (index, groups, shards)


def _lanes(like: Tensor) -> int:
    """Return the row length that PyTorch's kernel takes."""
    return KERNEL_BYTES // like.element_size()


def _ones(index: Tensor, like: Tensor) -> Tensor:
    """Return [t, lanes]: a one in each row, and zeros behind it."""
    ones = (torch.arange(_lanes(like), device=like.device) == 0).to(like.dtype)
    return ones.expand(len(index), -1).clone()


def _ordered(x: Tensor, letters: str, order: str) -> Tensor:
    return x if letters == order else x.permute([letters.index(c) for c in order])


def _count(letters: str, sizes: dict[str, int]) -> int:
    return math.prod(sizes[c] for c in letters)


# Group rows by the matrix that an index chooses for each, where the matrices are sharded.
#
#     %ws = index(%table, [%index])                table: expert _ _, on expert=4, for 8 groups
#     %y  = einsum(tk,tkn->tn, %x, %ws)
#
# `split_groups` replaces them by
#
#     %xs = take_blocks(%x, %index, 4, 8)          [4, t, k]
#     %ys = block_mm(%xs, %ws, %index, 4, 8)
#     %y  = put_blocks(%ys, %index, 4, 8)          [t, n]
#
# The same index may add further values to such rows, as biases. They are read by blocks too, so
# that they never force a replicated result.


def group_choices(
    graph: fx.Graph, layouts: Layouts, rules: Rules, splitting: Mapping[fx.Node, int]
) -> bool:
    """Rewrite the graph in place; return whether it has such products.

    splitting: products over sorted groups that are computed by blocks, with the number of shards.
    """
    cuts: dict[fx.Node, tuple[int, fx.Node | None]] = {}  # index -> shards, ends if it is sorted
    for product, shards in splitting.items():
        ends = product.args[2]
        if (index := sorted_index_of(ends)) is not None:
            cuts[index] = shards, ends
    products = [(node, found) for node in graph.nodes if (found := product_of_choices(node))]
    # On one shard, each row's matrix is there anyway.
    products = [(node, found) for node, found in products if _shards(found, layouts) > 1]
    for node, choices in products:
        cuts[choices.index] = _shards(choices, layouts), None
        _compute_by_blocks(node, choices, _shards(choices, layouts))
    drop_unused(graph)
    for node in list(graph.nodes) if cuts else ():
        choices = rows_of_choices(node)
        if choices is None or choices.index not in cuts:
            continue
        shards, ends = cuts[choices.index]
        # A value that is only added to others may be pending as they are.
        users = [rules.op(user) if user.op == "call_function" else None for user in node.users]
        is_added = all(op is not None and op.rule.joins for op in users)
        if _shards(choices, layouts) > 1 or choices.table is node or is_added:
            _compute_by_blocks(node, rows_of_choices(node, ends), shards)
    drop_unused(graph)
    return bool(products)


def _shards(choices: Choices, layouts: Layouts) -> int:
    """Return the number of shards into which propagation cuts a table."""
    spec = layouts.spec.get(choices.table)
    return layouts.mesh.count(spec.dims[0]) if spec is not None else 1


def _compute_by_blocks(node: fx.Node, choices: Choices | None, shards: int) -> None:
    assert choices is not None
    values = tuple(v.meta["val"] for v in choices.operands)
    inner = trace(choices.compute, (*values, shards), {})
    if inner is DECLINED:
        return
    with node.graph.inserting_before(node):
        out = inline(node.graph, inner, choices.operands, origin_of(node))
    node.replace_all_uses_with(out)
