"""Products, and other work on whole matrices, that no layout divides as it stands.

    %g = einsum(mk,kn->mn, %x, %y)        x: data _, y: _ data      `data` would shard m and n

An axis divides an operation if it shards one factor in it. Without such an axis, an operand is
gathered first, or each device computes all of it. A sum over weights' rows is reduced behind it.
A factor of the batch comes from an argument, and no weight has it. With it the model computes, and
weights are gathered for that.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import fx

from ...capture import ARGUMENT, MUTATION, TANGENT
from ...compat.operators import aten
from ...rules.custom_ops.loops import LOOP_MARKS
from ...rules.notation import Dims
from ...rules.ops.concat_slice import FEWEST_PARTS, PART_OPS, pieces_taken
from ...shard_spec import Axes, ShardSpec
from ..ir import Op, Rules, tensors_of
from ..partition.regions import UnionFind
from ..program import Program
from ..propagate.factors import project
from ..propagate.layouts import Layouts
from ..schedule.arithmetic import flops
from .batched_op import may_batch

Node = Hashable


class Cut:
    """The cheapest cut of edges, each with the cost of having its source and target apart.

    source   Dinic's algorithm (1970)
    """

    def __init__(self) -> None:
        self.left: dict[Node, dict[Node, float]] = defaultdict(dict)  # capacity that is left

    def add(self, source: Node, target: Node, cost: float) -> None:
        self.left[source][target] = self.left[source].get(target, 0.0) + cost
        # The way back, without capacity: flow on the edge can be taken back by it.
        self.left[target].setdefault(source, 0.0)

    def tie(self, one: Node, other: Node) -> None:
        """Keep two nodes on one side."""
        self.add(one, other, math.inf)
        self.add(other, one, math.inf)

    def first_side(self, source: Node, sink: Node) -> set[Node]:
        """Return the nodes on `source`'s side if `sink` is on the other; as few as can be."""
        while sink in (depth := self._depths(source, sink)):
            # The edges that this round has not tried: each is tried once.
            edges, path = {node: iter(self.left[node]) for node in depth}, [source]
            while path:
                if (at := path[-1]) == sink:
                    path = path[: self._fill(path)]
                    continue
                for target in edges[at]:
                    if self.left[at][target] > 0 and depth.get(target) == depth[at] + 1:
                        path.append(target)
                        break
                else:
                    path.pop()
        return set(depth)

    def _fill(self, path: Sequence[Node]) -> int:
        """Fill a path with flow; return how many nodes precede its first full edge."""
        steps = [*itertools.pairwise(path)]
        flow = min(self.left[a][b] for a, b in steps)
        if flow == math.inf:
            # A path without any finite edge: no cut keeps them apart.
            raise AssertionError("the two sides of a cut are tied")
        for a, b in steps:
            self.left[a][b] -= flow
            self.left[b][a] += flow
        return 1 + next(i for i, (a, b) in enumerate(steps) if self.left[a][b] <= 0)

    def _depths(self, source: Node, sink: Node) -> dict[Node, int]:
        """Return the nodes that more can flow to, up to `sink`, each with its distance."""
        depth, queue = {source: 0}, deque([source])
        while queue and sink not in depth:
            at = queue.popleft()
            for target, left in self.left[at].items():
                if left > 0 and target not in depth:
                    depth[target] = depth[at] + 1
                    queue.append(target)
        return depth


class Pair(NamedTuple):
    """A product of two operands along whose rows the same axes lie.

    row, column: the factors of these rows; the columns are those of the smaller operand.
    """

    op: Op
    row: str
    column: str
    sizes: tuple[int, int]
    axes: Axes


class Work:
    """Who has the work in a propagated graph. arguments: the inputs that are its batch."""

    def __init__(
        self, graph: fx.Graph, layouts: Layouts, rules: Rules, arguments: Collection[fx.Node]
    ) -> None:
        self.graph, self.layouts, self.arguments = graph, layouts, arguments
        self.ops = list(rules.ops(graph))

    def axes_by_factor(self, op: Op) -> dict[str, set[str]]:
        """Return, for each axis that shards an operand, the factors that it shards.

        An axis of results alone counts, too: each device computes its part of them.
        """
        operands = self._places(op, op.operands, op.rule.operands)
        return self._places(op, op.results, op.rule.results) | operands

    def _places(
        self, op: Op, values: Sequence[fx.Node | None], tensors: Sequence[Dims]
    ) -> dict[str, set[str]]:
        places: dict[str, set[str]] = {}
        for value, dims in zip(values, tensors):
            spec = ShardSpec.replicated(len(dims)) if value is None else self.layouts.spec[value]
            found = project(dims, spec, op.rule.sizes, self.layouts.mesh)
            for factor, axis in ((f, axis) for f, axes in found.items() for axis in axes):
                places.setdefault(axis, set()).add(factor)
        return places

    def is_undivided(self, op: Op) -> bool:
        """Return whether no axis divides an operation, which has products, or its sums alone.

        Rows that each meet a chosen matrix are divided in their own way (Split.blocks).
        """
        split = op.rule.split
        by_blocks = op.rule.chosen or split is not None and split.blocks is not None
        if not op.rule.described or by_blocks or not flops(op.node):
            return False
        places = self.axes_by_factor(op).values()
        if single := [each for each in places if len(each) == 1 and not each & op.rule.replicated]:
            return self._is_sum_of_weights(op, single)
        return not places or not self.batch_factors(op)

    def _is_sum_of_weights(self, op: Op, divided: Collection[set[str]]) -> bool:
        """Return whether axes divide sums alone, which all devices need, and no batch.

        As `x @ x.T` with sharded columns: each iteration of a polynomial would reduce it. divided:
        the factor that an axis shards, for each such axis.
        """
        if not set().union(*divided) <= {*op.rule.reduce}:
            return False
        factors, batch, _ = self._classes
        names = {f for dims in op.rule.operands for names in dims for f in names[:1]}
        return batch.isdisjoint({factors.find((op.node, f)) for f in names})

    def pairs(self, least: float) -> Iterator[Pair]:
        """Yield products with a value for each pair of rows of a batch, on the same axes.

        Then differences and the like, whose operands broadcast, and products that sum such a value.
        least: bytes of the values on a device, which also are more than an operand's that would be
        gathered.
        """
        products = [op for op in self.ops if op.rule.contraction]
        others = (op for op in self.ops if op.node.target in _OF_PAIRS and broadcasts(op.node))
        for op in (*products, *others):
            if len(op.operands) != 2 or op.results != (op.node,):
                continue
            sizes, places = op.rule.sizes, self._sharded_factors(op)
            # A factor of both operands is summed, or a batch of products.
            both = {*itertools.chain(*op.rule.operands[0])} & {
                *itertools.chain(*op.rule.operands[1])
            }
            for row, column in itertools.product(*places):
                axes = places[0][row]
                if axes != places[1][column] or {row, column} & both:
                    continue
                val, count = op.node.meta["val"], self.layouts.mesh.count(axes)
                elements = [v.meta["val"].numel() for v in op.operands]
                is_large = val.nbytes >= count * least and val.numel() > count * min(elements)
                if is_large and not self._are_weights(op, (row, column)):
                    if elements[0] < elements[1]:
                        row, column = column, row
                    yield Pair(op, row, column, (sizes[row], sizes[column]), axes)
        for op in products:
            yield from self._summed_pairs(op, least)

    def _sharded_factors(self, op: Op) -> list[dict[str, Axes]]:
        """Return for each operand the factors that shard a dimension, with their axes."""
        pairs = zip(op.operands, op.rule.operands)
        tensors = ((self.layouts.spec[value].dims, dims) for value, dims in pairs)
        return [
            {names[0]: axes for axes, names in zip(*each) if axes and len(names) == 1}
            for each in tensors
        ]

    def _summed_pairs(self, op: Op, least: float) -> Iterator[Pair]:
        """Yield a product that sums a computed value for each pair over the columns.

        The gradient of a maximum over other rows is such a value, which no product has made.
        """
        if len(op.operands) != 2 or op.results != (op.node,):
            return
        sizes, places = op.rule.sizes, self._sharded_factors(op)
        for i, value in enumerate(op.operands):
            names = {f for factors in op.rule.operands[i] for f in factors}
            of_other = {f for factors in op.rule.operands[1 - i] for f in factors}
            val, other = value.meta["val"], op.operands[1 - i].meta["val"]
            for row, column in itertools.product(places[i], places[1 - i]):
                axes = places[i][row]
                is_pair = axes == places[1 - i][column] and column in names and row not in of_other
                count = self.layouts.mesh.count(axes)
                is_large = val.nbytes >= count * least and val.numel() > count * other.numel()
                if is_pair and is_large and not self._are_weights(op, (row, column)):
                    yield Pair(op, row, column, (sizes[row], sizes[column]), axes)

    def _are_weights(self, op: Op, names: Sequence[str]) -> bool:
        """Return whether any factor is one of weights."""
        factors, _, weights = self._classes
        return not weights.isdisjoint({factors.find((op.node, f)) for f in names})

    def has_twins(self) -> bool:
        """Return whether several equal operations, on equal shapes, are divided by no axis."""
        counts = Counter(op.key for op in self.ops if flops(op.node))
        several = (op for op in self.ops if counts[op.key] > 1)
        return any(
            n > 1 for n in Counter(op.key for op in several if self.is_undivided(op)).values()
        )

    def batch_factors(self, op: Op) -> set[str]:
        """Return the factors that an operation's operands have from arguments, not from weights.

        None if it has no factor of weights: arguments alone may be matrices as well.
        """
        factors, batch, weights = self._classes
        names = {f for dims in op.rule.operands for names in dims for f in names[:1]}
        roots = {f: factors.find((op.node, f)) for f in names}
        if weights.isdisjoint(roots.values()):
            return set()
        return {f for f, root in roots.items() if root in batch}

    @cached_property
    def _classes(self) -> tuple[UnionFind, set[Hashable], set[Hashable]]:
        """Return the factors that dimensions connect, their sets of the batch, and of weights."""
        factors, ends = UnionFind(), dict[tuple[fx.Node, int], bool]()
        for op in self.ops:
            tensors = (*zip(op.operands, op.rule.operands), *zip(op.results, op.rule.results))
            for value, dims in tensors:
                for d, names in enumerate(dims):
                    if value is not None and names:
                        # The major factor: an axis shards it before the others.
                        factors.join((op.node, names[0]), (value, d))
                        if value.op == "placeholder":
                            ends[value, d] = value in self.arguments
        weights = {factors.find(end) for end, is_batch in ends.items() if not is_batch}
        batch = {factors.find(end) for end, is_batch in ends.items() if is_batch}
        return factors, batch - weights, weights


def work_of(p: Program) -> Work:
    """Return who has the work in a propagated program."""
    captured = p.captured
    kept = {out.input for out in captured.outputs if out.kind == MUTATION}  # as weights are
    pairs = enumerate(zip(p.placeholders, captured.inputs))
    batch = {node for i, (node, inp) in pairs if inp.kind in (ARGUMENT, TANGENT) and i not in kept}
    return Work(p.graph, p.layouts, p.rules, batch)


def has_pairs(p: Program) -> bool:
    """Return whether a product has so many values for pairs of rows that blocks are worth it."""
    least = p.request.constants.pair_bytes
    products = p.graph.find_nodes(op="call_function", target=torch.ops.torchgspmd.einsum.default)
    maxima = p.graph.find_nodes(op="call_function", target=aten.scatter.src)  # their gradients
    others = (n for op in _OF_PAIRS for n in p.graph.find_nodes(op="call_function", target=op))
    # First by fx's table of nodes: most programs have no such value, and need no walk.
    found = itertools.chain(products, maxima, filter(broadcasts, others))
    is_large = any(node.meta["val"].nbytes >= least for node in found)
    return is_large and any(True for _ in work_of(p).pairs(least))


# Operations besides products that may have a value for each pair of rows.
_OF_PAIRS = dict.fromkeys(
    (
        *(aten.sub.Tensor, aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor),
        *(aten.maximum.default, aten.minimum.default, aten._cdist_forward.default),
    )
)


def broadcasts(node: fx.Node) -> bool:
    """Return whether an operation has a number for each pair of rows of two smaller operands."""
    val, operands = node.meta.get("val"), node.all_input_nodes
    if len(operands) != 2 or not isinstance(val, torch.Tensor) or not val.is_floating_point():
        return False
    sizes = [x.meta.get("val") for x in operands]
    return all(isinstance(x, torch.Tensor) and x.numel() < val.numel() for x in sizes)


def has_sharded_parts(p: Program) -> bool:
    """Return whether operations take several equal parts of a value along a sharded dimension.

    A loop takes its rows one by one.
    """
    if not p.calls_any(PART_OPS | LOOP_MARKS):
        return False
    for op in p.rules.ops(p.graph):
        if len(op.operands) != 1 or not op.results:
            continue
        dims, shape = p.layouts.spec[op.operands[0]].dims, op.operands[0].meta["val"].shape
        if op.node.target in LOOP_MARKS:
            if dims and dims[0] and {*op.rule.operands[0][0]} & op.rule.replicated:
                return True
            continue
        if not may_batch(op):  # its parts may depend on values
            continue
        shapes = [t.shape for t in tensors_of(op.node)]
        pieces = pieces_taken(op.node.target, op.node.args, op.rule, shape, shapes)
        # Fewer are gates of a cell, or queries beside keys.
        if pieces is not None and pieces.count >= FEWEST_PARTS and dims[pieces.dim]:
            return True
    return False
