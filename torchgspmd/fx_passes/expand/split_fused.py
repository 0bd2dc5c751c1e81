"""Choose the fused operations to decompose: those sharded along a dimension they need whole.

before   %y = softmax(%x, -1)        x, y: data model
after    {%y: two shards ..}         for decompose_ops: of the last dimension
needs    a propagated graph, rules
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence

from torch import fx

from ...layout.halo_window import sent_rows
from ...rules import SplitRequest
from ...rules.notation import Split
from ...rules.ops.concat_slice import goes_by_parts
from ..ir import Op, Rules, tensors_of
from ..program import Program
from ..propagate.layouts import Layouts


def block_ops_to_split(
    graph: fx.Graph, layouts: Layouts, rules: Rules
) -> dict[fx.Node, SplitRequest]:
    """Return the operations to compute block by block."""
    shards = {op: _block_shards(op, layouts) for op in rules.ops(graph)}
    return {op.node: _request(op, count, layouts) for op, count in shards.items() if count > 1}


def _request(op: Op, shards: int, layouts: Layouts) -> SplitRequest:
    """Return how an operation is sharded that is split over `shards` devices."""
    counts = {
        value: tuple(map(layouts.mesh.count, layouts.spec[value].dims)) for value, _ in op.tensors
    }
    return SplitRequest(
        shards,
        tuple(counts[value] for value in op.operands),
        tuple(value and counts[value] for value in op.results),
    )


def _block_shards(op: Op, layouts: Layouts) -> int:
    """Return into how many shards propagation cuts the factor that is computed block by block."""
    blocks = _split_of(op).blocks
    return max(
        (
            layouts.mesh.count(axes)
            for value, dims in op.tensors
            for factors, axes in zip(dims, layouts.spec[value].dims)
            if blocks in factors
        ),
        default=1,
    )


def split_fused(p: Program, tried: bool = False) -> fx.Graph | None:
    """Decompose operations that are sharded along a dimension which they need whole.

    tried: those that send less in parts, or more, as the partition shows. A sort (18.sort_1d_x8 of
    the communication suite) sends 1,408 bytes in parts, 3,584 without.
    """
    splitting = _ops_to_split(p.graph, p.layouts, p.rules, tried)
    if not splitting:
        return None
    graph = p.request.expand(p.graph, splitting)
    # Of 9 rows, 4 blocks cannot be equal. An operation that stays is no change: this pass and
    # keep_dims, whose work expand undoes, would run forever.
    return None if _calls(graph) == _calls(p.request.expand(p.graph)) else graph


def _calls(graph: fx.Graph) -> Counter[Hashable]:
    """Count the calls of operations, by the shapes of their results."""
    calls = (node for node in graph.nodes if node.op == "call_function")
    return Counter((n.target, *(t.shape for t in tensors_of(n))) for n in calls)


def _ops_to_split(
    graph: fx.Graph, layouts: Layouts, rules: Rules, tried: bool
) -> dict[fx.Node, SplitRequest]:
    """Return the operations to decompose, and how they are sharded. tried: as in Split."""
    ops = {op.node: op for op in rules.ops(graph)}
    split = {
        node: _shards_of(op, layouts)
        for node, op in ops.items()
        if op.rule.split is not None and op.rule.split.blocks is None
        if op.rule.split.tried == tried
    }
    split = {
        node: shards
        for node, shards in split.items()
        if shards > 1 and not (tried and _has_free_dim(ops[node], shards, layouts))
    }
    # Again until nothing changes: an operation that stays fused may tie the next one to it.
    while unsplittable := [node for node in split if _is_tied_to_whole_op(ops[node], ops, split)]:
        for node in unsplittable:
            del split[node]
    return {node: _request(ops[node], shards, layouts) for node, shards in split.items()}


def _has_free_dim(op: Op, shards: int, layouts: Layouts) -> bool:
    """Return whether a factor that may be sharded has room for so many shards more."""
    value, dims = op.tensors[0]
    return any(
        op.rule.replicated.isdisjoint(factors) and size >= layouts.mesh.count(axes) * shards
        for factors, size, axes in zip(dims, value.meta["val"].shape, layouts.spec[value].dims)
    )


def _is_tied_to_whole_op(op: Op, ops: Mapping[fx.Node, Op], split_ops: Collection[fx.Node]) -> bool:
    """Return whether an operation shares an intermediate with one that stays fused.

    Max-pool indices are an example. Both are split or neither, since the formats differ.
    """
    split = _split_of(op)
    if split.takes is not None:
        # The operand is an element of a tuple; its input is the operation that returns the tuple.
        makers = op.operands[split.takes].all_input_nodes
        return not makers or makers[0] not in split_ops or _split_of(ops[makers[0]]).hands is None
    handed = op.results[split.hands] if split.hands is not None else None
    return handed is not None and any(
        user not in split_ops or _split_of(ops[user]).takes is None for user in handed.users
    )


def _split_of(op: Op) -> Split:
    return op.rule.split or Split()


def _whole_shards(op: Op, layouts: Layouts) -> int:
    """Return into how many shards propagation cuts a factor that the operation needs whole.

    Only its largest tensors count.
    """
    # Gathering a small operand is cheaper than splitting the operation.
    largest = max(value.meta["val"].numel() for value, _ in op.tensors)
    tensors = [
        (value, *_axes(value, dims, op, layouts))
        for value, dims in op.tensors
        if value.meta["val"].numel() == largest
    ]
    operand_axes, result_axes = (
        [(along, across) for value, along, across in tensors if value in of]
        for of in (op.operands, op.results)
    )
    if operand_axes and result_axes:
        pairs = itertools.product(operand_axes, result_axes)
        if all(of[0] & across or along & of[1] for of, (along, across) in pairs):
            return 1  # Operands are resharded to the results anyhow, and can be whole then.
    return max(layouts.mesh.count(tuple(along)) for _, along, _ in tensors)


def _axes(
    value: fx.Node, dims: Sequence[tuple[str, ...]], op: Op, layouts: Layouts
) -> tuple[set[str], set[str]]:
    """Return the axes that shard a value along factors needed whole, and its other axes."""
    along = {
        a
        for axes, factors in zip(layouts.spec[value].dims, dims)
        if not op.rule.replicated.isdisjoint(factors)
        for a in axes
    }
    return along, set(layouts.spec[value].sharding_axes) - along


def _uneven_shards(op: Op, layouts: Layouts) -> int:
    """Return into how many uneven shards propagation cuts a dimension's major factor.

    The factor is alone in one tensor, and the first among several in another tensor's dimension.
    """
    # Shards of r s rows need not hold whole groups of s, unless the devices divide r.
    shared = {factors[0] for _, dims in op.tensors for factors in dims if len(factors) > 1}
    counts = (
        layouts.mesh.count(axes)
        for value, dims in op.tensors
        for factors, axes in zip(dims, layouts.spec[value].dims)
        if len(factors) == 1
        and factors[0] in shared
        and op.rule.sizes[factors[0]] % layouts.mesh.count(axes)
    )
    return max(counts, default=1)


def _multi_factor_shards(op: Op, layouts: Layouts) -> int:
    """Return into how many shards propagation cuts a dimension that several factors share.

    Only if they divide the minor factors and not the major one.
    """
    dims = (
        (factors, layouts.mesh.count(axes))
        for value, dims in op.tensors
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
    """Return into how many shards propagation cuts a factor whose shards need a halo."""
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


def axes_along(op: Op, factor: str | None, layouts: Layouts) -> list[tuple[str, ...]]:
    """Return the axes along a factor, for each tensor that has it alone in a dimension."""
    return [
        layouts.spec[value].dims[d]
        for value, dims in op.tensors
        for d, factors in enumerate(dims)
        if factors == (factor,) and layouts.spec[value].dims[d]
    ]


def _shards_of(op: Op, layouts: Layouts) -> int:
    """Return over how many devices an operation that is sharded along `split` is split."""
    split = _split_of(op)
    if split.merges:
        # Into how many shards propagation cuts a factor along which results are merged. 1 if the
        # results use its axes otherwise.
        axes = {a for along in axes_along(op, _split_of(op).merges, layouts) for a in along}
        if any(axes & {*layouts.spec[v].sharding_axes} for v in op.results if v is not None):
            return 1
        return layouts.mesh.count(tuple(axes))
    ways = (_whole_shards, _uneven_shards, _multi_factor_shards, _window_shards)
    return max(shards(op, layouts) for shards in ways)
