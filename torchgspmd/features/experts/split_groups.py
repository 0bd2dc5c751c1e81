"""Compute row groups on the devices that have their matrices, and nowhere else.

before   %y = grouped_mm(%x, %w, %ends)              w: expert _ _, on expert=4
         %h = silu(%y)
         %z = grouped_mm(%h, %v, %ends)              v: expert _ _
after    %xs = take_blocks(%x, %ends, 4)             [4@expert, t, k]
         %hs = silu(block_mm(%xs, %ws, %ends, 4))    [4@expert, t, m]
         %zs = block_mm(%hs, %vs, %ends, 4)          [4@expert, t, n]
         %z  = put_blocks(%zs, %ends)                [t, n], pending over expert
needs    a propagated graph, rules
source   ours

Operations between two products are computed for each block too, if each result row depends on the
same row in their operands alone. So nothing is reduced between the products. A sum over several
results is put back once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.fx_nodes import inline, origin_of
from ...compat.private_apis import _pytree as pytree
from ...fx_passes.ir import Op, Rules, is_operation, operands_of
from ...rules import DECLINED, FactorRule, trace
from .rule import BlockCut, put_blocks_of, taken_blocks_of

# The longest chain between two grouped products that is lifted; a layer has fewer operations.
MAX_DEPTH = 32


def keep_blocks(graph: fx.Graph, rules: Rules) -> fx.Graph:
    """Compute the nodes between blocks by blocks; rewrite the graph in place and return it."""
    lifter = _Lifter(graph, rules)
    for node in list(graph.nodes):
        if (taken := taken_blocks_of(node)) and (blocks := lifter.lift(*taken, node)):
            node.replace_all_uses_with(blocks)
        elif put := put_blocks_of(node):
            for addition in _additions_after(node, rules, put[1].lead):
                lifter.add_by_blocks(addition, put[1])
    # Operations on rows whose blocks took over have no users.
    graph.eliminate_dead_code()
    return graph


def _additions_after(node: fx.Node, rules: Rules, lead: int) -> Iterator[fx.Node]:
    """Yield the additions that take a value, or another value with only its rows."""
    for user in node.users:
        if user.op != "call_function" or not is_operation(user):
            continue
        op = rules.op(user)
        if op.rule.joins:
            yield user
        elif len(op.operands) == 1 and op.results == (user,) and _operands_with_rows(op, lead):
            yield from _additions_after(user, rules, lead)


class _Lifter:
    """Computes values by row blocks, each only once."""

    def __init__(self, graph: fx.Graph, rules: Rules) -> None:
        self.graph, self.rules = graph, rules
        self.lifted: dict[tuple[fx.Node, BlockCut], fx.Node | None] = {}

    def lift(
        self, value: fx.Node, cut: BlockCut, before: fx.Node, depth: int = 0
    ) -> fx.Node | None:
        """Return a value's blocks; None if it is not computed from blocks of these groups."""
        key = value, cut
        if key not in self.lifted:
            put = put_blocks_of(value)
            if put is not None:
                # Blocks with another cut hold other rows.
                self.lifted[key] = put[0] if put[1] == cut else None
            else:
                self.lifted[key] = None
                self._lift_operation(value, cut, before, depth)
        return self.lifted[key]

    def add_by_blocks(self, node: fx.Node, cut: BlockCut) -> None:
        """Add up blocks, if every summand is blocks that were put back."""
        if all(self.lift(value, cut, node) for value in operands_of(node)):
            blocks = self.lift(node, cut, node)
            if blocks is not None:
                with self.graph.inserting_before(node):
                    put = put_blocks_node(self.graph, node, blocks, cut)
                node.replace_all_uses_with(put)
                self.lifted[put, cut] = blocks

    def _lift_operation(self, value: fx.Node, cut: BlockCut, before: fx.Node, depth: int) -> None:
        """Note the blocks for all results of the operation that computes a value."""
        node: Any = value.args[0] if value.target is operator.getitem else value
        if depth >= MAX_DEPTH or not is_operation(node):
            return
        op = self.rules.op(node)
        has_rows = _operands_with_rows(op, cut.lead)
        if has_rows is None:
            return
        operands: list[fx.Node | None] = [
            self.lift(v, cut, before, depth + 1) if rows else None
            for v, rows in zip(op.operands, has_rows)
        ]
        if not any(operands):
            return
        with self.graph.inserting_before(before):
            for i, (v, rows) in enumerate(zip(op.operands, has_rows)):
                if rows and operands[i] is None:
                    operands[i] = self._take(v, cut)
            results = self._emit(op, has_rows, operands, cut.lead)
        for result, lifted in zip(op.results, results or ()):
            if result is not None:
                self.lifted[result, cut] = lifted

    def _take(self, value: fx.Node, cut: BlockCut) -> fx.Node:
        """Return the blocks of a value that exists as a whole."""
        key = value, cut
        if self.lifted.get(key) is None:
            self.lifted[key] = take_blocks_node(self.graph, *key)
        lifted = self.lifted[key]
        assert lifted is not None
        return lifted

    def _emit(
        self, op: Op, has_rows: list[bool], operands: list[fx.Node | None], lead: int
    ) -> list[fx.Node] | None:
        """Return an operation's results on blocks, by a copy or by its vmap."""
        inputs = [lifted or v for v, lifted in zip(op.operands, operands)]
        if _is_elementwise(op) and op.results == (op.node,):
            copy = self.graph.node_copy(op.node, dict(zip(op.operands, inputs)).__getitem__)
            first = next(v for v, r in zip(inputs, has_rows) if r)
            val = _with_blocks(op.node.meta["val"], first.meta["val"].shape[lead], lead)
            copy.meta = {**carried_meta(op.node), "val": val}
            return [copy]
        leaves, tree = pytree.tree_flatten((op.node.args, dict(op.node.kwargs)))

        def call(*tensors: Tensor) -> Any:
            rest = iter(tensors)
            args, kwargs = pytree.tree_unflatten(
                [next(rest) if isinstance(leaf, fx.Node) else leaf for leaf in leaves], tree
            )
            return op.node.target(*args, **kwargs)

        # Operands without rows are the same for all blocks.
        batched = torch.vmap(
            call, in_dims=tuple(lead if rows else None for rows in has_rows), out_dims=lead
        )
        try:
            inner = trace(batched, tuple(v.meta["val"] for v in inputs), {})
        except (NotImplementedError, RuntimeError, TypeError, ValueError):
            return None  # as for random numbers, and operators without a rule for vmap
        if inner is DECLINED or any(map(_writes, inner.nodes)):
            return None
        out = inline(self.graph, inner, inputs, carried_meta(op.node))
        return list(out) if isinstance(out, (tuple, list)) else [out]


def take_blocks_node(graph: fx.Graph, value: fx.Node, cut: BlockCut) -> fx.Node:
    target = torch.ops.torchgspmd.take_blocks.default
    node = graph.call_function(target, (value, *cut.arguments))
    val = _with_blocks(value.meta["val"], cut.blocks, cut.lead)
    node.meta = {**carried_meta(value), "val": val}
    return node


def _with_blocks(val: Tensor, blocks: int, lead: int) -> Tensor:
    """Return a value like rows, with a block dimension before them."""
    return val.new_empty([*val.shape[:lead], blocks, *val.shape[lead:]])


def put_blocks_node(graph: fx.Graph, value: fx.Node, blocks: fx.Node, cut: BlockCut) -> fx.Node:
    """Add a node that puts a value's blocks back."""
    target = torch.ops.torchgspmd.put_blocks.default
    node = graph.call_function(target, (blocks, *cut.arguments))
    node.meta = {**carried_meta(value), "val": value.meta["val"]}
    return node


def carried_meta(node: fx.Node) -> dict[str, Any]:
    """Return the metadata that a node with other shapes takes over."""
    return origin_of(node)


def _is_elementwise(op: Op) -> bool:
    """Return whether all operands and results have the same dimensions and sizes, or none.

    Operations that name dimensions or sizes, as a softmax, do not count.
    """
    tensors = [*zip(op.rule.operands, op.operands), *zip(op.rule.results, op.results)]
    whole = {(dims, v.meta["val"].shape) for dims, v in tensors if dims and v is not None}
    return len(whole) == 1 and torch.Tag.pointwise in getattr(op.node.target, "tags", ())


def _writes(node: fx.Node) -> bool:
    """Return whether a node changes an operand."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _operands_with_rows(op: Op, lead: int) -> list[bool] | None:
    """Return for each operand whether it has all results' rows, behind `lead` dimensions.

    None if a result row depends on more than one operand row.
    """
    rule: FactorRule = op.rule
    fronts = {dims[: lead + 1] for dims in rule.results}
    if len(fronts) != 1 or rule.contraction or "mark" in op.node.meta:
        return None
    (front,) = fronts
    # Rows along these factors mix, or cannot be cut.
    bound = rule.replicated | rule.special | rule.windowed | set(rule.reduce)
    if len(front) <= lead or any(len(dim) != 1 or dim[0] in bound for dim in front):
        return None
    (row,) = front[lead]
    places = [[d for d, names in enumerate(dims) if row in names] for dims in rule.operands]
    fits = all(
        at == [] or at == [lead] and dims[: lead + 1] == front
        for at, dims in zip(places, rule.operands)
    )
    return [bool(at) for at in places] if fits and any(places) else None
