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

from torch import Tensor, fx

from ...compat.fx_nodes import drop_unused, inline, origin_of
from ...fx_passes.expand.undivided import Work
from ...fx_passes.ir import Op
from ...rules import trace
from ...rules.ops.concat_slice import Pieces
from .batch_iterations import batch_iterations
from .find_chunks import Family, Finder, Parts, ends_of


def split_sequences(work: Work) -> bool:
    """Rewrite the graph in place; return whether it has recurrences along a sharded dimension."""
    splitter = _Splitter(work)
    for op, pieces in ends_of(work):
        splitter.split(op, pieces)
    for end, result in splitter.results.items():
        end.replace_all_uses_with(result)
    drop_unused(work.graph)
    return bool(splitter.results)


class _Splitter:
    def __init__(self, work: Work) -> None:
        self.work, self.graph = work, work.graph
        self.parts: dict[int, Parts] = {}
        self.batched: dict[Family, fx.Node] = {}
        # Replaced when all are known: the operations still read the old ones.
        self.results: dict[fx.Node, fx.Node] = {}

    def split(self, op: Op, joined: Pieces) -> None:
        """Compute the parts of a concatenation at once, if they are a recurrence."""
        end, operands = op.node, op.operands
        parts = self.parts.get(joined.count) or Parts(self.work, joined.count)
        self.parts[joined.count] = parts
        spans = parts.spans(self.graph)
        for reverse in (False, True):
            finder = Finder(parts, spans, reverse)
            if not finder.find(operands) or not self._is_sharded(finder):
                continue
            with self.graph.inserting_before(end):
                rows = {value: self._rows(family) for value, family in finder.rows.items()}
                new = batch_iterations(self.graph, finder.recurrence(rows))
                if new is None:
                    continue
                result = _added(
                    self.graph, new[operands[finder.at]], lambda x: _joined(x, joined), end
                )
            for value, column in (*finder.columns.items(), *finder.carries.items()):
                if value in new:
                    parts.add(new[value], column)
            self.results[end] = result
            return

    def _is_sharded(self, finder: Finder) -> bool:
        """Return whether parts lie on several devices, and iterations depend on earlier ones."""
        specs = self.work.layouts.spec
        return any(
            bool(specs[value].dims[pieces.dim]) and bool(finder.carries)
            if pieces
            else bool(finder.ops)
            for value, pieces in finder.rows.values()
        )

    def _rows(self, family: Family) -> fx.Node:
        """Return the value with all parts along a first dimension."""
        value, pieces = family
        if pieces is None:
            return value
        if family not in self.batched:
            self.batched[family] = _added(self.graph, value, lambda x: _parted(x, pieces), value)
        return self.batched[family]


def _parted(x: Tensor, pieces: Pieces) -> Tensor:
    d = pieces.dim
    return (x.unflatten(d, (pieces.count, pieces.width)) if pieces.width else x).movedim(d, 0)


def _joined(x: Tensor, pieces: Pieces) -> Tensor:
    d = pieces.dim
    x = x.movedim(0, d)
    return x.flatten(d, d + 1) if pieces.width else x


def _added(graph: fx.Graph, value: fx.Node, function: object, like: fx.Node) -> fx.Node:
    inner = trace(function, (value.meta["val"],), {})  # pyright: ignore
    return inline(graph, inner, [value], origin_of(like))  # pyright: ignore
