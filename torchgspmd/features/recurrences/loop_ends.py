"""Find where loops put their results side by side: concatenations, sums of rows among zeros."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple

from torch import fx

from ...fx_passes.expand.batched_op import may_batch
from ...fx_passes.expand.undivided import Work
from ...fx_passes.ir import Op
from ...rules.ops.concat_slice import (
    FEWEST_PARTS,
    Pieces,
    is_plain_sum,
    piece_placed,
    pieces_joined,
)
from .step_numbers import loose_key

Column = tuple[fx.Node | None, ...]  # one value in all iterations; None: an end does without


class End(NamedTuple):
    """Where a loop's results are put side by side: a concatenation, or a sum of rows among zeros.

    columns: the summands, by iteration. pieces: where they lie. others: further summands. total:
    summands of a plain sum, such as a weight's gradient, in place of columns and pieces.
    """

    node: fx.Node
    pieces: Pieces | None
    columns: tuple[Column, ...]
    others: tuple[fx.Node, ...] = ()
    total: tuple[fx.Node, ...] = ()
    depth: int = 1  # of a plain sum: terms in an iteration

    @property
    def count(self) -> int:
        return self.pieces.count if self.pieces else len(self.total) // self.depth

    def aligned(self, spans: Mapping[fx.Node, tuple[int, int]], edge: int) -> Iterator[End]:
        """Yield ends with columns. spans: see Parts. edge: of the span, that says the iteration.

        A gradient may have a term behind the last iteration, and none in the first one.
        """
        if self.pieces:
            yield self
            return
        rows: dict[int, list[fx.Node]] = {}
        for value in self.total:
            rows.setdefault(spans.get(value, (-1, -1))[edge], []).append(value)
        numbers, sizes = range(self.count), [len(row) for row in rows.values()]
        if rows.keys() == {*numbers} and {*sizes} == {self.depth}:
            yield self._replace(columns=tuple(zip(*(rows[i] for i in numbers))))
        ends = {*numbers} - rows.keys()
        if len(ends) == self.depth == 1 and ends <= {0, self.count - 1} and max(sizes) == 2:
            own = max(rows.values(), key=len)
            for value, other in (own, own[::-1]):
                first = {i: value if row is own else row[0] for i, row in rows.items()}
                column = tuple(map(first.get, numbers))
                yield self._replace(columns=(column,), others=(*self.others, other))


def ends_of(work: Work) -> Iterator[End]:
    """Yield the ends of loops with several equal parts, in order."""
    ops = {op.node: op for op in work.ops}
    for op in work.ops:
        if len(op.operands) >= FEWEST_PARTS and op.results == (op.node,) and may_batch(op):
            shapes = [v.meta["val"].shape for v in op.operands]
            shape = op.node.meta["val"].shape
            pieces = pieces_joined(op.node.target, op.node.args, op.rule, shapes, shape)
            if pieces is not None:
                yield End(op.node, pieces, (op.operands,))
        elif is_sum(op) and not (
            len(op.node.users) == 1 and is_sum(ops.get(next(iter(op.node.users))))
        ):
            yield from _end_by_sum(op, ops)


def is_sum(op: Op | None) -> bool:
    """Return whether an operation adds two values with the result's shape."""
    return (
        op is not None
        and is_plain_sum(op.node.target, op.node.kwargs)
        and len(op.operands) == 2
        and all(v.meta["val"].shape == op.node.meta["val"].shape for v in op.operands)
    )


def _end_by_sum(op: Op, ops: dict[fx.Node, Op]) -> Iterator[End]:
    """Yield the end that a tree of sums makes: the gradient of a value that is cut into parts."""
    stack, others = [*op.operands], list[fx.Node]()
    placed: dict[Pieces, dict[int, list[fx.Node]]] = {}
    while stack:
        value = stack.pop()
        made = ops.get(value)
        if made is not None and len(value.users) == 1 and is_sum(made):
            stack += made.operands
            continue
        pieces = None
        if made is not None and len(made.operands) == 1 and may_batch(made):
            shape = made.operands[0].meta["val"].shape
            pieces = piece_placed(made.node.target, made.node.args, shape)
        if made is None or pieces is None:
            others.append(value)
            continue
        rows = placed.setdefault(pieces._replace(indices=()), {})
        rows.setdefault(pieces.indices[0], []).append(value)
    if not placed:
        yield from _totals(op.node, others, ops)
    terms = {pieces: [v for row in rows.values() for v in row] for pieces, rows in placed.items()}
    for pieces, rows in placed.items():
        last = pieces.count - 1
        if last + 1 < FEWEST_PARTS or not {*range(1, last)} <= rows.keys():
            continue
        sources = {i: [ops[v].operands[0] for v in row] for i, row in rows.items()}
        aligned = [_aligned(sources.get(i, []), sources[1], ops) for i in range(last + 1)]
        if all(row and (i in (0, last) or None not in row) for i, row in enumerate(aligned)):
            rest = [v for other, values in terms.items() if other != pieces for v in values]
            yield End(op.node, pieces, tuple(zip(*aligned)), (*others, *rest))


def _aligned(
    row: list[fx.Node], like: list[fx.Node], ops: Mapping[fx.Node, Op]
) -> list[fx.Node | None]:
    """Return an iteration's summands in the order of another one; none if it has more of them."""
    if len(row) == len(like):
        return [*row]
    rest, result = [*row], list[fx.Node | None]()
    for value in like:
        keys = [loose_key(ops[v]) if v in ops else None for v in rest]
        key = loose_key(ops[value]) if value in ops else None
        result.append(rest.pop(keys.index(key)) if key in keys else None)
    return [] if rest else result


def _totals(node: fx.Node, terms: list[fx.Node], ops: dict[fx.Node, Op]) -> Iterator[End]:
    """Yield the end of a sum that has a term of each iteration."""
    alike: dict[Hashable, list[fx.Node]] = {}
    for term in terms:
        for key in {ops[term].key, loose_key(ops[term])} if term in ops else ():
            alike.setdefault(key, []).append(term)
    for found in alike.values():
        others = tuple(term for term in terms if term not in found)
        for depth in (1, 2):
            if len(found) >= FEWEST_PARTS * depth and len(found) % depth == 0:
                yield End(node, None, (), others, tuple(found), depth)
