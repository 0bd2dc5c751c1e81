"""Move slices and concatenations through products where that moves less data.

before   %y = einsum(bsm,mk->bsk, %x, %w)
         %q = slice(%y, 2, 0, 64)                 %k = slice(%y, 2, 64, 128)
after    %u = slice(%w, 1, 0, 64)                 %q = einsum(bsm,mk->bsk, %x, %u) ...

before   %g = cat([%dq, %dk], 2)
         %d = einsum(bsk,bsm->mk, %g, %x)         %e = einsum(bsk,mk->bsm, %g, %w)
after    %d = cat([einsum(%dq, %x), einsum(%dk, %x)], 1)
         %e = einsum(%dq, %u) + einsum(%dk, %v)

needs    a propagated graph, rules
source   ours. If a fused weight for queries, keys and values is cut into equal shards, no part is
         on all devices. So either the weight has to move or the product; the product is larger,
         mostly.

Only sharded dimensions matter. The measure is the element count that one device moves. Case 23.b of
the communication suite, the halves of a GLU, sends 721,728 bytes with this pass, 782,144 without.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from ...compat.fx_nodes import copy_node, reached
from ...rules.ops import concat_slice
from ..ir import Op, Rules, tensors_of
from ..propagate.layouts import Layouts

Place = tuple[fx.Node, int]  # a value and one of its dimensions
Span = tuple[int, int]


@dataclass(frozen=True)
class Frontier:
    """Places where values are sliced or concatenated, and the elements that one device moves."""

    elements: float
    places: frozenset[Place]


def split_products(graph: fx.Graph, layouts: Layouts, rules: Rules) -> fx.Graph | None:
    """Rewrite the graph in place and return it; None if nothing changed."""
    return graph if _Splitter(graph, layouts, rules).run() else None


def splits_products(graph: fx.Graph, layouts: Layouts, rules: Rules) -> bool:
    """Return whether `split_products` will change the graph."""
    return _Splitter(graph, layouts, rules).moves_any()


class _Splitter:
    """Moves one graph's slices and concatenations."""

    def __init__(self, graph: fx.Graph, layouts: Layouts, rules: Rules) -> None:
        self.graph, self.rules, self.mesh = graph, rules, layouts.mesh
        self.specs = dict(layouts.spec)  # A slice has the layout of the whole value.
        # Borders that depend on values are not known, and no number is sharded.
        self.ops: dict[fx.Node, Op] = {
            op.node: op for op in rules.ops(graph) if not op.node.meta.get("dynamic")
        }
        self.new_slices: dict[tuple[fx.Node, int, Span], fx.Node] = {}
        self.order = {node: i for i, node in enumerate(graph.nodes)}

    def run(self) -> bool:
        """Move slices, then concatenations; return whether any moved."""
        changed = [
            self._move_slices(value, dim, cuts) for value, dim, cuts in self._sliced_values()
        ]
        changed += [
            self._move_concat(value, dim, borders) for value, dim, borders in self._joined_values()
        ]
        return any(changed)

    def moves_any(self) -> bool:
        """Return whether any slice or concatenation is to be moved."""
        return any(
            (value, dim) not in self._slice_frontier(value, dim).places
            for value, dim, _ in self._sliced_values()
        ) or any(
            (value, dim) not in self._join_frontier(value, dim, value).places
            for value, dim, _ in self._joined_values()
        )

    def _elements(self, place: Place) -> float:
        """Return how many elements of a value one device has."""
        value = place[0]
        return math.prod(self.specs[value].local_shape(value.meta["val"].shape, self.mesh))

    def _shards_evenly(self, place: Place, borders: Iterable[int]) -> bool:
        """Return whether the dimension is sharded, and its parts can be so evenly."""
        count = self.mesh.count(self.specs[place[0]].dims[place[1]])
        return count > 1 and all(border % count == 0 for border in borders)

    def _movable_factor(self, value: fx.Node, dim: int) -> str | None:
        """Return the factor of a result's dimension if operand slices give a result slice."""
        op = self.ops.get(value)
        if op is None or op.results != (value,):
            return None
        names = op.rule.results[0][dim]
        return names[0] if len(names) == 1 and _passes_parts(op, names[0]) else None

    # -------------------------------------------------------------------------------------- slices

    def _sliced_values(self) -> list[tuple[fx.Node, int, dict[fx.Node, Span]]]:
        """Return values that are used only through slices along one sharded dimension.

        With each the dimension and its slices.
        """
        candidates = []
        for value in reversed(self.ops):
            cuts = [self._slices_of(user) for user in value.users]
            spans = sorted(cut[1:] for taken in cuts for cut in taken.values())
            dims = {d for taken in cuts for d, *_ in taken.values()}
            if (
                not all(cuts)
                or len(dims) != 1
                or any(a[1] > b[0] for a, b in zip(spans, spans[1:]))
            ):
                continue
            if self._shards_evenly((value, min(dims)), (n for span in spans for n in span)):
                candidates.append(
                    (
                        value,
                        min(dims),
                        {node: cut[1:] for taken in cuts for node, cut in taken.items()},
                    )
                )
        return candidates

    def _slices_of(self, node: fx.Node) -> dict[fx.Node, tuple[int, int, int]]:
        """Return the results for an operation that only takes rows, as (dimension, start, end)."""
        op = self.ops.get(node)
        if op is None or len(op.operands) != 1:
            return {}
        taken = concat_slice.parts_taken(
            node.target,
            node.args,
            op.rule,
            op.operands[0].meta["val"].shape,
            [tuple(t.shape) for t in tensors_of(node)],
        )
        return {result: cut for result, cut in zip(op.results, taken) if result is not None}

    def _move_slices(self, value: fx.Node, dim: int, cuts: dict[fx.Node, Span]) -> bool:
        """Slice operands instead of a value; return whether that moves less."""
        frontier = self._slice_frontier(value, dim)
        if (value, dim) in frontier.places:
            return False
        for user, span in cuts.items():
            self._replace_node(user, self._slice(value, dim, span, frontier, before=value))
        return True

    def _replace_node(self, old: fx.Node, new: fx.Node) -> None:
        """Replace a node, and erase the operands that only the old one needed."""
        for user in old.replace_all_uses_with(new):
            if user in self.ops:
                # The users have other operands now, so their cached operations are out of date.
                self.ops[user] = self.rules.op(user)
        dead = [old]
        while dead:
            node = dead.pop()
            if not node.users and node.op == "call_function":
                self.ops.pop(node, None)
                dead += node.all_input_nodes
                self.graph.erase_node(node)

    def _slice_frontier(self, value: fx.Node, dim: int) -> Frontier:
        """Return where slices cost least: on the value, or on its operands."""
        here, factor = (
            Frontier(self._elements((value, dim)), frozenset({(value, dim)})),
            self._movable_factor(value, dim),
        )
        places = _operands_with(self.ops[value], factor) if factor is not None else []
        # An operand with other users exists anyhow: the search ends there.
        above = _union(
            self._slice_frontier(*place) if len(place[0].users) == 1 else self._frontier_at(place)
            for place in places
        )
        return min(here, above, key=lambda frontier: frontier.elements) if places else here

    def _frontier_at(self, place: Place) -> Frontier:
        """Return the frontier with a value's own slices; existing slices cost nothing."""
        exists = any(key[:2] == place for key in self.new_slices)
        return Frontier(0.0 if exists else self._elements(place), frozenset({place}))

    def _slice(
        self, value: fx.Node, dim: int, span: Span, frontier: Frontier, before: fx.Node
    ) -> fx.Node:
        """Return a slice of a value, computed from slices at the frontier."""
        if (value, dim) not in frontier.places:
            op = self.ops[value]
            copies = {
                v: self._slice(v, d, span, frontier, before)
                for v, d in _operands_with(op, self._movable_factor(value, dim))
            }
            return self._copy_op(
                op, copies, before, value.meta["val"].narrow(dim, span[0], span[1] - span[0])
            )
        key = (value, dim, span)
        # A slice made further down would be read before it exists: then there is a second one.
        if key not in self.new_slices or self.order[self.new_slices[key]] > self.order[before]:
            with self.graph.inserting_before(before):
                self.new_slices[key] = self._register(
                    concat_slice.take(self.graph, value, dim, *span), value, before
                )
        return self.new_slices[key]

    def _copy_op(
        self, op: Op, slices: Mapping[fx.Node, fx.Node], before: fx.Node, val: Tensor
    ) -> fx.Node:
        """Copy a call with slices in place of operands."""
        with self.graph.inserting_before(before):
            copy = copy_node(self.graph, op.node, lambda n: slices.get(n, n))
        copy.meta = {
            key: item for key, item in op.node.meta.items() if key not in ("captured", "spec")
        } | {"val": val}
        return self._register(copy, op.node, before)

    def _register(self, node: fx.Node, like: fx.Node, before: fx.Node) -> fx.Node:
        """Record a new node's order, operation and layout."""
        self.order[node], self.ops[node], self.specs[node] = (
            self.order[before],
            self.rules.op(node),
            self.specs[like],
        )
        return node

    # ------------------------------------------------------------------------------- concatenations

    def _joined_values(self) -> list[tuple[fx.Node, int, list[int]]]:
        """Return concatenations along a sharded dimension, with the operands' borders."""
        candidates = []
        for op in self.ops.values():
            joined = (
                concat_slice.parts_joined(
                    op.rule, [v.meta["val"].shape for v in op.operands], op.node.meta["val"].shape
                )
                if (op.results == (op.node,))
                else None
            )
            if (
                joined
                and len(op.operands) <= concat_slice.MOST
                and self._shards_evenly((op.node, joined[0]), joined[1])
            ):
                candidates.append((op.node, *joined))
        return candidates

    def _move_concat(self, value: fx.Node, dim: int, borders: list[int]) -> bool:
        """Concatenate after a value's users; return whether that moves less."""
        frontier = self._join_frontier(value, dim, value)
        if (value, dim) in frontier.places:
            return False
        self._replace_concat(
            value, dim, self.ops[value].operands, list(zip(borders, borders[1:])), frontier
        )
        return True

    def _join_frontier(self, value: fx.Node, dim: int, joined: fx.Node) -> Frontier:
        """Return where operands are best concatenated: here, or after operations that use them.

        joined: the first concatenation.
        """
        here, frontiers = Frontier(self._elements((value, dim)), frozenset({(value, dim)})), []
        for user in value.users:
            op, factor = self.ops.get(user), self._factor_in_user(user, value, dim)
            if op is None or factor is None:
                return here
            others = [place for place in _operands_with(op, factor) if place[0] is not value]
            # Such an operand would have to be sliced and concatenated before.
            if any(self._depends_on(other, joined) for other, _ in others):
                return here
            frontiers += [self._frontier_at(place) for place in others]
            frontiers += (
                [self._join_frontier(user, op.rule.results[0].index((factor,)), joined)]
                if (factor,) in op.rule.results[0]
                else []
            )
        # `here` comes first in min: equal costs leave the program as it is.
        return min(here, _union(frontiers), key=lambda frontier: frontier.elements)

    def _depends_on(self, value: fx.Node, source: fx.Node) -> bool:
        first = self.order[source]
        above = reached([value], lambda n: n.all_input_nodes if self.order[n] > first else ())
        return any(node is source for node in above)

    def _factor_in_user(self, user: fx.Node, value: fx.Node, dim: int) -> str | None:
        """Return the factor of a value's dimension in a user; None if that needs it whole."""
        op = self.ops.get(user)
        if op is None or op.results != (user,):
            return None
        names = {dims[dim] for v, dims in zip(op.operands, op.rule.operands) if v is value}
        if len(names) != 1 or len(next(iter(names))) != 1:
            return None
        factor = next(iter(names))[0]
        return factor if _passes_parts(op, factor) else None

    def _replace_concat(
        self,
        value: fx.Node,
        dim: int,
        operands: Sequence[fx.Node],
        spans: list[Span],
        frontier: Frontier,
    ) -> None:
        """Give all users of a concatenation its operands instead."""
        for user in list(value.users):
            op, factor = self.ops[user], self._factor_in_user(user, value, dim)
            others = [place for place in _operands_with(op, factor) if place[0] is not value]
            frontier_of_others, val = Frontier(0.0, frozenset(others)), user.meta["val"]
            out_dim = (
                op.rule.results[0].index((factor,)) if (factor,) in op.rule.results[0] else None
            )
            copies = [
                self._copy_op(
                    op,
                    {
                        value: operand,
                        **{v: self._slice(v, d, span, frontier_of_others, user) for v, d in others},
                    },
                    user,
                    val if out_dim is None else val.narrow(out_dim, span[0], span[1] - span[0]),
                )
                for operand, span in zip(operands, spans)
            ]
            if out_dim is not None and (user, out_dim) not in frontier.places:
                self._replace_concat(user, out_dim, copies, spans, frontier)
                continue
            # The user sums over a dimension that its result lacks: then the parts are added.
            with self.graph.inserting_before(user):
                total = (
                    concat_slice.add(self.graph, copies, val, user.meta)
                    if out_dim is None
                    else concat_slice.join(self.graph, copies, out_dim, val, user.meta)
                )
            self._replace_node(user, self._register(total, user, user))


def _passes_parts(op: Op, factor: str) -> bool:
    """Return whether operand slices give one result slice, with one slice for each value.

    A value may be two operands, as in `x @ x.T`; then one may have the factor elsewhere.
    """
    dims_of: dict[fx.Node, set] = {}
    for v, dims in zip(op.operands, op.rule.operands):
        dims_of.setdefault(v, set()).add(
            tuple(d for d, names in enumerate(dims) if factor in names)
        )
    is_one = all(len(places) == 1 for places in dims_of.values())
    return is_one and concat_slice.passes_parts(op.rule, factor)


def _operands_with(op: Op, factor: str | None) -> list[Place]:
    return [
        (v, dims.index((factor,)))
        for v, dims in zip(op.operands, op.rule.operands)
        if (factor,) in dims
    ]


def _union(frontiers: Iterable[Frontier]) -> Frontier:
    """Return all places in some frontiers, with their elements summed."""
    frontiers = list(frontiers)
    return Frontier(
        sum(frontier.elements for frontier in frontiers),
        frozenset().union(*(frontier.places for frontier in frontiers)),
    )
