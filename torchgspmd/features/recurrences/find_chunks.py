"""Find recurrences in Python loops over parts of a sequence.

    for x in xs.split(64, 1):        x: a row of the recurrence
        y = f(x, h)
        h = y[:, -1]                 h: a carry
        ys.append(y)
    torch.cat(ys, 1)                 where the search begins

From the operands of a concatenation, one for each part, the search goes up through like operations.
It ends at parts of one value, at values that all iterations read, and at carries: values of the
part before. The loop of a backward begins with the last part. Loops often treat the first part in
another way: there is no carry, or it is a constant zero. Then the recurrence has zeros there.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence

from torch import fx

from ...fx_passes.expand.batched_op import may_batch
from ...fx_passes.ir import Op
from ...rules.algebra import constant_of
from ...rules.ops.concat_slice import COPIES
from .loop_ends import is_sum
from .parts import Column, Family, Parts
from .recurrence import Carry, Recurrence

MOST_OPS = 2048


class Finder:
    """Aligns the iterations of a loop. reverse: whether it begins with the last part.

    columns: an operation's value in the iteration that stands for all -> in all of them.
    """

    def __init__(
        self,
        parts: Parts,
        spans: dict[fx.Node, tuple[int, int]],
        reverse: bool,
        end: fx.Node,
        guess: bool = True,
        choose: bool = False,
        exact: bool = True,
    ) -> None:
        self.guess, self.guessed = guess, False  # the last iteration's next carries
        self.exact = exact  # whether operations with other numbers differ
        self.choose, self.chosen = choose, dict[tuple[fx.Node, int], fx.Node]()
        self.parts, self.spans, self.reverse, self.count = parts, spans, reverse, parts.count
        self.begin, self.step = (self.count - 1, -1) if reverse else (0, 1)
        # The second iteration: it has a carry, and a next one. The first may choose another value
        # for that carry.
        self.second = self.begin + self.step
        self.at = self.second + self.step * choose
        self.last, self.before = self.count - 1 - self.begin, parts.order[end]
        self.ends: dict[fx.Node, fx.Node | None] = {}  # carry -> the last iteration's next one
        self.columns: dict[fx.Node, Column] = {}
        self.rows: dict[fx.Node, Family] = {}
        self.carries: dict[fx.Node, Column] = {}
        self.vanishing: set[tuple[fx.Node, int]] = set()
        self.ops: dict[fx.Node, Op] = {}
        self.numbers: dict[fx.Node, list[Op]] = {}  # operations that have other ones by iteration

    def find(self, columns: Sequence[Column]) -> bool:
        """Add columns, and all that they are computed from; return whether iterations are alike."""
        stack = [*columns]
        for column in columns:  # The program has zeros where an end lacks a summand.
            value = column[self.at]
            ends = (i for i in (0, self.count - 1) if column[i] is None)
            self.vanishing.update((value, i) for i in ends if value is not None)
        while stack:
            column = stack.pop()
            value = column[self.at]
            if value is None or len(self.ops) > MOST_OPS:
                return False
            known = self.columns.get(value) or self.carries.get(value)
            if known is not None:
                merged = self._merged(known, column)
                if merged is None:
                    return False
                if merged == known:
                    continue
                column = merged  # and so are the columns above
            more = self._above(value, column)
            if more is None:
                return False
            stack += more
        return all(self._may_vanish(*end) for end in self.vanishing)

    def _may_vanish(self, value: fx.Node, i: int) -> bool:
        """Return whether no reader of a value in an iteration sees another one than zero there."""
        column = self.columns.get(value) or self.carries.get(value) or (None,) * self.count
        own = column[i]
        return own is None or self._is_zero(own)

    def _above(self, value: fx.Node, column: Column) -> list[Column] | None:
        """Return the columns that a column is computed from; None if it is none."""
        for family, i in self.parts.families.get(value, {}).items():
            numbers = [v is None or self.parts.families.get(v, {}).get(family) for v in column]
            if i == self.at and all(
                n is True
                or n == j
                or (v is not None and (family.value, j) in self.parts.zeros and self._is_zero(v))
                for j, (n, v) in enumerate(zip(numbers, column))
            ):
                self.rows[value] = family
                return []
        if all(v is None or v is value for v in column):
            return []
        sources = tuple(self._source(v) for v in column)
        if sources != column:  # A copy at an end may have been simplified.
            if sources[self.at] is not value:
                op, _ = self.parts.makers[value]
                self.columns[value], self.ops[op.node] = column, op
            return [sources]
        if self._is_carry(value, column) and not self._follows(column[self.count // 2] or value):
            self.carries[value] = column
            again: list[fx.Node | None] = [None] * self.count
            for i in range(self.count):
                if 0 <= i + self.step < self.count:
                    again[i] = column[i + self.step]
            # An iteration at the end may not use its carry, and another loop does.
            place = self.last - self.step
            if again[place] is None:
                again[place] = self._end(again[self.at], place)
                filled = [*column]
                filled[self.last] = again[place]
                self.carries[value] = tuple(filled)
            again[self.last] = self.ends.get(value) or self._end(again[self.at], self.last)
            self.ends[value] = again[self.last]
            return [tuple(again)]
        made = [self.parts.makers.get(v) if v is not None else None for v in column]
        template = made[self.at]
        if template is None or not may_batch(template[0]):
            return None
        op, _ = template
        alike = [m is not None and self._is_alike(template, m) for m in made]
        alike[self.at] = True
        if is_sum(op):
            return self._summands(value, column, op)
        hollow = [*column]
        for i in {0, self.count - 1, self.second}:
            v = column[i]
            if not alike[i] and v is not None and self._is_zero(v):
                self.vanishing.add((value, i))
                hollow[i] = None
            elif not alike[i] and self._chooses(value, i, v):
                hollow[i] = None
        if not all(same or v is None for same, v in zip(alike, hollow)):
            return None
        self.columns[value], self.ops[op.node] = column, op
        if any(m and v is not None and m[0].key != op.key for m, v in zip(made, hollow)):
            self.numbers[value] = [
                m[0] if m and v is not None else op for m, v in zip(made, hollow)
            ]
        none = (None,) * len(op.operands)
        rows = [m[0].operands if m and v is not None else none for m, v in zip(made, hollow)]
        return [*zip(*rows)]

    def _is_alike(self, template: tuple[Op, int], made: tuple[Op, int]) -> bool:
        """Return whether an operation is the template's, and reads parts where that reads some."""
        (op, result), (other, number), known = template, made, self.parts.families
        if self._key(other) != self._key(op) or number != result or other.node is op.node:
            return False
        for value, v in zip(op.operands, other.operands if self.choose else ()):
            families = {f for f in known.get(value, ()) if f.pieces}
            if families and families.isdisjoint(known.get(v, ())):
                return self._is_zero(v)
        return True

    def _key(self, op: Op) -> Hashable:
        return op.key if self.exact else self.parts.keys[op.node]

    def _chooses(self, value: fx.Node, i: int, v: fx.Node | None) -> bool:
        """Note that an iteration at an end has another value; False if that is not asked for."""
        if not self.choose or v is None or i not in (0, self.count - 1, self.second):
            return False
        val, other = value.meta["val"], v.meta["val"]
        if other.shape != val.shape or other.dtype != val.dtype:
            return False
        self.chosen[value, i] = v
        return True

    def alike(self, value: fx.Node, i: int) -> Iterator[fx.Node]:
        """Yield the values in all iterations whose one in iteration i is this one."""
        families = self.parts.families.get(value, {})
        yield from (row for row, family in self.rows.items() if families.get(family) == i)
        for columns in (self.columns, self.carries):
            yield from (v for v, column in columns.items() if column[i] is value)

    def _merged(self, one: Column, other: Column) -> Column | None:
        """Return a column that has the values of both; None if they differ."""
        pairs = [*zip(one, other)]
        if any(self._source(a) is not self._source(b) for a, b in pairs if a and b):
            return None
        return tuple(a if a is not None else b for a, b in pairs)

    def _source(self, value: fx.Node | None) -> fx.Node | None:
        """Return the original of a copy, or the value itself."""
        op, _ = self.parts.makers.get(value, (None, 0)) if value else (None, 0)
        return op.operands[0] if op is not None and op.node.target in COPIES else value

    def _summands(self, value: fx.Node, column: Column, op: Op) -> list[Column] | None:
        """Return the columns of the summands; None if iterations have others.

        The first and the last iteration may lack some: these have to be zeros there.
        """
        terms = self._terms(value, self.ops)
        above: list[list[fx.Node | None]] = [[None] * self.count for _ in terms]
        self.columns[value] = column
        for i, v in enumerate(column):
            if v is None:
                continue
            own = [x for x in self._terms(v, most=len(terms)) if not self._is_zero(x)]
            # An end that lacks a summand further up looks like the others from close by.
            for depth in (3, 2, 1, 0):
                signs = [self._signature(x, i, depth) for x in own]
                wanted = {
                    place: self._signature(term, self.at, depth)
                    for place, term in enumerate(terms)
                    if above[place][i] is None
                }
                for place, sign in wanted.items():
                    alone = signs.count(sign) == [*wanted.values()].count(sign) == 1
                    if sign in signs and (alone or depth == 3):
                        j = signs.index(sign)
                        above[place][i] = own.pop(j)
                        signs.pop(j)
            missing = [place for place in range(len(terms)) if above[place][i] is None]
            if (own or missing and i == self.second) and self._chooses(value, i, v):
                for each in above:
                    each[i] = None
                continue
            # A state that is given stands for one carry; the others have to be zeros then.
            if i == self.begin:
                before = column[self.at - self.step]
                missing.sort(key=lambda p: (terms[p] is not before, self._follows(terms[p])))
            fits = len(own) == len(missing) or not own and i in (0, self.count - 1)
            if not fits and (i != self.begin or len(own) > len(missing)):
                return None
            for place, x in zip(missing, own):
                above[place][i] = x
            self.vanishing.update((terms[place], i) for place in missing[len(own) :])
        return [tuple(each) for each in above]

    def _terms(
        self, value: fx.Node, ops: dict[fx.Node, Op] | None = None, most: float = math.inf
    ) -> list[fx.Node]:
        """Return the summands of a sum, and no more than `most`. ops: gets its operations."""
        root, terms, stack = value, list[fx.Node](), [value]
        while stack:
            value = stack.pop()
            op, _ = self.parts.makers.get(value, (None, 0))
            is_term = value is not root and (
                len(value.users) > 1 or len(terms) + len(stack) + 2 > most
            )
            if op is None or not is_sum(op) or is_term:
                terms.append(value)
                continue
            if ops is not None:
                ops[op.node] = op
            stack += op.operands[::-1]
        return terms

    def _signature(self, value: fx.Node, i: int, depth: int) -> Hashable:
        """Return a number for what a value is in iteration i, to tell summands apart."""
        value = self._source(value) or value
        families = self.parts.families.get(value, {})
        # Other loops have computed some iterations of a value, where an end was not asked for.
        if own := frozenset(family for family, n in families.items() if n == i and family.pieces):
            return own
        span, made = self.spans.get(value), self.parts.makers.get(value)
        # The first iteration reads a constant in place of a carry.
        if span is None or made is None or span[0 if self.reverse else 1] != i:
            return "outer"
        key = self._key(made[0])
        if depth == 0 or is_sum(made[0]):
            return key, is_sum(made[0])
        above = (self._signature(x, i, depth - 1) for x in made[0].operands)
        return key, made[1], *above

    def _signatures(self, value: fx.Node, i: int) -> frozenset[Hashable]:
        return frozenset(self._signature(term, i, 3) for term in self._terms(value))

    def _is_zero(self, value: fx.Node) -> bool:
        """Return whether a value is a constant zero, or computed from such ones alone."""
        if value in self.spans or value in self.parts.families:
            return False
        if constant_of(value) == 0:
            return True
        op, _ = self.parts.makers.get(value, (None, 0))
        groups = op.rule.linear if op else ()
        return any(all(self._is_zero(op.operands[i]) for i in g) for g in groups if op)

    def _is_carry(self, value: fx.Node, column: Column) -> bool:
        """Return whether each iteration has a value of the one before here, or of one further."""
        edge, lags = 0 if self.reverse else 1, set[int]()
        for i, v in enumerate(column):
            if v is None or i == self.begin or self.choose and i == self.second:
                continue
            if (span := self.spans.get(v)) is None:
                return False
            lags.add((i - span[edge]) * self.step)
        return len(lags) == 1 and min(lags) >= 1

    def _end(self, again: fx.Node | None, i: int) -> fx.Node | None:
        """Return an iteration's next carry, if the program has one that looks like it."""
        made = self.parts.makers.get(again) if again is not None else None
        if again is None or made is None or not self.guess:
            return None
        sign, edge = self._signatures(again, self.at), 0 if self.reverse else 1
        found = [
            value
            for value in self.parts.values_of.get(self._key(made[0]), ())
            if self.spans.get(value, (-1, -1))[edge] == i and self._signatures(value, i) == sign
        ]
        # A loop that writes into a tensor ends with a write, and may compute the state behind it.
        before = [value for value in found if self.parts.order[value] < self.before]
        found = before or found
        self.guessed |= len(found) == 1
        return found[0] if len(found) == 1 else None

    def _follows(self, value: fx.Node) -> bool:
        """Return whether a value is computed from another one alone that is no larger."""
        made = self.parts.makers.get(value)
        if made is None:
            return False
        sources = [v for v in made[0].operands if v in self.spans]
        return len(sources) == 1 and sources[0].meta["val"].numel() <= value.meta["val"].numel()

    def recurrence(self, batched: dict[fx.Node, fx.Node]) -> Recurrence:
        """Return the recurrence. batched: the rows' values along a first dimension."""
        ops = sorted(self.ops.values(), key=lambda op: self.parts.order[op.node])
        carries = {}
        for value, column in self.carries.items():
            again = column[self.at + self.step]
            assert again is not None
            carries[value] = Carry(column[self.begin], again)
        zeros = {
            (value, i)
            for value, family in self.rows.items()
            for i in (0, self.count - 1)
            if (family.value, i) in self.parts.zeros
        }
        return Recurrence(self.count, self.reverse, ops, batched, carries, self.vanishing, zeros)
