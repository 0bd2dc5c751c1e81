"""Which fused operations have to be taken apart, since propagation shards what they need whole.

before   %y = softmax(%x, -1)        x, y: data model
after    {%y: 2}                     for expand, which knows how: two shards of the last dimension
needs    a propagated graph, rules
"""
from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from torch import fx

from ..rules.parts import goes_by_parts
from ..window import sent_rows
from .graph import Op, Rules
from .propagate import Layouts


def to_split(graph: fx.Graph, layouts: Layouts, rules: Rules) -> dict[fx.Node, int]:
    """The operations, and over how many devices they are sharded there."""
    ops = {op.node: op for op in rules.ops(graph)}
    found = {node: max(shards(op, layouts) for shards in (_whole_shards, _uneven_shards, _parted_shards, _window_shards))
             for node, op in ops.items() if op.rule.splits}
    found = {node: shards for node, shards in found.items() if shards > 1}
    while alone := [node for node in found if _is_alone(ops[node], ops, found)]:
        for node in alone:
            del found[node]
    return found


def _is_alone(op: Op, ops: Mapping[fx.Node, Op], found: Collection[fx.Node]) -> bool:
    """Whether it hands a result to, or takes one from, an operation that stays whole: the result would have two forms."""
    rule = op.rule
    if rule.takes is not None:
        makers = op.operands[rule.takes].all_input_nodes                    # of the element of a tuple: the operation
        return not makers or makers[0] not in found or ops[makers[0]].rule.hands is None
    handed = op.results[rule.hands] if rule.hands is not None else None
    return handed is not None and any(user not in found or ops[user].rule.takes is None for user in handed.users)


def _whole_shards(op: Op, layouts: Layouts) -> int:
    """Into how many shards propagation cuts a factor that the fused operation needs whole, in one of its largest tensors."""
    tensors = [(v, d) for v, d in zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results)) if v is not None]
    largest = max(v.meta["val"].numel() for v, _ in tensors)
    return max((layouts.mesh.count(axes) for value, dims in tensors if value.meta["val"].numel() == largest
                for factors, axes in zip(dims, layouts.spec[value].dims) if set(factors) & op.rule.whole), default=1)


def _uneven_shards(op: Op, layouts: Layouts) -> int:
    """Into how many shards propagation cuts a factor that they do not divide, and that shares a dimension of another tensor."""
    tensors = [(v, d) for v, d in zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results)) if v is not None]
    shared = {factors[0] for _, dims in tensors for factors in dims if len(factors) > 1}
    counts = (layouts.mesh.count(axes) for value, dims in tensors for factors, axes in zip(dims, layouts.spec[value].dims)
              if len(factors) == 1 and factors[0] in shared and op.rule.sizes[factors[0]] % layouts.mesh.count(axes))
    return max(counts, default=1)


def _parted_shards(op: Op, layouts: Layouts) -> int:
    """Into how many shards propagation cuts a dimension of several factors, of which they divide only the others than the major one."""
    tensors = [(v, d) for v, d in zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results)) if v is not None]
    dims = ((factors, layouts.mesh.count(axes)) for value, dims in tensors for factors, axes in zip(dims, layouts.spec[value].dims)
            if len(factors) > 1 and axes)
    sizes = ((op.rule.sizes[major], math.prod(op.rule.sizes[f] for f in others), count) for (major, *others), count in dims)
    return max((count for rows, others, count in sizes if goes_by_parts(rows, others, count)), default=1)


def _window_shards(op: Op, layouts: Layouts) -> int:
    """Into how many shards propagation cuts a factor along which devices need rows of neighbours."""
    counts = [1]
    for (operand, dim), reach in op.rule.halo.items():
        value, (factor,) = op.operands[operand], op.rule.operands[operand][dim]
        count, size = layouts.mesh.count(layouts.spec[value].dims[dim]), value.meta["val"].shape[dim]
        if count > 1 and sent_rows(reach.bind(op.rule.sizes[factor], size, count), size, count):
            counts.append(count)
    return max(counts)
