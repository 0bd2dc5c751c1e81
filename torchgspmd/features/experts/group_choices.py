"""Group rows by the matrix that an index chooses for each, where the matrices are sharded.

    %ws = index(%table, [%index])                table: expert _ _, on expert=4, for 8 groups
    %y  = einsum(tk,tkn->tn, %x, %ws)

`split_groups` replaces them by

    %xs = take_blocks(%x, %index, 4, 8)          [4, t, k]
    %ys = block_mm(%xs, %ws, %index, 4, 8)
    %y  = put_blocks(%ys, %index, 4, 8)          [t, n]

The same index may add further values to such rows, as biases. They are read by blocks too, so that
they never force a replicated result.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ...compat.fx_nodes import drop_unused, inline
from ...fx_passes.ir import Rules
from ...fx_passes.propagate.layouts import Layouts
from ...rules import DECLINED, trace
from .chosen import Choices, product_of_choices, rows_of_choices, sorted_index_of
from .split_groups import carried_meta


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
        if _shards(choices, layouts) > 1 or choices.table is node or _is_added(node, rules):
            _compute_by_blocks(node, rows_of_choices(node, ends), shards)
    drop_unused(graph)
    return bool(products)


def _shards(choices: Choices, layouts: Layouts) -> int:
    """Return the number of shards into which propagation cuts a table."""
    spec = layouts.spec.get(choices.table)
    return layouts.mesh.count(spec.dims[0]) if spec is not None else 1


def _is_added(node: fx.Node, rules: Rules) -> bool:
    """Return whether a value is only added to others, so that it may be pending as they are."""
    return all(user.op == "call_function" and rules.op(user).rule.joins for user in node.users)


def _compute_by_blocks(node: fx.Node, choices: Choices | None, shards: int) -> None:
    """Compute a node by blocks instead."""
    assert choices is not None
    values = tuple(v.meta["val"] for v in choices.operands)
    inner = trace(choices.compute, (*values, shards), {})
    if inner is DECLINED:
        return
    with node.graph.inserting_before(node):
        out = inline(node.graph, inner, choices.operands, carried_meta(node))
    node.replace_all_uses_with(out)
