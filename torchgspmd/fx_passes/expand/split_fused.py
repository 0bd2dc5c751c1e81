"""Which fused operations have to be taken apart, since propagation shards what they need whole.

before   %y = softmax(%x, -1)        x, y: data model
after    {%y: 2}                     for expand, which knows how: two shards of the last dimension
needs    a propagated graph, rules
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from torch import fx

from ...halo import sent_rows
from ...rules.ops.concat_slice import goes_by_parts
from ..ir import Op, Rules
from ..propagate.propagate import Layouts


def ops_to_split(graph: fx.Graph, layouts: Layouts, rules: Rules) -> dict[fx.Node, int]:
    """The operations, and over how many devices they are sharded there."""
    ops = {op.node: op for op in rules.ops(graph)}
    found = {
        node: max(
            shards(op, layouts)
            for shards in (_whole_shards, _uneven_shards, _parted_shards, _window_shards)
        )
        for node, op in ops.items()
        if op.rule.splits
    }
    found = {node: shards for node, shards in found.items() if shards > 1}
    while alone := [node for node in found if _is_alone(ops[node], ops, found)]:
        for node in alone:
            del found[node]
    return found


def _is_alone(op: Op, ops: Mapping[fx.Node, Op], found: Collection[fx.Node]) -> bool:
    """Whether it hands a result to, or takes one from, an operation that stays whole: the result
    would have two forms.
    """
    rule = op.rule
    if rule.takes is not None:
        makers = op.operands[rule.takes].all_input_nodes  # of the element of a tuple: the operation
        return not makers or makers[0] not in found or ops[makers[0]].rule.hands is None
    handed = op.results[rule.hands] if rule.hands is not None else None
    return handed is not None and any(
        user not in found or ops[user].rule.takes is None for user in handed.users
    )


def _whole_shards(op: Op, layouts: Layouts) -> int:
    """Into how many shards propagation cuts a factor that the fused operation needs whole, in one
    of its largest tensors.
    """
    largest = max(value.meta["val"].numel() for value, _ in _tensors(op))
    tensors = [
        (value, *_axes(value, dims, op, layouts))
        for value, dims in _tensors(op)
        if value.meta["val"].numel() == largest
    ]
    taken, made = (
        [(along, across) for value, along, across in tensors if value in of]
        for of in (op.operands, op.results)
    )
    if (
        len(taken) == 1
        and made
        and all(taken[0][0] & across or along & taken[0][1] for along, across in made)
    ):
        return 1  # the one has to become the others, and can be whole then
    return max(layouts.mesh.count(tuple(along)) for _, along, _ in tensors)


def _axes(
    value: fx.Node, dims: Sequence[tuple[str, ...]], op: Op, layouts: Layouts
) -> tuple[set[str], set[str]]:
    """Those that shard a value along factors that are needed whole, and the others."""
    along = {
        a
        for axes, factors in zip(layouts.spec[value].dims, dims)
        if not op.rule.whole.isdisjoint(factors)
        for a in axes
    }
    return along, set(layouts.spec[value].sharding_axes) - along


def _tensors(op: Op) -> list[tuple[fx.Node, Sequence[tuple[str, ...]]]]:
    """Operands and results, with the factors of their dimensions."""
    return [
        (v, dims)
        for v, dims in zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results))
        if v is not None
    ]


def _uneven_shards(op: Op, layouts: Layouts) -> int:
    """Into how many shards propagation cuts a factor that they do not divide, and that shares a
    dimension of another tensor.
    """
    shared = {factors[0] for _, dims in _tensors(op) for factors in dims if len(factors) > 1}
    counts = (
        layouts.mesh.count(axes)
        for value, dims in _tensors(op)
        for factors, axes in zip(dims, layouts.spec[value].dims)
        if len(factors) == 1
        and factors[0] in shared
        and op.rule.sizes[factors[0]] % layouts.mesh.count(axes)
    )
    return max(counts, default=1)


def _parted_shards(op: Op, layouts: Layouts) -> int:
    """Into how many shards propagation cuts a dimension of several factors, of which they divide
    only the others than the major one.
    """
    dims = (
        (factors, layouts.mesh.count(axes))
        for value, dims in _tensors(op)
        for factors, axes in zip(dims, layouts.spec[value].dims)
        if len(factors) > 1 and axes
    )
    sizes = (
        (op.rule.sizes[major], math.prod(op.rule.sizes[f] for f in others), count)
        for (major, *others), count in dims
    )
    return max(
        (count for rows, others, count in sizes if goes_by_parts(rows, others, count)), default=1
    )


def _window_shards(op: Op, layouts: Layouts) -> int:
    """Into how many shards propagation cuts a factor along which devices need rows of neighbours."""
    counts = [1]
    for (operand, dim), reach in op.rule.halo.items():
        value, (factor,) = op.operands[operand], op.rule.operands[operand][dim]
        count, size = (
            layouts.mesh.count(layouts.spec[value].dims[dim]),
            value.meta["val"].shape[dim],
        )
        if count > 1 and sent_rows(reach.bind(op.rule.sizes[factor], size, count), size, count):
            counts.append(count)
    return max(counts)
