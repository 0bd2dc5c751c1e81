"""Find where loops put their results side by side: concatenations, sums of rows among zeros."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterator, Mapping
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
from .parts import Column, Parts, part_counts
from .step_numbers import loose_key


class End(NamedTuple):
    """Where a loop's results are put side by side: a concatenation, or a sum of rows among zeros.

    columns: the summands, by iteration. pieces: where they lie. others: further summands. total:
    summands of a plain sum, such as a weight's gradient, in place of columns and pieces. at: the
    iteration that has the node, if it is a value of one.
    """

    node: fx.Node
    pieces: Pieces | None
    columns: tuple[Column, ...]
    others: tuple[fx.Node, ...] = ()
    total: tuple[fx.Node, ...] = ()
    depth: int = 1  # of a plain sum: terms in an iteration
    at: int | None = None
    iterations: int = 0  # of a plain sum

    @property
    def count(self) -> int:
        return len(self.columns[0]) if self.columns else self.iterations

    def aligned(self, spans: Mapping[fx.Node, tuple[int, int]], edge: int) -> Iterator[End]:
        """Yield ends with columns. spans: see Parts. edge: of the span, that says the iteration.

        A gradient may have a term behind the last iteration, and none in the first one.
        """
        if self.columns:
            yield self
            return
        rows: dict[int, list[fx.Node]] = {}
        for value in self.total:
            rows.setdefault(spans.get(value, (-1, -1))[edge], []).append(value)
        numbers, sizes = range(self.count), {len(row) for row in rows.values()}
        if rows.keys() == {*numbers} and sizes == {self.depth}:
            yield self._replace(columns=tuple(zip(*(rows[i] for i in numbers))))
            return
        ends, depth = {*numbers} - rows.keys(), self.depth
        if len(ends) == 1 and ends <= {0, self.count - 1} and max(sizes) == 2 * depth:
            own = max(rows.values(), key=len)
            for values, others in ((own[:depth], own[depth:]), (own[depth:], own[:depth])):
                first = {i: values if row is own else row for i, row in rows.items()}
                columns = zip(*(first.get(i, [None] * depth) for i in numbers))
                yield self._replace(columns=(*columns,), others=(*self.others, *others))
        # The first and the last iteration may read another one's row, and may have no terms.
        lacks = self.count - len(self.total) // depth
        for begin in range(lacks // 2, min(lacks, 1) + 1):
            none = [[None] * depth]
            for order in (1, -1) if max(sizes) > 1 else (1,):
                values = [value for i in sorted(rows) for value in rows[i][::order]]
                numbers = [spans[v][edge] if v in spans else -9 for v in values]
                own = [values[i : i + depth] for i in range(0, len(values), depth)]
                if all(abs(n - begin - i // depth) < 2 for i, n in enumerate(numbers)):
                    terms = (*none * begin, *own, *none * (lacks - begin))
                    yield self._replace(columns=(*zip(*terms),))


def ends_of(work: Work) -> Iterator[End]:
    """Yield the ends of loops with several equal parts, in order."""
    ops, counts = {op.node: op for op in work.ops}, part_counts(work)
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
            yield from _end_by_sum(op, ops, counts)


def is_sum(op: Op | None) -> bool:
    """Return whether an operation adds two values with the result's shape."""
    return (
        op is not None
        and is_plain_sum(op.node.target, op.node.kwargs)
        and len(op.operands) == 2
        and all(v.meta["val"].shape == op.node.meta["val"].shape for v in op.operands)
    )


def _end_by_sum(op: Op, ops: dict[fx.Node, Op], counts: Collection[int]) -> Iterator[End]:
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
        yield from _totals(op.node, others, ops, counts)
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


def _totals(
    node: fx.Node, terms: list[fx.Node], ops: dict[fx.Node, Op], counts: Collection[int]
) -> Iterator[End]:
    """Yield the end of a sum that has a term of each iteration, but for the first and the last."""
    alike: dict[Hashable, list[fx.Node]] = {}
    for term in terms:
        for key in {ops[term].key, loose_key(ops[term])} if term in ops else ():
            alike.setdefault(key, []).append(term)
    for found in alike.values():
        others = tuple(term for term in terms if term not in found)
        for depth, count in itertools.product((1, 2), sorted(counts)):
            terms_each, rest = divmod(len(found), depth)
            if rest == 0 and max(FEWEST_PARTS, count - 2) <= terms_each <= count:
                total = {"total": tuple(found), "depth": depth, "iterations": count}
                yield End(node, None, (), others, **total)


def last_values(parts: Parts, spans: Mapping[fx.Node, tuple[int, int]]) -> Iterator[End]:
    """Yield the values of a loop's last iteration that operations behind the loop read.

    Like operations are in all iterations, and each follows from all parts up to its own.
    """
    order = {node: i for i, node in enumerate(spans)}
    for last, first in ((parts.count - 1, 0), (0, parts.count - 1)):
        edge, step = int(last > 0), 1 if last else -1
        columns: dict[Hashable, dict[int, list[fx.Node]]] = {}
        for node, span in spans.items():
            if span[1 - edge] == first and node in parts.keys:
                rows = columns.setdefault(parts.keys[node], {})
                rows.setdefault(span[edge], []).append(node)
        inner = range(first + step, last + step, step)
        whole = [rows for rows in columns.values() if rows.keys() >= {*inner}]
        chains = {values: rows for rows in whole for values in zip(*(rows[i] for i in inner))}
        inside = {value for values in chains for value in values}
        for values, rows in chains.items():
            numbers = [order[value] for value in values]
            behind = {spans[u][edge] for u in values[0].users if u in spans}
            is_carried = inner[0] + step in behind and numbers == sorted(numbers)
            if is_carried and not inside.issuperset(values[-1].users):
                # The first iteration may lack like operations, as its state is zeros.
                for start in (*rows.get(first, ()), None):
                    yield End(values[-1], None, ((start, *values)[::step],), at=last)
