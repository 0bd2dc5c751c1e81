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

from torch import Tensor, fx

from ...compat.fx_nodes import origin_of
from ...fx_passes.expand.batched_op import add_batched, with_dim
from ...fx_passes.ir import Op, Rules, is_operation, operands_of
from ...rules import FactorRule
from .op import put_blocks, take_blocks
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
                    put = _blocks_node(put_blocks, blocks, cut, node, node.meta["val"])
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
            inputs = [lifted or v for v, lifted in zip(op.operands, operands)]
            results = add_batched(self.graph, op, has_rows, inputs, cut.lead)
        for result, lifted in zip(op.results, results or ()):
            if result is not None:
                self.lifted[result, cut] = lifted

    def _take(self, value: fx.Node, cut: BlockCut) -> fx.Node:
        """Return the blocks of a value that exists as a whole."""
        key = value, cut
        if self.lifted.get(key) is None:
            val = with_dim(value.meta["val"], cut.blocks, cut.lead)
            self.lifted[key] = _blocks_node(take_blocks, value, cut, value, val)
        lifted = self.lifted[key]
        assert lifted is not None
        return lifted


def _blocks_node(op: Any, rows: fx.Node, cut: BlockCut, value: fx.Node, val: Tensor) -> fx.Node:
    """Add a node that takes a value's blocks, or puts them back. val: of its result."""
    node = value.graph.call_function(op._opoverload, (rows, *cut.arguments))
    node.meta = {**origin_of(value), "val": val}
    return node


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
