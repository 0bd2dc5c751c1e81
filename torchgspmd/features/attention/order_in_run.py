"""An order of tokens that each run computes, for a mask whose buffers planning does not know.

    %documents = searchsorted(%cu_seqlens, %place);      %x = embedding(%table, %tokens)

is from then on

    %documents = searchsorted(%cu_seqlens, %place)
    %blocks = token_order([%documents], "aten.eq.Tensor(...)", 1, 4, 4096, 8, 64, 12.5)
    %tokens_1 = index_select(%tokens, 0, %blocks);       %x = embedding(%table, %tokens_1)

The mask's buffers are replicated, so all devices compute the same order without a message. The
operation bounds the mask over blocks (bounds.py) on the host, and searches as planning does.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.fx_nodes import origin_of
from ...compat.operators import aten, custom_op, draws
from ...compat.private_apis import OpOverload
from ...fx_passes.ir import tensors_of
from ...fx_passes.propagate.layouts import Layouts
from ...rules.notation import Call, FactorRule, factors
from ...rules.registry import rule_for
from ...shard_spec import ShardSpec
from .bounds import Visible
from .flex_op import READS_MASKS, Flex
from .tiles import Place
from .token_orders import TokenOrder, best_order

# Operations before a mask that may move in front of the program's others.
MOST = 200


def pairs_of(
    seen: Visible, queries: Sequence[tuple[int, int]], keys: Sequence[tuple[int, int]]
) -> Tensor:
    """Return how many pairs of each two blocks are computed: half of a block seen in part."""
    sizes = [torch.tensor(each, device="cpu").diff()[:, 0] for each in (queries, keys)]
    return (seen.some.double() + seen.whole) / 2 * sizes[0].view(-1, 1) * sizes[1]


@custom_op(
    "token_order",
    schema="(Tensor[] buffers, str mask, SymInt batch, SymInt heads, SymInt rows, SymInt shards, "
    "SymInt count, float pairs_per_row) -> Tensor",
    tags=READS_MASKS,
)
def token_order(
    buffers: Sequence[Tensor],
    mask: str,
    batch: int,
    heads: int,
    rows: int,
    shards: int,
    count: int,
    pairs_per_row: float,
) -> Tensor:
    """Return which block of tokens is at each of `count` places."""
    lead, width, cpu = (batch, 1, heads, rows, rows), rows // count, torch.device("cpu")
    pieces = [(i, i + width) for i in range(0, rows, width)]
    change = Flex([x.to(cpu) for x in buffers], mask, "", "")
    seen = change.blocks(lead, Place((0,) * 5, lead), pieces, pieces, cpu)
    assert seen is not None  # there is a mask
    pairs = pairs_of(seen, pieces, pieces)
    order = best_order(seen.some, pairs, shards, width * pairs_per_row)
    return order.to(buffers[0].device)


@token_order.register_fake
def _(buffers: Sequence[Tensor], mask: str, *args: Any) -> Tensor:
    return buffers[0].new_empty(args[4], dtype=torch.int64)


@rule_for(token_order._opoverload)
def _token_order(call: Call) -> FactorRule:
    names = [factors(f"u{i}_", x.dim()) for i, x in enumerate(call.tensors)]
    whole = [name for dims in names for name in dims] + ["p"]
    return call.rule(names, [["p"]], replicated=whole)


def add_order(
    graph: fx.Graph, layouts: Layouts, order: TokenOrder, like: fx.Node
) -> tuple[fx.Node, dict[bool, fx.Node]] | None:
    """Add the operations that compute an order, in front of the others.

    Returns:
        Where each block begins in the sequence; the blocks (False), and those of the way back
        (True). None if the mask needs too many operations, or one that is not pure.
    """
    buffers, mask, *sizes, pairs_per_row = order.in_run
    first = _before_all(graph, buffers)
    if first is None:
        return None
    meta = {**origin_of(like), "source": None, "backward": False}
    (x, *_) = tensors_of(like)
    place = x.new_empty(len(order.blocks), dtype=torch.int64)

    def add(op: Any, *args: Any, results: int = 1) -> fx.Node:
        with graph.inserting_before(first):
            node = graph.call_function(op, args)
        node.meta = meta | {"val": place if results == 1 else (place,) * results}
        if results == 1:
            layouts.spec[node] = ShardSpec.replicated(1)
        return node

    count = len(order.blocks)
    args = *sizes, order.rows, order.shards, count, pairs_per_row
    blocks = add(token_order._opoverload, [*buffers], mask, *args)
    back = add(operator.getitem, add(aten.sort.default, blocks, results=2), 1)
    return add(aten.mul.Scalar, blocks, order.rows // count), {False: blocks, True: back}


def _before_all(graph: fx.Graph, values: Sequence[fx.Node]) -> fx.Node | None:
    """Move values, and those that they need, in front of the other operations.

    Returns:
        The first operation behind them; None if they need too many, or one that is not pure.
    """
    needed, queue = dict[fx.Node, None](), [*values]
    while queue:
        node = queue.pop()
        if node in needed or node.op in ("placeholder", "get_attr"):
            continue
        if node.op != "call_function" or not is_pure(node.target) or len(needed) > MOST:
            return None
        needed[node] = None
        queue += node.all_input_nodes
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    for node in [node for node in graph.nodes if node in needed]:
        if node is first:
            first = node.next
        first.prepend(node)
    return first


def is_pure(target: Any) -> bool:
    """Return whether an operation follows from its arguments, and changes none."""
    if target is operator.getitem or not isinstance(target, OpOverload):
        return target is operator.getitem
    is_fixed = not draws(target) and not target._schema.is_mutable
    return target.namespace in ("aten", "prims") and is_fixed
