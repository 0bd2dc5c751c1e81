"""Regions: operations whose strategies `partition` changes together, as none gains alone.

    %a = einsum(...);  %b = embedding_backward(...);  %c = reshape(%b);  %d = add(%a, %c)

sum      summands (here einsum and embedding_backward) that are only added: one reduction does
chain    operations on one tensor each, like reshape and transpose, one after the other
source   a contraction, positions counted, or another sum, with the chain that its result goes
         through
body     everything between contractions and marks, like a transformer's residual stream with its
         norms, forward and backward
thread   everything that one dimension runs through, also contractions, like the heads from their
         projections to the output projection
course   everything that an open input's dimension runs through, like a batch through a model
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from torch import fx

from ...layout.mesh import Mesh
from ...layout.open_sizes import is_whole
from ...shard_spec import Axes, ShardSpec
from ..ir import Op, has_one_use
from .assignment import Assignment
from .cost_constants import CostConstants


@lru_cache(maxsize=256)
def neighboring_parts(mesh: Mesh) -> tuple[tuple[str, str], ...]:
    """Return the axis pairs that follow on each other as parts of one axis."""
    return tuple(
        (major, minor)
        for major, minor in itertools.pairwise(mesh.names)
        if len(mesh.merge((major, minor))) == 1
    )


def pieces(
    mesh: Mesh, layouts: Iterable[ShardSpec] = (), sets: Iterable[Axes] = ()
) -> tuple[Axes, ...]:
    """Return all mesh axes, grouped in pieces: parts that stand together in all layouts around.

        mesh seq=8 split into seq:(1)2 and seq:(2)4
        %x : [64@seq:(1)2+seq:(2)4, 32]          one piece: the whole axis
        %q : [64@seq:(2)4, 4@seq:(1)2, 8]        two pieces

    One operation may need a part of an axis. For all others the axis is as it was. Searching its
    parts one by one would judge more candidates on a larger mesh for the same program.

    layouts: in which parts have to stand together; without any, each whole axis is a piece. sets:
    axis sets, each with both parts or none.
    """
    together = neighboring_parts(mesh)
    if together:
        layouts, sets = list(layouts), list(sets)
        together = [
            pair
            for pair in together
            if not any(_are_apart(layout, *pair) for layout in layouts)
            and not any((pair[0] in axes) != (pair[1] in axes) for axes in sets)
        ]
    grouped: list[Axes] = []
    for axis in mesh.names:
        if grouped and (grouped[-1][-1], axis) in together:
            grouped[-1] = (*grouped[-1], axis)
        else:
            grouped.append((axis,))
    return tuple(grouped)


def divides_all(mesh: Mesh, axes: Axes, sizes: Iterable[int]) -> bool:
    """Return whether axes divide all sizes that are large enough; where not, a part may."""
    count = mesh.count(axes)
    return all(not is_whole(n) and (n < count or n % count == 0) for n in sizes)


@lru_cache(maxsize=1 << 16)
def _are_apart(layout: ShardSpec, major: str, minor: str) -> bool:
    """Return whether a layout separates two axes that follow on each other."""
    for axes in layout.dims:
        if major in axes or minor in axes:
            return (major, minor) not in itertools.pairwise(axes)
    return (major in layout.pending) != (minor in layout.pending)


@dataclass(frozen=True, eq=False)
class Region:
    """Operations with the values between them.

    ops: in program order; in a sum first those that compute the summands, then the additions.
    values: the values between the operations, and the result.
    value: the result.
    """

    ops: tuple[Op, ...]
    values: frozenset[fx.Node]
    value: fx.Node

    @cached_property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The operations' nodes."""
        return tuple(op.node for op in self.ops)


@dataclass(frozen=True, eq=False)
class Body:
    """Connected operations with the factors that run through them.

    ops: in program order. classes: for each factor its name in the operations that have it.
    """

    ops: tuple[Op, ...]
    classes: tuple[Mapping[fx.Node, str], ...]

    @cached_property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The operations' nodes."""
        return tuple(op.node for op in self.ops)

    @cached_property
    def leaving(self) -> frozenset[fx.Node]:
        """The results that other operations use."""
        inside = {*self.nodes}
        results = (v for op in self.ops for v in op.results if v is not None)
        return frozenset(v for v in results if not inside.issuperset(v.users))


def adds(op: Op) -> bool:
    """Return whether an operation is like an addition: pending if both summands are."""
    return len(summand_indices(op)) == 2


def summand_indices(op: Op) -> Sequence[int]:
    """Return the operands that add up to the result: all, or several beside an index."""
    if len(op.results) != 1:
        return ()
    groups = [g for g in op.rule.linear if len(g) > 1 or len(g) == len(op.operands)]
    return sorted(groups[0]) if groups else ()


def passes(op: Op) -> bool:
    """Return whether the result is pending if all its summands are."""
    return bool(summand_indices(op))


def sums(at: Assignment) -> list[Region]:
    """Return all sums that have at least two summands, each used once."""
    totals = []
    for value, op in at.producers.items():
        user = at.ops.get(next(iter(value.users))) if has_one_use(value) else None
        # A sum ends where its user adds no more: inner additions are part of the longer sum.
        if passes(op) and (user is None or not passes(user)):
            totals.append(_collect(op, value, at))
    return [total for total in totals if total is not None]


def _collect(root: Op, value: fx.Node, at: Assignment) -> Region | None:
    """Return the sum that ends with an addition; None if a summand is used more than once."""
    passing, summands, values, stack = [], {}, {value}, [root]
    while stack:
        op = stack.pop()
        operands = [op.operands[i] for i in summand_indices(op)]
        # A sum of a shared value, like a bias gradient, is a summand of its own.
        if not operands or (op.rule.reduce and not has_one_use(op.operands[0])):
            summands[op.node] = op
            continue
        if not all(v in at.producers and has_one_use(v) for v in operands):
            return None
        passing.append(op)
        values.update(operands)
        stack += (at.producers[v] for v in operands)
    if not any(adds(op) for op in passing):
        return None
    ops = (*at.in_order(summands.values()), *at.in_order(passing))
    return Region(ops, frozenset(values), value)


def chains(ops: Mapping[fx.Node, Op]) -> list[Region]:
    """Return the longest sequences of at least two operations on one tensor each.

    Every result but the last is used once.
    """
    starts = [op for op in ops.values() if _is_link(op) and not _is_link(ops.get(op.operands[0]))]
    return [_chain([op, *links]) for op in starts if (links := _links_after(op, ops))]


def sources(ops: Mapping[fx.Node, Op]) -> list[Region]:
    """Return contractions, other sums, and nodes without operands, each with the chain behind it.

    Nothing else uses their result.
    """
    makers = [op for op in ops.values() if _is_source(op, ops)]
    return [_chain([op, *links]) for op in makers if (links := _links_after(op, ops))]


def _is_source(op: Op, ops: Mapping[fx.Node, Op]) -> bool:
    """Return whether a chain may be laid out like an operation, which is unlike its operands."""
    if op.rule.contraction or not op.operands:
        return True
    # A sum of one tensor that nothing else uses is itself in a chain.
    in_chain = _is_link(op) and (
        has_one_use(op.operands[0]) or not _is_link(ops.get(op.operands[0]))
    )
    return len(op.results) == 1 and bool(op.rule.reduce) and not in_chain


def _chain(ops: list[Op]) -> Region:
    """Return the region for operations that follow one another."""
    return Region(tuple(ops), frozenset(map(_result, ops)), _result(ops[-1]))


def _result(op: Op) -> fx.Node:
    """Return the result of an operation that has one, which is never without a node."""
    return next(value for value in op.results if value is not None)


def _links_after(op: Op, ops: Mapping[fx.Node, Op]) -> list[Op]:
    """Return the longest sequence of operations on one tensor each that follows an operation."""
    links = [op]
    while has_one_use(last := _result(links[-1])) and (
        (after := ops.get(next(iter(last.users)))) is not None and _is_link(after)
    ):
        links.append(after)
    return links[1:]


def _is_link(op: Op | None) -> bool:
    """Return whether an operation can be part of a chain."""
    return (
        op is not None
        and len(op.operands) == len(op.results) == 1
        and op.node.meta.get("mark") is None
    )


# ------------------------------------------------------------------------------------------ bodies


class UnionFind:
    """Disjoint item sets, which grow by joining two items at a time."""

    def __init__(self) -> None:
        self.parent: dict[Hashable, Hashable] = {}

    def find(self, item: Hashable) -> Hashable:
        """Return the representative of an item's set."""
        parent = self.parent
        above = parent.setdefault(item, item)
        while above is not item:
            # Each step also halves the path behind it, so that long chains stay cheap to follow.
            parent[item] = item = parent[above]
            above = parent[item]
        return item

    def join(self, one: Hashable, other: Hashable) -> None:
        """Unite two items' sets."""
        self.parent[self.find(one)] = self.find(other)

    def groups(self) -> list[list]:
        """Return all sets, ordered by their first items."""
        groups: dict[Hashable, list] = {}
        for item in self.parent:
            groups.setdefault(self.find(item), []).append(item)
        return list(groups.values())


def bodies(ops: Mapping[fx.Node, Op]) -> list[Body]:
    """Return groups of at least two flexible operations that values connect, no contractions."""
    # A contraction ends a body: it can take its operands in other layouts than it returns.
    inner = {node: op for node, op in _flexible_ops(ops).items() if not op.rule.contraction}
    connected, factors = _connect(inner)
    classes: dict[Hashable, list[Mapping[fx.Node, str]]] = {}
    for factor_class in factors.groups():
        classes.setdefault(connected.find(factor_class[0][0]), []).append(dict(factor_class))
    return [
        Body(tuple(inner[node] for node in group), tuple(classes.get(connected.find(group[0]), ())))
        for group in connected.groups()
        if len(group) > 1
    ]


def threads(ops: Mapping[fx.Node, Op], constants: CostConstants) -> list[Body]:
    """Return the operations that one factor runs through, with at least two contractions.

    Not with more different contractions than a layer has. A factor also runs through weights that a
    loop's rounds share. It does not run through convolutions: between them images
    stay sharded in space, and neighbors exchange rows.
    """
    free = {node: op for node, op in _flexible_ops(ops).items() if not op.rule.halo}
    places = {node: i for i, node in enumerate(free)}
    threads_by_factors: dict[frozenset, Body] = {}
    # Both ways: through shared weights a thread is larger, and may have too many contractions.
    for through_weights in (False, True):
        for group in _connect(free, through_weights)[1].groups():
            if len(group) == 1:
                continue
            factors = dict(group)
            contractions = [free[node].key for node in factors if free[node].rule.contraction]
            different = len(set(contractions))
            if (
                len(contractions) > 1
                and different <= constants.max_different_contractions
                and (
                    not through_weights
                    or len(contractions) >= constants.min_loop_rounds * different
                )
            ):
                threads_by_factors.setdefault(
                    frozenset(factors.items()),
                    Body(
                        tuple(free[node] for node in sorted(factors, key=places.__getitem__)),
                        (factors,),
                    ),
                )
    return list(threads_by_factors.values())


def courses(
    ops: Mapping[fx.Node, Op], inputs: Sequence[fx.Node]
) -> list[tuple[Body, list[tuple[fx.Node, int]]]]:
    """Return the operations that input dimensions run through, and for each these dimensions."""
    free = {node: op for node, op in _flexible_ops(ops).items() if not op.rule.halo}
    _, factors = _connect(free)
    places: dict[Hashable, dict[tuple[fx.Node, int], None]] = {}
    for value in inputs:
        for user in value.users:
            for operand, dims in (
                zip(free[user].operands, free[user].rule.operands) if (user in free) else ()
            ):
                for d, names in enumerate(dims if operand is value else ()):
                    if names:
                        root = factors.find((user, names[0]))
                        places.setdefault(root, {})[value, d] = None
    groups = {factors.find(group[0]): dict(group) for group in factors.groups()}
    return [
        (
            Body(tuple(op for node, op in free.items() if node in groups[root]), (groups[root],)),
            list(dims),
        )
        for root, dims in places.items()
    ]


def _flexible_ops(ops: Mapping[fx.Node, Op]) -> dict[fx.Node, Op]:
    """Return the operations with a choice between strategies: with a rule, and no marks."""
    return {
        node: op
        for node, op in ops.items()
        if op.rule.described and op.node.meta.get("mark") is None
    }


def _connect(
    ops: Mapping[fx.Node, Op], through_weights: bool = False
) -> tuple[UnionFind, UnionFind]:
    """Return two kinds of sets: operations that values connect, factors that dimensions connect.

    through_weights: inputs that like operations share connect them too.
    """
    makers = {
        value: (op, i)
        for op in ops.values()
        for i, value in enumerate(op.results)
        if value is not None
    }
    connected, factors = UnionFind(), UnionFind()
    sharers: dict[tuple, Op] = {}
    for op in ops.values():
        connected.find(op.node)
        for at, (value, dims) in enumerate(zip(op.operands, op.rule.operands)):
            if value in makers:
                maker, i = makers[value]
                connected.join(maker.node, op.node)
                for result_factors, used in zip(maker.rule.results[i], dims):
                    # Join the major factors: an axis shards both or none.
                    if result_factors and used:
                        factors.join((maker.node, result_factors[0]), (op.node, used[0]))
            elif through_weights:
                other = sharers.setdefault((value, at, op.key), op)
                connected.join(other.node, op.node)
                for used in filter(None, dims):
                    factors.join((other.node, used[0]), (op.node, used[0]))
    return connected, factors
