"""Compute recurrences along a sharded sequence by shards.

before   %x0, ... = split(%x, 64, 1)              x: _ seq _
         %y0 = ...;  %h1 = ...;  ...              a chain of parts
         %y = cat([%y0, ...], 1)
after    %xs = permute(view(%x, ...))             seq _ _ _: a first dimension for the parts
         %hs = affine_states(%A, %B, %h0, False)  see batch_iterations.py
         %y = view(permute(%ys))
needs    a propagated graph, rules
source   ours; batch_iterations.py has the algorithm's
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, fx

from ...compat.fx_nodes import drop_unused, inline, origin_of
from ...fx_passes.expand.undivided import Work
from ...fx_passes.ir import operands_of
from ...rules import trace
from ...rules.algebra_rows import flipped_dim
from ...rules.custom_ops.loops import LOOP_MARKS, STACK, mark_of
from ...rules.ops.concat_slice import Pieces
from .batch_iterations import batch_iterations
from .find_chunks import Finder
from .find_loops import loops_of, value_behind
from .loop_ends import End, ends_of, last_values
from .parts import Family, Parts, part_counts
from .recurrence import Recurrence
from .step_numbers import numbers_of, row_of, with_tensors


def split_sequences(work: Work) -> bool:
    """Rewrite the graph in place; return whether it has recurrences along a sharded dimension."""
    splitter = _Splitter(work)
    ends = [*ends_of(work)]
    splitter.ends = {end.node for end in ends}
    order = {node: i for i, node in enumerate(work.graph.nodes)}
    for end in sorted((*ends, *splitter.last_values(ends)), key=lambda end: order[end.node]):
        splitter.split(end)
    splitter.split_loops()
    for end, result in splitter.results.items():
        end.replace_all_uses_with(result)
    for end in splitter.exits:
        work.graph.erase_node(end)
    drop_unused(work.graph)
    for _ in range(2):  # An operation has few results that are read once the ends are taken.
        splitter.take_ends()
        drop_unused(work.graph)
    return bool(splitter.results)


class _Splitter:
    def __init__(self, work: Work) -> None:
        self.work, self.graph = work, work.graph
        self.parts: dict[int, Parts] = {}
        self.ends: set[fx.Node] = set()
        self.exits: list[fx.Node] = []  # of loops of scan; a `next` has effects, so it is erased
        self.batched: dict[Family, fx.Node] = {}
        # Replaced when all are known: the operations still read the old ones.
        self.results: dict[fx.Node, fx.Node] = {}

    def split(self, end: End) -> None:
        """Compute the parts that are put together at once, if they are a recurrence."""
        if end.node in self.results:  # taken in another way
            return
        parts = self._parts_in(end.count)
        if end.at is not None and any(not f.pieces for f in parts.families.get(end.node, ())):
            return  # The loop has another end.
        spans = parts.spans(self.graph, self.ends)
        for reverse in (False, True) if end.at is None else (not end.at,):
            for one in end.aligned(spans, 0 if reverse else 1):
                if self._split_from(one, parts, spans, reverse):
                    return

    def last_values(self, ends: Sequence[End]) -> Iterator[End]:
        """Yield the ends of loops of which the last iteration's values alone are read."""
        joined = {v for end in ends for column in end.columns for v in column}
        for count in sorted(part_counts(self.work)):
            parts = self._parts_in(count)
            spans = parts.spans(self.graph, self.ends)
            yield from (end for end in last_values(parts, spans) if end.node not in joined)

    def _parts_in(self, count: int) -> Parts:
        if count not in self.parts:
            self.parts[count] = Parts(self.work, count)
        return self.parts[count]

    def _split_from(
        self, end: End, parts: Parts, spans: dict[fx.Node, tuple[int, int]], reverse: bool
    ) -> bool:
        """Compute the parts at once that lead to an end's columns, if that is possible."""
        for exact in (True, False) if parts.has_numbers else (True,):
            guessed = False
            for guess, choose in ((True, False), (False, False), (True, True)):
                if guess or guessed:
                    finder = Finder(parts, spans, reverse, end.node, guess, choose, exact)
                    found = finder.find(end.columns) and self._is_sharded(finder)
                    if found and self._batch(finder, end):
                        return True
                    guessed = finder.guessed and not found
        return False

    def _batch(self, finder: Finder, end: End) -> bool:
        """Compute all iterations at once; return False if they are no affine recurrence."""
        parts = finder.parts
        with self.graph.inserting_before(end.node):
            rows = {value: self._rows(family) for value, family in finder.rows.items()}
            found = finder.recurrence(rows)
            chosen = self._choose(finder, found)
            if chosen is not None:
                self._add_numbers(finder, found, chosen)
            new = None if chosen is None else batch_iterations(self.graph, found)
            if chosen is None or new is None:
                return False
            new |= {value: new[node] for value, node in chosen.items() if node in new}
            results = [
                _added(self.graph, lambda x: _joined(x, end), new[value])
                for column in end.columns
                if (value := column[finder.at]) is not None
            ]
            first, *others = *results, *end.others
            for other in others:
                first = _added(self.graph, torch.add, first, other)
        for value, column in (*finder.columns.items(), *finder.carries.items()):
            if value in new:
                parts.add(new[value], column)
                ends, known = (0, parts.count - 1), chosen.get(value, value)
                parts.zeros |= {(new[value], i) for i in ends if found.vanishes(known, i)}
        self.results[end.node] = first
        return True

    def _choose(self, finder: Finder, found: Recurrence) -> dict[fx.Node, fx.Node] | None:
        """Choose the ends' own values in their iterations; return the values in all iterations.

        Where the program has nothing, values become zeros, if they are not by their operations.
        None if one of these is no operation's.
        """
        chosen, order = dict[fx.Node, fx.Node](), finder.parts.order
        zeros = sorted(found.vanishing, key=lambda end: (order[end[0]], end[1]))
        own = dict[tuple[fx.Node, int], fx.Node | None](finder.chosen)
        own |= {end: None for end in zeros if end not in own and not found.vanishes(*end)}
        late = (v for v in own.values() if v and order.get(v, 0) >= finder.before)
        if any(value not in found.makers for value, _ in own) or any(late):
            return None
        for (value, i), other in own.items():
            is_end = _added(self.graph, lambda x: x.new_zeros((), dtype=torch.bool), value)
            place = lambda x, i=i: torch.arange(found.count, device=x.device) == i  # noqa: E731
            found.rows[is_end] = _added(self.graph, place, value)
            if other is not None:
                alike = (
                    v for v in finder.alike(other, i) if v in found.rows or order[v] < order[value]
                )
                v = next(alike, None)
                # Nodes of one iteration stand for all, so the value of another one needs a node.
                other = chosen.get(v, v) if v else _added(self.graph, torch.clone, other)
            chosen[value] = found.choose(self.graph, is_end, other, chosen.get(value, value))
        return chosen

    def _add_numbers(
        self, finder: Finder, found: Recurrence, chosen: dict[fx.Node, fx.Node]
    ) -> None:
        """Add a row for each number that differs by iteration. chosen: gets the new values."""
        for value, ops in finder.numbers.items():
            op = found.makers[value]
            numbers = zip(*map(numbers_of, ops))
            rows = [_added(self.graph, partial(row_of, op, n), value) for n in numbers]
            places = [_added(self.graph, lambda x: x.select(0, 0), row) for row in rows]
            found.rows |= dict(zip(places, rows))
            new = found.replace(self.graph, value, *with_tensors(op, places))
            chosen.setdefault(value, new)

    def take_ends(self) -> None:
        """Take what is still read of a first or last iteration from the values of all."""
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        for count, parts in self.parts.items():
            for value, families in parts.families.items():
                for (rows, pieces), i in families.items():
                    if value not in order or rows not in order or i not in (0, count - 1):
                        continue
                    if pieces is not None and not _is_one_of_few(value):
                        continue
                    anchor = value if pieces else rows
                    readers = [u for u in value.users if u is not anchor]
                    if readers and (pieces or self._move_behind(rows, readers)):
                        with self.graph.inserting_after(anchor):
                            add = lambda x, p=pieces, i=i: _part(x, p, i)  # noqa: E731
                            place = _added(self.graph, add, rows)
                        for reader in readers:
                            reader.replace_input_with(value, place)

    def _move_behind(self, rows: fx.Node, readers: Sequence[fx.Node]) -> bool:
        """Move readers and all that reads them behind a value; return whether that is possible."""
        nodes, moved = [*self.graph.nodes], dict[fx.Node, None]()
        for node in nodes[: nodes.index(rows) + 1]:
            if node in readers or any(v in moved for v in node.all_input_nodes):
                moved[node] = None
        if rows in moved or any(n.target in LOOP_MARKS or "draw" in n.meta for n in moved):
            return False
        for node in reversed(moved):
            rows.append(node)
        return True

    def split_loops(self) -> None:
        """Compute the iterations of loops at once, if the rows of one of them are sharded."""
        loops, specs = [*loops_of(self.work)], self.work.layouts.spec
        turned = set[fx.Node]()
        lengths = {
            loop.found.count
            for loop in loops
            if any(specs[rows].dims[0] for rows in loop.found.rows.values())
        }
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        for loop in loops:
            found, last = loop.found, loop.exits[-1]
            users = [u for end in loop.exits for u in end.users if u not in loop.exits]
            early = any(order.get(user, 0) < order[last] for user in users)
            if found.count not in lengths or not found.rows or early:
                continue
            with self.graph.inserting_before(last):
                is_turned = self._turn(found, turned)
                new = batch_iterations(self.graph, found)
                if new is None:
                    continue
                end_at = found.count - 1 - found.begin
                for end in loop.exits:
                    value = mark_of(end).value
                    result = _added(
                        self.graph,
                        lambda x, e=end, i=end_at: value_behind(e, x, i),
                        new.get(value) or self._repeated(value, found.count),
                    )
                    if is_turned and end.target is STACK:
                        result = _added(self.graph, _from_behind, result)
                        turned.add(end)
                    self.results[end] = result
            self.exits += loop.exits

    def _turn(self, found: Recurrence, turned: Collection[fx.Node]) -> bool:
        """Begin a loop over flipped rows, as scan with `reverse` is, with the last row.

        turned: results of such loops, which are flipped. Returns whether most rows are.
        """
        flipped = [x for x in found.rows.values() if flipped_dim(x) == 0 or x in turned]
        if 2 * len(flipped) <= len(found.rows):
            return False
        for entry, x in found.rows.items():
            is_flip = flipped_dim(x) == 0
            found.rows[entry] = (
                operands_of(x)[0] if is_flip else _added(self.graph, _from_behind, x)
            )
        found.reverse = not found.reverse
        return True

    def _repeated(self, value: fx.Node, count: int) -> fx.Node:
        """Add the rows of a value that is the same in all iterations."""
        return _added(self.graph, lambda x: x.expand(count, *x.shape), value)

    def _is_sharded(self, finder: Finder) -> bool:
        """Return whether parts lie on several devices, and iterations depend on earlier ones.

        A loop's gradients may lie in another way, so that parts of another value count, too.
        """
        specs, rows = self.work.layouts.spec, finder.rows.values()
        if any(pieces is None for _, pieces in rows):
            return True
        all_families = {f for families in finder.parts.families.values() for f in families}
        return bool(rows and finder.carries) and any(
            pieces is None or bool(specs[value].dims[pieces.dim]) for value, pieces in all_families
        )

    def _rows(self, family: Family) -> fx.Node:
        """Return the value with all parts along a first dimension."""
        value, pieces = family
        if pieces is None:
            return value
        if family not in self.batched:
            self.batched[family] = _added(self.graph, lambda x: _parted(x, pieces), value)
        return self.batched[family]


def _from_behind(x: Tensor) -> Tensor:
    return x.flip(0)


def _parted(x: Tensor, pieces: Pieces) -> Tensor:
    d = pieces.dim
    return (x.unflatten(d, (pieces.count, pieces.width)) if pieces.width else x).movedim(d, 0)


def _part(x: Tensor, pieces: Pieces | None, i: int) -> Tensor:
    if pieces is None or not pieces.width:
        return x.select(pieces.dim if pieces else 0, i)
    return x.narrow(pieces.dim, i * pieces.width, pieces.width)


def _is_one_of_few(value: fx.Node) -> bool:
    """Return whether an operation with many results is there for one or two: it needs all rows."""
    return value.target is operator.getitem and len(value.all_input_nodes[0].users) <= 2


def _joined(x: Tensor, end: End) -> Tensor:
    if end.pieces is None:
        return x.sum(0) if end.at is None else x.select(0, end.at)
    d = end.pieces.dim
    x = x.movedim(0, d)
    return x.flatten(d, d + 1) if end.pieces.width else x


def _added(graph: fx.Graph, function: Callable, *values: fx.Node) -> fx.Node:
    """Add what a function computes."""
    inner = trace(function, tuple(v.meta["val"] for v in values), {})
    assert isinstance(inner, fx.Graph), "views and sums have a graph"
    return inline(graph, inner, values, origin_of(values[0]))
