"""Find products of two sharded operands whose results, one for each pair of rows, are reduced.

    %l = einsum(mk,kn->mn, %a, %b)      a: data _, b: _ data; l would be data _ or _ data
    %p = log_sigmoid(%l);  %s = sum(%p) ...                   l and p are reduced, no one reads them

The region has every operation with a value for each pair, forward and backward. The rules of its
operations say which dimension is the row's and which the column's. Values that are constant, or
come from indices (an identity matrix, a mask), are in the region, too: a block can make its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from ...fx_passes.expand.batched_op import may_batch
from ...fx_passes.expand.undivided import Pair, Work
from ...fx_passes.ir import Op
from ...rules import IDENTITY, SplitRequest
from ...rules.notation import Dims
from ...shard_spec import Axes

ROWS, COLUMNS = 0, 1  # indices of Places
Factors = tuple[str, str]  # of the rows, and of the columns
Places = tuple[int | None, int | None]  # the dimensions of the rows, and of the columns


@dataclass
class PairRegion:
    """Operations with a value for each pair of rows.

    sizes: how many rows and columns. axes: shard both. factors: by operation, in the graph's order.
    exits: values without rows, without columns or without both, that operations outside read.
    """

    sizes: tuple[int, int]
    axes: Axes
    factors: dict[fx.Node, Factors] = field(default_factory=dict)
    ops: dict[fx.Node, Op] = field(default_factory=dict)
    exits: dict[fx.Node, Op] = field(default_factory=dict)
    makers: dict[fx.Node, fx.Node] = field(default_factory=dict)  # a value for pairs -> operation


def places_of(factors: Sequence[str | None], dims: Dims) -> Places:
    """Return where an operand or result has the rows and the columns."""
    row, column = (dims.index((f,)) if f and (f,) in dims else None for f in factors)
    return row, column


def region_of(work: Work, pair: Pair) -> PairRegion | dict[fx.Node, SplitRequest] | None:
    """Return a product's region; operations to split before it is one; None if there is none."""
    finder = _Finder(work, pair)
    if not finder.add(pair.op, (pair.row, pair.column)):
        return None
    while finder.values:
        if not finder.follow(*finder.values.popitem()):
            return None
    return finder.split or finder.ended()


class _Finder:
    """Follows values for pairs. values: those to follow, with where rows and columns are."""

    def __init__(self, work: Work, pair: Pair) -> None:
        self.ops = {op.node: op for op in work.ops}
        self.makers = {v: op for op in work.ops for v in op.results if v is not None}
        self.count = work.layouts.mesh.count(pair.axes)
        self.values: dict[fx.Node, Places] = {}
        self.known: dict[fx.Node, Places] = {}
        self.split: dict[fx.Node, SplitRequest] = {}
        self.region = PairRegion(pair.sizes, pair.axes)

    def follow(self, value: fx.Node, places: Places) -> bool:
        """Add the makers and readers of a value; return False if there is no region."""
        maker = self.makers.get(value)
        if maker is None or any(user not in self.ops for user in value.users):
            return False
        users = [self.ops[user] for user in value.users]
        made = [(maker, zip(maker.results, maker.rule.results))]
        read = [(op, zip(op.operands, op.rule.operands)) for op in users]
        for op, tensors in (*made, *read):
            for names in (dims for v, dims in tensors if v is value):
                factors = [names[p] for p in places if p is not None]
                if any(len(each) != 1 for each in factors):
                    return False
                if not self.add(op, (factors[0][0], factors[1][0])):
                    return False
        return True

    def add(self, op: Op, factors: Factors) -> bool:
        """Add an operation, whose rows and columns have these factors."""
        region = self.region
        if op.node in region.factors:
            return region.factors[op.node] == factors
        if not self._goes_by_blocks(op, {*factors}):
            return False
        region.factors[op.node], region.ops[op.node] = factors, op
        for value, dims in zip(op.operands, op.rule.operands):
            places = places_of(factors, dims)
            if None not in places and not self._add_value(value, places):
                return False
        for value, dims in zip(op.results, op.rule.results):
            places = places_of(factors, dims)
            lost = [f for f, p in zip(factors, places) if p is None]
            if value is None:
                continue
            if not lost and not self._add_value(value, places):
                return False
            if lost:
                if op.node not in self.split and any(
                    op.rule.reduce.get(f) not in IDENTITY for f in lost
                ):
                    return False
                region.exits[value] = op
        return True

    def _goes_by_blocks(self, op: Op, factors: set[str]) -> bool:
        """Return whether an operation may be computed by blocks, maybe once it is split."""
        rule = op.rule
        tensors = [*rule.operands, *rule.results]
        windows = {f for i, d in rule.row_access for f in rule.operands[i][d]}
        is_one_dim = any(len(d) > 1 and not factors.isdisjoint(d) for dims in tensors for d in dims)
        if not may_batch(op) or rule.chosen or is_one_dim or windows & factors:
            return False
        if rule.replicated.isdisjoint(factors):
            return True
        if rule.split is None:
            return False
        cuts = [tuple(1 if factors.isdisjoint(d) else self.count for d in dims) for dims in tensors]
        n = len(rule.operands)
        self.split[op.node] = SplitRequest(self.count, tuple(cuts[:n]), tuple(cuts[n:]))
        return True

    def _add_value(self, value: fx.Node, places: Places) -> bool:
        if value not in self.known:
            self.known[value] = self.values[value] = places
        return self.known[value] == places

    def ended(self) -> PairRegion:
        """Return the region in the graph's order."""
        region = self.region
        order = {node: i for i, node in enumerate(self.ops)}
        exits = sorted(region.exits.items(), key=lambda pair: order[pair[1].node])
        inside = sorted(region.factors, key=order.__getitem__)
        return PairRegion(
            region.sizes,
            region.axes,
            {node: region.factors[node] for node in inside},
            {node: region.ops[node] for node in inside},
            dict(exits),
            {value: self.makers[value].node for value in self.known},
        )
