"""Values that are parts of a sequence, one for each iteration of a loop over it."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator
from typing import NamedTuple

from torch import fx

from ...fx_passes.expand.batched_op import may_batch
from ...fx_passes.expand.undivided import Work
from ...fx_passes.ir import Op
from ...rules.ops.concat_slice import FEWEST_PARTS, Pieces, pieces_taken
from .step_numbers import loose_key

Column = tuple[fx.Node | None, ...]  # one value in all iterations; None: an end does without


class Family(NamedTuple):
    """The value that has all parts. pieces: how they lie in it; None: along a first dimension."""

    value: fx.Node
    pieces: Pieces | None


class Parts:
    """Which values are parts of a sequence, for one number of parts."""

    def __init__(self, work: Work, count: int) -> None:
        self.count = count
        self.makers = {v: (op, i) for op in work.ops for i, v in enumerate(op.results) if v}
        self.order = {node: i for i, node in enumerate(work.graph.nodes)}
        self.keys = {op.node: loose_key(op) for op in work.ops}
        self.has_numbers = any(op.key != self.keys[op.node] for op in work.ops)
        self.values_of: dict[Hashable, list[fx.Node]] = {}  # by an operation's key
        for value, (op, _) in self.makers.items():
            for key in {op.key, self.keys[op.node]}:
                self.values_of.setdefault(key, []).append(value)
        self.families: dict[fx.Node, dict[Family, int]] = {}  # part -> its number in families
        self.zeros: set[tuple[fx.Node, int]] = set()  # values that have zeros in a part
        members: dict[Family, dict[int, list[fx.Node]]] = {}
        for op in work.ops:
            for family, i, value in _parts_of(op, count):
                members.setdefault(family, {}).setdefault(i, []).append(value)
        for family, rows in members.items():
            # A last decay, say, may be unused.
            if len(rows) >= count - 2 and {*range(1, count - 1)} <= rows.keys():
                for i, values in rows.items():
                    for value in values:
                        self.families.setdefault(value, {})[family] = i

    def add(self, batched: fx.Node, column: Column) -> None:
        """Note that a new value has these parts, along a first dimension."""
        for i, value in enumerate(column):
            if value is not None:
                self.families.setdefault(value, {})[Family(batched, None)] = i

    def spans(self, graph: fx.Graph, ends: Container[fx.Node]) -> dict[fx.Node, tuple[int, int]]:
        """Return the first and the last part that each value is computed from.

        ends: values of all parts together, which belong to none.
        """
        result: dict[fx.Node, tuple[int, int]] = {}
        for node in graph.nodes:
            if node in self.families and node.op != "placeholder":
                numbers = self.families[node].values()
                result[node] = max(numbers), min(numbers)
                continue
            spans = [result[x] for x in node.all_input_nodes if x in result]
            if spans and node not in ends:
                result[node] = min(low for low, _ in spans), max(high for _, high in spans)
        return result


def part_counts(work: Work) -> set[int]:
    """Return the numbers of equal parts that values are cut into."""
    cuts = {family.pieces for op in work.ops for family, _, _ in _parts_of(op) if family.pieces}
    return {pieces.count for pieces in cuts if pieces.count >= FEWEST_PARTS}


def _parts_of(op: Op, count: int | None = None) -> Iterator[tuple[Family, int, fx.Node]]:
    if len(op.operands) != 1 or not may_batch(op):
        return
    shape = op.operands[0].meta["val"].shape
    val = op.node.meta["val"]
    shapes = [t.shape for t in (val if isinstance(val, (tuple, list)) else (val,))]
    pieces = pieces_taken(op.node.target, op.node.args, op.rule, shape, shapes)
    if pieces is None or count not in (None, pieces.count):
        return
    family = Family(op.operands[0], pieces._replace(indices=()))
    for i, value in zip(pieces.indices, op.results):
        if value is not None:
            yield family, i, value
